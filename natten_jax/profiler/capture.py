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
import itertools
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

#: Where JAX's profiler puts a folder per run, and what it calls a trace in there.
_RUNS = ("plugins", "profile")
_TRACES = "*.xplane.pb"

#: Prefixes of events that are no kernels; the device's own names for filling and copying memory.
_NO_KERNELS = ("memset", "memcpy")


class CaptureError(RuntimeError):
    """The profiler's traces could not be read."""


class DamagedTrace(CaptureError, ValueError):
    """A trace file is not what JAX's profiler wrote."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the trace {str(path)!r} is truncated or corrupt: {reason}")


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
class Interval:
    """An event, and what a trace says about where it belongs.

    Attributes:
        event: The event.
        run: The run of the program that it belongs to; ``None`` where the trace does not say.
        module: The program; ``None`` where the trace does not say.
        number: Number of the program, likewise.
    """

    event: Event
    run: Any
    module: str | None = None
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """A compiled program and how it is run.

    Attributes:
        run: Runs it once; the results are waited for by the caller.
        program: What it consists of; its module's name is not that of any other launch of a capture.
    """

    run: Callable[[], Any]
    program: Program


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
    (events,) = capture_in_turns([Launch(run, program)], iterations, platform)
    return events


def capture_in_turns(
    launches: Sequence[Launch], iterations: int, platform: str, *, with_memory: bool = False, folder: Path | None = None
) -> list[list[list[Event]]]:
    """Events of every iteration of every launch, which take turns: one device, one clock, one trace.

    Args:
        launches: What to run.
        iterations: How often each of them.
        platform: ``"cpu"`` or ``"cuda"``.
        with_memory: Whether a GPU's filling and copying of memory counts.
        folder: Where the trace is kept, beside those of other captures; ``None`` deletes it.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.2 * attempt)
        profile = _trace(launches, iterations, folder)
        with warnings.catch_warnings():
            # Python 3.12 and newer complain about how ProfileData's types are made, over which nobody here has a say.
            warnings.simplefilter("ignore", DeprecationWarning)
            intervals = host_intervals(profile) if platform == "cpu" else gpu_intervals(profile, with_memory)
        captured = []
        for launch in launches:
            of_launch = [
                each
                for each in intervals
                if (len(launches) == 1 if each.module is None else launch.program.is_module(each.module))
            ]
            parts = split(of_launch, iterations) if of_launch else None
            if parts is None:
                found = f"{len(of_launch)} events cannot be attributed to {iterations} iterations"
                problem = f"its {found}" if of_launch else "it recorded nothing that the program ran"
                break
            events = [[interval.event for interval in part] for part in parts]
            captured.append([exclusive(part, launch.program) for part in events] if platform == "cpu" else events)
        else:
            return captured
    raise CaptureError(f"the JAX profiler's trace is of no use after {_ATTEMPTS} attempts: {problem}")


def _trace(launches: Sequence[Launch], iterations: int, folder: Path | None) -> ProfileData:
    options = ProfileOptions()
    options.python_tracer_level = 0  # it would slow down dispatch and fill the trace
    options.host_tracer_level = 1
    options.enable_hlo_proto = folder is not None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    # A fresh folder holds this capture's trace and no other. Inside the one where it is to be kept, it need only move.
    with tempfile.TemporaryDirectory(prefix=".natten-jax-profiler-", dir=folder) as fresh:
        with jax.profiler.trace(fresh, profiler_options=options):
            for _ in range(iterations):
                for launch in launches:
                    jax.block_until_ready(launch.run())  # type: ignore[no-untyped-call]
        file = trace_file(Path(fresh))
        profile = read(file)
        if folder is not None:
            _keep(file.parent, folder)
        return profile


def _keep(run: Path, folder: Path) -> None:
    """Move a run's folder to where JAX's profiler would have put it, under a name that no other run has."""
    runs = folder.joinpath(*_RUNS)
    runs.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([run.name], (f"{run.name}_{number}" for number in itertools.count(2)))
    run.rename(next(runs / name for name in names if not (runs / name).exists()))


def trace_file(path: Path) -> Path:
    """``path``, or the newest trace in it where it is a folder that JAX's profiler wrote to, or a run's folder there.

    Raises:
        CaptureError: There is none.
    """
    if path.is_file():
        return path
    # Not anywhere below: that may be a whole file system.
    found = [*path.glob(_TRACES), *path.glob("/".join((*_RUNS, "*", _TRACES)))]
    if not found:
        raise CaptureError(
            f"there is no trace ({_TRACES}) in {str(path)!r}, nor in the folders {'/'.join(_RUNS)}/* in it"
        )
    return max(found, key=lambda each: each.stat().st_mtime)


def read(path: Path) -> ProfileData:
    """The trace in a file, or the newest one in a folder.

    Raises:
        CaptureError: There is none.
        DamagedTrace: It is truncated, or something else.
    """
    file = trace_file(path)
    try:
        return ProfileData.from_file(str(file))
    except Exception as error:
        raise DamagedTrace(file, str(error)) from error


def gpu_intervals(profile: ProfileData, with_memory: bool = False) -> list[Interval]:
    """What ran on the GPUs; ``with_memory`` includes filling and copying memory."""
    intervals = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # lines such as "XLA Ops" repeat the streams' events in other groupings
            done = 0.0
            for event in sorted(line.events, key=lambda each: each.start_ns):
                if event.duration_ns <= 0 or (not with_memory and event.name.lower().startswith(_NO_KERNELS)):
                    continue
                # A kernel may start early, and wait for the one before it in its stream: that time is the latter's.
                own, done = event.end_ns - max(event.start_ns, done), max(event.end_ns, done)
                stats = _stats(event)
                module = stats.get("hlo_module")
                scope = str(stats.get("name") or "")
                instruction = str(stats.get("hlo_op") or "")
                launched = Event(event.name, instruction, scope, event.start_ns, max(own, 0.0))
                name = None if module is None else str(module)
                intervals.append(Interval(launched, stats.get("run_id"), name, _number(stats)))
    return intervals


def host_intervals(profile: ProfileData) -> list[Interval]:
    """What XLA's runtime ran on the CPU."""
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
                if "hlo_op" in stats:
                    intervals.append((event.name, event.start_ns, event.end_ns, stats))
    result = []
    for name, start, end, stats in intervals:
        end = ends.get(stats.get("_p"), end)
        event = Event(name, str(stats["hlo_op"]), "", start, end - start)
        result.append(Interval(event, stats.get("run_id"), str(stats.get("hlo_module")), _number(stats)))
    return result


def _stats(event: Any) -> dict[str, Any]:
    return dict(event.stats)


def _number(stats: dict[str, Any]) -> int | None:
    number = stats.get("program_id")
    return number if isinstance(number, int) else None


def split(intervals: Iterable[Interval], iterations: int) -> list[list[Interval]] | None:
    """The intervals of each iteration in order of time; ``None`` where that cannot be told."""
    ordered = sorted(intervals, key=lambda interval: interval.event.start)
    runs: dict[Any, list[Interval]] = collections.defaultdict(list)
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
