"""Exact counts of tiles in one token dimension: what :mod:`natten_jax.tile_counts` multiplies over the dimensions."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from natten_jax import windows
from natten_jax.axis_sums import Lengths, Totals, check_extent, inverse_window_changes, totals, window_changes
from natten_jax.passes import Pass
from natten_jax.problem import Problem

Placement = Literal["anchored", "aligned"]

#: Products of three entries below it are int64.
_SMALL_ENTRY = 1 << 19


class Axis(NamedTuple):
    """One token dimension of a problem."""

    queries: int
    keys: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool


def axes_of(problem: Problem) -> list[Axis]:
    """The token dimensions of a problem."""
    return [
        Axis(*values)
        for values in zip(
            problem.query_layout,
            problem.kv_layout,
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            problem.is_causal,
            strict=True,
        )
    ]


class AxisCounts(NamedTuple):
    """In one dimension, over all dilation groups: as in TileCounts."""

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    hull_pairs: int

    def times(self, groups: int) -> AxisCounts:
        """Of so many equal dilation groups."""
        return AxisCounts(*(each * groups for each in self))._replace(most_streamed=self.most_streamed)

    @staticmethod
    def of_all(groups: Sequence[AxisCounts]) -> AxisCounts:
        """Of all dilation groups together."""
        most = max(each.most_streamed for each in groups)
        return AxisCounts(*map(sum, zip(*groups, strict=True)))._replace(most_streamed=most)


#: First and last coordinate inside an owned tile, in one dimension.
Rows = tuple[int, int]


class Judgement(enum.IntEnum):
    """What the rows of a row group find a streamed tile to be."""

    ANYTHING = 0
    SEEN = 1
    WHOLE = 2


@functools.lru_cache(maxsize=1 << 16)
def axis_counts(axis: Axis, owned_tile: int, streamed_tile: int, placement: Placement, pass_: Pass) -> AxisCounts:
    """Counts of one dimension.

    Raises:
        ValueError: The dimension is too long, or its tiles are too different from each other, to be counted.
    """
    found = []
    for groups, queries, keys in dilation_groups(axis):
        walk = _Walk(axis, queries, keys, owned_tile, streamed_tile, placement, pass_)

        def lengths(tiles: Any, walk: _Walk = walk) -> Any:
            bounds = walk.bounds(tiles)
            (streamed_begin, streamed_end), _, (whole_begin, whole_end) = walk.judged(bounds, (0, walk.owned_tile - 1))
            hull = bounds.hull_end - bounds.hull_begin
            return np.stack([streamed_end - streamed_begin, whole_end - whole_begin, hull])

        total = walk.totals(lengths, (0, walk.owned_tile - 1))
        streamed, whole, hull = total.sums
        # The last tile may own fewer tokens than the others.
        last = max(total.last[2], 0)
        hull_pairs = (hull - last) * walk.owned_tile + last * (walk.tokens - (walk.tiles - 1) * walk.owned_tile)
        found.append(AxisCounts(walk.tiles, streamed, whole, max(total.most[0], 0), hull_pairs).times(groups))
    return AxisCounts.of_all(found)


@functools.lru_cache(maxsize=1 << 16)
def judged_tiles(
    axis: Axis, owned_tile: int, streamed_tile: int, placement: Placement, pass_: Pass, rows: tuple[Rows, ...]
) -> Any:
    """Streamed tiles of one dimension by what row groups, whose ``rows`` are given, find them to be.

    Returns:
        An entry for every ``itertools.product`` of a judgement per row group: anything, seen, whole. Entries are of
        int64 where the products of three of them are, too, and Python's integers otherwise.

    Raises:
        ValueError: As :func:`axis_counts`.
    """
    judged = [0] * len(Judgement) ** len(rows)
    for groups, queries, keys in dilation_groups(axis):
        walk = _Walk(axis, queries, keys, owned_tile, streamed_tile, placement, pass_)

        def lengths(tiles: Any, walk: _Walk = walk) -> Any:
            bounds = walk.bounds(tiles)
            of_row_groups = [walk.judged(bounds, each) for each in rows]
            found = []
            for ranges in itertools.product(*of_row_groups):
                begins, ends = zip(*ranges, strict=True)
                found.append(functools.reduce(np.minimum, ends) - functools.reduce(np.maximum, begins))
            return np.stack(found)

        total = walk.totals(lengths, *rows)
        judged = [entry + groups * each for entry, each in zip(judged, total.sums, strict=True)]
    return np.array(judged, np.int64 if max(judged) < _SMALL_ENTRY else object)


def dilation_groups(axis: Axis) -> Iterator[tuple[int, int, int]]:
    """How many dilation groups have how many queries and keys."""
    # The first groups have a token more than the others.
    bounds = sorted({0, axis.dilation, axis.queries % axis.dilation, axis.keys % axis.dilation})
    for first, end in itertools.pairwise(bounds):
        queries, keys = (windows.group_length(extent, axis.dilation, first) for extent in (axis.queries, axis.keys))
        yield end - first, queries, keys


class _Bounds(NamedTuple):
    """Of some owned tiles of a dilation group.

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
    """The owned tiles of a dilation group in one dimension, and the streamed tiles past each of them."""

    def __init__(
        self,
        axis: Axis,
        queries: int,
        keys: int,
        owned_tile: int,
        streamed_tile: int,
        placement: Placement,
        pass_: Pass,
    ) -> None:
        check_extent(max(queries, keys))
        self._axis = axis._replace(queries=queries, keys=keys)
        self._which = pass_
        self._is_anchored = placement == "anchored"
        self.tokens, self._others = (queries, keys) if pass_ == "forward" else (keys, queries)
        # Larger ones make no difference.
        self.owned_tile = min(owned_tile, self.tokens)
        self._streamed_tile = min(streamed_tile, self._others + 1)
        self.tiles = -(-self.tokens // self.owned_tile)

    def totals(self, lengths: Lengths, *rows: Rows) -> Totals:
        """Sums over all owned tiles of lengths that are made of the bounds at the given rows."""
        axis, tile = self._axis, self.owned_tile
        is_forward = self._which == "forward"
        # Where all windows move at one pace, what lies between their ends stays; else it changes by whole tiles only.
        moves_alike = is_forward and not axis.is_causal and self._is_anchored
        period = math.lcm(tile, axis.stride, 1 if moves_alike else self._streamed_tile) // tile
        of_tokens = (window_changes if is_forward else inverse_window_changes)(
            axis.queries, axis.keys, axis.kernel_size, axis.stride, axis.is_causal
        )
        offsets = {0, tile - 1, *(min(row, tile - 1) for each in rows for row in each)}
        changes = (-(-(change - offset) // tile) for change in of_tokens for offset in offsets)
        return totals(self.tiles, period, changes, lengths)

    def bounds(self, tiles: Any) -> _Bounds:
        """Tokens and hulls of tiles of the given numbers."""
        first = tiles * self.owned_tile
        last = np.minimum(first + self.owned_tile, self.tokens) - 1
        return _Bounds(first, last, self._windows(first)[0], self._windows(last)[1])

    def judged(self, bounds: _Bounds, rows: Rows) -> tuple[tuple[Any, Any], ...]:
        """For each judgement, first and last plus one of the streamed tiles that some rows find to be so."""
        first, last, hull_begin, hull_end = bounds
        origin = hull_begin if self._is_anchored else np.zeros_like(hull_begin)
        tile = self._streamed_tile

        def holding(begin: Any, end: Any) -> tuple[Any, Any]:
            number = (begin - origin) // tile
            return number, np.where(end > begin, -(-(end - origin) // tile), number)

        # Rows past the last token count as it does.
        (seen_begin, inner_end), (inner_begin, seen_end) = (
            self._windows(np.minimum(first + min(row, self.owned_tile - 1), last)) for row in rows
        )
        whole = -(-(inner_begin - origin) // tile), (np.minimum(inner_end, self._others) - origin) // tile
        return holding(hull_begin, hull_end), holding(seen_begin, seen_end), whole

    def _windows(self, index: Any) -> tuple[Any, Any]:
        axis = self._axis
        window = axis.kernel_size, axis.stride, axis.is_causal
        if self._which == "forward":
            return windows.window_bounds(index, axis.keys, *window)
        return windows.inverse_window_bounds(index, axis.queries, axis.keys, *window)
