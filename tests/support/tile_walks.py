"""Tiles of a pass as kernels walk over them, looking only at the mask."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from natten_jax.problem import Problem
from tests.support import oracle


def groups_of(problem: Problem) -> Any:
    """Per dilation group, the flat numbers of its tokens as an array of the group's layout."""
    tokens = np.arange(math.prod(problem.query_layout)).reshape(problem.query_layout)
    for group in itertools.product(*map(range, problem.dilation)):
        yield tokens[tuple(slice(first, None, step) for first, step in zip(group, problem.dilation, strict=True))]


def boxes(layout: tuple[int, ...], tile: tuple[int, ...]) -> Any:
    """The tiles of a grid over a layout, as slices."""
    for corner in itertools.product(*(range(0, extent, t) for extent, t in zip(layout, tile, strict=True))):
        yield tuple(slice(c, min(c + t, extent)) for c, t, extent in zip(corner, tile, layout, strict=True))


def walk(problem: Problem, pair: Any, pass_: str, placement: str) -> dict[str, int]:
    """Count as a kernel walks, looking only at the mask."""
    mask = oracle.neighborhood_mask(
        problem.query_layout, problem.kernel_size, problem.stride, problem.dilation, problem.is_causal
    )
    mask = mask if pass_ == "forward" else mask.T
    outer_tile, inner_tile = pair if pass_ == "forward" else pair[::-1]
    counts = dict.fromkeys(("outer", "inner", "full", "most_inner", "hull_pairs"), 0)
    for group in groups_of(problem):
        for box in boxes(group.shape, outer_tile):
            rows = group[box].ravel()
            seen = mask[np.ix_(rows, group.ravel())].reshape(len(rows), *group.shape)
            counts["outer"] += 1
            coordinates = np.argwhere(seen.any(axis=0))
            if len(coordinates) == 0:
                continue
            begin, end = coordinates.min(axis=0), coordinates.max(axis=0) + 1
            counts["hull_pairs"] += len(rows) * math.prod(end - begin)
            start = begin if placement == "anchored" else begin // inner_tile * inner_tile
            corners = [range(s, e, t) for s, e, t in zip(start, end, inner_tile, strict=True)]
            inner = list(itertools.product(*corners))
            counts["inner"] += len(inner)
            counts["most_inner"] = max(counts["most_inner"], len(inner))
            for corner in inner:
                tile = tuple(slice(c, c + t) for c, t in zip(corner, inner_tile, strict=True))
                part = seen[(slice(None), *tile)]
                counts["full"] += part[0].size == math.prod(inner_tile) and bool(part.all())
    return counts
