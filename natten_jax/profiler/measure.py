"""Build the program that the options describe, run it, and sum up what it launched."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import natten_jax
from natten_jax import backends
from natten_jax.backends.base import Pass
from natten_jax.devices import Device, default_device
from natten_jax.flops import flops
from natten_jax.problem import Problem, TileConfig, attention_problem, neighborhood_problem, tile_config
from natten_jax.profiler import baselines, capture, symbols
from natten_jax.profiler.arguments import DTYPES, Options
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.profiler.progress import Progress


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
        device: Where it ran.
        rows: One per name of launches, in the order of the report.
        totals: Seconds of device time per iteration, one value for each.
        flops: Floating-point operations per iteration that the mask leaves.
    """

    options: Options
    problem: Problem
    backends: dict[str, str]
    device: Device
    rows: tuple[Row, ...]
    totals: tuple[float, ...]
    flops: dict[str, int]

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


def profile(options: Options) -> Result:
    """Measure on the default device.

    Raises:
        ValueError: The problem cannot run as the options ask.
        natten_jax.profiler.capture.CaptureError: The trace could not be read.
    """
    device = default_device()
    problem, tiles = describe(options)
    with Progress(options.warmup_steps + options.iterations) as progress:
        progress.stage("compiling")
        function = _function(options, problem, device)
        arguments = _inputs(options)
        compiled = compile_for_trace(function, *arguments)

        def run() -> Any:
            progress.advance()
            return compiled(*arguments)

        progress.stage("warming up")
        for _ in range(options.warmup_steps):
            jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        progress.stage("measuring")
        program = Program.of(compiled)
        iterations = capture.capture(run, options.iterations, program, device.platform)
    rows = summarize(iterations, program, "fmha" if problem.is_attention else "fna", device.platform)
    passes: tuple[Pass, ...] = ("forward", "backward") if options.backprop else ("forward",)
    return Result(
        options,
        problem,
        _chosen_backends(options, problem, tiles, device, passes),
        device,
        rows,
        tuple(sum(event.duration for event in events) / 1e9 for events in iterations),
        {which: flops(problem, which) for which in passes},
    )


def describe(options: Options) -> tuple[Problem, TileConfig]:
    """The problem and the tiles that the options stand for.

    Raises:
        ValueError: The operators do not take this problem.
    """
    query, key, value, *additional = _shapes(options)
    keys, values = additional or (None, None)
    problem = neighborhood_problem(
        options.rank, query, key, value,
        options.window_size, options.stride, options.dilation, options.causal, None, keys, values,
    )  # fmt: skip
    return problem, tile_config(options.rank, **_tile_arguments(options))


def summarize(
    iterations: Sequence[Sequence[capture.Event]], program: Program, operator: str, platform: str
) -> tuple[Row, ...]:
    """The rows of a report: launches by name, known names first, then by runtime.

    Args:
        iterations: The events of each iteration.
        program: The program that launched them.
        operator: ``"fna"`` or ``"fmha"``, what launches that do not say it themselves belong to.
        platform: ``"cpu"`` or ``"cuda"``.
    """
    names: dict[tuple[str, str, str], symbols.Name] = {}
    runtimes: dict[symbols.Name, list[float]] = defaultdict(lambda: [0.0] * len(iterations))
    calls: dict[symbols.Name, list[int]] = defaultdict(lambda: [0] * len(iterations))
    origins: dict[symbols.Name, Counter[str]] = defaultdict(Counter)
    for i, events in enumerate(iterations):
        for event in events:
            source = event.symbol, event.instruction, event.scope
            if source not in names:
                instruction = program.instruction(event.instruction)
                symbol = instruction.target or event.symbol if platform == "cpu" else event.symbol
                names[source] = symbols.name(symbol, instruction, operator, event.scope)
            named = names[source]
            runtimes[named][i] += event.duration / 1e9
            calls[named][i] += 1
            origins[named][event.symbol] += 1
    rows = [
        Row(named, round(statistics.median(calls[named])), tuple(runtimes[named]), tuple(origins[named]))
        for named in runtimes
        if any(runtimes[named])
    ]
    return tuple(sorted(rows, key=lambda row: (symbols.order(row.name), -row.runtime)))


def _shapes(options: Options) -> list[Any]:
    """Query, key, value and additional keys and values, as shapes and dtypes."""

    def array(layout: tuple[int, ...], heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = options.batch_size, *layout, heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPES[options.dtype]))  # type: ignore[no-untyped-call]

    dims = options.dim, options.dim_value
    arrays = [array(options.input_size, options.heads, options.dim)]
    arrays += [array(options.input_size, options.heads_kv, dim) for dim in dims]
    if options.add_kv:
        arrays += [array((options.add_kv,), options.heads_kv, dim) for dim in dims]
    return arrays


def _inputs(options: Options) -> tuple[jax.Array, ...]:
    """Random normal arrays, never zeros: easy data runs faster than real data, as it draws less power."""
    shapes = _shapes(options)
    if options.backprop:
        query = shapes[0]
        shapes.insert(0, query.update(shape=(*query.shape[:-1], options.dim_value)))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, each.shape, each.dtype) for key, each in zip(keys, shapes, strict=True))


def _tile_arguments(options: Options) -> dict[str, Any]:
    return {
        "q_tile_shape": options.q_tile,
        "kv_tile_shape": options.kv_tile,
        "backward_q_tile_shape": options.backward_q_tile,
        "backward_kv_tile_shape": options.backward_kv_tile,
        "run_persistent_kernel": options.persistent,
        "kernel_schedule": options.schedule,
    }


def _function(options: Options, problem: Problem, device: Device) -> Callable[..., Any]:
    """The function to profile: of query, key, value, ...; with ``--backprop``, of the output's cotangent first."""
    if options.is_baseline:
        name = str(options.backend)
        baselines.check(name, problem, device)

        def forward(*arrays: jax.Array) -> Any:
            return baselines.attend(name, *arrays)
    else:
        operator: Callable[..., Any] = getattr(natten_jax, f"na{options.rank}d")
        attention_kwargs = {} if options.fmha_backend is None else {"backend": options.fmha_backend}

        def forward(*arrays: jax.Array) -> Any:
            query, key, value, *additional = arrays
            return operator(
                query,
                key,
                value,
                options.window_size,
                options.stride,
                options.dilation,
                options.causal,
                additional_keys=additional[0] if additional else None,
                additional_values=additional[1] if additional else None,
                attention_kwargs=attention_kwargs,
                backend=options.backend,
                **_tile_arguments(options),
            )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward


def _chosen_backends(
    options: Options, problem: Problem, tiles: TileConfig, device: Device, passes: Sequence[Pass]
) -> dict[str, str]:
    """The backend of every part, found as the operators find it."""
    if options.is_baseline:
        return dict.fromkeys(passes, str(options.backend))
    query, key, value, *additional = (_flat(each) for each in _shapes(options))
    fmha_backend = options.fmha_backend or backends.fmha_counterpart(options.backend)
    parts: list[tuple[str, Problem, TileConfig, str | None]] = []
    if problem.is_attention:
        whole = attention_problem(query, _longer(key, options.add_kv), _longer(value, options.add_kv), None, False)
        parts.append(("", dataclasses.replace(whole, is_causal=(any(problem.is_causal),)), tiles, fmha_backend))
    else:
        parts.append(("", dataclasses.replace(problem, additional_kv=0), tiles, options.backend))
        if additional:
            keys, values = additional
            context = attention_problem(query, keys, values, None, False)
            parts.append(("additional_kv_", context, TileConfig(), fmha_backend))
    chosen = {}
    for prefix, part, part_tiles, requested in parts:
        if part.operator == "fmha" and part_tiles is tiles:
            part_tiles = _flat_tiles(options)
        for which in passes:
            choice = backends.choose_pass(part, part_tiles, device, which, requested)
            chosen[f"{prefix}{which}"] = backends.backend_name(choice, part.operator)
    return chosen


def _flat_tiles(options: Options) -> TileConfig:
    arguments = _tile_arguments(options)
    for name in ("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"):
        if arguments[name] is not None:
            arguments[name] = math.prod(arguments[name])
    return tile_config(1, **arguments)


def _flat(array: Any) -> Any:
    batch, *layout, heads, dim = array.shape
    return array.update(shape=(batch, math.prod(layout), heads, dim))


def _longer(array: Any, tokens: int) -> Any:
    batch, own, heads, dim = array.shape
    return array.update(shape=(batch, own + tokens, heads, dim))
