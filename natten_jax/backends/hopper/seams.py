"""What seams cost: tiles that the kernels for Hopper load in boxes where dimensions wrap.

Boxes begin on either side of a seam, so that none is cut, and tiles begin up to a box earlier for it: the smaller boxes
are, the fewer tiles there are, and the more boxes. Launches choose, and tiles are ranked by what that comes to: both
ask one piece of native code (``csrc/cuda/common/seam_boxes.cpp``).
"""

from __future__ import annotations

from natten_jax.native import module as native
from natten_jax.native.abi import axis_rows, with_kernel_tiles
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem


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
    outer, inner = outer_and_inner(with_kernel_tiles(problem, pair), pass_)
    return native.seam_factor(axis_rows(problem), inner, outer)
