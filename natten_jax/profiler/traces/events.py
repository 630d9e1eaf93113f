"""What a trace says that ran on the device.

Three kinds of traces are read, all in this process through :class:`jax.profiler.ProfileData`:

- NVIDIA GPUs have a plane ``/device:GPU:n`` with a line ``Stream #...`` per stream; its events are kernels.
- The CPU has one host plane, where XLA's runtime records every step ("thunk") of a program. Only a separate end
  mark says when a step was over: the event itself ends too early where the step runs on in other threads, and too
  late where its own thread was not scheduled while another one went on with the program.
- TPUs have a plane ``/device:TPU:n`` with a line ``XLA Ops``, whose events are the program's instructions, loops around
  those of their bodies, and a line ``XLA Modules`` with an event for each run of a program. This is what is documented
  of them: no trace of a TPU was at hand.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.profiler import ProfileData

from natten_jax.profiler.traces.collectives import kind_of_instruction

#: Prefixes of events that are no kernels; the device's own names for filling and copying memory.
_NO_KERNELS = ("memset", "memcpy")

_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_TPU_PLANE = re.compile(r"/device:TPU:(\d+)")
#: An instruction as events name it, by itself or with all that it says; and a module with the number of its program.
_INSTRUCTION, _MODULE = re.compile(r"%?([\w.\-]+)"), re.compile(r"(.*?)(?:\((\d+)\))?$")


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that ran on the device.

    Attributes:
        symbol: A kernel's symbol on a GPU; the instruction's name on a CPU.
        instruction: Name of the instruction of the compiled program that launched it; empty where unknown.
        scope: Scope path in the traced function, where the trace itself gives one; else empty.
        start: In nanoseconds.
        duration: In nanoseconds, without what other events of the iteration account for.
    """

    symbol: str
    instruction: str
    scope: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Interval:
    """An event, and what a trace says about where it belongs.

    Attributes:
        event: The event.
        run: The run of the program that it belongs to; ``None`` where the trace does not say.
        module: The program; ``None`` where the trace does not say.
        number: Number of the program, likewise.
        device: Number of the device that it ran on.
    """

    event: Event
    run: Any
    module: str | None = None
    number: int | None = None
    device: int = 0


def gpu_intervals(profile: ProfileData, with_memory: bool = False) -> list[Interval]:
    """What ran on the GPUs; ``with_memory`` includes filling and copying memory."""
    intervals = []
    for plane in profile.planes:
        match = _GPU_PLANE.match(plane.name)
        if match is None:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # lines such as "XLA Ops" repeat the streams' events in other groupings
            done = 0.0
            for event in sorted(line.events, key=lambda each: each.start_ns):
                stats = dict(event.stats)
                instruction = str(stats.get("hlo_op") or "")
                # Copies from one device to another may be how a collective is done.
                is_kernel = not event.name.lower().startswith(_NO_KERNELS) or kind_of_instruction(instruction)
                if event.duration_ns <= 0 or not (with_memory or is_kernel):
                    continue
                # A kernel may start early, and wait for the one before it in its stream: that time is the latter's.
                own, done = event.end_ns - max(event.start_ns, done), max(event.end_ns, done)
                scope = str(stats.get("name") or "")
                launched = Event(event.name, instruction, scope, event.start_ns, max(own, 0.0))
                intervals.append(_interval(launched, stats, int(match[1])))
    return intervals


def host_intervals(profile: ProfileData) -> list[Interval]:
    """What XLA's runtime ran on the CPU."""
    intervals, ends = [], {}
    for plane in profile.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if event.name.startswith("end: "):
                    ends[stats.get("_c")] = event.start_ns
                elif "hlo_op" in stats:
                    intervals.append((event.name, event.start_ns, event.end_ns, stats))
    result = []
    for name, start, end, stats in intervals:
        event = Event(name, str(stats["hlo_op"]), "", start, ends.get(stats.get("_p"), end) - start)
        result.append(_interval(event, stats, int(stats.get("device_ordinal", 0))))
    return result


def _interval(event: Event, stats: dict[str, Any], device: int) -> Interval:
    """An event with what its statistics say about where it belongs."""
    module, number = stats.get("hlo_module"), stats.get("program_id")
    name = None if module is None else str(module)
    return Interval(event, stats.get("run_id"), name, number if isinstance(number, int) else None, device)


def device_intervals(profile: ProfileData, platform: str, with_memory: bool = False) -> list[Interval]:
    """What ran on the devices of a platform: ``"cpu"``, ``"tpu"``, or any GPU's."""
    if platform == "cpu":
        return host_intervals(profile)
    return tpu_intervals(profile) if platform == "tpu" else gpu_intervals(profile, with_memory)


def tpu_intervals(profile: ProfileData) -> list[Interval]:
    """What ran on the TPUs."""
    intervals = []
    for plane in profile.planes:
        match = _TPU_PLANE.fullmatch(plane.name)
        if match is None:
            continue
        lines = {line.name: sorted(line.events, key=lambda each: each.start_ns) for line in plane.lines}
        runs = lines.get("XLA Modules", [])
        starts = [run.start_ns for run in runs]
        for event, own in _without_nested(lines.get("XLA Ops", [])):
            instruction = _INSTRUCTION.match(event.name)
            name = event.name if instruction is None else instruction[1]
            launched = Event(name, name, "", event.start_ns, own)
            at = bisect.bisect_right(starts, event.start_ns) - 1
            if at < 0:
                intervals.append(Interval(launched, None, device=int(match[1])))
                continue
            module = _MODULE.match(runs[at].name)
            assert module is not None  # it matches anything
            run = dict(runs[at].stats).get("run_id", at)
            number = None if module[2] is None else int(module[2])
            intervals.append(Interval(launched, run, module[1], number, int(match[1])))
    return intervals


def _without_nested(events: Sequence[Any]) -> Iterator[tuple[Any, float]]:
    """Events in order of their starts, with their durations less those of events inside them."""
    own = [float(event.duration_ns) for event in events]
    around: list[int] = []
    for i, event in enumerate(events):
        while around and events[around[-1]].end_ns <= event.start_ns:
            around.pop()
        if around:
            own[around[-1]] -= event.duration_ns
        around.append(i)
    return zip(events, (max(each, 0.0) for each in own), strict=True)
