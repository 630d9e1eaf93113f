"""What a tile configuration makes of a problem, and how long that takes: counted and predicted without a device.

:mod:`natten_jax.tile_counts` has the counts, which are exact. The predicted time of a pass, in seconds, with
coefficients fitted to measurements on one kind of device (:mod:`natten_jax.calibration`):

    streaming = streamed_tile * (seen tiles) + masking * (masked tiles) + skipping * (skipped tiles)
    tile = owned_tile + streaming / (owned tiles)
    work = rounds * tile
    busy = launch + max(work, byte * (bytes of inputs and results))
    time = busy * (1 + slowdown * power * busy / (busy + onset))

A tile counts as masked if any row group masks it, because they take turns. There are ``batch * heads * (owned tiles) /
(multiprocessors * side_by_side)`` rounds, rounded up; where a kernel takes its tiles from a counter, half a round is
added instead. The last line is the clock, which falls while a kernel keeps the device at its power limit: how much,
depends on the power that the kernel draws. A backward pass is several kernels and has a ``launch`` of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from natten_jax.axis_tiles import Axis, Placement, axes_of, axis_counts
from natten_jax.calibration import Calibration, Kernel, calibration_for, ordered
from natten_jax.flops import flops
from natten_jax.passes import Pass, TilePair
from natten_jax.problem import ELEMENT_BYTES, Problem, Shape, problem_of
from natten_jax.tile_counts import (
    TileCounts,
    TimedTiles,
    additional_counts,
    check_tiles,
    count_tiles,
    part_counts,
)

__all__ = [
    "Calibration",
    "Kernel",
    "Recommendation",
    "Simulation",
    "TileCounts",
    "calibration_for",
    "count_tiles",
    "least_block_sparse_stride",
    "predict",
    "problem_of",
    "rank",
    "recommend_stride",
    "simulate",
]

#: Strides that are tried for aligned tiles, which are no backend's.
_MOST_STRIDES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a pass of a problem comes to with a pair of tiles.

    Attributes:
        problem: The problem.
        pass_: The pass.
        pair: Query and key/value tile.
        placement: Where streamed tiles start.
        counts: Tiles and pairs per batch element and head.
        seconds: Predicted device time; ``None`` where nothing was calibrated.
    """

    problem: Problem
    pass_: Pass
    pair: TilePair
    placement: Placement
    counts: TileCounts
    seconds: float | None

    @property
    def flops(self) -> int:
        """Floating-point operations that the mask leaves."""
        return flops(self.problem, self.pass_)

    @property
    def executed_flops(self) -> int:
        """Floating-point operations that are computed, on masked pairs and padding, too."""
        return self.flops * self.counts.executed_pairs // self.counts.visible_pairs

    @property
    def flop_bound(self) -> float:
        """Speedup over self attention if time were the operations that the mask leaves."""
        return all_pairs(self.problem) / self.counts.visible_pairs

    @property
    def tile_bound(self) -> float:
        """Speedup over self attention if time were the operations that the tiles execute."""
        return all_pairs(self.problem) / self.counts.executed_pairs

    @property
    def least_bytes(self) -> int:
        """Bytes that inputs and results take: each is moved from or to memory at least once."""
        return least_bytes(self.problem, self.pass_)

    @property
    def tile_bytes(self) -> int:
        """Bytes of all owned and streamed tiles: what is loaded, mostly from the device's cache."""
        problem = self.problem
        owned, streamed = (math.prod(tile) for tile in ordered(self.pair, self.pass_))
        tokens = self.counts.owned * owned + self.counts.streamed * streamed
        width = problem.head_dim + problem.head_dim_v
        return problem.batch * problem.heads * tokens * width * ELEMENT_BYTES[problem.dtype]


def all_pairs(problem: Problem) -> int:
    """Query-key pairs without any mask, for one batch element and one head."""
    return math.prod(problem.query_layout) * (math.prod(problem.kv_layout) + problem.additional_kv)


def least_bytes(problem: Problem, pass_: Pass) -> int:
    """Bytes of the inputs and results of a pass."""
    queries, keys = math.prod(problem.query_layout), math.prod(problem.kv_layout) + problem.additional_kv
    width = problem.head_dim + problem.head_dim_v
    elements = queries * problem.heads * width + keys * problem.heads_kv * width
    once = problem.batch * elements * ELEMENT_BYTES[problem.dtype]
    logsumexp = problem.batch * problem.heads * queries * ELEMENT_BYTES[problem.accumulator_dtype]
    # The backward pass reads the output beside its gradient, and writes a gradient for every other array.
    return (once if pass_ == "forward" else 2 * once) + logsumexp


def simulate(
    problem: Problem,
    pair: TilePair,
    pass_: Pass = "forward",
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Simulation:
    """Count a pass and, with a calibration, predict its time.

    Args:
        problem: The problem.
        pair: Query and key/value tile shape.
        pass_: The pass.
        calibration: The time model, of :func:`calibration_for`; without one no time is predicted.
        placement: Where streamed tiles start; see :func:`count_tiles`.

    Raises:
        ValueError: A tile or the placement is not valid.
    """
    kernel = None if calibration is None else calibration.kernel(problem, pair, pass_)
    counts = count_tiles(problem, pair, pass_, placement=placement, kernel=kernel)
    seconds = None
    if calibration is not None and kernel is not None:
        seconds = float(predict(problem, counts.tiles, pass_, kernel, calibration))
    return Simulation(problem, pass_, pair, placement, counts, seconds)


def rank(
    problem: Problem, pairs: Iterable[TilePair], pass_: Pass, calibration: Calibration | None
) -> list[tuple[TilePair, float]]:
    """Pairs that anchored kernels take, with predicted seconds, fastest first; without a model, none."""
    groups: dict[Kernel, list[TilePair]] = collections.defaultdict(list)
    for pair in pairs:
        kernel = None if calibration is None else calibration.kernel(problem, pair, pass_)
        if kernel is not None:
            groups[kernel].append(pair)
    timed: list[tuple[TilePair, float]] = []
    axes = axes_of(problem)
    for kernel, of_kernel in groups.items():
        assert calibration is not None
        counts = [timed_tiles(problem, axes, pair, pass_, kernel) for pair in of_kernel]
        seconds = predict(problem, counts, pass_, kernel, calibration)
        timed += zip(of_kernel, map(float, seconds), strict=True)
    # Among equals, tiles that are long in the leading dimensions: on an H200 (16, 8) took 5% less time than (8, 16).
    return sorted(timed, key=lambda item: (item[1], *([-extent for extent in tile] for tile in item[0])))


def timed_tiles(problem: Problem, axes: Sequence[Axis], pair: TilePair, pass_: Pass, kernel: Kernel) -> TimedTiles:
    """:attr:`TileCounts.tiles` of an anchored kernel, and nothing else: tiles are ranked by the thousand."""
    owned_tile, streamed_tile = ordered(pair, pass_)
    extents = list(zip(axes, owned_tile, streamed_tile, strict=True))
    counts = [axis_counts(*each, "anchored", pass_) for each in extents]
    owned, streamed = math.prod(each.owned for each in counts), math.prod(each.streamed for each in counts)
    parts = part_counts(extents, "anchored", pass_, kernel)
    if problem.additional_kv:
        tokens = kernel.owned_tokens, kernel.streamed_tokens
        extra = additional_counts(problem, owned, streamed_tile, tokens, pass_)
        fills = math.prod(streamed_tile) == kernel.streamed_tokens
        parts = parts.plus(kernel.row_groups, extra.streamed, extra.whole if fills or pass_ == "forward" else 0)
        owned, streamed = owned + extra.owned, streamed + extra.streamed
    return TimedTiles(owned, streamed, parts.seen / kernel.row_groups, parts.masked)


def predict(problem: Problem, counts: Any, pass_: Pass, kernel: Kernel, calibration: Calibration) -> Any:
    """Predicted seconds of a pass.

    Args:
        problem: The problem.
        counts: :class:`TimedTiles` of one pair or, in an array's last axis, of many.
        pass_: The pass.
        kernel: The kernel that executes them.
        calibration: The time model.

    Returns:
        Seconds, without the last axis.
    """
    owned, streamed, seen, masked = np.moveaxis(np.asarray(counts, np.float64), -1, 0)
    # In the backward pass a key/value tile is worked on once for all query heads that share it.
    heads, repeats = (problem.heads, 1) if pass_ == "forward" else (problem.heads_kv, problem.heads // problem.heads_kv)
    streaming = kernel.streamed_tile * seen + kernel.masking * masked + kernel.skipping * (streamed - seen)
    rounds = calibration.rounds(problem.batch * heads * owned, pass_, kernel)
    tile = kernel.owned_tile + repeats * streaming / owned
    moving = calibration.byte * least_bytes(problem, pass_)
    return calibration.clocked(calibration.launch_of(pass_) + np.maximum(rounds * tile, moving), kernel)


class Recommendation(NamedTuple):
    """A stride with which no tile needs a mask.

    Attributes:
        stride: The stride.
        simulation: The problem with that stride, and the pair of tiles that it was found for.
    """

    stride: Shape
    simulation: Simulation


def least_block_sparse_stride(problem: Problem, pair: TilePair, *, placement: Placement = "anchored") -> Shape | None:
    """The smallest stride, per dimension, with which the forward mask is fully block-sparse for a pair of tiles.

    ``None`` where no stride is: a window that is no multiple of the key/value tile, or a causal dimension, has tiles
    that need a mask in every case.

    Raises:
        ValueError: As :func:`count_tiles`, or there are too many strides to try.
    """
    check_tiles(problem, pair, placement)
    strides = []
    for axis, q_tile, kv_tile in zip(axes_of(problem), *pair, strict=True):
        largest = _largest_stride_to_try(axis, q_tile, kv_tile, placement)
        if largest > _MOST_STRIDES:
            raise ValueError(f"{largest} strides are too many to try for a window of {axis.kernel_size} tokens")
        for stride in range(1, largest + 1):
            counts = axis_counts(axis._replace(stride=stride), q_tile, kv_tile, placement, "forward")
            if counts.streamed == counts.whole:
                strides.append(stride)
                break
        else:
            return None
    return tuple(strides)


def _largest_stride_to_try(axis: Axis, q_tile: int, kv_tile: int, placement: Placement) -> int:
    """The last stride that may be the smallest one without masks in a dimension; 0 where no stride is."""
    if axis.is_causal:
        return 1  # a query's last key is its own, whatever the stride
    if axis.kernel_size % kv_tile:
        return 0  # somewhere a tile crosses the end of a window
    # With one multiple of the query tile all are free of masks that start with the windows.
    return axis.kernel_size if placement == "aligned" else min(axis.kernel_size, q_tile)


def recommend_stride(
    problem: Problem,
    pairs: Sequence[TilePair],
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Recommendation | None:
    """The smallest stride that makes the mask fully block-sparse for one of the pairs, at nearly the best speed.

    Among the pairs that have such a stride, those within 2% of the fewest executed operations (or of the shortest
    predicted time) count; the one with the smallest stride is taken.

    Returns:
        The recommendation, or ``None`` where no pair has such a stride.
    """
    found = []
    for pair in pairs:
        stride = least_block_sparse_stride(problem, pair, placement=placement)
        if stride is None:
            continue
        strided = problem.with_axes(stride=stride)
        simulation = simulate(strided, pair, calibration=calibration, placement=placement)
        if simulation.counts.is_fully_block_sparse:
            found.append(Recommendation(stride, simulation))

    def cost(each: Recommendation) -> float:
        seconds = each.simulation.seconds
        return each.simulation.counts.executed_pairs if seconds is None else seconds

    bound = 1.02 * min(map(cost, found), default=0.0)
    nearly_best = [each for each in found if cost(each) <= bound]
    return min(nearly_best, key=lambda each: (math.prod(each.stride), cost(each)), default=None)
