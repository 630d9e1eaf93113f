"""Tile counts and predicted times of attention problems for given tile shapes, computed without a device.

Counts are exact (:func:`count_tiles`). Times come from a model (:func:`predict`) that was fitted to measurements on one
kind of device (:func:`calibration_for`).

Example:
    >>> from natten_jax import simulator
    >>> problem = simulator.problem_of((256, 256), 80, stride=16, heads=24, head_dim=128)
    >>> tiles = (16, 8), (16, 8)  # query, key/value
    >>> simulator.count_tiles(problem, tiles).is_fully_block_sparse
    True
    >>> simulator.least_block_sparse_stride(problem, tiles)
    (16, 8)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from natten_jax.arguments.names import check_types, checked_pair
from natten_jax.cost_model.calibration import Calibration, Kernel, calibration_for
from natten_jax.cost_model.halos import Link, SplitTime, link_between, predict_split
from natten_jax.cost_model.simulation import Simulation, predict, rank, simulate
from natten_jax.cost_model.tiles import Placement, TileCounts, classified_tiles, count_tiles
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, Shape, problem_of
from natten_jax.windows import Axis

__all__ = [
    "Calibration",
    "DilationRecommendation",
    "Kernel",
    "Link",
    "Recommendation",
    "Simulation",
    "SplitTime",
    "TileCounts",
    "calibration_for",
    "count_tiles",
    "least_block_sparse_stride",
    "link_between",
    "predict",
    "predict_split",
    "problem_of",
    "rank",
    "recommend_dilation",
    "recommend_stride",
    "simulate",
]

#: Largest stride that is tried. Only the placement ``"aligned"``, which no backend uses, can reach this limit.
_MAX_STRIDES = 1 << 16

#: Dilations that are tried in a dimension: all up to 24, the next 8 divisors of the extent, the largest divisor up to
#: 65536, and the dilation of the problem. Dilations with which the window exceeds the extent are not tried.
_SMALLEST_DILATIONS, _DIVISORS = 24, 8

#: Of the strides (or dilations) whose time is within this factor of the best time, the smallest is recommended.
_NEARLY_BEST = 1.02


class Recommendation(NamedTuple):
    """A stride with which no tile needs a mask.

    Attributes:
        stride: The stride.
        simulation: Simulation of the problem with this stride, for a pair of tile shapes that needs no mask.
    """

    stride: Shape
    simulation: Simulation


@check_types
def least_block_sparse_stride(problem: Problem, pair: TilePair, *, placement: Placement = "anchored") -> Shape | None:
    """Return the smallest stride, per dimension, that makes the forward mask fully block-sparse for a pair of tiles.

    The mask is fully block-sparse if no visited key/value tile needs a mask. Return ``None`` if no stride achieves
    this. For example, no stride does if the window is not a multiple of the key/value tile. In a causal dimension, the
    stride makes no difference, and usually some tiles need a mask.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80)
        >>> simulator.least_block_sparse_stride(problem, ((16, 8), (16, 8)))
        (16, 8)

    Raises:
        ValueError: :func:`count_tiles` rejects the tiles or the placement, or there are too many strides to try.
    """
    strides = []
    for axis, q_tile, kv_tile in zip(problem.axes, *checked_pair(pair, problem.rank), strict=True):
        largest = _largest_stride_to_try(axis, q_tile, kv_tile, placement)
        if largest > _MAX_STRIDES:
            raise ValueError(f"{largest} strides are too many to try for a window of {axis.kernel_size} tokens")
        for stride in range(1, largest + 1):
            inner, full = _inner_tiles(dataclasses.replace(axis, stride=stride), q_tile, kv_tile, placement)
            if inner == full:
                strides.append(stride)
                break
        else:
            return None
    return tuple(strides)


def _inner_tiles(axis: Axis, q_tile: int, kv_tile: int, placement: Placement) -> tuple[int, int]:
    """Count the visits of query tiles to key/value tiles in a dimension: all visits, and visits without a mask."""
    tiles = classified_tiles(axis, q_tile, (kv_tile,), placement, "forward", ((0, q_tile - 1),))
    inner, _, full = map(int, tiles.classified[0])
    return inner, full


def _largest_stride_to_try(axis: Axis, q_tile: int, kv_tile: int, placement: Placement) -> int:
    """Return an upper bound of the smallest stride that needs no mask in a dimension; 0 if every stride needs one."""
    if axis.is_causal:
        return 1  # larger strides do not help: with every stride, a query's window ends at the query
    if axis.kernel_size % kv_tile:
        return 0  # with every stride, some tile crosses the end of a window
    # If the stride is a multiple of the query tile, anchored tiles need no mask.
    return axis.kernel_size if placement == "aligned" else min(axis.kernel_size, q_tile)


@check_types
def recommend_stride(
    problem: Problem,
    pairs: Iterable[TilePair],
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Recommendation | None:
    """Recommend a small stride with which the mask is fully block-sparse, at nearly the best speed.

    For each pair of tile shapes, the smallest stride with a fully block-sparse mask is found
    (:func:`least_block_sparse_stride`). Pairs whose number of executed operations (or predicted time) is within 2% of
    the smallest are kept. Of these pairs, the pair with the smallest stride is returned.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80)
        >>> simulator.recommend_stride(problem, [((16, 8), (16, 8)), ((8, 16), (8, 16))]).stride
        (16, 8)

    Args:
        problem: The problem; its stride is ignored.
        pairs: Pairs of a query tile shape and a key/value tile shape.
        calibration: The time model, from :func:`calibration_for`. If ``None``, executed operations are compared.
        placement: Position of the inner tiles; see :func:`count_tiles`.

    Returns:
        The recommendation, or ``None`` if no pair has a stride with a fully block-sparse mask.
    """
    recommendations = []
    for pair in pairs:
        stride = least_block_sparse_stride(problem, pair, placement=placement)
        if stride is not None:
            strided = problem.with_axes(stride=stride)
            simulation = simulate(strided, pair, calibration=calibration, placement=placement)
            if simulation.counts.is_fully_block_sparse:
                recommendations.append(Recommendation(stride, simulation))
    return _smallest(recommendations)


def _cost(simulation: Simulation) -> float:
    """Return the predicted seconds, or the number of executed operations if there was no time model."""
    return simulation.executed_flops if simulation.seconds is None else simulation.seconds


_Recommended = TypeVar("_Recommended", Recommendation, "DilationRecommendation")


def _smallest(recommendations: Sequence[_Recommended]) -> _Recommended | None:
    """Return the recommendation with the smallest stride or dilation at nearly the best speed.

    Return ``None`` if ``recommendations`` is empty.
    """
    best = min((_cost(each.simulation) for each in recommendations), default=math.inf)
    fast = [each for each in recommendations if _cost(each.simulation) <= _NEARLY_BEST * best]
    return min(fast, key=lambda each: (math.prod(each[0]), _cost(each.simulation)), default=None)


class DilationRecommendation(NamedTuple):
    """A dilation with which a problem is faster than with its own dilation.

    Attributes:
        dilation: The dilation.
        simulation: Simulation of the problem with this dilation, for the pair of tile shapes that was chosen.
    """

    dilation: Shape
    simulation: Simulation


@check_types
def recommend_dilation(
    problem: Problem,
    pairs: Iterable[TilePair],
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> DilationRecommendation | None:
    """Recommend a small dilation with which the forward pass has nearly the best speed.

    A dilation divides the tokens of a dimension into groups, and a query sees only keys of its own group. A larger
    dilation makes the groups smaller, while the number of keys in a window stays the same. If a window covers its whole
    group, no tile needs a mask.

    For each pair of tile shapes and in each dimension, the dilation with the fewest visited tiles is found. The problem
    is simulated with these dilations. Simulations whose number of executed operations (or predicted time) is within 2%
    of the smallest are kept. Of these, the simulation with the smallest dilation is returned.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((30, 48, 80), kernel_size=(18, 24, 24))
        >>> simulator.recommend_dilation(problem, [((2, 8, 8), (2, 8, 8))]).dilation
        (1, 2, 2)

    Args:
        problem: The problem; its stride is kept.
        pairs: Pairs of a query tile shape and a key/value tile shape.
        calibration: The time model, from :func:`calibration_for`. If ``None``, executed operations are compared.
        placement: Position of the inner tiles; see :func:`count_tiles`.

    Returns:
        The recommendation, or ``None`` if no dilation is at least 2% faster than the problem's dilation.

    Raises:
        ValueError: :func:`count_tiles` rejects the tiles or the placement.
    """
    current = [simulate(problem, pair, calibration=calibration, placement=placement) for pair in pairs]
    recommendations = []
    for pair in (each.pair for each in current):
        tiles = zip(problem.axes, *pair, strict=True)
        dilation = tuple(_dilation_with_fewest_tiles(*each, placement) for each in tiles)
        dilated = problem.with_axes(dilation=dilation)
        with contextlib.suppress(ValueError):  # the dilation groups have too many tiles to count
            simulation = simulate(dilated, pair, calibration=calibration, placement=placement)
            recommendations.append(DilationRecommendation(dilation, simulation))
    best = min((_cost(each.simulation) for each in recommendations), default=math.inf)
    if not current or best * _NEARLY_BEST > min(map(_cost, current)):
        return None
    return _smallest(recommendations)


def _dilation_with_fewest_tiles(axis: Axis, q_tile: int, kv_tile: int, placement: Placement) -> int:
    """Return the dilation with which query tiles visit the fewest key/value tiles in a dimension.

    If several dilations have the fewest visits, return the one with the fewest visits that need a mask. If these
    numbers are also equal, return the smallest dilation.
    """
    visited = {}
    for dilation in _dilations_to_try(axis):
        with contextlib.suppress(ValueError):  # too many tiles to count
            inner, full = _inner_tiles(dataclasses.replace(axis, dilation=dilation), q_tile, kv_tile, placement)
            visited[dilation] = inner, inner - full, dilation
    return min(visited, key=visited.__getitem__)


def _dilations_to_try(axis: Axis) -> list[int]:
    largest = axis.kv_extent // axis.kernel_size if axis.query_extent == axis.kv_extent else axis.dilation
    smallest = range(1, min(largest, _SMALLEST_DILATIONS) + 1)
    divisors = range(_SMALLEST_DILATIONS + 1, min(largest, 1 << 16) + 1)
    dividing = [each for each in divisors if axis.kv_extent % each == 0]
    return sorted({*smallest, *dividing[:_DIVISORS], *dividing[-1:], axis.dilation})
