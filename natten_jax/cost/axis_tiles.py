"""Exact counts of tiles in one token dimension, which multiply over the dimensions."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from natten_jax.cost.axis_sums import (
    Lengths,
    Totals,
    are_few,
    check_extent,
    inverse_window_changes,
    totals,
    window_changes,
)
from natten_jax.performance import Pass
from natten_jax.windows import Axis

Placement = Literal["anchored", "aligned"]

#: Entries of three dimensions that are below it have products, and sums of them, which float64 holds exactly.
_SMALL_ENTRY = 1 << 17


class AxisCounts(NamedTuple):
    """In one dimension, over all dilation groups: as in TileCounts."""

    outer: int
    inner: int
    full: int
    most_inner: int
    hull_pairs: int

    def times(self, groups: int) -> AxisCounts:
        """The counts of so many equal dilation groups."""
        return AxisCounts(*(each * groups for each in self))._replace(most_inner=self.most_inner)

    @staticmethod
    def of_all(groups: Sequence[AxisCounts]) -> AxisCounts:
        """The counts of all dilation groups together."""
        most = max(each.most_inner for each in groups)
        return AxisCounts(*map(sum, zip(*groups, strict=True)))._replace(most_inner=most)


#: First and last coordinate inside an outer tile, in one dimension.
Rows = tuple[int, int]


class Judgement(enum.IntEnum):
    """What the rows of a row group find an inner tile to be; of two that hold, the greater one says more."""

    ANYTHING = 0
    SEEN = 1
    FULL = 2


@functools.lru_cache(maxsize=1 << 16)
def axis_counts(axis: Axis, outer_tile: int, inner_tile: int, placement: Placement, pass_: Pass) -> AxisCounts:
    """Counts of one dimension.

    Raises:
        ValueError: The dimension is too long, or its tiles are too different from each other, to be counted.
    """
    found = []
    for groups, queries, keys in axis.dilation_groups():
        walk = _Walk(axis, queries, keys, outer_tile, placement, pass_)

        def lengths(tiles: Any, walk: _Walk = walk) -> Any:
            bounds = walk.bounds(tiles)
            begins, ends = walk.judged(bounds, (0, walk.outer_tile - 1), (inner_tile,))
            (inner,), _, (full,) = ends - begins
            return np.stack([inner, full, bounds.hull_end - bounds.hull_begin])

        total = walk.totals(lengths, ((0, walk.outer_tile - 1),), inner_tile)
        inner, full, hull = total.sums
        # The last tile may own fewer tokens than the others.
        last = max(total.last[2], 0)
        hull_pairs = (hull - last) * walk.outer_tile + last * (walk.tokens - (walk.tiles - 1) * walk.outer_tile)
        found.append(AxisCounts(walk.tiles, inner, full, max(total.most[0], 0), hull_pairs).times(groups))
    return AxisCounts.of_all(found)


def outer_tiles(axis: Axis, outer_tile: int, pass_: Pass) -> int:
    """As ``axis_counts(...).outer``, which no inner tile has to do with."""
    return sum(
        groups * -(-(queries if pass_ == "forward" else keys) // outer_tile)
        for groups, queries, keys in axis.dilation_groups()
    )


def judged_tiles(
    axis: Axis,
    outer_tile: int,
    inner_tiles: tuple[int, ...],
    placement: Placement,
    pass_: Pass,
    rows: tuple[Rows, ...],
) -> Any:
    """Inner tiles of one dimension by what row groups, whose ``rows`` are given, find them to be.

    Returns:
        For every extent of inner tiles, an entry for every ``itertools.product`` of a judgement per row group:
        ``[len(inner_tiles), 3 ** len(rows)]``. Entries are of int64 where they are small enough for sums of products of
        three of them to be exact in float64, too, and Python's integers otherwise.

    Raises:
        ValueError: As :func:`axis_counts`.
    """
    distinct = tuple(dict.fromkeys(rows))
    judged = _judged_tiles(axis, outer_tile, inner_tiles, placement, pass_, distinct)
    return judged if len(distinct) == len(rows) else judged[:, _strictest(tuple(map(distinct.index, rows)))]


@functools.lru_cache(maxsize=1 << 13)
def _judged_tiles(
    axis: Axis,
    outer_tile: int,
    inner_tiles: tuple[int, ...],
    placement: Placement,
    pass_: Pass,
    rows: tuple[Rows, ...],
) -> Any:
    judged = [0] * (len(inner_tiles) * len(Judgement) ** len(rows))
    for groups, queries, keys in axis.dilation_groups():
        walk = _Walk(axis, queries, keys, outer_tile, placement, pass_)
        # Few outer tiles are looked at one by one: all inner tiles at once. Else each has its own period.
        together = (inner_tiles,) if are_few(walk.tiles) else tuple((each,) for each in inner_tiles)
        sums: list[int] = []
        for extents in together:

            def lengths(tiles: Any, walk: _Walk = walk, extents: tuple[int, ...] = extents) -> Any:
                return _lengths(walk, walk.bounds(tiles), rows, extents)

            sums += walk.totals(lengths, rows, *extents).sums
        judged = [entry + groups * each for entry, each in zip(judged, sums, strict=True)]
    table = np.array(judged, np.int64 if max(judged) < _SMALL_ENTRY else object)
    return table.reshape(len(inner_tiles), -1)


def _lengths(walk: _Walk, bounds: _Bounds, rows: Sequence[Rows], inner_tiles: tuple[int, ...]) -> Any:
    """Inner tiles, ``[inner_tiles * judgements, tiles]``, that every one of some row groups judges in some way."""
    begins, ends = walk.judged(bounds, rows[0], inner_tiles)
    for each in rows[1:]:
        more_begins, more_ends = walk.judged(bounds, each, inner_tiles)
        begins = np.maximum(begins[:, np.newaxis], more_begins).reshape(-1, *begins.shape[1:])
        ends = np.minimum(ends[:, np.newaxis], more_ends).reshape(-1, *ends.shape[1:])
    return np.swapaxes(ends - begins, 0, 1).reshape(-1, ends.shape[-1])


@functools.cache
def _strictest(numbers: tuple[int, ...]) -> Any:
    """For every product of a judgement per row group, its number among those of groups that differ.

    Row groups with the same rows judge alike, and a tile that one finds full the other sees: the strictest judgement
    says it all.

    Args:
        numbers: For every row group, which of the different ones it is.
    """
    judgements = np.array(list(itertools.product(Judgement, repeat=len(numbers))))
    of_distinct = np.zeros((len(judgements), max(numbers) + 1), np.int64)
    for group, number in enumerate(numbers):
        of_distinct[:, number] = np.maximum(of_distinct[:, number], judgements[:, group])
    return of_distinct @ len(Judgement) ** np.arange(max(numbers), -1, -1)


class _Bounds(NamedTuple):
    """What some outer tiles of a dilation group see.

    Attributes:
        first: First token.
        last: Last token.
        hull_begin: First token of the other side that some token of the tile sees.
        hull_end: Last one plus one.
    """

    first: Any
    last: Any
    hull_begin: Any
    hull_end: Any


class _Walk:
    """The outer tiles of a dilation group in one dimension, and the inner tiles that each of them visits."""

    def __init__(self, axis: Axis, queries: int, keys: int, outer_tile: int, placement: Placement, pass_: Pass) -> None:
        check_extent(max(queries, keys))
        self._axis, self._lengths = axis, (queries, keys)
        self._is_forward = pass_ == "forward"
        self._is_anchored = placement == "anchored"
        self.tokens, self._others = (queries, keys) if self._is_forward else (keys, queries)
        # Larger ones make no difference.
        self.outer_tile = min(outer_tile, self.tokens)
        self.tiles = -(-self.tokens // self.outer_tile)

    def totals(self, lengths: Lengths, rows: Sequence[Rows], *inner_tiles: int) -> Totals:
        """Sums over all outer tiles of lengths that are made of the bounds at the given rows."""
        tile = self.outer_tile
        # Where all windows move at one pace, what lies between their ends stays; else it changes by full tiles only.
        moves_alike = self._is_forward and not self._axis.is_causal and self._is_anchored
        steps = () if moves_alike else map(self._within_reach, inner_tiles)
        period = math.lcm(tile, self._axis.stride, *steps) // tile
        changes_of = window_changes if self._is_forward else inverse_window_changes
        of_tokens = changes_of(self._axis.window, *self._lengths)
        offsets = {0, tile - 1, *(min(row, tile - 1) for each in rows for row in each)}
        changes = (-(-(change - offset) // tile) for change in of_tokens for offset in offsets)
        return totals(self.tiles, period, changes, lengths)

    def bounds(self, tiles: Any) -> _Bounds:
        """Tokens and hulls of tiles of the given numbers."""
        first = tiles * self.outer_tile
        last = np.minimum(first + self.outer_tile, self.tokens) - 1
        return _Bounds(first, last, self._windows(first)[0], self._windows(last)[1])

    def judged(self, bounds: _Bounds, rows: Rows, inner_tiles: tuple[int, ...]) -> tuple[Any, Any]:
        """First, and last plus one, of the inner tiles that some rows judge to be so: ``[judgement, extent, tiles]``.

        Args:
            bounds: The bounds of the outer tiles.
            rows: Rows of the outer tiles.
            inner_tiles: Extents of inner tiles.
        """
        first, last, hull_begin, hull_end = bounds
        origin = hull_begin if self._is_anchored else np.zeros_like(hull_begin)
        tile = np.array(list(map(self._within_reach, inner_tiles)))[:, np.newaxis]
        # Rows past the last token count as it does.
        (seen_begin, core_end), (core_begin, seen_end) = (
            self._windows(np.minimum(first + min(row, self.outer_tile - 1), last)) for row in rows
        )
        # Tiles that hold some of what has to be there ...
        begin, end = np.stack([hull_begin, seen_begin]), np.stack([hull_end, seen_end])
        is_empty = (end <= begin)[:, np.newaxis]
        holding = ((begin - origin)[:, np.newaxis] // tile, -(-(end - origin)[:, np.newaxis] // tile))
        # ... and tiles inside of what every row sees.
        full_begin = -(-(core_begin - origin) // tile)
        full_end = (np.minimum(core_end, self._others) - origin) // tile
        begins = np.concatenate([holding[0], full_begin[np.newaxis]])
        ends = np.concatenate([np.where(is_empty, holding[0], holding[1]), full_end[np.newaxis]])
        return begins, ends

    def _within_reach(self, inner_tile: int) -> int:
        return min(inner_tile, self._others + 1)  # larger ones make no difference

    def _windows(self, index: Any) -> tuple[Any, Any]:
        return self._axis.bounds(index, self._lengths, of_query=self._is_forward)
