"""Pairs of tiles by predicted time, the fastest first.

A kernel takes tiles of any shape, so that in three dimensions there are thousands of pairs. All inner tiles that one
outer tile may visit are counted together, and what dimensions have in common is counted once.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from natten_jax.cost import small_windows
from natten_jax.cost.axis_tiles import outer_tiles
from natten_jax.cost.calibration import Calibration, Kernel
from natten_jax.cost.predict import predict
from natten_jax.cost.row_groups import RowGroupCounts, part_counts
from natten_jax.cost.tile_counts import TimedTiles, additional_counts
from natten_jax.cost.tile_shapes import pairs_of
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis


def rank_sizes(
    problem: Problem, pass_: Pass, sizes: Iterable[tuple[int, int]], calibration: Calibration | None
) -> tuple[tuple[TilePair, float], ...]:
    """Every query and key/value tile of the given numbers of tokens, with predicted seconds, the fastest first.

    Args:
        problem: What the tiles are for.
        pass_: The pass.
        sizes: Tokens of query and key/value tiles.
        calibration: The time model; without one there are no pairs.
    """
    pairs = itertools.chain.from_iterable(pairs_of(q_size, kv_size, problem.rank) for q_size, kv_size in sizes)
    return tuple(rank(problem, dict.fromkeys(pairs), pass_, calibration))


def rank(
    problem: Problem, pairs: Iterable[TilePair], pass_: Pass, calibration: Calibration | None
) -> list[tuple[TilePair, float]]:
    """Pairs that anchored kernels take, with predicted seconds, fastest first; without a model, none.

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), 80, stride=16, heads=24, head_dim=128)
        >>> model = simulator.calibration_for("hopper")
        >>> pairs = [((16, 8), (16, 8)), ((128, 1), (128, 1))]
        >>> [pair for pair, seconds in simulator.rank(problem, pairs, "forward", model)]
        [((16, 8), (16, 8)), ((128, 1), (128, 1))]

    Args:
        problem: The problem.
        pairs: Query and key/value tile shapes.
        pass_: The pass.
        calibration: The time model, of :func:`calibration_for`.
    """
    if calibration is None:
        return []
    # Tiles of one size are executed by one kernel.
    visits: dict[tuple[Shape, int], list[Shape]] = collections.defaultdict(list)
    timed: list[tuple[TilePair, float]] = []
    for pair in pairs:
        if small_windows.is_for(calibration, problem, pass_, pair):
            seconds = small_windows.seconds(calibration.family, problem, pass_, pair, calibration.compute_capability)
            timed += [] if seconds is None else [(pair, seconds)]
            continue
        outer_tile, inner_tile = outer_and_inner(pair, pass_)
        visits[outer_tile, math.prod(inner_tile)].append(inner_tile)
    kernels: dict[tuple[int, int], Kernel | None] = {}
    axes = problem.axes
    for (outer_tile, inner_tokens), inner_tiles in visits.items():
        found = [outer_and_inner((outer_tile, inner_tile), pass_) for inner_tile in inner_tiles]
        tokens = math.prod(outer_tile), inner_tokens
        if tokens not in kernels:
            kernels[tokens] = calibration.kernel(problem, found[0], pass_)
        kernel = kernels[tokens]
        if kernel is not None:
            tiles = _timed_tiles(problem, axes, outer_tile, tuple(inner_tiles), pass_, kernel)
            timed += zip(found, predict(problem, tiles, pass_, kernel, calibration).tolist(), strict=True)
    # Among equals, tiles that are long in the leading dimensions: on an H200 (16, 8) took 5% less time than (8, 16).
    timed.sort(reverse=True)
    timed.sort(key=lambda item: item[1])
    return timed


def _timed_tiles(
    problem: Problem,
    axes: Sequence[Axis],
    outer_tile: Shape,
    inner_tiles: tuple[Shape, ...],
    pass_: Pass,
    kernel: Kernel,
) -> TimedTiles:
    """:attr:`TileCounts.tiles` of an anchored kernel, for inner tiles of as many tokens, and nothing else."""
    outer = math.prod(outer_tiles(axis, tile, pass_) for axis, tile in zip(axes, outer_tile, strict=True))
    parts = part_counts(axes, outer_tile, inner_tiles, "anchored", pass_, kernel)
    if problem.additional_kv:
        tokens = kernel.outer_tokens, kernel.inner_tokens
        fills = math.prod(inner_tiles[0]) == kernel.inner_tokens
        extra = [additional_counts(problem, outer, inner_tile, tokens, pass_) for inner_tile in inner_tiles]
        parts = RowGroupCounts(*(each.astype(object) for each in parts)).plus(
            kernel.row_groups,
            np.array([each.inner for each in extra], object),
            np.array([each.full if fills or pass_ == "forward" else 0 for each in extra], object),
        )
        outer += extra[0].outer
    return TimedTiles(outer, parts.inner, parts.seen / kernel.row_groups, parts.partial)
