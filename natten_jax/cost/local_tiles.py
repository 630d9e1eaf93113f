"""Tiles that a device visits of a token dimension that is split: in parts, the same pairs of tokens take more."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from natten_jax.halo import Halo, travel_order
from natten_jax.performance import Pass
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis

#: Tokens ``[first, last)`` of the global layout, some of which may lie outside of it.
Range = tuple[int, int]


class Visits(NamedTuple):
    """Outer tiles, and the inner tiles that they visit; along one dimension, or of several."""

    outer: int
    inner: int

    def __mul__(self, other: object) -> Visits:
        """Those of both dimensions."""
        assert isinstance(other, Visits)
        return Visits(self.outer * other.outer, self.inner * other.inner)


@functools.lru_cache(maxsize=4096)
def visits(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Along a dimension; of a dilated one, those of all groups, as if these had one length.

    Args:
        axis: The dimension.
        pass_: Forwards, query tiles are the outer ones; backwards, key/value tiles are.
        tile: Extents of query and key/value tile.
        queries: Which ones are run.
        keys: Which ones are run.
    """
    d = axis.dilation
    (first, last), (first_key, last_key) = ((a // d, -(-b // d)) for a, b in (queries, keys))
    lengths = axis.lengths(0)
    if axis.edges == "wrap":
        return Visits(d, d) * _visits_around(axis, pass_, tile, (first, last), (first_key, last_key))
    start, end = axis.bounds(np.arange(lengths[0]), lengths)
    if pass_ == "forward":
        outer = np.arange(first, last, tile[0])
        begin = np.maximum(start[outer], first_key)
        stop = np.minimum(end[np.minimum(outer + tile[0], last) - 1], last_key)
    else:
        outer = np.arange(first_key, last_key, tile[1])
        # Windows move with their queries: those that see a key are neighbors.
        begin = np.maximum(np.searchsorted(end, np.maximum(outer, 0), side="right"), first)
        stop = np.minimum(np.searchsorted(start, np.minimum(outer + tile[1], last_key) - 1, side="right"), last)
    inner = np.maximum(-(-(stop - begin) // tile[0 if pass_ == "backward" else 1]), 0)
    return Visits(d * len(outer), d * int(inner.sum()))


def _visits_around(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Tiles visited in a dilation group of a dimension that wraps; ranges are indices."""
    lengths = axis.lengths(0)
    is_forward = pass_ == "forward"
    (outer_range, inner_range), (outer_tile, inner_tile) = (
        (queries, keys) if is_forward else (keys, queries),
        tile if is_forward else tile[::-1],
    )
    outer = np.arange(*outer_range, outer_tile)
    begin, _ = axis.bounds(outer, lengths, of_query=is_forward)
    _, stop = axis.bounds(np.minimum(outer + outer_tile, outer_range[1]) - 1, lengths, of_query=is_forward)
    if lengths[0] not in (queries[1] - queries[0], keys[1] - keys[0]):  # else tokens come again behind the ends
        begin, stop = np.maximum(begin, inner_range[0]), np.minimum(stop, inner_range[1])
    return Visits(len(outer), int(np.maximum(-(-(stop - begin) // inner_tile), 0).sum()))


def visits_at_once(plan: Plan, halos: Sequence[Halo]) -> Visits:
    """Tiles of a call with own keys and all halos, on the device that visits most."""

    def of_dimension(axis: Axis, halo: Halo, tile: tuple[int, int]) -> Visits:
        found = (
            visits(axis, plan.pass_, tile, (first, first + halo.part), halo.held(first))
            for first in _starts_of_some_parts(halo)
        )
        return max(found, key=lambda each: each.inner)

    of_all = map(of_dimension, plan.problem.axes, halos, zip(*plan.tiles, strict=True))
    return math.prod(of_all, start=Visits(1, 1))


class _Dimension(NamedTuple):
    """What a device visits along a split dimension: with its own keys, with each slab, and with all of these joined."""

    own: Visits
    of_slabs: list[Visits]
    joined: Visits


def visits_by_keys(plan: Plan, halos: Sequence[Halo]) -> list[Visits]:
    """Tiles of calls with own keys, and with each slab and the queries that see it, on the device that visits most."""

    def of_dimension(axis: Axis, halo: Halo, tile: tuple[int, int]) -> _Dimension:
        found = []
        for first in _starts_of_some_parts(halo):
            last = first + halo.part
            of = functools.partial(visits, axis, plan.pass_, tile)
            of_slabs = []
            for slab in halo.seen_slabs(axis):
                is_front = first > 0 if slab.is_front is None else slab.is_front
                query, key = (first + start for start in slab.starts(halo.part, is_front))
                of_slabs.append(of((query, query + slab.queries), (key, key + slab.keys)))
            before, after = halo.before, halo.after
            if halo.changes_places:
                before, after = (before, 0) if first > 0 else (0, after)
            joined = of((first, last), (first - before, last + after))
            found.append(_Dimension(of((first, last), (first, last)), of_slabs, joined))
        return max(found, key=lambda each: each.own.inner + sum(slab.inner for slab in each.of_slabs))

    dimensions = list(map(of_dimension, plan.problem.axes, halos, zip(*plan.tiles, strict=True)))
    across = [each.own for each in dimensions]
    calls = [math.prod(across, start=Visits(1, 1))]
    for i in travel_order(halos):
        others = math.prod(across[:i] + across[i + 1 :], start=Visits(1, 1))
        calls += [slab * others for slab in dimensions[i].of_slabs]
        across[i] = dimensions[i].joined
    return calls


def visits_of_one(plan: Plan) -> Visits:
    """Tiles of one device that has all tokens."""
    tiles = zip(*plan.tiles, strict=True)
    of_all = [
        visits(axis, plan.pass_, tile, (0, axis.kv_extent), (0, axis.kv_extent))
        for axis, tile in zip(plan.problem.axes, tiles, strict=True)
    ]
    return math.prod(of_all, start=Visits(1, 1))


def _starts_of_some_parts(halo: Halo) -> list[int]:
    """The first tokens of parts at both ends and in the middle, one of which visits the most tiles."""
    return [halo.part * i for i in sorted({0, min(1, halo.parts - 1), halo.parts // 2, halo.parts - 1})]
