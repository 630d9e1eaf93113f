"""Strides with which no tile of the forward pass needs a mask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from natten_jax.cost.axis_tiles import Placement, axis_counts
from natten_jax.cost.calibration import Calibration
from natten_jax.cost.simulation import Simulation, simulate
from natten_jax.cost.tile_counts import check_tiles
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

#: Strides that are tried for aligned tiles, which are no backend's.
_MOST_STRIDES = 1 << 16


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

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80)
        >>> simulator.least_block_sparse_stride(problem, ((16, 8), (16, 8)))
        (16, 8)

    Raises:
        ValueError: As :func:`count_tiles`, or there are too many strides to try.
    """
    check_tiles(problem, pair, placement)
    strides = []
    for axis, q_tile, kv_tile in zip(problem.axes, *pair, strict=True):
        largest = _largest_stride_to_try(axis, q_tile, kv_tile, placement)
        if largest > _MOST_STRIDES:
            raise ValueError(f"{largest} strides are too many to try for a window of {axis.kernel_size} tokens")
        for stride in range(1, largest + 1):
            counts = axis_counts(dataclasses.replace(axis, stride=stride), q_tile, kv_tile, placement, "forward")
            if counts.inner == counts.full:
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

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80)
        >>> simulator.recommend_stride(problem, [((16, 8), (16, 8)), ((8, 16), (8, 16))]).stride
        (16, 8)

    Args:
        problem: The problem; its own stride does not count.
        pairs: Query and key/value tile shapes.
        calibration: The time model, of :func:`calibration_for`; without one, executed operations are compared.
        placement: Where inner tiles start; see :func:`count_tiles`.

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
