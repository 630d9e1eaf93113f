"""Halos: the keys that a device needs from its neighbors if token dimensions are split over devices.

A device that holds the tokens ``[first, last)`` of a dimension needs the keys from the start of its first query's
window to the end of its last query's window. The excess over its local tokens follows exactly from the window
arithmetic (:mod:`natten_jax.windows`), including borders, near which windows shift inwards by up to their whole extent.
If the dimension wraps, the devices form a ring. All devices run the same program, so all receive halos of equal
lengths: on each side, the largest number of tokens that any device needs there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from natten_jax.problem import Problem
from natten_jax.windows import Axis


@dataclasses.dataclass(frozen=True)
class Halo:
    """Halos of the parts of a token dimension.

    Attributes:
        extent: Tokens of the dimension.
        parts: Number of equal parts; it divides the extent.
        before: Keys that a part needs before its local tokens.
        after: Keys that a part needs after its local tokens.
        wraps: The last part and the first part are also neighbors.
    """

    extent: int
    parts: int
    before: int
    after: int
    wraps: bool = False

    @functools.cached_property
    def part(self) -> int:
        """Tokens of a part."""
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
        """Return True if some part needs all keys: then every part gathers all keys."""
        return self.parts > 1 and self.received >= self.extent - self.part

    def held(self, first: int) -> tuple[int, int]:
        """Return the range ``[begin, end)`` of the keys in the arrays of a part that starts at ``first``, with halos.

        Both halos are included, even if a device needs only one: the range may extend beyond the layout.
        """
        return (0, self.extent) if self.is_gathered else (first - self.before, first + self.part + self.after)

    def slabs(self, tokens: int) -> tuple[int, ...]:
        """Split a halo of ``tokens`` tokens by source part: return the tokens from each part, nearest part first."""
        whole, rest = divmod(tokens, self.part)
        return (self.part,) * whole + ((rest,) if rest else ())

    @property
    def changes_places(self) -> bool:
        """Return True if two devices swap halos of equal length. Each device then has a halo on one side only."""
        return self.parts == 2 and self.before == self.after and not self.is_gathered and not self.wraps

    def evened(self) -> Halo:
        """Pad both halos to the longer one, so that two devices swap them in one permute."""
        if self.parts != 2 or not (self.before and self.after) or self.wraps:
            return self
        longer = max(self.before, self.after)
        return dataclasses.replace(self, before=longer, after=longer)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # halos are small, and few
    def seen_slabs(self, axis: Axis) -> tuple[SeenSlab, ...]:
        """Return the halos of a part, one per source part: first before the part, then after it, nearest first."""
        if self.changes_places and self.before:
            queries = max(self._seeing(axis, is_front, 0) for is_front in (True, False))
            return (SeenSlab(None, queries, self.before, 0),)
        found: list[SeenSlab] = []
        for is_front, halo in ((True, self.before), (False, self.after)):
            distance = 0
            for keys in self.slabs(halo):
                found.append(SeenSlab(is_front, self._seeing(axis, is_front, distance), keys, distance))
                distance += keys
        return tuple(found)

    def _seeing(self, axis: Axis, is_front: bool, distance: int) -> int:
        """Return how many queries at an end of any part, at most, see keys ``distance`` or more keys beyond it."""
        first, last = self._reach(axis)
        # Window bounds increase with the query, so the queries that need keys before the part are the first of each
        # dilation group.
        sees = first < -distance if is_front else last[::-1] > self.part + distance
        found = np.nonzero(sees)[0]
        return int(found[-1]) + 1 if found.size else 0

    def _reach(self, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key and one past the last key that each query of a part sees: extremes over all parts."""
        queries = np.arange(self.extent).reshape(self.parts, self.part)
        first, last = axis.reach(queries)
        return np.min(first - queries[:, :1], axis=0), np.max(last - queries[:, :1], axis=0)


class SeenSlab(NamedTuple):
    """The halo that a part receives from another part, and the part's queries that see it.

    Attributes:
        is_front: The halo lies before the part; ``None`` if that depends on the device.
        queries: Number of queries that see the halo, at the end of the part next to it.
        keys: Number of keys in the halo.
        distance: Number of keys between the halo and the part.
    """

    is_front: bool | None
    queries: int
    keys: int
    distance: int

    def starts(self, part: int, is_front: bool) -> tuple[int, int]:
        """Return the first query that sees the halo, and the halo's first key, relative to the start of the part."""
        if is_front:
            return 0, -self.distance - self.keys
        return part - self.queries, part + self.distance


@functools.lru_cache(maxsize=1024)
def halo_of(axis: Axis, parts: int) -> Halo:
    """Compute the halo of a token dimension that is split into equal parts.

    Example:
        A window of 24 of 80 tokens, split into two parts, reaches 12 tokens to the front and 11 to the back.

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
    # The first and the last query of each dilation group are enough: window bounds increase with the query.
    groups = np.arange(min(axis.dilation, part), dtype=np.int64)
    first, _ = axis.reach(starts + groups)
    _, last = axis.reach(starts + part - 1 - groups)
    before = int(np.max(starts - first))
    after = int(np.max(last - (starts + part)))
    return Halo(extent, parts, max(before, 0), max(after, 0), axis.edges == "wrap")


def halos_of(problem: Problem, parts: Sequence[int]) -> tuple[Halo, ...]:
    """Compute the halo of each token dimension from the number of its parts.

    Example:
        >>> from natten_jax import simulator
        >>> from natten_jax.halo import halos_of
        >>> [halo.before for halo in halos_of(simulator.problem_of((64, 80), 24), (1, 2))]
        [0, 12]
    """
    return tuple(halo_of(axis, each) for axis, each in zip(problem.axes, parts, strict=True))


def travel_order(halos: Sequence[Halo]) -> list[int]:
    """Order the token dimensions that have halos by received tokens relative to the part, the largest first.

    Halos are exchanged in this order: the halos of a dimension include the halos of the dimensions before it.
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

    A backward pass returns gradients of the same size, and receives keys and values again unless they were kept.

    Args:
        problem: The whole problem, with one device's share of batch and heads.
        parts: Parts of each token dimension.
    """
    halos = halos_of(problem, parts)
    own = math.prod(halo.part for halo in halos)
    held = math.prod(halo.part + halo.received for halo in halos)
    per_token = problem.batch * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * problem.element.bytes
    return (held - own) * per_token


def _indivisible(extent: int, parts: int) -> str:
    """Explain why tokens cannot be split, and suggest an alternative."""
    below = max(n for n in range(1, min(parts, extent) + 1) if extent % n == 0)
    nearest = sorted({extent // parts * parts, -(-extent // parts) * parts} - {0})
    sizes = " or ".join(map(str, nearest))
    return (
        f"a token dimension has {extent} tokens, which {parts} devices cannot share equally: split it over {below}, "
        f"or make it {sizes} tokens"
    )
