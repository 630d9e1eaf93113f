"""Run compiled programs under JAX's profiler, and read the launches of each iteration from the trace.

:class:`jax.profiler.ProfileData` parses a trace into planes. A plane has lines, and a line has events. The planes and
lines depend on the device:

- An NVIDIA GPU has a plane ``/device:GPU:n`` with one line ``Stream #...`` per stream. The events of a stream are
  kernels, memory fills and memory copies.
- The CPU has one host plane. XLA's runtime records two events per step ("thunk") of a program: the first event is the
  step, and the second event marks the step's end. :func:`cpu_events` computes the duration from the starts of both
  events. The duration in the first event is too short if the step continues in other threads. This duration is too
  long if the event's thread was not scheduled while another thread continued the program.
- A TPU has a plane ``/device:TPU:n``. Its line ``XLA Ops`` has one event per instruction; the event of a loop encloses
  the events of the loop's instructions. Its line ``XLA Modules`` has one event per run of a program. This description
  of TPU traces comes from documentation. The code that reads them was never run on a TPU.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.profiler import ProfileData, ProfileOptions

from natten_jax.profiler.program import Program
from natten_jax.profiler.symbols import kind_of_collective_instruction

#: Maximum number of attempts to record a trace. A trace can be empty, for example while another profiler releases the
#: GPU.
_ATTEMPTS = 5

#: Glob patterns. ``_TRACES`` matches trace files. ``_RUNS`` matches subfolders of the folder that JAX's profiler writes
#: to. Each subfolder has the trace files of one run.
_TRACES, _RUNS = "*.xplane.pb", "plugins/profile/*"

#: Prefixes of the names of GPU events that fill or copy memory, in lower case.
_MEMORY = ("memset", "memcpy")

#: Names of the stats of a trace event that become :attr:`Event.module`, :attr:`Event.number` and :attr:`Event.run`, in
#: this order.
_MODULE_STATS = ("hlo_module", "program_id", "run_id")

#: Patterns for the names of TPU events. ``_INSTRUCTION`` finds an instruction's name, which precedes the operands.
#: ``_MODULE`` finds the name of a program, and the program's number in parentheses if there is one.
_INSTRUCTION, _MODULE = re.compile(r"^%?([\w.\-]+).*", re.DOTALL), re.compile(r"(.*?)(?:\((\d+)\))?$")


class CaptureError(RuntimeError):
    """A trace was not found, is not readable, or has events that cannot be attributed to iterations."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A launch on a device.

    Attributes:
        symbol: Symbol of a GPU kernel; the instruction's name on a CPU or TPU.
        instruction: Name of the instruction that made the launch, or empty if the trace does not contain the name.
        scope: Scope path of the instruction in the traced function, or empty if the trace does not contain the path.
        start: Time of the start, in nanoseconds.
        duration: Device time, in nanoseconds, without the time that is attributed to overlapping events.
        device: Number of the device.
        module: Name of the program, or ``None`` if the trace does not contain the name.
        number: Number of the program in the trace, or ``None``.
        run: Identifier of the program's run, equal for all launches of the run. ``None`` if the trace does not contain
            the identifier, as on GPUs.
    """

    symbol: str
    instruction: str
    scope: str
    start: float
    duration: float
    device: int = 0
    module: str | None = None
    number: int | None = None
    run: Any = None


#: Events of a program: device number -> one list of events per iteration.
Devices = dict[int, list[list[Event]]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A compiled program and a function that runs it.

    Attributes:
        run: Start one run of the program, and return the results without waiting for them.
        program: The program. Programs in the same trace need different module names.
    """

    run: Callable[[], Any]
    program: Program


# Run.


def capture(run: Callable[[], Any], iterations: int, program: Program, platform: str) -> list[list[Event]]:
    """Trace runs of one program, and return the events of each iteration on the device with the most device time.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    return capture_interleaved([Launch(run, program)], iterations, platform)[0]


def capture_interleaved(launches: Sequence[Launch], iterations: int, platform: str) -> list[list[list[Event]]]:
    """Trace alternating runs of programs, and return for each program the events of each iteration.

    If a program runs on several devices, only the events of the device with the most device time are returned.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    return [devices[busiest(devices)] for devices in capture_by_device(launches, iterations, platform)]


def capture_by_device(
    launches: Sequence[Launch], iterations: int, platform: str, with_memory: bool = False, folder: Path | None = None
) -> list[Devices]:
    """Trace alternating runs of programs, and return for each program the events by device and iteration.

    Args:
        launches: Programs to run. An iteration runs each of them once, in this order.
        iterations: Number of iterations.
        platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.
        with_memory: Include memory fills and copies on GPUs.
        folder: Folder to which the trace is written. Default: a temporary folder, which is deleted.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    problem, is_only = "", len(launches) == 1
    for attempt in range(_ATTEMPTS):
        time.sleep(0.2 * attempt)
        events = device_events(_trace(launches, iterations, folder), platform, with_memory)
        try:
            return [_iterations_by_device(events, each.program, is_only, iterations, platform) for each in launches]
        except CaptureError as error:
            problem = str(error)
    raise CaptureError(f"the JAX profiler wrote no usable trace in {_ATTEMPTS} attempts: {problem}")


def _trace(launches: Sequence[Launch], iterations: int, folder: Path | None) -> ProfileData:
    """Run and trace the iterations. Wait for the results of each run, so that runs do not overlap."""
    options = ProfileOptions()
    options.python_tracer_level = 0  # events of Python calls would slow down dispatch and fill the trace
    options.host_tracer_level = 1
    options.enable_hlo_proto = folder is not None
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) if folder is None else folder
        with jax.profiler.trace(str(target), profiler_options=options):
            for _ in range(iterations):
                for launch in launches:
                    jax.block_until_ready(launch.run())  # type: ignore[no-untyped-call]
        return read_trace(traced_runs(target)[0][0])[0]


def _iterations_by_device(
    every: Sequence[Event], program: Program, is_only: bool, iterations: int, platform: str
) -> Devices:
    """Return the events of a program by device and iteration.

    Events without a module are attributed to the program if it is the trace's only program (``is_only``).
    """
    events = [each for each in every if (is_only if each.module is None else program.is_module(each.module))]
    if not events:
        raise CaptureError("it contains no operation of the program")
    traces: Devices = {}
    for device, on_device in by_device(events).items():
        parts = split(on_device, iterations) or []
        traces[device] = [without_overlap(part, program.is_container) for part in parts] if platform == "cpu" else parts
    if len(traces) != program.devices or not all(traces.values()):
        devices = f" on {program.devices} devices" if program.devices > 1 else ""
        raise CaptureError(f"its {len(events)} events cannot be attributed to {iterations} iterations{devices}")
    return traces


# Trace files.


def traced_runs(path: Path) -> list[list[Path]]:
    """Return the trace files of each run in a folder that JAX's profiler wrote to, the newest run first.

    A run has one trace file per host.

    Args:
        path: The folder, the subfolder of one run, or a trace file.

    Raises:
        CaptureError: No trace was found.
    """
    if path.is_file():
        return [[path]]
    files = [*path.glob(_TRACES), *path.glob(f"{_RUNS}/{_TRACES}")]  # not recursive, because the folder can be large
    if not files:
        raise CaptureError(f"there is no trace ({_TRACES}) in {str(path)!r}, nor in the folders {_RUNS} in it")
    files.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    return list(grouped(files, lambda each: each.parent).values())


#: Files of JAX's profiler that are not traces: suffix of the name -> description.
_OTHER_FILES = {
    ".json.gz": f"it is a copy of a trace for Perfetto, and the trace itself ({_TRACES}) is in the same folder",
    ".prof": "it is a profile of memory, for pprof",
}


def read_trace(file: Path) -> tuple[ProfileData, bytes]:
    """Read a trace file. Return the parsed trace, and the bytes of the file.

    Raises:
        CaptureError: The file is not a trace.
    """
    content = file.read_bytes()
    try:
        return ProfileData.from_serialized_xspace(content), content
    except RuntimeError:
        kind = next((what for end, what in _OTHER_FILES.items() if file.name.endswith(end)), "or it is incomplete")
        raise CaptureError(f"{str(file)!r} is not a trace of JAX's profiler ({_TRACES}): {kind}") from None


# Events.


def device_events(profile: ProfileData, platform: str, with_memory: bool = False) -> list[Event]:
    """Return the launches on all devices of a platform. ``with_memory`` adds memory fills and copies on GPUs."""
    with warnings.catch_warnings():
        # Python 3.12 and newer raise DeprecationWarning for the types that ProfileData defines.
        warnings.simplefilter("ignore", DeprecationWarning)
        if platform == "cpu":
            return cpu_events(profile)
        return tpu_events(profile) if platform == "tpu" else gpu_events(profile, with_memory)


def _device_planes(profile: ProfileData, kind: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the plane of each device of one kind: ``"GPU"`` or ``"TPU"``."""
    for plane in profile.planes:
        if match := re.fullmatch(rf"/device:{kind}:(\d+)", plane.name):
            yield int(match[1]), plane


def gpu_events(profile: ProfileData, with_memory: bool = False) -> list[Event]:
    """Return the launches on all GPUs. ``with_memory`` adds memory fills and copies."""
    events = []
    for device, plane in _device_planes(profile, "GPU"):
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # other lines, such as "XLA Ops", repeat the events of the streams
            done = 0.0
            for event in sorted(line.events, key=lambda each: each.start_ns):
                stats = dict(event.stats)
                instruction = str(stats.get("hlo_op") or "")
                # Memory copies of a collective are launches: they transfer data between devices.
                is_kernel = not event.name.lower().startswith(_MEMORY) or kind_of_collective_instruction(instruction)
                if event.duration_ns <= 0 or not (with_memory or is_kernel):
                    continue
                # A kernel may start before the previous kernel of its stream ends. The overlap counts as time of the
                # previous kernel, for which the new kernel waits.
                self_time, done = event.end_ns - max(event.start_ns, done), max(event.end_ns, done)
                scope, start = str(stats.get("name") or ""), event.start_ns
                run = map(stats.get, _MODULE_STATS)
                events.append(Event(event.name, instruction, scope, start, max(self_time, 0.0), device, *run))
    return events


def cpu_events(profile: ProfileData) -> list[Event]:
    """Return the launches on CPU devices: the steps that XLA's runtime recorded."""
    lines = (line for plane in profile.planes if plane.name.startswith("/host:CPU") for line in plane.lines)
    host = [(event, dict(event.stats)) for line in lines for event in line.events]
    ends = {stats.get("_c"): event.start_ns for event, stats in host if event.name.startswith("end: ")}
    events = []
    for event, stats in host:
        if "hlo_op" in stats and not event.name.startswith("end: "):
            duration = ends.get(stats.get("_p"), event.end_ns) - event.start_ns
            device, run = int(stats.get("device_ordinal", 0)), map(stats.get, _MODULE_STATS)
            events.append(Event(event.name, str(stats["hlo_op"]), "", event.start_ns, duration, device, *run))
    return events


def tpu_events(profile: ProfileData) -> list[Event]:
    events = []
    for device, plane in _device_planes(profile, "TPU"):
        lines = {line.name: sorted(line.events, key=lambda each: each.start_ns) for line in plane.lines}
        runs = lines.get("XLA Modules", [])
        starts = [run.start_ns for run in runs]
        nested = []
        for event in lines.get("XLA Ops", []):
            name = _INSTRUCTION.sub(r"\1", event.name)
            run: tuple[Any, ...] = ()
            at = bisect.bisect_right(starts, event.start_ns) - 1
            if at >= 0 and (module := _MODULE.match(runs[at].name)):
                number = None if module[2] is None else int(module[2])
                run = module[1], number, dict(runs[at].stats).get("run_id", at)
            nested.append(Event(name, name, "", event.start_ns, event.duration_ns, device, *run))
        events += without_overlap(nested, lambda _: True)
    return events


# Attribution of events to devices and iterations, and of time to events.


_Grouped = TypeVar("_Grouped")


def grouped(items: Iterable[_Grouped], key: Callable[[_Grouped], Any]) -> dict[Any, list[_Grouped]]:
    """Group items by their key. Groups are in the order in which their keys first appear."""
    groups: dict[Any, list[_Grouped]] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def by_device(events: Iterable[Event]) -> dict[int, list[Event]]:
    return dict(sorted(grouped(events, lambda event: event.device).items()))


def busiest(devices: Mapping[int, Sequence[Sequence[Event]]]) -> int:
    """Return the number of the device whose device time per iteration has the largest median."""
    times = {
        device: statistics.median(sum(event.duration for event in events) for events in iterations)
        for device, iterations in devices.items()
    }
    return max(times, key=times.__getitem__)


def split(events: Iterable[Event], iterations: int) -> list[list[Event]] | None:
    """Split the events of one device into iterations, or return ``None`` if the split is ambiguous.

    CPU and TPU events carry the identifier of their run, and each run is an iteration. GPU events lack this
    identifier. GPU events are sorted by start and cut into ``iterations`` parts with equal numbers of events. This
    split is ambiguous unless all parts have the same kernels, equally often.
    """
    ordered = sorted(events, key=lambda event: event.start)
    runs = grouped(ordered, lambda event: event.run)
    if None not in runs:
        return list(runs.values()) if len(runs) == iterations else None
    if len(ordered) % iterations:
        return None
    size = len(ordered) // iterations
    parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    kernels = [collections.Counter(event.symbol for event in part) for part in parts]
    return parts if all(kernel == kernels[0] for kernel in kernels) else None


def without_overlap(events: Sequence[Event], is_container: Callable[[str], bool]) -> list[Event]:
    """Return the events with reduced durations, which add up to the time in which at least one event ran.

    Events of a program overlap for two reasons. First, the event of a loop or call (a container) encloses the events of
    the instructions in the loop or call. Second, independent instructions run in parallel on a CPU. Events that run at
    the same time share that time equally, but containers get no share. If only containers run, the container that
    started most recently gets the time.

    Args:
        events: Events of one device, in the order of their starts.
        is_container: Function that returns True for the name of an instruction that contains other instructions.
    """
    timed = [(i, event) for i, event in enumerate(events) if event.duration > 0]
    starts = [(event.start, True, i) for i, event in timed]
    ends = [(event.start + event.duration, False, i) for i, event in timed]
    containers = [is_container(event.instruction) for event in events]
    durations = [0.0] * len(events)
    running: dict[int, None] = {}  # indices of events, in the order of their starts
    previous = 0.0
    for now, is_start, i in sorted(starts + ends):
        if now > previous and running:
            steps = [j for j in running if not containers[j]] or [next(reversed(running))]
            for j in steps:
                durations[j] += (now - previous) / len(steps)
        previous = now
        if is_start:
            running[i] = None
        else:
            del running[i]
    return [dataclasses.replace(event, duration=time_) for event, time_ in zip(events, durations, strict=True)]
