"""Dilations with which the forward pass takes less time: as many keys, in fewer tiles and with fewer masks.

A dilation divides a dimension into groups of every so many tokens, each of which is a layout of its own. Windows are as
large as before, in groups that are smaller: where a window fills its group, nothing is masked at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from natten_jax.cost.axis_tiles import Placement, axis_counts
from natten_jax.cost.calibration import Calibration
from natten_jax.cost.simulation import Simulation, simulate
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

#: Dilations of a dimension that are tried: the smallest ones, and beyond these as many that divide it, the largest one
#: among them.
_SMALLEST, _DIVISORS = 24, 8

#: How much a dilation must gain, and how much slower a smaller one may be.
_WORTH_IT = 1.02


class DilationRecommendation(NamedTuple):
    """A dilation that is faster.

    Attributes:
        dilation: The dilation.
        simulation: The problem with that dilation, and the pair of tiles that it was found for.
    """

    dilation: Shape
    simulation: Simulation


def recommend_dilation(
    problem: Problem,
    pairs: Sequence[TilePair],
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> DilationRecommendation | None:
    """The smallest dilation at nearly the best speed of the forward pass.

    For each pair, and in each dimension, the dilation with the fewest tiles is looked at. Of these, the ones within 2%
    of the fewest executed operations (or of the shortest predicted time) count.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((30, 48, 80), kernel_size=(18, 24, 24))
        >>> simulator.recommend_dilation(problem, [((2, 8, 8), (2, 8, 8))]).dilation
        (1, 2, 2)

    Args:
        problem: The problem; its stride stays.
        pairs: Query and key/value tile shapes.
        calibration: The time model, of :func:`calibration_for`; without one, executed operations are compared.
        placement: Where inner tiles start; see :func:`count_tiles`.

    Returns:
        The recommendation, or ``None`` where no dilation gains 2% over the problem's own.

    Raises:
        ValueError: As :func:`count_tiles`.
    """

    def cost(simulation: Simulation) -> float:
        return simulation.executed_flops if simulation.seconds is None else simulation.seconds

    own = [simulate(problem, pair, calibration=calibration, placement=placement) for pair in pairs]
    found = []
    for pair in pairs:
        tiles = zip(problem.axes, *pair, strict=True)
        dilation = tuple(_with_fewest_tiles(*each, placement) for each in tiles)
        dilated = problem.with_axes(dilation=dilation)
        with contextlib.suppress(ValueError):  # groups may be too uneven to be counted where the layout is not
            simulation = simulate(dilated, pair, calibration=calibration, placement=placement)
            found.append(DilationRecommendation(dilation, simulation))
    least = min((cost(each.simulation) for each in found), default=math.inf)
    if not own or least * _WORTH_IT > min(map(cost, own)):
        return None
    nearly_best = [each for each in found if cost(each.simulation) <= least * _WORTH_IT]
    return min(nearly_best, key=lambda each: (math.prod(each.dilation), cost(each.simulation)))


def _with_fewest_tiles(axis: Axis, q_tile: int, kv_tile: int, placement: Placement) -> int:
    """The smallest dilation at which query tiles visit the fewest key/value tiles of a dimension."""
    visited = {}
    for dilation in _dilations_to_try(axis):
        with contextlib.suppress(ValueError):  # as above
            counts = axis_counts(dataclasses.replace(axis, dilation=dilation), q_tile, kv_tile, placement, "forward")
            visited[dilation] = counts.inner, counts.inner - counts.full, dilation
    return min(visited, key=visited.__getitem__)


def _dilations_to_try(axis: Axis) -> list[int]:
    largest = axis.kv_extent // axis.kernel_size if axis.query_extent == axis.kv_extent else axis.dilation
    smallest = range(1, min(largest, _SMALLEST) + 1)
    divisors = [each for each in range(_SMALLEST + 1, min(largest, 1 << 16) + 1) if axis.kv_extent % each == 0]
    return sorted({*smallest, *divisors[:_DIVISORS], *divisors[-1:], axis.dilation})
