"""Which tiles the kernels take, and their order.

A tile of queries has 128 tokens, or in the forward pass 256, two halves in flight; a box of keys has 128. Extents are
powers of two, and the last one is a multiple of the pieces in which lines of tokens are copied. They are ranked by the
model of time whose coefficients follow from arithmetic: nobody has measured the kernels.
"""

from __future__ import annotations

import functools
import math

from natten_jax.backends.blackwell.layout import PIECE
from natten_jax.cost.calibration import calibration_for
from natten_jax.cost.ranking import rank
from natten_jax.cost.tile_shapes import pairs_of
from natten_jax.performance import Pass, TilePair
from natten_jax.problem import Problem, Shape


def sizes_of(pass_: Pass) -> tuple[tuple[int, int], ...]:
    """Tokens of tiles of queries and of boxes of keys."""
    return ((256, 128), (128, 128)) if pass_ == "forward" else ((128, 128),)


def is_taken(pair: TilePair, pass_: Pass) -> bool:
    """Whether the kernels of a pass take a pair."""
    return tuple(map(math.prod, pair)) in sizes_of(pass_) and all(map(_is_copied, pair))


@functools.lru_cache(maxsize=256)
def ranked(family: str, problem: Problem, pass_: Pass) -> tuple[tuple[TilePair, float], ...]:
    """Pairs of tiles with seconds by the model, the fastest first."""
    pairs = [pair for sizes in sizes_of(pass_) for pair in pairs_of(*sizes, problem.rank) if is_taken(pair, pass_)]
    return tuple(rank(problem, pairs, pass_, calibration_for(family)))


def _is_copied(tile: Shape) -> bool:
    return tile[-1] % PIECE == 0
