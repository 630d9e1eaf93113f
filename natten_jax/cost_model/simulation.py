"""Predicted times of passes, and a ranking of tile pairs by predicted time.

:func:`predict` computes seconds from the tile counts of a pass. The coefficients belong to a compiled kernel on one
kind of device (:mod:`natten_jax.cost_model.calibration`). The formula is:

    visiting = inner_tile * (seen tiles) + masking * (partial tiles) + skipping * (skipped tiles)
    tile = outer_tile + visiting / (outer tiles)
    work = rounds * tile
    busy = launch + max(work, byte * (bytes of inputs and results))
    time = busy * (1 + slowdown * power * busy / (busy + onset))

- Each row group of a kernel sees or skips an inner tile, and may mask it (``natten_jax.cost_model.tiles``). If only
  some of the row groups skip a tile, the tile counts partly as seen and partly as skipped. A tile counts as partial if
  at least one row group masks it, because row groups take turns: one uses the tensor cores while another computes
  exponentials.
- The number of rounds (waves) is ``batch * heads * (outer tiles) / (multiprocessors * side_by_side)``, with
  ``heads_kv`` instead of ``heads`` in the backward pass. It is rounded up. If thread blocks take their tiles from a
  counter, the number is not rounded up. Instead, ``tail`` is added to it (half a round on Hopper).
- The last line of the formula models the clock. The clock drops while a kernel keeps the device at its power limit, and
  it drops further for kernels that draw more power.
- A backward pass consists of several kernels and has a separate ``launch`` coefficient.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from natten_jax.arguments.names import check_types, checked_pair
from natten_jax.cost_model import small_windows
from natten_jax.cost_model.calibration import Calibration, Kernel
from natten_jax.cost_model.tiles import (
    Placement,
    TileCounts,
    TimedTiles,
    all_pairs,
    count_tiles,
    flops,
    least_bytes,
    part_counts,
)
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem, Shape


@check_types
def predict(problem: Problem, tiles: TimedTiles, pass_: Pass, kernel: Kernel, calibration: Calibration) -> Any:
    """Predict the seconds that a pass takes.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), 80, heads=24, head_dim=128)
        >>> pair = (16, 8), (16, 8)
        >>> model = simulator.calibration_for("hopper")
        >>> kernel = model.kernel(problem, pair, "forward")
        >>> counts = simulator.count_tiles(problem, pair, kernel=kernel)
        >>> bool(0 < simulator.predict(problem, counts.tiles, "forward", kernel, model) < 0.1)
        True

    Args:
        problem: The problem.
        tiles: Tile counts for a pair of tiles, or arrays of tile counts for several pairs.
        pass_: The pass.
        kernel: The kernel that executes the tiles.
        calibration: The time model, which includes the kernel.

    Returns:
        Predicted seconds, for each pair of tiles.
    """
    outer, inner, seen, partial = (np.asarray(each, np.float64) for each in tiles)
    # The backward pass processes a key/value tile with all query heads that share the tile's key head.
    heads, repeats = (problem.heads, 1) if pass_ == "forward" else (problem.heads_kv, problem.heads // problem.heads_kv)
    visiting = kernel.inner_tile * seen + kernel.masking * partial + kernel.skipping * (inner - seen)
    rounds = calibration.rounds(problem.batch * heads * outer, pass_, kernel)
    tile = kernel.outer_tile + repeats * visiting / outer
    moving = calibration.byte * least_bytes(problem, pass_)
    return calibration.clocked(calibration.launch_of(pass_) + np.maximum(rounds * tile, moving), kernel)


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Work and predicted time of a pass with given tiles.

    Attributes:
        problem: The problem.
        pass_: The pass.
        pair: Query tile and key/value tile.
        placement: Position of the inner tiles, as in :func:`count_tiles`.
        counts: Counts of tiles and of query-key pairs, per batch entry and head.
        executed_flops: Floating-point operations that are executed. These include operations on masked pairs and on
            padding.
        tile_bytes: Bytes that are loaded for all outer and inner tiles, mostly from the device's cache.
        seconds: Predicted device time; ``None`` if no time was predicted.
    """

    problem: Problem
    pass_: Pass
    pair: TilePair
    placement: Placement
    counts: TileCounts
    executed_flops: int
    tile_bytes: int
    seconds: float | None

    @property
    def flops(self) -> int:
        """Floating-point operations on visible pairs, which are the pairs that the mask does not hide."""
        return flops(self.problem, self.pass_)

    @property
    def flop_bound(self) -> float:
        """Speedup over self attention if times were proportional to the number of visible pairs."""
        return all_pairs(self.problem) / self.counts.visible_pairs

    @property
    def tile_bound(self) -> float:
        """Speedup over self attention if times were proportional to the number of executed operations."""
        return self.flop_bound * self.flops / self.executed_flops

    @property
    def least_bytes(self) -> int:
        """Bytes of inputs and results: the minimum of the bytes that a pass reads from and writes to memory."""
        return least_bytes(self.problem, self.pass_)


@check_types
def simulate(
    problem: Problem,
    pair: TilePair,
    pass_: Pass = "forward",
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Simulation:
    """Count the work of a pass. If a calibration is given, also predict the time.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80, heads=24, head_dim=128)
        >>> model = simulator.calibration_for("hopper", compute_capability=(9, 0))
        >>> 0 < simulator.simulate(problem, ((16, 8), (16, 8)), calibration=model).seconds < 0.1
        True

    Args:
        problem: The problem.
        pair: Query tile shape and key/value tile shape.
        pass_: The pass.
        calibration: The time model, from :func:`calibration_for`. If it is ``None``, no time is predicted.
        placement: Position of the inner tiles; see :func:`count_tiles`.

    Raises:
        ValueError: A tile or the placement is invalid, or a dimension has more than ``2**20`` tiles.
    """
    pair, kernel, seconds = checked_pair(pair, problem.rank), None, None
    if calibration is not None and small_windows.is_for(calibration, problem, pass_, pair):
        seconds = small_windows.seconds(calibration, problem, pass_, pair)  # no other kernels support these tiles
    elif calibration is not None:
        kernel = calibration.kernel(problem, pair, pass_)
    counts = count_tiles(problem, pair, pass_, placement=placement, kernel=kernel)
    if calibration is not None and kernel is not None:
        seconds = float(predict(problem, counts.tiles, pass_, kernel, calibration))
    executed = flops(problem, pass_) * counts.executed_pairs // counts.visible_pairs
    outer, inner = map(math.prod, outer_and_inner(pair, pass_))
    loaded = problem.batch * problem.heads * (counts.outer * outer + counts.inner * inner)
    loaded *= (problem.head_dim + problem.head_dim_v) * problem.element.bytes
    return Simulation(problem, pass_, pair, placement, counts, executed, loaded, seconds)


@check_types
def rank(
    problem: Problem, pairs: Iterable[TilePair], pass_: Pass, calibration: Calibration | None
) -> list[tuple[TilePair, float]]:
    """Rank pairs of tiles by predicted time, the fastest first. Omit pairs without a predicted time.

    The inner tiles are anchored, as in :func:`count_tiles`.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), 80, stride=16, heads=24, head_dim=128)
        >>> model = simulator.calibration_for("hopper")
        >>> pairs = [((16, 8), (16, 8)), ((128, 1), (128, 1))]
        >>> [pair for pair, seconds in simulator.rank(problem, pairs, "forward", model)]
        [((16, 8), (16, 8)), ((128, 1), (128, 1))]

    Args:
        problem: The problem.
        pairs: Pairs of a query tile shape and a key/value tile shape.
        pass_: The pass.
        calibration: The time model, from :func:`calibration_for`. If it is ``None``, the result is empty.

    Raises:
        ValueError: A dimension has more than ``2**20`` tiles.
    """
    if calibration is None:
        return []
    # Pairs with equal numbers of tokens per tile run in the same kernel. In three dimensions there are thousands of
    # pairs, so one call counts all inner tile shapes for an outer tile shape.
    outer_side, inner_side = (0, 1) if pass_ == "forward" else (1, 0)
    by_size: dict[tuple[int, int], dict[Shape, list[TilePair]]] = collections.defaultdict(dict)
    for pair in (checked_pair(each, problem.rank) for each in pairs):
        same_size = by_size[math.prod(pair[0]), math.prod(pair[1])]
        same_size.setdefault(pair[outer_side], []).append(pair)
    timed: list[tuple[TilePair, float]] = []
    for by_outer in by_size.values():
        members = [pair for group in by_outer.values() for pair in group]
        if small_windows.is_for(calibration, problem, pass_, members[0]):
            estimates = ((pair, small_windows.seconds(calibration, problem, pass_, pair)) for pair in members)
            timed += [(pair, seconds) for pair, seconds in estimates if seconds is not None]
        elif (kernel := calibration.kernel(problem, members[0], pass_)) is not None:
            tiles = []
            for outer, group in by_outer.items():
                inner = tuple([pair[inner_side] for pair in group])
                parts = part_counts(problem, outer, inner, "anchored", pass_, kernel)
                outer_tiles = np.full(len(group), parts.outer)
                tiles.append((outer_tiles, parts.inner, parts.seen_parts / kernel.row_groups, parts.partial))
            counts = TimedTiles(*map(np.concatenate, zip(*tiles, strict=True)))
            timed += zip(members, predict(problem, counts, pass_, kernel, calibration).tolist(), strict=True)
    # If predicted times are equal, prefer tiles that are longer in the leading dimensions: on an H200, a pass with
    # tiles (16, 8) took 5% less time than with (8, 16).
    timed.sort(reverse=True)
    timed.sort(key=operator.itemgetter(1))
    return timed


_LANES = 128
#: Instruction bundles that the softmax of 1024 logits takes. The number is doubled in the backward pass, because both
#: of its kernels compute the weights.
_SOFTMAX: Mapping[Pass, float] = {"forward": 2.5, "backward": 2 * 2.5}
#: Number of matrix products of width ``head_dim``, and number of matrix products of width ``head_dim_v``, in all
#: kernels of a pass. Both kernels of the backward pass compute the weights and the gradients of the weights, so these
#: products count twice.
_PRODUCTS: Mapping[Pass, tuple[int, int]] = {"forward": (1, 1), "backward": (4, 3)}
#: Number of 16-bit products that the matrix units execute for one float32 product at full precision.
_PRODUCTS_PER_FLOAT32 = 6


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """A kind of TPU. All figures are per chip, and are published figures, not measurements.

    Attributes:
        name: Name in common use, such as ``"v5e"``.
        product: Name that JAX uses (``device_kind``).
        flops: Peak rate of bfloat16 operations per second.
        bandwidth: Memory bandwidth in bytes per second.
        cycles: Clock cycles per second, summed over the cores of the chip.
    """

    name: str
    product: str
    flops: float
    bandwidth: float
    cycles: float

    @property
    def device(self) -> Device:
        """A device of this kind, with ``is_present`` False."""
        return Device("tpu", is_present=False, product=self.product)

    def seconds(self, simulation: Simulation) -> float:
        """Estimate the seconds of a simulated pass with a roofline model. Use it to compare problems and tiles.

        The estimate is the largest of three times: the matrix products of all executed pairs, the instructions of the
        softmax, and the loads of the tiles from memory. It does not include latencies and instructions per tile.
        """
        problem, pass_ = simulation.problem, simulation.pass_
        heads = problem.batch * problem.heads
        pairs = heads * simulation.counts.executed_pairs
        widths = [-(-width // _LANES) * _LANES for width in (problem.head_dim, problem.head_dim_v)]
        total_width = sum(count * width for count, width in zip(_PRODUCTS[pass_], widths, strict=True))
        products = 2.0 * pairs * total_width * (_PRODUCTS_PER_FLOAT32 if problem.dtype == "float32" else 1) / self.flops
        softmax = pairs / 1024 * _SOFTMAX[pass_] / self.cycles
        padded = sum(widths) / (problem.head_dim + problem.head_dim_v)
        return max(products, softmax, simulation.tile_bytes * padded / self.bandwidth)


#: TPU chips by name.
TPU_CHIPS: Mapping[str, TpuChip] = {
    chip.name: chip
    for chip in (
        TpuChip("v4", "TPU v4", 275e12, 1.23e12, 2 * 1.05e9),
        TpuChip("v5e", "TPU v5 lite", 197e12, 0.82e12, 1.5e9),
        TpuChip("v5p", "TPU v5", 459e12, 2.46e12, 2 * 1.75e9),
        TpuChip("v6e", "TPU v6 lite", 918e12, 1.64e12, 1.75e9),
    )
}


def chip_of(device: Device) -> TpuChip | None:
    """Return the :class:`TpuChip` of a device; ``None`` if :data:`TPU_CHIPS` does not contain it."""
    chips = (chip for chip in TPU_CHIPS.values() if device.platform == "tpu" and device.product == chip.product)
    return next(chips, None)
