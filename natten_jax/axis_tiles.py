"""Exact counts of tiles in one token dimension: what :mod:`natten_jax.tile_counts` multiplies over the dimensions."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from natten_jax import windows
from natten_jax.calibration import Pass

Placement = Literal["anchored", "aligned"]


class Axis(NamedTuple):
    """One token dimension of a problem."""

    queries: int
    keys: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool


class AxisCounts(NamedTuple):
    """In one dimension, over all dilation groups: as in TileCounts."""

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    hull_pairs: int


#: First and last coordinate inside an owned tile, in one dimension.
Rows = tuple[int, int]


class Judgement(enum.IntEnum):
    """What the rows of a row group find a streamed tile to be."""

    ANYTHING = 0
    SEEN = 1
    WHOLE = 2


@functools.lru_cache(maxsize=1 << 16)
def axis_counts(axis: Axis, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass) -> AxisCounts:
    """Counts of one dimension."""
    found = []
    for groups, queries, keys in _dilation_groups(axis):
        rows = 0, owned_tile - 1
        walks = _walks(axis, queries, keys, owned_tile, streamed_tile, placement, which, rows)
        streamed, _, whole = (np.maximum(end - begin, 0) for begin, end in walks.tiles)
        sums = (groups * int(np.sum(each)) for each in (streamed, whole, walks.hull_pairs))
        found.append((groups * streamed.size, *sums, int(np.max(streamed))))
    owned, streamed, whole, hull_pairs, most = zip(*found, strict=True)
    return AxisCounts(sum(owned), sum(streamed), sum(whole), max(most), sum(hull_pairs))


@functools.lru_cache(maxsize=1 << 16)
def judged_tiles(
    axis: Axis, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass, rows: tuple[Rows, ...]
) -> Any:
    """Streamed tiles of one dimension by what row groups, whose ``rows`` are given, find them to be.

    Returns:
        An entry for every ``itertools.product`` of a judgement per row group: anything, seen, whole.
    """
    judged = np.zeros(len(Judgement) ** len(rows), np.int64)
    for groups, queries, keys in _dilation_groups(axis):
        of_row_groups = [
            _walks(axis, queries, keys, owned_tile, streamed_tile, placement, which, each).tiles for each in rows
        ]
        for entry, ranges in enumerate(itertools.product(*of_row_groups)):
            begins, ends = zip(*ranges, strict=True)
            lengths = functools.reduce(np.minimum, ends) - functools.reduce(np.maximum, begins)
            judged[entry] += groups * int(np.sum(np.maximum(lengths, 0)))
    return judged


def _dilation_groups(axis: Axis) -> Iterator[tuple[int, int, int]]:
    """How many dilation groups have how many queries and keys."""
    extents = collections.Counter(
        tuple(windows.group_length(extent, axis.dilation, group) for extent in (axis.queries, axis.keys))
        for group in range(axis.dilation)
    )
    for (queries, keys), groups in extents.items():
        yield groups, queries, keys


class _Walks(NamedTuple):
    """Of the owned tiles of a dilation group, in one dimension.

    Attributes:
        tiles: For each judgement, first and last plus one of the streamed tiles that some rows find to be so.
        hull_pairs: Pairs of tokens in the tiles.
    """

    tiles: tuple[tuple[Any, Any], ...]
    hull_pairs: Any


def _walks(
    axis: Axis,
    queries: int,
    keys: int,
    owned_tile: int,
    streamed_tile: int,
    placement: Placement,
    which: Pass,
    rows: Rows,
) -> _Walks:
    tokens, others = (queries, keys) if which == "forward" else (keys, queries)
    first = np.arange(0, tokens, owned_tile)
    last = np.minimum(first + owned_tile, tokens) - 1

    def bounds(index: Any) -> tuple[Any, Any]:
        window = axis.kernel_size, axis.stride, axis.is_causal
        if which == "forward":
            return windows.window_bounds(index, keys, *window)
        return windows.inverse_window_bounds(index, queries, keys, *window)

    hull_begin, hull_end = bounds(first)[0], bounds(last)[1]
    origin = hull_begin if placement == "anchored" else np.zeros_like(hull_begin)

    def holding(begin: Any, end: Any) -> tuple[Any, Any]:
        tile = (begin - origin) // streamed_tile
        return tile, np.where(end > begin, -(-(end - origin) // streamed_tile), tile)

    # Rows past the last token count as it does.
    (seen_begin, inner_end), (inner_begin, seen_end) = (bounds(np.minimum(first + row, last)) for row in rows)
    whole = -(-(inner_begin - origin) // streamed_tile), (np.minimum(inner_end, others) - origin) // streamed_tile
    tiles = holding(hull_begin, hull_end), holding(seen_begin, seen_end), whole
    return _Walks(tiles, (last - first + 1) * np.maximum(hull_end - hull_begin, 0))
