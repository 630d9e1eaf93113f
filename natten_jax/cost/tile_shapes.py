"""Every shape of tiles of so many tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from natten_jax.performance import TilePair
from natten_jax.problem import Shape


def pairs_of(q_size: int, kv_size: int, rank: int) -> Iterator[TilePair]:
    """Every query and key/value tile of so many tokens."""
    return itertools.product(_factorisations(q_size, rank), _factorisations(kv_size, rank))


def _factorisations(size: int, rank: int) -> list[Shape]:
    if rank == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in _factorisations(size // first, rank - 1)
    ]
