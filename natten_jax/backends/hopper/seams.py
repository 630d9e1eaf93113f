"""What seams cost: tiles that the kernels for Hopper load in boxes where dimensions wrap.

Boxes begin on either side of a seam, so that none is cut, and tiles begin up to a box earlier for it: the smaller boxes
are, the fewer tiles there are, and the more boxes. Launches choose (``csrc/cuda/common/tile_boxes.cpp``); here is what
that comes to, by which tiles are ranked.
"""

from __future__ import annotations

import functools
import itertools
import math

from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem
from natten_jax.windows import Axis

#: So many boxes of a tile are loaded while the tile before is computed; more take longer.
_BOXES_MEANWHILE = 3


def ranked_around(
    problem: Problem, pass_: Pass, ranked: tuple[tuple[TilePair, float], ...]
) -> tuple[tuple[TilePair, float], ...]:
    """Pairs of tiles with their predicted seconds, the fastest first, where seams are counted in.

    Args:
        problem: What they are for.
        pass_: The pass.
        ranked: The same where seams cost nothing.
    """
    if "wrap" not in problem.edges:
        return ranked
    timed = ((pair, seconds * times_as_long(problem, pass_, pair)) for pair, seconds in ranked)
    return tuple(sorted(timed, key=lambda each: each[1]))


def times_as_long(problem: Problem, pass_: Pass, pair: TilePair) -> float:
    """How many times as long a pass takes as if seams cost nothing.

    Args:
        problem: Some of whose dimensions wrap.
        pass_: The pass.
        pair: Query and key/value tile.
    """
    outer, inner = outer_and_inner(pair, pass_)
    choices = [_choices(*each) for each in zip(problem.axes, inner, outer, strict=True)]
    return min(
        math.prod(tiles for _, tiles in chosen) * max(math.prod(boxes for boxes, _ in chosen) / _BOXES_MEANWHILE, 1.0)
        for chosen in itertools.product(*choices)
    )


@functools.lru_cache(maxsize=1 << 14)
def _choices(axis: Axis, tile: int, outer: int) -> tuple[tuple[int, float], ...]:
    """Boxes of a tile along a dimension, and how many times as many tiles there are with them."""
    if axis.edges != "wrap":
        return ((1, 1.0),)
    length = axis.kv_extent // axis.dilation
    most = axis.kernel_size + min(outer, length) - 1 + 2 * (axis.stride - 1)
    tiles = -(-most // tile)
    room = tiles * tile - most
    seams = min(most / length, 1.0)
    return tuple(
        (tile // box, 1 + seams * max(box - 1 - room, 0) / (box * tiles))
        for box in range(tile, 0, -1)
        if tile % box == 0 and (length % box == 0 or most + box - 1 <= length)
    )
