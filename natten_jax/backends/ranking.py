"""Tile shapes of kernels that take any shape of some sizes, by predicted time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from natten_jax import simulator
from natten_jax.backends.base import Pass, TilePair
from natten_jax.calibration import Calibration
from natten_jax.problem import Problem, Shape
from natten_jax.symbolic_batch import planned_batch


def rank_pairs(
    problem: Problem, pass_: Pass, sizes: Iterable[tuple[int, int]], times: Calibration | None
) -> tuple[TilePair, ...]:
    """Every query and key/value tile of the given numbers of tokens, the fastest first.

    Args:
        problem: What the tiles are for.
        pass_: The pass.
        sizes: Tokens of query and key/value tiles.
        times: Of the kernels; ``None`` where none were measured.
    """
    pairs = itertools.chain.from_iterable(
        itertools.product(_factorisations(q_size, problem.rank), _factorisations(kv_size, problem.rank))
        for q_size, kv_size in dict.fromkeys(sizes)
    )
    problem = dataclasses.replace(problem, batch=planned_batch(problem.batch))
    return tuple(pair for pair, _ in simulator.rank(problem, pairs, pass_, times))


def _factorisations(size: int, rank: int) -> list[Shape]:
    if rank == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in _factorisations(size // first, rank - 1)
    ]
