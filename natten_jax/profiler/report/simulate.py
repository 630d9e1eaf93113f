"""``--simulate``: what a problem comes to on a device, predicted and explained, and which windows suit it better."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TextIO

from natten_jax import backends, simulator
from natten_jax.backends.select import resolve
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId
from natten_jax.plan.request import Request
from natten_jax.problem import Shape
from natten_jax.profiler.options import Options
from natten_jax.profiler.report.dry_run import STATIC
from natten_jax.profiler.report.measurements import context, problem_line
from natten_jax.profiler.report.tables import Table, digits, format_time, print_lines, print_table
from natten_jax.profiler.run import split
from natten_jax.profiler.run.split import splits_tokens, token_parts
from natten_jax.profiler.run.workload import passes, request_of, sub_calls_of_device
from natten_jax.profiler.search.configurations import Listing, listing, main_sub_call, remarks, tile_text
from natten_jax.simulator import DilationRecommendation, Recommendation, Simulation, SplitTime

#: How many of the fastest pairs of tiles are tried with each dilation.
_PAIRS_TO_DILATE = 16


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The simulated passes of a problem.

    Attributes:
        options: What was asked for.
        device: The device that was predicted for.
        passes: By name of the pass: the backend, and the simulation of its tiles.
        split: By name of the pass, what it takes on the devices that the options ask for; ``None`` where that was not
            calibrated.
        recommendation: A stride that needs no masks; ``None`` where there is none, or none is needed.
        dilation: A dilation that is faster; ``None`` where none is.
        is_static: Whether times are those of a static model, which nothing was measured for.
    """

    options: Options
    device: Device
    passes: dict[Pass, tuple[str, Simulation]]
    split: dict[Pass, SplitTime | None]
    recommendation: Recommendation | None
    dilation: DilationRecommendation | None
    is_static: bool = False


def simulate(options: Options, device: Device) -> Simulated:
    """Simulate the passes that the options ask for, with the tiles they name or the backends' own.

    Raises:
        ValueError: No backend runs the problem on such a device.
    """
    request = main_sub_call(options).request
    simulated: dict[Pass, tuple[str, Simulation]] = {}
    times: dict[Pass, SplitTime | None] = {}
    of_device = dataclasses.replace(sub_calls_of_device(options)[0].request, parts=token_parts(options))
    first: Listing | None = None
    for pass_ in passes(options):
        plan = resolve(request, device, pass_)
        offered = listing(backends.of(plan.backend), plan.problem, device, pass_)
        simulated[pass_] = str(plan.backend), offered.simulate(plan.tiles, device)
        first = first or offered
        if options.devices > 1:
            times[pass_] = _split_time(options, of_device, device, pass_)
    assert first is not None
    recommendation, dilation = None, None
    forward = simulated["forward"][1]
    if not request.problem.is_attention:
        requested = request.performance.tiles("forward")
        pairs = [requested] if requested else first.pairs
        calibration = simulator.calibration_for(first.backend.family, device.compute_capability)
        if not forward.counts.is_fully_block_sparse:
            recommendation = simulator.recommend_stride(request.problem, pairs, calibration=calibration)
        fastest = pairs[:_PAIRS_TO_DILATE]
        dilation = simulator.recommend_dilation(request.problem, fastest, calibration=calibration)
    is_static = first.static_chip(device) is not None
    return Simulated(options, device, simulated, times, recommendation, dilation, is_static)


def _split_time(options: Options, request: Request, device: Device, pass_: Pass) -> SplitTime | None:
    """What a pass takes on several devices, from how it runs on one with its share of batch and heads."""
    plan = resolve(request, device, pass_)
    calibration = simulator.calibration_for(plan.backend.family, device.compute_capability)
    if calibration is None:
        return None
    if splits_tokens(options):
        return simulator.predict_split(plan, request.parts, calibration)
    seconds = simulator.simulate(plan.problem, plan.tiles, plan.pass_, calibration=calibration).seconds
    return None if seconds is None else SplitTime(options.devices, plan.tiles, 0, seconds, 0.0, 0.0)


def print_simulation(simulated: Simulated, file: TextIO | None = None) -> None:
    """Print the table and the recommendation."""
    print_table(_table(simulated), file)
    line = problem_line(simulated.options, request_of(simulated.options).problem)
    static = [STATIC] if simulated.is_static else []
    said = *static, *_remarks(simulated), *_split_lines(simulated), *_advice(simulated)
    print_lines([line, f"Device: {simulated.device}", *said], file)


def _remarks(simulated: Simulated) -> list[str]:
    families = dict.fromkeys(BackendId.parse(name).family for name, _ in simulated.passes.values())
    capability = simulated.device.compute_capability
    return [line for family in families for line in remarks(simulator.calibration_for(family, capability))]


def to_json(simulated: Simulated) -> dict[str, Any]:
    """The simulation as JSON values."""
    options, stride, dilation = simulated.options, simulated.recommendation, simulated.dilation
    return {
        **context(options, request_of(options).problem),
        "simulated_device": dataclasses.asdict(simulated.device),
        "is_static": simulated.is_static,
        "passes": {
            pass_: {"backend": name, **_values(simulation)} for pass_, (name, simulation) in simulated.passes.items()
        },
        "devices": {
            "count": options.devices,
            "split": options.split,
            "passes": {
                pass_: None if time is None else {**dataclasses.asdict(time), "predicted_seconds": time.seconds}
                for pass_, time in simulated.split.items()
            },
        },
        "recommendation": stride and {"stride": stride.stride, **_values(stride.simulation)},
        "dilation_recommendation": dilation and {"dilation": dilation.dilation, **_values(dilation.simulation)},
    }


def _values(simulation: Simulation) -> dict[str, Any]:
    names = ("flops", "executed_flops", "flop_bound", "tile_bound", "least_bytes", "tile_bytes")
    return {
        "q_tile_shape": simulation.pair[0],
        "kv_tile_shape": simulation.pair[1],
        "counts": dataclasses.asdict(simulation.counts),
        "predicted_seconds": simulation.seconds,
        **{name: getattr(simulation, name) for name in names},
    }


def _table(simulated: Simulated) -> Table:
    columns = [dict(_quantities(*each)) for each in simulated.passes.values()]
    rows = [(quantity, *(column[quantity] for column in columns)) for quantity in columns[0]]
    title = "Simulation" if len(columns) > 1 else "Simulation of the forward pass"
    return Table(title, ("Quantity", *simulated.passes), tuple(rows))


def _quantities(backend: str, simulation: Simulation) -> Iterator[tuple[str, str]]:
    problem, counts = simulation.problem, simulation.counts
    yield "backend", backend
    yield "query tile", tile_text(simulation.pair[0])
    yield "key/value tile", tile_text(simulation.pair[1])
    yield "outer tiles, all heads", f"{problem.batch * problem.heads * counts.outer}"
    yield "inner tiles of each: mean, most", f"{digits(counts.inner_per_outer)}, {counts.most_inner}"
    yield "  share of pairs masked, padding", f"{counts.masked_share:.1%}, {counts.padding_share:.1%}"
    yield "  share computed; of that, full", f"{counts.computed_share:.1%}, {counts.full_share:.1%}"
    yield "GFLOP that the mask leaves", digits(simulation.flops / 1e9)
    yield "GFLOP executed", digits(simulation.executed_flops / 1e9)
    yield "MB of inputs and results", digits(simulation.least_bytes / 1e6)
    yield "MB of tiles", digits(simulation.tile_bytes / 1e6)
    yield "speedup over self attention: FLOP-wise", f"{digits(simulation.flop_bound)}X"
    yield "  for these tiles", f"{digits(simulation.tile_bound)}X"
    seconds = simulation.seconds
    yield "predicted time", "not calibrated" if seconds is None else format_time(seconds)
    yield "predicted TFLOP/s", "-" if seconds is None else digits(simulation.flops / seconds / 1e12)


def _split_lines(simulated: Simulated) -> Iterator[str]:
    """A sentence for each pass on several devices."""
    for pass_, time in simulated.split.items():
        on_one = simulated.passes[pass_][1]
        line = f"On {split.describe(simulated.options)}: the {pass_} pass"
        if time is None or on_one.seconds is None:
            yield f"{line} was not calibrated."
            continue
        gain = on_one.seconds / time.seconds
        yield (
            f"{line} takes {format_time(time.seconds)}, {digits(gain)}X as fast: an efficiency of "
            f"{gain / time.devices:.0%}, as predicted."
        )
        if time.tiles != on_one.pair:
            yield f"  Of a device's part, {' and '.join(map(tile_text, time.tiles))} are the fastest tiles."
        if time.received:
            link = simulator.link_between(time.devices).name
            yield (
                f"  A device receives {digits(time.received / 1e6)} MB of keys and values. Halos travel for "
                f"{format_time(time.exchange)} over {link}, {format_time(time.exposed)} of which nothing hides."
            )


def _advice(simulated: Simulated) -> Iterator[str]:
    """A sentence about the stride, and one about the dilation."""
    forward, stride, dilation = simulated.passes["forward"][1], simulated.recommendation, simulated.dilation
    if forward.counts.is_fully_block_sparse:
        yield "No tile of the forward pass needs a mask: the mask is fully block-sparse."
    elif stride is not None:
        why = "that makes the mask fully block-sparse at nearly the best speed"
        yield _recommended("stride", "-s", stride.stride, why, stride.simulation, forward)
    elif not forward.problem.is_attention:
        yield "No stride makes the mask fully block-sparse for tiles that this backend offers."
    if dilation is not None:
        mask = ", without any mask" if dilation.simulation.counts.is_fully_block_sparse else ""
        why = f"at nearly the best speed{mask}"
        yield _recommended("dilation", "--dilation", dilation.dilation, why, dilation.simulation, forward)
    elif not forward.problem.is_attention:
        yield "No dilation that was tried makes the forward pass faster."


def _recommended(name: str, flag: str, value: Shape, why: str, simulation: Simulation, forward: Simulation) -> str:
    """A recommendation, its tiles, and what it gains."""
    if simulation.seconds is None or forward.seconds is None:
        gain = f"{1 - simulation.executed_flops / forward.executed_flops:.0%} fewer operations"
    else:
        times = forward.seconds / simulation.seconds
        gain = f"{format_time(simulation.seconds)} predicted, {digits(times)}X as fast"
    return (
        f"{name.capitalize()} {tile_text(value)} is the smallest {why}, with tiles "
        f"{' and '.join(map(tile_text, simulation.pair))}: {gain}. ({flag} {' '.join(map(str, value))}; another {name} "
        "is another model.)"
    )
