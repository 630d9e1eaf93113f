"""Halos: the keys that a device needs from its neighbors if token dimensions are split over devices.

A device that holds the tokens ``[first, last)`` of a dimension needs the keys from the start of its first query's
window to the end of its last query's window. The number of these keys beyond the local tokens is computed exactly with
:mod:`natten_jax.windows`, also at the borders of the layout. Near a border, a window can be shifted so far that all its
other keys are on one side of its query. If the dimension wraps, the devices form a ring.

All devices run the same program and therefore receive halos of the same lengths. The length on each side is the largest
number of keys that a device needs on that side.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from natten_jax.arguments.names import check_types
from natten_jax.arguments.static import int_tuple
from natten_jax.problem import Problem
from natten_jax.windows import Axis


@dataclasses.dataclass(frozen=True)
class Halo:
    """Halos of a token dimension that is split into equal parts, one per device.

    Attributes:
        extent: Number of tokens of the dimension.
        parts: Number of parts; it divides the extent.
        before: Number of keys that a part needs before its local tokens: the maximum over all parts.
        after: Number of keys that a part needs after its local tokens: the maximum over all parts.
        wraps: True if the dimension wraps, so that the last part and the first part are also neighbors.
    """

    extent: int
    parts: int
    before: int
    after: int
    wraps: bool = False

    @functools.cached_property
    def part(self) -> int:
        """Number of tokens of a part."""
        return self.extent // self.parts

    @functools.cached_property
    def received(self) -> int:
        """Number of keys that a part receives: the maximum over all parts."""
        if self.wraps:
            return self.before + self.after
        lengths = np.arange(self.parts) * self.part
        return int(np.max(np.minimum(self.before, lengths) + np.minimum(self.after, lengths[::-1])))

    @property
    def is_gathered(self) -> bool:
        """Return True if at least one part needs all keys. Every part then gathers all keys."""
        return self.parts > 1 and self.received >= self.extent - self.part

    def held(self, first: int) -> tuple[int, int]:
        """Return the range ``[begin, end)`` of the keys in a part's arrays, including halos.

        The part starts at token ``first``. If all keys are gathered, the range is the whole dimension. Otherwise it
        includes both halos, and extends beyond the layout if the part is at a border.
        """
        return (0, self.extent) if self.is_gathered else (first - self.before, first + self.part + self.after)

    def slabs(self, tokens: int) -> tuple[int, ...]:
        """Return how many of a halo's ``tokens`` tokens come from each source part, the nearest part first."""
        whole, rest = divmod(tokens, self.part)
        return (self.part,) * whole + ((rest,) if rest else ())

    @property
    def changes_places(self) -> bool:
        """Return True if two devices swap halos of equal length. Each device then has a halo on one side only."""
        return self.parts == 2 and self.before == self.after and not self.is_gathered and not self.wraps

    def evened(self) -> Halo:
        """If two devices swap halos, extend the shorter halo to the longer one's length: one permute then suffices."""
        if self.parts != 2 or not (self.before and self.after) or self.wraps:
            return self
        longer = max(self.before, self.after)
        return dataclasses.replace(self, before=longer, after=longer)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # the cache keeps only few small halos alive
    def seen_slabs(self, axis: Axis) -> tuple[SeenSlab, ...]:
        """Return the slabs of a part's halos: first the slabs before it, then the slabs after it, the nearest first."""
        if self.changes_places and self.before:
            queries = max(self._count_queries(axis, is_front, 0) for is_front in (True, False))
            return (SeenSlab(None, queries, self.before, 0),)
        slabs: list[SeenSlab] = []
        for is_front, halo in ((True, self.before), (False, self.after)):
            distance = 0
            for keys in self.slabs(halo):
                slabs.append(SeenSlab(is_front, self._count_queries(axis, is_front, distance), keys, distance))
                distance += keys
        return tuple(slabs)

    def _count_queries(self, axis: Axis, is_front: bool, distance: int) -> int:
        """Return the number of queries from one end of a part to the farthest query that sees distant halo keys.

        Distant keys are all halo keys at this end except the nearest ``distance`` keys. The number is the maximum over
        all parts.
        """
        first, last = self._reach(axis)
        # In a dilation group, window bounds increase with the query. The queries that need keys before the part are
        # therefore the first queries of each group.
        sees = first < -distance if is_front else last[::-1] > self.part + distance
        indices = np.nonzero(sees)[0]
        return int(indices[-1]) + 1 if indices.size else 0

    def _reach(self, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """Return the range of keys that each query of a part sees, relative to the start of the part.

        Returns:
            Two arrays: the first key of each query (the minimum over all parts), and one past the last key (the maximum
            over all parts).
        """
        queries = np.arange(self.extent).reshape(self.parts, self.part)
        first, last = axis.reach(queries)
        return np.min(first - queries[:, :1], axis=0), np.max(last - queries[:, :1], axis=0)


class SeenSlab(NamedTuple):
    """A *slab*: the keys of a halo that a part receives from one other part, and the queries that see these keys.

    Attributes:
        is_front: True if the slab lies before the part, False if after it. ``None`` if that depends on the device.
        queries: Number of queries from the part's end next to the slab to the farthest query that sees the slab.
        keys: Number of keys in the slab.
        distance: Number of keys between the slab and the part.
    """

    is_front: bool | None
    queries: int
    keys: int
    distance: int

    def starts(self, part: int, is_front: bool) -> tuple[int, int]:
        """Return the first query that sees the slab and the slab's first key. Both are relative to the part's start."""
        if is_front:
            return 0, -self.distance - self.keys
        return part - self.queries, part + self.distance


@check_types
@functools.lru_cache(maxsize=1024)
def halo_of(axis: Axis, parts: int) -> Halo:
    """Compute the halo of a token dimension that is split into equal parts.

    Example:
        80 tokens are split into two parts. With a window of 24 tokens, a part needs up to 12 keys before and 11 keys
        after its local tokens.

        >>> from natten_jax.halo import halo_of
        >>> from natten_jax.windows import Axis
        >>> halo_of(Axis(80, 80, 24), 2)
        Halo(extent=80, parts=2, before=12, after=11, wraps=False)

    Args:
        axis: The dimension; it has equal numbers of query and key/value tokens.
        parts: Number of parts.

    Raises:
        ValueError: ``parts`` does not divide the extent.
    """
    extent = axis.kv_extent
    if extent % parts:
        raise ValueError(_indivisible(extent, parts))
    if parts == 1:
        return Halo(extent, 1, 0, 0, axis.edges == "wrap")
    part = extent // parts
    starts = np.arange(parts, dtype=np.int64)[:, None] * part
    # Window bounds increase with the query, so only the first and the last query of each dilation group matter.
    groups = np.arange(min(axis.dilation, part), dtype=np.int64)
    first, _ = axis.reach(starts + groups)
    _, last = axis.reach(starts + part - 1 - groups)
    before = int(np.max(starts - first))
    after = int(np.max(last - (starts + part)))
    return Halo(extent, parts, max(before, 0), max(after, 0), axis.edges == "wrap")


@check_types
def halos_of(problem: Problem, parts: Sequence[int]) -> tuple[Halo, ...]:
    """Compute the halos of all token dimensions, given the number of parts of each dimension.

    Example:
        >>> from natten_jax import simulator
        >>> from natten_jax.halo import halos_of
        >>> [halo.before for halo in halos_of(simulator.problem_of((64, 80), 24), (1, 2))]
        [0, 12]
    """
    return tuple(map(halo_of, problem.axes, int_tuple("parts", parts, problem.rank, repeat=False)))


def travel_order(halos: Sequence[Halo]) -> list[int]:
    """Sort the token dimensions that have halos by the ratio of received to local tokens, the largest ratio first.

    Passes that overlap computation with halo exchange use this order. The keys that are sent along a dimension include
    the halos of the dimensions that come earlier in the order.
    """
    dimensions = [i for i, halo in enumerate(halos) if halo.received]
    return sorted(dimensions, key=lambda i: -halos[i].received / halos[i].part)


def bytes_received(problem: Problem, parts: Sequence[int]) -> int:
    """Return the bytes of keys and values that a device receives in a forward pass: the maximum over all devices.

    Example:
        >>> from natten_jax import simulator
        >>> from natten_jax.halo import bytes_received
        >>> bytes_received(simulator.problem_of((64, 80), 24, heads=2, head_dim=32), (1, 2))
        196608

    A backward pass sends gradients of the same size back. It also receives keys and values again, unless the forward
    pass kept them.

    Args:
        problem: The problem on the whole layout, with one device's share of batch and heads.
        parts: Number of parts of each token dimension.
    """
    halos = halos_of(problem, parts)
    local = math.prod(halo.part for halo in halos)
    held = math.prod(halo.part + halo.received for halo in halos)
    per_token = problem.batch * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * problem.element.bytes
    return (held - local) * per_token


def _indivisible(extent: int, parts: int) -> str:
    """Explain why tokens cannot be split, and suggest an alternative."""
    below = max(n for n in range(1, min(parts, extent) + 1) if extent % n == 0)
    nearest = sorted({extent // parts * parts, -(-extent // parts) * parts} - {0})
    sizes = " or ".join(map(str, nearest))
    return (
        f"a token dimension has {extent} tokens, which {parts} devices cannot share equally: split it over {below}, "
        f"or make it {sizes} tokens"
    )
