"""Run compiled programs and sum up what they launched."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import jax

from natten_jax.cost_model.tiles import flops
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device, default_device
from natten_jax.problem import Problem
from natten_jax.profiler import capture, symbols
from natten_jax.profiler.capture import Event
from natten_jax.profiler.cli import Progress
from natten_jax.profiler.options import Options, arrays_of
from natten_jax.profiler.program import Program
from natten_jax.profiler.run.workload import Workload, check_runs, compile_workload, passes


@dataclasses.dataclass(frozen=True)
class Row:
    """All launches of one name.

    Attributes:
        name: What it is called.
        calls: Launches per iteration.
        runtimes: Seconds per iteration, one value for each.
        symbols: The symbols, or on a CPU the instructions, that go by this name.
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
    """What was measured.

    Attributes:
        options: What was asked for.
        problem: The problem; that of a baseline is self attention.
        backends: What ran the ``"forward"`` and ``"backward"`` pass, and ``"additional_kv_forward"`` and so on for
            additional tokens.
        tiles: Query and key/value tile of each pass of a backend of this package.
        device: The device that ran it.
        rows: One per name of launches on the busiest device, in the order of the report.
        totals: Seconds of that device's time per iteration, one value for each.
        flops: Floating-point operations per iteration that the mask leaves, on all devices together.
        device_times: By number of the device, its seconds of device time per iteration.
        busiest: Number of the device that was busy longest.
    """

    options: Options
    problem: Problem
    backends: dict[str, str]
    tiles: dict[Pass, TilePair]
    device: Device
    rows: tuple[Row, ...]
    totals: tuple[float, ...]
    flops: dict[str, int]
    device_times: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    busiest: int = 0

    @property
    def rows_total(self) -> float:
        """Sum of the rows' runtimes."""
        return sum(row.runtime for row in self.rows)

    @property
    def median(self) -> float:
        """Median over the iterations of the device time of one iteration."""
        return statistics.median(self.totals)

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second, at the median iteration."""
        return sum(self.flops.values()) / self.median / 1e12


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A result and a baseline that took turns with it.

    Attributes:
        result: What was asked for.
        baseline: What it is held against.
    """

    result: Result
    baseline: Result

    @property
    def name(self) -> str:
        """The baseline's name."""
        return str(self.baseline.options.backend)

    @property
    def speedup(self) -> float:
        """Median over the turns of the baseline's time by the result's."""
        turns = zip(self.baseline.totals, self.result.totals, strict=True)
        return statistics.median(theirs / ours for theirs, ours in turns)

    @property
    def flop_bound(self) -> float:
        """The speedup if time were the operations that the masks leave."""
        return sum(self.baseline.flops.values()) / sum(self.result.flops.values())


def profile(options: Options) -> Result:
    """Measure on the default device.

    Raises:
        ValueError: The problem cannot run as the options ask.
        MemoryError: It is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    (result,) = _profile([options])
    return result


def compare(options: Options, baseline: str) -> Comparison:
    """Measure in turns with a baseline, or another backend, on the default device.

    Raises:
        ValueError: One of the two cannot run.
        MemoryError: The problem is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    return Comparison(*_profile([options, options.for_baseline(baseline)]))


def _profile(every: Sequence[Options]) -> list[Result]:
    first, device = every[0], default_device()
    for options in every:
        check_runs(options, device)
    with arrays_of(first.dtype), Progress(len(every) * (first.warmup_steps + first.iterations)) as progress:
        progress.stage("compiling")
        workloads: list[Workload] = []
        for number, options in enumerate(every):
            arguments = workloads[0].arguments if workloads else None
            workloads.append(compile_workload(options, f"profiled_{number}", arguments))
        launches = [workload.launch.after(progress.advance) for workload in workloads]
        progress.stage("warming up")
        for _ in range(first.warmup_steps):
            for launch in launches:
                jax.block_until_ready(launch.run())  # type: ignore[no-untyped-call]
        progress.stage("measuring")
        captured = capture.capture_by_device(
            launches, first.iterations, device.platform, with_memory=first.verbose, folder=first.trace_dir
        )
    return [_result(*each) for each in zip(workloads, captured, strict=True)]


def _result(workload: Workload, devices: capture.Devices) -> Result:
    """The result of a workload's captured iterations."""
    times = {
        device: tuple(sum(event.duration for event in events) / 1e9 for events in iterations)
        for device, iterations in devices.items()
    }
    busiest = capture.busiest(devices)
    return Result(
        workload.options,
        workload.problem,
        workload.backends,
        workload.tiles,
        workload.device,
        summarize(devices[busiest], workload.program, workload.operator, workload.device.platform),
        times[busiest],
        {pass_: flops(workload.problem, pass_) for pass_ in passes(workload.options)},
        times,
        busiest,
    )


def summarize(iterations: Sequence[Sequence[Event]], program: Program, operator: str, platform: str) -> tuple[Row, ...]:
    """The rows of a report: launches by name, known names first, then by runtime.

    Args:
        iterations: The events of each iteration.
        program: The program that launched them.
        operator: ``"fna"`` or ``"fmha"``, what launches that do not say it themselves belong to.
        platform: ``"cpu"`` or ``"cuda"``.
    """
    names: dict[tuple[str, str, str], symbols.Name] = {}
    launched: dict[symbols.Name, list[list[Event]]] = defaultdict(lambda: [[] for _ in iterations])
    for i, events in enumerate(iterations):
        for event in events:
            source = event.symbol, event.instruction, event.scope
            if source not in names:
                instruction = program.instruction(event.instruction)
                symbol = instruction.target or event.symbol if platform == "cpu" else event.symbol
                names[source] = symbols.name(symbol, instruction, operator, event.scope)
            launched[names[source]][i].append(event)
    rows = []
    for named, in_turn in launched.items():
        runtimes = tuple(sum(event.duration / 1e9 for event in events) for events in in_turn)
        origins = dict.fromkeys(event.symbol for events in in_turn for event in events)
        if any(runtimes):
            rows.append(Row(named, round(statistics.median(map(len, in_turn))), runtimes, tuple(origins)))
    return tuple(sorted(rows, key=lambda row: (symbols.order(row.name), -row.runtime)))
