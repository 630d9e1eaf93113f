"""Dry runs and simulations, which need no measurement.

``--dry-run`` lists the configurations of a problem with predicted times. ``--simulate`` predicts the time of one
configuration, and prints the quantities behind the prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from natten_jax import backends, simulator
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.cost_model.simulation import TpuChip, chip_of
from natten_jax.performance import PASSES, KernelSchedule, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, tile_arguments
from natten_jax.problem import Problem
from natten_jax.profiler.options import Options
from natten_jax.profiler.report import Table, context, digits, format_time, print_lines, print_table, problem_line
from natten_jax.simulator import DilationRecommendation, Recommendation, Simulation, SplitTime

#: Line below predicted times of TPUs.
STATIC = "Times are static estimates from the published figures of the chip, not measurements on a TPU."

#: A dry run of self attention also lists the multidimensional tiles of neighborhood attention, below this line.
_WINDOWS = "Multidimensional tiles, for windows (-w) smaller than the input; in the order for windows of its size:"

#: Number of tile pairs (query tile, key/value tile) that are tried with each dilation, fastest pairs first.
_PAIRS_TO_DILATE = 16


# Configurations.


@dataclasses.dataclass(frozen=True)
class Listing:
    """Configurations that a backend offers for one pass of a problem on a device.

    Attributes:
        backend: The backend.
        pass_: The pass.
        problem: The problem.
        device: The device.
        pairs: Pairs of a query tile and a key/value tile, best first.
        schedules: Kernel schedules, default first. Empty if the backend has only one schedule.
    """

    backend: BackendId
    pass_: Pass
    problem: Problem
    device: Device
    pairs: tuple[TilePair, ...]
    schedules: tuple[str, ...]

    @property
    def calibration(self) -> simulator.Calibration | None:
        """Time model of the backend on the device. ``None`` if this backend was not calibrated for the device."""
        return simulator.calibration_for(self.backend.family, self.device.compute_capability)

    @property
    def static_chip(self) -> TpuChip | None:
        """TPU whose published rates predict the time. ``None`` for other platforms, which use :attr:`calibration`."""
        platform = backends.by_id(self.backend).capabilities.platform
        return chip_of(self.device) if platform is not None and platform.name == "tpu" else None

    @property
    def remarks(self) -> list[str]:
        if self.static_chip is not None:
            return [STATIC]
        if self.calibration is None or self.calibration.is_measured:
            return []
        return [f"Predicted times of {self.backend.family}-*: from arithmetic, not measured."]

    def simulate(self, pair: TilePair) -> Simulation:
        """Count the tiles that the pass computes with a tile pair. Predict the time if there is a time model."""
        simulation = simulator.simulate(self.problem, pair, self.pass_, calibration=self.calibration)
        chip = self.static_chip
        return simulation if chip is None else dataclasses.replace(simulation, seconds=chip.seconds(simulation))


def candidates(options: Options) -> tuple[Backend, ...]:
    """Return the backend that the options name, or all backends if they name none."""
    request = options.main_request
    if request.backend is None:
        return backends.registered()
    return (backends.find(request.backend, request.problem.operator),)


def listings(options: Options, problem: Problem, device: Device) -> list[Listing]:
    """Return a listing of each pass for each candidate backend that supports the problem on the device."""
    return [
        listing(backend, problem, device, pass_)
        for backend in candidates(options)
        if backend.rejection(problem, device, "forward") is None
        for pass_ in PASSES
        if backend.rejection(problem, device, pass_) is None
    ]


def listing(backend: Backend, problem: Problem, device: Device, pass_: Pass) -> Listing:
    """Return the configurations that one backend offers for one pass."""
    schedules = tuple(map(str, backend.capabilities.schedules.get(pass_, ())))
    id_ = BackendId(backend.family, problem.operator)
    pairs = backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_)
    return Listing(id_, pass_, problem, device, tuple(pairs), schedules)


def tile_text(tile: tuple[int, ...]) -> str:
    """Return text such as ``(4, 4, 8)``. A tile with one dimension becomes a number without parentheses."""
    return str(tile[0]) if len(tile) == 1 else f"({', '.join(map(str, tile))})"


# --dry-run.


def print_dry_run(options: Options, device: Device) -> tuple[dict[str, Any], bool]:
    """Print the configurations of every backend that supports the problem.

    Returns:
        The results as JSON values, and True if a backend supports the problem. The results contain the configurations
        only if the options request a JSON file.
    """
    main, problem = options.main_request.problem, options.problem
    problems, families = [main], {backend.family for backend in candidates(options)}
    if problem.is_attention and (options.fmha_backend is None or options.backend is not None):
        # Tiles of self attention have one dimension. Users who plan to add a window need the multidimensional tiles.
        problems.append(problem)
    print_lines([problem_line(options), f"Device: {device}"])
    configurations, rejections, is_supported = [], dict[str, str](), False
    for problem in problems:
        if problem is not main:
            print_lines(["", _WINDOWS])
        for each in listings(options, problem, device):
            is_supported = True
            _print_listing(each, options)
            if options.json is not None:
                configurations += [_configuration_json(each, pair) for pair in each.pairs]
        reasons = select.rejections(problem, device, "forward").items()
        rejected = {str(id_): reason for id_, reason in reasons if id_.family in families}
        lines = [f"Use case is not compatible with backend {name}: {why}." for name, why in rejected.items()]
        print_lines(["", *lines] if lines else [])
        rejections |= rejected
    result = {"dry_run_device": dataclasses.asdict(device), "configurations": configurations, "rejections": rejections}
    return {**context(options), **result}, is_supported


def _print_listing(listing: Listing, options: Options) -> None:
    is_forward = listing.pass_ == "forward"
    if is_forward:
        print_lines(["", f"Use case is compatible with backend {listing.backend}."])
    has_schedules = bool(listing.schedules)
    names = [*tile_arguments(listing.problem.operator, listing.pass_), *["kernel_schedule"] * has_schedules]
    columns = *names, "KV/Q tile" if is_forward else "Q/KV tile", "no mask", "waste", "predicted"
    rows = []
    for pair in listing.pairs[: options.max_configs or None]:
        simulation = listing.simulate(pair)
        counts, time = simulation.counts, "-" if simulation.seconds is None else format_time(simulation.seconds)
        shares = digits(counts.inner_per_outer), f"{counts.full_share:.0%}", f"{counts.wasted_share:.0%}"
        rows.append((*map(tile_text, pair), *[", ".join(listing.schedules)] * has_schedules, *shares, time))
    if len(rows) < len(listing.pairs):
        rows.append(("...",) * len(columns))
    title = f"Backend: {listing.backend}\n{listing.pass_.capitalize()} pass configurations"
    print_table(Table(title, columns, tuple(rows)))
    print_lines(listing.remarks)
    if has_schedules:
        schedules = (f"{name} is KernelSchedule.{KernelSchedule(name).natten_name}" for name in listing.schedules)
        print_lines([f"kernel_schedule: {', '.join(schedules)}"])


def _configuration_json(listing: Listing, pair: TilePair) -> dict[str, Any]:
    simulation = listing.simulate(pair)
    shares = ("full_share", "masked_share", "padding_share", "wasted_share")
    return {
        "backend": str(listing.backend),
        "pass": listing.pass_,
        "q_tile_shape": pair[0],
        "kv_tile_shape": pair[1],
        "kernel_schedules": listing.schedules,
        "inner_tiles_per_outer_tile": simulation.counts.inner_per_outer,
        **{name: getattr(simulation.counts, name) for name in shares},
        "predicted_seconds": simulation.seconds,
        "is_static": listing.static_chip is not None,
    }


# --simulate.


def print_simulation(options: Options, device: Device) -> dict[str, Any]:
    """Simulate each pass, and print the results. Tiles that the options do not set are the backend's defaults.

    Returns:
        The results as JSON values.

    Raises:
        ValueError: No backend supports the problem on the device.
    """
    request = options.main_request
    passes: dict[Pass, tuple[Listing, Simulation]] = {}
    for pass_ in options.passes:
        plan = select.resolve(request, device, pass_)
        offered = listing(backends.by_id(plan.backend), plan.problem, device, pass_)
        passes[pass_] = offered, offered.simulate(plan.tiles)
    split = {pass_: _split_time(options, device, pass_) for pass_ in options.passes if options.devices > 1}
    (offered, forward), stride, dilation = passes["forward"], None, None
    if not request.problem.is_attention:
        requested, model = request.performance.tiles("forward"), offered.calibration
        pairs = (requested,) if requested else offered.pairs
        if not forward.counts.is_fully_block_sparse:
            stride = simulator.recommend_stride(request.problem, pairs, calibration=model)
        dilation = simulator.recommend_dilation(request.problem, pairs[:_PAIRS_TO_DILATE], calibration=model)

    columns = [dict(_quantities(*each)) for each in passes.values()]
    rows = [(quantity, *(column[quantity] for column in columns)) for quantity in columns[0]]
    title = "Simulation" if len(columns) > 1 else "Simulation of the forward pass"
    print_table(Table(title, ("Quantity", *passes), tuple(rows)))
    remarks = dict.fromkeys(remark for offered, _ in passes.values() for remark in offered.remarks)
    splits = [line for pass_, time in split.items() for line in _split_lines(options, passes[pass_][1], time)]
    advice = _advice(forward, stride, dilation)
    print_lines([problem_line(options), f"Device: {device}", *remarks, *splits, *advice])

    times = {
        pass_: None if time is None else {**dataclasses.asdict(time), "predicted_seconds": time.seconds}
        for pass_, time in split.items()
    }
    return {
        **context(options),
        "simulated_device": dataclasses.asdict(device),
        "is_static": offered.static_chip is not None,
        "passes": {name: {"backend": str(each.backend), **_values(result)} for name, (each, result) in passes.items()},
        "devices": {"count": options.devices, "split": options.split, "passes": times},
        "recommendation": stride and {"stride": stride.stride, **_values(stride.simulation)},
        "dilation_recommendation": dilation and {"dilation": dilation.dilation, **_values(dilation.simulation)},
    }


def _split_time(options: Options, device: Device, pass_: Pass) -> SplitTime | None:
    """Predict the time of a pass that is split over devices, or return ``None`` if there is no time model.

    The prediction uses the plan of one device. The problem of this plan has the device's share of batch and heads.
    """
    request = dataclasses.replace(options.sub_calls_per_device()[0].request, parts=options.token_parts())
    plan = select.resolve(request, device, pass_)
    calibration = simulator.calibration_for(plan.backend.family, device.compute_capability)
    if calibration is None:
        return None
    time = simulator.predict_split(plan, request.parts, calibration)
    return None if time is None else dataclasses.replace(time, devices=options.devices)


def _values(simulation: Simulation) -> dict[str, Any]:
    names = ("flops", "executed_flops", "flop_bound", "tile_bound", "least_bytes", "tile_bytes")
    return {
        "q_tile_shape": simulation.pair[0],
        "kv_tile_shape": simulation.pair[1],
        "counts": dataclasses.asdict(simulation.counts),
        "predicted_seconds": simulation.seconds,
        **{name: getattr(simulation, name) for name in names},
    }


def _quantities(offered: Listing, simulation: Simulation) -> Iterator[tuple[str, str]]:
    """Yield the rows of the simulation's table: names of quantities and their values."""
    problem, counts = simulation.problem, simulation.counts
    yield "backend", str(offered.backend)
    yield "query tile", tile_text(simulation.pair[0])
    yield "key/value tile", tile_text(simulation.pair[1])
    yield "outer tiles, all heads", f"{problem.batch * problem.heads * counts.outer}"
    yield "inner tiles per outer tile: mean, max", f"{digits(counts.inner_per_outer)}, {counts.most_inner}"
    yield "  share of pairs masked, padding", f"{counts.masked_share:.1%}, {counts.padding_share:.1%}"
    yield "  share computed; of that, full", f"{counts.computed_share:.1%}, {counts.full_share:.1%}"
    yield "GFLOP of unmasked pairs", digits(simulation.flops / 1e9)
    yield "GFLOP executed", digits(simulation.executed_flops / 1e9)
    yield "MB of inputs and results", digits(simulation.least_bytes / 1e6)
    yield "MB of tiles", digits(simulation.tile_bytes / 1e6)
    yield "speedup over self attention: FLOP-wise", f"{digits(simulation.flop_bound)}X"
    yield "  for these tiles", f"{digits(simulation.tile_bound)}X"
    seconds = simulation.seconds
    yield "predicted time", "not calibrated" if seconds is None else format_time(seconds)
    yield "predicted TFLOP/s", "-" if seconds is None else digits(simulation.flops / seconds / 1e12)


def _split_lines(options: Options, on_one: Simulation, time: SplitTime | None) -> Iterator[str]:
    """Yield lines about the predicted time of a pass that is split over devices."""
    line = f"On {options.describe_split()}: the {on_one.pass_} pass"
    if time is None or on_one.seconds is None:
        yield f"{line} was not calibrated."
        return
    gain = on_one.seconds / time.seconds
    yield (
        f"{line} is predicted to take {format_time(time.seconds)}, {digits(gain)}X as fast: an efficiency of "
        f"{gain / time.devices:.0%}."
    )
    if time.tiles != on_one.pair:
        yield f"  The fastest tiles for a device's part are {' and '.join(map(tile_text, time.tiles))}."
    if time.received:
        link = simulator.link_between(time.devices).name
        yield (
            f"  A device receives {digits(time.received / 1e6)} MB of keys and values. The exchange takes "
            f"{format_time(time.exchange)} over {link}; computation does not hide {format_time(time.exposed)} of it."
        )


def _advice(
    forward: Simulation, stride: Recommendation | None, dilation: DilationRecommendation | None
) -> Iterator[str]:
    """Yield sentences that recommend a stride and a dilation, or that state why none is recommended."""
    if forward.counts.is_fully_block_sparse:
        yield "No tile of the forward pass needs a mask: the mask is fully block-sparse."
    elif stride is not None:
        why = "that makes the mask fully block-sparse at nearly the best speed"
        yield _recommended("stride", "-s", stride, why, forward)
    elif not forward.problem.is_attention:
        yield "No stride makes the mask fully block-sparse for tiles that this backend offers."
    if dilation is not None:
        mask = ", without any mask" if dilation.simulation.counts.is_fully_block_sparse else ""
        yield _recommended("dilation", "--dilation", dilation, f"at nearly the best speed{mask}", forward)
    elif not forward.problem.is_attention:
        yield "No dilation that was tried makes the forward pass faster."


def _recommended(
    name: str, flag: str, recommendation: Recommendation | DilationRecommendation, why: str, forward: Simulation
) -> str:
    value, simulation = recommendation
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
