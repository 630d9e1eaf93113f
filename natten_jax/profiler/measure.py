"""Run the compiled programs and sum up their launches by name."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.tiles import flops
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import Plan
from natten_jax.profiler import symbols
from natten_jax.profiler.capture import Devices, Event, busiest, capture_by_device
from natten_jax.profiler.cli import progress
from natten_jax.profiler.options import Options, arrays_of
from natten_jax.profiler.program import Program
from natten_jax.profiler.workload import Workload, check_runs, compile_workload


@dataclasses.dataclass(frozen=True)
class Row:
    """All launches with one name.

    Attributes:
        name: The name.
        calls: Launches per iteration.
        runtimes: Seconds of each iteration.
        symbols: Symbols of the kernels; on a CPU, names of the instructions.
    """

    name: symbols.Name
    calls: int
    runtimes: tuple[float, ...]
    symbols: tuple[str, ...]

    @property
    def runtime(self) -> float:
        """Median over the iterations."""
        return statistics.median(self.runtimes)


@dataclasses.dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        options: Options of the measurement.
        plans: Plans by ``"forward"``, ``"backward"``, ``"additional_kv_forward"``, ...; empty for baselines.
        device: Kind of device.
        rows: Launches by name on the busiest device, in the order of the report.
        device_times: Number of the device -> device time of each iteration, in seconds.
        busiest: Number of the device with the most device time.
    """

    options: Options
    plans: dict[str, Plan]
    device: Device
    rows: tuple[Row, ...]
    device_times: dict[int, tuple[float, ...]]
    busiest: int = 0

    @property
    def backends(self) -> dict[str, str]:
        """Names of backends by the names of plans; for a baseline, its name by pass."""
        if self.options.is_baseline:
            return dict.fromkeys(self.options.passes, str(self.options.backend))
        return {name: str(plan.backend) for name, plan in self.plans.items()}

    @property
    def tiles(self) -> dict[Pass, TilePair]:
        """Query and key/value tiles of the passes over the tokens; empty for baselines."""
        return {pass_: self.plans[pass_].tiles for pass_ in self.options.passes if pass_ in self.plans}

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations per iteration on all devices, without masked pairs, by pass."""
        return {pass_: flops(self.options.problem, pass_) for pass_ in self.options.passes}

    @property
    def totals(self) -> tuple[float, ...]:
        """Device time of each iteration on the busiest device, in seconds."""
        return self.device_times[self.busiest]

    def calibration(self, pass_: Pass) -> Calibration | None:
        """Return the time model of the kernel of a pass."""
        return calibration_for(self.plans[pass_].backend.family, self.device.compute_capability)

    @property
    def rows_total(self) -> float:
        """Sum of the rows' runtimes."""
        return sum(row.runtime for row in self.rows)

    @property
    def median(self) -> float:
        """Median device time of an iteration."""
        return statistics.median(self.totals)

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second, at the median iteration."""
        return sum(self.flops.values()) / self.median / 1e12

    def speedup_over(self, baseline: Result) -> float:
        """Return the median ratio of a baseline's time, measured in alternation, to this time."""
        turns = zip(baseline.totals, self.totals, strict=True)
        return statistics.median(theirs / ours for theirs, ours in turns)

    def flop_bound_over(self, baseline: Result) -> float:
        """Return the ratio of floating-point operations, an upper bound of the speedup."""
        return sum(baseline.flops.values()) / sum(self.flops.values())


def profile(options: Options) -> Result:
    """Measure on the default device.

    Raises:
        ValueError: The problem cannot run with these options.
        MemoryError: It is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    return _profile([options])[0]


def compare(options: Options, baseline: str) -> tuple[Result, Result]:
    """Measure in alternation with a baseline or another backend, on the default device; return both results.

    Raises:
        ValueError: The problem or the baseline cannot run.
        MemoryError: The problem is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    result, other = _profile([options, options.for_baseline(baseline)])
    return result, other


def _profile(every: Sequence[Options]) -> list[Result]:
    first, device = every[0], default_device()
    for options in every:
        check_runs(options, device)
    with arrays_of(first.problem), progress(len(every) * first.warmup_steps) as update:
        update("compiling")
        workloads: list[Workload] = []
        for number, options in enumerate(every):
            arguments = workloads[0].arguments if workloads else None
            workloads.append(compile_workload(options, f"profiled_{number}", arguments))
        update("warming up")
        for _ in range(first.warmup_steps):
            for workload in workloads:
                workload.warm_up(1)
                update(done=1)
        update("measuring")
        captured = capture_by_device(
            [workload.launch for workload in workloads],
            first.iterations,
            device.platform,
            with_memory=first.verbose,
            folder=first.trace_dir,
        )
    return [_result(*each) for each in zip(workloads, captured, strict=True)]


def seconds_of_iterations(iterations: Sequence[Sequence[Event]]) -> tuple[float, ...]:
    """Return the device time of each iteration, in seconds."""
    return tuple(sum(event.duration for event in events) / 1e9 for events in iterations)


def _result(workload: Workload, devices: Devices) -> Result:
    times = {device: seconds_of_iterations(iterations) for device, iterations in devices.items()}
    slowest, options = busiest(devices), workload.options
    operator = "fmha" if options.problem.is_attention else "fna"
    rows = summarize(devices[slowest], workload.program, operator, workload.device.platform)
    return Result(options, workload.plans, workload.device, rows, times, slowest)


#: A launch and its name.
NamedEvent = tuple[symbols.Name, Event]


def summarize(iterations: Sequence[Sequence[Event]], program: Program, operator: str, platform: str) -> tuple[Row, ...]:
    """Return :func:`rows_of` the events of each iteration, with names from :func:`name_function`."""
    name = name_function(program, operator, platform)
    return rows_of([[(name(event), event) for event in events] for events in iterations])


def name_function(program: Program, operator: str, platform: str) -> Callable[[Event], symbols.Name]:
    """Return a function that returns the name of a launch.

    Args:
        program: Program of the launches.
        operator: ``"fna"`` or ``"fmha"``, for launches of instructions without a plan.
        platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.
    """

    @functools.cache
    def name(symbol: str, instruction_name: str, scope: str) -> symbols.Name:
        instruction = program.instruction(instruction_name)
        if platform == "cpu":
            symbol = instruction.target or symbol
        return symbols.name(symbol, instruction, operator, scope)

    return lambda event: name(event.symbol, event.instruction, event.scope)


def rows_of(iterations: Sequence[Iterable[NamedEvent]]) -> tuple[Row, ...]:
    """Return launches by name, known names first, then by runtime."""
    launched: dict[symbols.Name, list[list[Event]]] = defaultdict(lambda: [[] for _ in iterations])
    for i, events in enumerate(iterations):
        for name, event in events:
            launched[name][i].append(event)
    rows = []
    for name, in_turn in launched.items():
        runtimes = seconds_of_iterations(in_turn)
        origins = dict.fromkeys(event.symbol for events in in_turn for event in events)
        if any(runtimes):
            rows.append(Row(name, round(statistics.median(map(len, in_turn))), runtimes, tuple(origins)))
    return tuple(sorted(rows, key=lambda row: (symbols.order(row.name), -row.runtime)))
