"""Compile the program that the options describe, run it, and sum the times of launches with equal names."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from natten_jax.backends.select import resolve
from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.tiles import flops
from natten_jax.ops import neighborhood
from natten_jax.ops.sub_calls import KeySubset
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device, default_device, default_jax_device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.profiler import baselines, symbols
from natten_jax.profiler.capture import Devices, Event, Launch, busiest, capture_by_device
from natten_jax.profiler.cli import progress
from natten_jax.profiler.options import DIMENSIONS, Options, arrays_of
from natten_jax.profiler.program import Program, compile_for_trace

# The program.


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled program and its inputs.

    Attributes:
        options: Options of the program.
        plans: Plan of each pass. Attention over the layout's tokens has the keys ``"forward"`` and ``"backward"``. A
            separate call for additional tokens has the keys ``"additional_kv_forward"`` and
            ``"additional_kv_backward"``. Empty for baselines.
        device: Device that runs the program.
        compiled: The compiled program.
        arguments: Inputs of the program.
        program: Instructions of the program.
    """

    options: Options
    plans: dict[str, Plan]
    device: Device
    compiled: jax.stages.Compiled
    arguments: tuple[jax.Array, ...]
    program: Program

    def run(self) -> Any:
        """Start one run of the program, and return the results without waiting for them."""
        return self.compiled(*self.arguments)

    def warm_up(self, steps: int) -> None:
        """Run the program ``steps`` times, and wait for the results of each run."""
        for _ in range(steps):
            jax.block_until_ready(self.run())  # type: ignore[no-untyped-call]

    @property
    def launch(self) -> Launch:
        return Launch(self.run, self.program)


def compile_workload(
    options: Options, name: str = "profiled", arguments: tuple[jax.Array, ...] | None = None
) -> Workload:
    """Compile the program that the options describe for the default device.

    Args:
        options: Options of the program.
        name: Name of the program. Programs in the same trace need different names.
        arguments: Inputs to reuse, from a workload whose arrays have the same shapes. Default: make new inputs.

    Raises:
        ValueError: The problem cannot run with these options.
    """
    device = default_device()
    plans: dict[str, Plan] = {}
    for call in () if options.is_baseline else options.sub_calls_per_device():
        prefix = "additional_kv_" if call.kind is KeySubset.ADDITIONAL else ""
        plans |= {prefix + pass_: resolve(call.request, device, pass_) for pass_ in options.passes}
    function = _function(options)
    function.__name__ = name
    # Reused inputs may end with additional keys and values, which a baseline does not have.
    arguments = make_inputs(options) if arguments is None else arguments[: len(input_shapes(options))]
    compiled = compile_for_trace(function, *arguments)
    return Workload(options, plans, device, compiled, arguments, Program.from_compiled(compiled))


def _function(options: Options) -> Callable[..., Any]:
    """Return the function to profile. Its arguments are arrays with the shapes that :func:`input_shapes` returns."""

    def forward(*arrays: jax.Array) -> Any:
        if options.is_baseline:
            return baselines.attend(str(options.backend), *arrays)
        _, *names = shapes_of(options.problem)
        operator: Callable[..., Any] = getattr(neighborhood, f"na{options.problem.rank}d")
        return operator(
            **dict(zip(names, arrays, strict=True)),
            **options.problem.windows._asdict(),
            attention_kwargs=options.attention_kwargs,
            backend=options.backend,
            **dataclasses.asdict(options.performance),
        )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward


# Checks before compilation.


def check_runs(options: Options, device: Device) -> None:
    """Check that the device has memory for the arrays. If the options profile a baseline, check that it can run.

    Raises:
        ValueError: The baseline cannot run, or the options request more devices than are available.
        MemoryError: The problem is too large for the device.
    """
    check_fits(options)
    if options.is_baseline:
        name = str(options.backend)
        flag = "--compare" if name == options.compare else "--backend"
        baselines.check(name, flag, options.problem, device, memory(options))


def check_fits(options: Options) -> None:
    """Check that the device has memory for the inputs and results. XLA would crash on some arrays that do not fit.

    Raises:
        ValueError: The options request more devices than are available.
        MemoryError: The arrays are larger than the memory.
    """
    shapes = [*shapes_of(options.problem).values()]
    if options.devices > 1:
        shapes = [sharding_of(options, shape).shard_shape(shape) for shape in shapes]
    needed = sum(map(math.prod, shapes)) * options.problem.element.bytes
    if options.backprop:
        needed *= 2  # the backward pass adds the output's cotangent, and the gradient of every input
    available = memory(options)
    if needed > available:
        raise MemoryError(
            "the problem is too large for this machine: its operands and results take "
            f"{needed / 2**30:,.1f} GiB, and {default_device()} has {available / 2**30:,.1f} GiB"
        )


def memory(options: Options) -> int:
    """Return the memory per device in bytes. CPU devices share the host's memory equally."""
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // options.devices
    return int((default_jax_device().memory_stats() or {}).get("bytes_limit", host_bytes))


# Inputs.


def shapes_of(problem: Problem) -> dict[str, Shape]:
    """Return the shapes of an operator's output cotangent and operands, by name."""
    tokens, keys = (problem.batch, *problem.query_layout), (problem.batch, *problem.kv_layout)
    widths = {"key": problem.head_dim, "value": problem.head_dim_v}
    shapes = {"out_cotangent": (*tokens, problem.heads, problem.head_dim_v)}
    shapes |= {"query": (*tokens, problem.heads, problem.head_dim)}
    shapes |= {name: (*keys, problem.heads_kv, width) for name, width in widths.items()}
    if problem.additional_kv:
        added = problem.batch, problem.additional_kv, problem.heads_kv
        shapes |= {f"additional_{name}s": (*added, width) for name, width in widths.items()}
    return shapes


def input_shapes(options: Options) -> list[Shape]:
    """Return the shapes of the program's inputs: the output cotangent (with ``backprop``), and the operands."""
    return [*shapes_of(options.problem).values()][not options.backprop :]


def make_inputs(options: Options) -> tuple[jax.Array, ...]:
    """Return random normal inputs, sharded over the devices. With zeros, kernels would draw less power and run faster.

    Raises:
        ValueError: The options request more devices than are available.
    """
    shapes, dtype = input_shapes(options), jnp.dtype(options.problem.dtype)

    def random(key: jax.Array, shape: Shape) -> Any:
        # Each device makes its own shard, because the whole array can exceed the memory of one device.
        shards = None if options.devices == 1 else sharding_of(options, shape)
        return jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=shards)(key, shape, dtype)

    return tuple(map(random, jax.random.split(jax.random.key(0), len(shapes)), shapes))


# Several devices.


def sharding_of(options: Options, shape: Shape) -> NamedSharding:
    """Return the sharding of an array ``[batch, ..., heads, head_dim]``.

    If heads are split, keys and values are replicated unless the number of their heads is a multiple of the number of
    devices. If tokens are split, additional keys and values are replicated.

    Raises:
        ValueError: The options request more devices than are available.
    """
    devices, wanted = jax.local_devices(backend=default_jax_device().platform), options.devices
    if wanted > len(devices):
        advice = f"; a CPU host has more with JAX_NUM_CPU_DEVICES={wanted}" if devices[0].platform == "cpu" else ""
        kind = devices[0].device_kind
        raise ValueError(f"--devices {wanted} is more than there are here: {len(devices)} ({kind}){advice}")
    axes: tuple[str | None, ...]
    if options.splits_tokens:
        parts, names = options.token_parts(), DIMENSIONS[options.problem.rank]
        axes = (None, *names) if shape[1:-2] == options.problem.query_layout else ()
    else:
        parts, names = (options.devices,), ("devices",)
        axis = 0 if options.split == "batch" else len(shape) - 2
        axes = (*(None,) * axis, "devices") if shape[axis] % options.devices == 0 else ()
    mesh = Mesh(np.asarray(devices[:wanted]).reshape(parts), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, PartitionSpec(*axes))


# The measurement.


@dataclasses.dataclass(frozen=True)
class Row:
    """All launches with one name.

    Attributes:
        name: The name.
        calls: Launches per iteration.
        runtimes: Device time of the launches in each iteration, in seconds.
        symbols: Symbols of the kernels; on a CPU, names of the instructions.
    """

    name: symbols.Name
    calls: int
    runtimes: tuple[float, ...]
    symbols: tuple[str, ...]

    @property
    def runtime(self) -> float:
        """Median of ``runtimes``, in seconds."""
        return statistics.median(self.runtimes)


@dataclasses.dataclass(frozen=True)
class Result:
    """A measurement.

    Attributes:
        options: Options of the measurement.
        plans: Plan of each pass, as in :class:`Workload`.
        device: Kind of the device that ran the program.
        rows: Rows of the report, in order. Each row is for all launches with one name on the busiest device.
        device_times: Device number -> device time of each iteration, in seconds.
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
        """Name of the backend of each plan, with the keys of ``plans``. For a baseline: pass -> the baseline's name."""
        if self.options.is_baseline:
            return dict.fromkeys(self.options.passes, str(self.options.backend))
        return {name: str(plan.backend) for name, plan in self.plans.items()}

    @property
    def tiles(self) -> dict[Pass, TilePair]:
        """Query tile and key/value tile of each pass over the layout's tokens. Empty for baselines."""
        return {pass_: self.plans[pass_].tiles for pass_ in self.options.passes if pass_ in self.plans}

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations of each pass in one iteration, summed over devices.

        Query-key pairs that are masked out do not count.
        """
        return {pass_: flops(self.options.problem, pass_) for pass_ in self.options.passes}

    @property
    def totals(self) -> tuple[float, ...]:
        """Device time of each iteration on the busiest device, in seconds."""
        return self.device_times[self.busiest]

    def calibration(self, pass_: Pass) -> Calibration | None:
        """Return the time model of the backend that runs a pass. ``None`` means that the device was not calibrated."""
        return calibration_for(self.plans[pass_].backend.family, self.device.compute_capability)

    @property
    def median(self) -> float:
        """Median device time of an iteration on the busiest device, in seconds."""
        return statistics.median(self.totals)

    @property
    def tflops(self) -> float:
        """TFLOP/s: the operations of all passes (``flops``) divided by ``median``."""
        return sum(self.flops.values()) / self.median / 1e12

    def speedup_over(self, baseline: Result) -> float:
        """Return the median over iterations of the baseline's time divided by this result's time.

        Iteration ``i`` of the baseline is compared with iteration ``i`` of this result.
        """
        turns = zip(baseline.totals, self.totals, strict=True)
        return statistics.median(theirs / ours for theirs, ours in turns)

    def flop_bound_over(self, baseline: Result) -> float:
        """Return the baseline's floating-point operations divided by this result's floating-point operations.

        This ratio is the speedup at equal TFLOP/s.
        """
        return sum(baseline.flops.values()) / sum(self.flops.values())


def profile(options: Options) -> Result:
    """Measure the program that the options describe on the default device.

    Raises:
        ValueError: The problem cannot run with these options.
        MemoryError: The problem is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    return _profile([options])[0]


def compare(options: Options, baseline: str) -> tuple[Result, Result]:
    """Measure two programs in alternating runs on the default device.

    The first program is the operator that the options describe. The second program is a baseline, or the same operator
    on another backend.

    Raises:
        ValueError: The problem or the baseline cannot run.
        MemoryError: The problem is too large for the device.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    result, other = _profile([options, options.with_baseline(baseline)])
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
        launches = [each.launch for each in workloads]
        captured = capture_by_device(launches, first.iterations, device.platform, first.verbose, first.trace_dir)
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


#: Name of a launch, and the launch.
NamedEvent = tuple[symbols.Name, Event]


def summarize(iterations: Sequence[Sequence[Event]], program: Program, operator: str, platform: str) -> tuple[Row, ...]:
    """Name the events with :func:`named`, and return one row per name with :func:`rows_of`."""
    return rows_of([named(events, program, operator, platform) for events in iterations])


def named(events: Iterable[Event], program: Program, operator: str, platform: str) -> list[NamedEvent]:
    """Return launches together with their readable names.

    Args:
        events: The launches.
        program: Program that made the launches.
        operator: ``"fna"`` or ``"fmha"``, for the names of launches whose instruction lacks a plan.
        platform: ``"cpu"``, ``"cuda"`` or ``"tpu"``.
    """

    @functools.cache
    def name(symbol: str, instruction_name: str, scope: str) -> symbols.Name:
        instruction = program.instruction(instruction_name)
        symbol = (platform == "cpu" and instruction.target) or symbol
        return symbols.name(symbol, instruction, operator, scope)

    return [(name(event.symbol, event.instruction, event.scope), event) for event in events]


def rows_of(iterations: Sequence[Iterable[NamedEvent]]) -> tuple[Row, ...]:
    """Return one row per name of launches.

    Rows of known operations are first, in the order of ``symbols.KNOWN_OPERATIONS``. All other rows are sorted by
    decreasing runtime.
    """
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
