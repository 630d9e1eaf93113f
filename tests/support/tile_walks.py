"""Count the tiles that kernels process in a pass. The only input is the attention mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from natten_jax.problem import Problem
from tests.support import oracle

Tile = tuple[int, ...]
Box = tuple[slice, ...]


def groups_of(problem: Problem) -> Iterator[np.ndarray]:
    """Yield, for each dilation group, the flat indices of its tokens, as an array with the layout of the group."""
    tokens = np.arange(math.prod(problem.query_layout)).reshape(problem.query_layout)
    for group in itertools.product(*map(range, problem.dilation)):
        yield tokens[tuple(slice(first, None, step) for first, step in zip(group, problem.dilation, strict=True))]


def walked(problem: Problem, pair: Any, pass_: str) -> tuple[np.ndarray, Tile, Tile]:
    """Return the visibility ``[outer tokens, inner tokens]`` in a pass, the outer tile shape and the inner tile shape.

    Outer tokens are queries in the forward pass, and keys in the backward pass.
    """
    mask = oracle.neighborhood_mask(
        problem.query_layout, problem.kernel_size, problem.stride, problem.dilation, problem.is_causal
    )
    return (mask, *pair) if pass_ == "forward" else (mask.T, *pair[::-1])


def outer_tiles(problem: Problem, mask: np.ndarray, tile: Tile) -> Iterator[tuple[np.ndarray, Box, np.ndarray]]:
    """Yield each outer tile's dilation group, its box in the group, and its visibility ``[rows, *group.shape]``."""
    for group in groups_of(problem):
        for corner in itertools.product(*(range(0, n, t) for n, t in zip(group.shape, tile, strict=True))):
            box = tuple(slice(c, min(c + t, n)) for c, t, n in zip(corner, tile, group.shape, strict=True))
            yield group, box, mask[np.ix_(group[box].ravel(), group.ravel())].reshape(-1, *group.shape)


def hull_of(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounding box ``[begin, end)`` of the tokens that rows see. It is empty if they see no token."""
    tokens = np.argwhere(seen.any(axis=0))
    return (tokens.min(axis=0), tokens.max(axis=0) + 1) if len(tokens) else (np.zeros(seen.ndim - 1, int),) * 2


def inner_tiles(begin: Any, end: Any, tile: Tile) -> list[Box]:
    """Return the tiles that cover the box ``[begin, end)``, as slices."""
    corners = itertools.product(*(range(b, e, t) for b, e, t in zip(begin, end, tile, strict=True)))
    return [tuple(slice(c, c + t) for c, t in zip(corner, tile, strict=True)) for corner in corners]


def walk(problem: Problem, pair: Any, pass_: str, placement: str) -> dict[str, int]:
    """Count the outer and inner tiles that a kernel processes.

    ``full`` counts inner tiles without masked-out pairs. ``most_inner`` is the largest number of inner tiles of an
    outer tile. ``hull_pairs`` is the sum, over outer tiles, of the number of rows times the number of tokens in the
    bounding box that these rows see.
    """
    mask, outer_tile, inner_tile = walked(problem, pair, pass_)
    counts = dict.fromkeys(("outer", "inner", "full", "most_inner", "hull_pairs"), 0)
    for _, _, seen in outer_tiles(problem, mask, outer_tile):
        begin, end = hull_of(seen)
        inner = inner_tiles(begin if placement == "anchored" else begin // inner_tile * inner_tile, end, inner_tile)
        counts["outer"] += 1
        counts["hull_pairs"] += len(seen) * math.prod(end - begin)
        counts["inner"] += len(inner)
        counts["most_inner"] = max(counts["most_inner"], len(inner))
        for tile in inner:
            part = seen[(slice(None), *tile)]
            counts["full"] += part[0].size == math.prod(inner_tile) and bool(part.all())
    return counts
