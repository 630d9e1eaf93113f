"""Run a compiled program under JAX's profiler and read back what it launched, iteration by iteration.

Each iteration is waited for before the next starts, so that no two overlap.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from natten_jax.profiler.traces import attribution, events
from natten_jax.profiler.traces.events import Event, Interval
from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.trace_files import CaptureError, keep, read, trace_file

#: Device number -> for each iteration, the events of the program.
Devices = dict[int, list[list[Event]]]

#: Traces come back empty now and then, for example while another profiler lets go of the GPU.
_ATTEMPTS = 5


@dataclasses.dataclass(frozen=True)
class Launch:
    """A compiled program and how it is run.

    Attributes:
        run: Runs it once; the results are waited for by the caller.
        program: What it consists of; its module's name is not that of any other launch of a capture.
    """

    run: Callable[[], Any]
    program: Program

    def after(self, step: Callable[[], None]) -> Launch:
        """The launch with something done in front of each run."""

        def run() -> Any:
            step()
            return self.run()

        return Launch(run, self.program)


def capture(run: Callable[[], Any], iterations: int, program: Program, platform: str) -> list[list[Event]]:
    """Events of every iteration of ``run``, in order: of the device that was busy longest, where there are several.

    Args:
        run: Runs the compiled program once; its results are waited for here.
        iterations: How many times to run it.
        program: The compiled program; events of other programs are left out.
        platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    (of_launch,) = capture_in_turns([Launch(run, program)], iterations, platform)
    return of_launch


def capture_in_turns(
    launches: Sequence[Launch], iterations: int, platform: str, *, folder: Path | None = None
) -> list[list[list[Event]]]:
    """Events of every iteration of every launch, as :func:`capture_by_device`; of the device that was busy longest.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    captured = capture_by_device(launches, iterations, platform, folder=folder)
    return [devices[attribution.busiest(devices)] for devices in captured]


def capture_by_device(
    launches: Sequence[Launch], iterations: int, platform: str, *, with_memory: bool = False, folder: Path | None = None
) -> list[Devices]:
    """Events of every iteration of every launch, which take turns: the same devices, one clock, one trace.

    Args:
        launches: What to run.
        iterations: How many times to run each of them.
        platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.
        with_memory: Whether a GPU's filling and copying of memory counts.
        folder: The folder that keeps the trace, beside those of other captures; ``None`` deletes it.

    Raises:
        CaptureError: The trace stayed empty or could not be attributed to iterations.
    """
    problem, is_only = "", len(launches) == 1
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(0.2 * attempt)
        intervals = _intervals(_trace(launches, iterations, folder), platform, with_memory)
        try:
            return [_devices(intervals, each.program, is_only, iterations, platform) for each in launches]
        except CaptureError as error:
            problem = str(error)
    raise CaptureError(f"the JAX profiler's trace is of no use after {_ATTEMPTS} attempts: {problem}")


def _devices(every: Sequence[Interval], program: Program, is_only: bool, iterations: int, platform: str) -> Devices:
    """The events of each device and iteration of a program; all that have no module are of the only one.

    Raises:
        CaptureError: There are none, or that cannot be told of every device.
    """
    intervals = [each for each in every if (is_only if each.module is None else program.is_module(each.module))]
    if not intervals:
        raise CaptureError("it recorded nothing that the program ran")
    found: Devices = {}
    for device, of_device in attribution.by_device(intervals).items():
        launched = [[each.event for each in part] for part in attribution.split(of_device, iterations) or ()]
        found[device] = [attribution.exclusive(part, program) for part in launched] if platform == "cpu" else launched
    if len(found) != program.devices or not all(found.values()):
        devices = f" on {program.devices} devices" if program.devices > 1 else ""
        raise CaptureError(f"its {len(intervals)} events cannot be attributed to {iterations} iterations{devices}")
    return found


def _intervals(profile: ProfileData, platform: str, with_memory: bool) -> list[Interval]:
    with warnings.catch_warnings():
        # Python 3.12 and newer complain about how ProfileData's types are made, over which nobody here has a say.
        warnings.simplefilter("ignore", DeprecationWarning)
        return events.device_intervals(profile, platform, with_memory)


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
            keep(file.parent, folder)
        return profile
