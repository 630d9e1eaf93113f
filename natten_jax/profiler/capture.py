"""Run a compiled program under JAX's profiler and read back what it launched, iteration by iteration.

Two kinds of traces are read, both in this process through :class:`jax.profiler.ProfileData`:

- NVIDIA GPUs have a plane ``/device:GPU:n`` with a line ``Stream #...`` per stream; its events are kernels.
- The CPU has one host plane, where XLA's runtime records every step ("thunk") of a program. Only a separate end
  mark says when a step was over: the event itself ends too early where the step runs on in other threads, and too
  late where its own thread was not scheduled while another one went on with the program.

Each iteration is waited for before the next starts, so that no two overlap. CPU events carry the number of the
run that they belong to. GPU events do not: there the events, in order of time, are cut into as many equal parts
as there were iterations, and each part must consist of the same kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from natten_jax.profiler.program import Program

#: Traces come back empty now and then, for example while another profiler lets go of the GPU.
_ATTEMPTS = 5

#: Prefixes of events that are no kernels; the device's own names for filling and copying memory.
_NO_KERNELS = ("memset", "memcpy")


class CaptureError(RuntimeError):
    """The profiler's traces could not be read."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that ran on the device.

    Attributes:
        symbol: A kernel's symbol on a GPU; the instruction's name on a CPU.
        instruction: Name of the instruction of the compiled program that launched it; empty where unknown.
        scope: Where in the traced function it comes from, as far as the trace itself says so.
        start: In nanoseconds.
        duration: In nanoseconds, without what other events of the iteration account for.
    """

    symbol: str
    instruction: str
    scope: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class _Interval:
    event: Event
    run: Any


def capture(run: Callable[[], Any], iterations: int, program: Program, platform: str) -> list[list[Event]]:
    """Events of every iteration of ``run``, in order.

    Args:
        run: Runs the compiled program once; its results are waited for here.
        iterations: How often.
        program: The compiled program; events of other programs are left out.
        platform: ``"cpu"`` or ``"cuda"``.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.2 * attempt)
        profile = _trace(run, iterations)
        with warnings.catch_warnings():
            # Python 3.12 and newer complain about how ProfileData's types are made, over which nobody here has a say.
            warnings.simplefilter("ignore", DeprecationWarning)
            intervals = _host_intervals(profile, program) if platform == "cpu" else _gpu_intervals(profile, program)
        if not intervals:
            problem = "it recorded nothing that the program ran"
            continue
        by_iteration = split(intervals, iterations)
        if by_iteration is None:
            problem = f"its {len(intervals)} events cannot be attributed to {iterations} iterations"
            continue
        events = [[interval.event for interval in part] for part in by_iteration]
        return [exclusive(part, program) for part in events] if platform == "cpu" else events
    raise CaptureError(f"the JAX profiler's trace is of no use after {_ATTEMPTS} attempts: {problem}")


def _trace(run: Callable[[], Any], iterations: int) -> ProfileData:
    options = ProfileOptions()
    options.python_tracer_level = 0  # it would slow down dispatch and fill the trace
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory(prefix="natten-jax-profiler-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(iterations):
                jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        paths = sorted(Path(folder).glob("**/*.xplane.pb"))
        if not paths:
            raise CaptureError("the JAX profiler wrote no trace")
        return ProfileData.from_file(str(paths[-1]))


def _gpu_intervals(profile: ProfileData, program: Program) -> list[_Interval]:
    intervals = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # lines such as "XLA Ops" repeat the streams' events in other groupings
            for event in line.events:
                stats = _stats(event)
                module = stats.get("hlo_module")
                if event.name.lower().startswith(_NO_KERNELS) or event.duration_ns <= 0:
                    continue
                if module is not None and not program.is_module(str(module)):
                    continue
                scope = str(stats.get("name") or "")
                instruction = str(stats.get("hlo_op") or "")
                launched = Event(event.name, instruction, scope, event.start_ns, event.duration_ns)
                intervals.append(_Interval(launched, stats.get("run_id")))
    return intervals


def _host_intervals(profile: ProfileData, program: Program) -> list[_Interval]:
    intervals, ends = [], {}
    for plane in profile.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith("end: "):
                    ends[_stats(event).get("_c")] = event.start_ns
                    continue
                stats = _stats(event)
                if "hlo_op" not in stats or not program.is_module(str(stats.get("hlo_module"))):
                    continue
                intervals.append((event.name, event.start_ns, event.end_ns, stats))
    result = []
    for name, start, end, stats in intervals:
        end = ends.get(stats.get("_p"), end)
        result.append(_Interval(Event(name, str(stats["hlo_op"]), "", start, end - start), stats.get("run_id")))
    return result


def _stats(event: Any) -> dict[str, Any]:
    return dict(event.stats)


def split(intervals: Iterable[_Interval], iterations: int) -> list[list[_Interval]] | None:
    """The intervals of each iteration in order of time; ``None`` where that cannot be told."""
    ordered = sorted(intervals, key=lambda interval: interval.event.start)
    runs: dict[Any, list[_Interval]] = collections.defaultdict(list)
    for interval in ordered:
        runs[interval.run].append(interval)
    if None not in runs:
        return list(runs.values()) if len(runs) == iterations else None
    if len(ordered) % iterations:
        return None
    size = len(ordered) // iterations
    parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    kernels = [collections.Counter(interval.event.symbol for interval in part) for part in parts]
    return parts if all(kernel == kernels[0] for kernel in kernels) else None


def exclusive(events: Sequence[Event], program: Program) -> list[Event]:
    """The events with durations that add up to the time in which anything ran.

    Steps of a CPU program overlap: loops and calls contain other steps, and independent steps run side by side on
    the same cores. At every moment the time goes, in equal parts, to the steps that are running; a loop or call
    gets only what none of its steps accounts for.
    """
    marks = sorted(
        (time_, is_start, i)
        for i, event in enumerate(events)
        if event.duration > 0
        for time_, is_start in ((event.start, True), (event.start + event.duration, False))
    )
    is_container = [program.is_container(event.instruction) for event in events]
    durations = [0.0] * len(events)
    running: dict[int, None] = {}  # in order of their starts
    previous = marks[0][0] if marks else 0.0
    for now, is_start, i in marks:
        if now > previous and running:
            steps = [j for j in running if not is_container[j]] or [next(reversed(running))]
            for j in steps:
                durations[j] += (now - previous) / len(steps)
        previous = now
        if is_start:
            running[i] = None
        else:
            del running[i]
    return [dataclasses.replace(event, duration=time_) for event, time_ in zip(events, durations, strict=True)]
