"""What a work item of the backward pass owns, and what it goes over: pairs of a tile of queries and a box of keys."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from natten_jax.backends.blackwell.call import Boxes, Call, Item, Scalar, column_of, divided
from natten_jax.backends.blackwell.copies import Place
from natten_jax.native.abi import KERNEL_RANK


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tile of queries, and a box of keys.

    Attributes:
        boxes: Those that the queries see.
        item: The tile of queries.
        first: First key of the box along each dimension.
    """

    boxes: Boxes
    item: Item
    first: Sequence[Scalar]

    @property
    def call(self) -> Call:
        """What runs."""
        return self.boxes.call

    @property
    def queries(self) -> Place:
        """Where the queries lie."""
        return queries_place(self.call, self.item)

    @property
    def keys(self) -> Place:
        """Where the keys lie."""
        head, _ = divided(self.item.head, self.call.group_heads)
        return keys_place(self.boxes, self.item.batch, head, self.first)

    @property
    def is_full(self) -> Scalar:
        """Whether all queries see all keys."""
        return self.boxes.is_full(self.first)


class Owned(abc.ABC):
    """What an item owns, and the pairs that it goes over.

    Attributes:
        place: Where it lies.
        count: How many pairs there are.
    """

    place: Place
    count: Scalar

    @abc.abstractmethod
    def pair(self, number: Scalar) -> Pair:
        """One of them."""


class OwnedQueries(Owned):
    """A tile of queries, which goes over the boxes of keys that it sees."""

    def __init__(self, call: Call, number: Scalar, tables: Sequence[Any]) -> None:
        self.item = call.item(number)
        self._boxes = Boxes.of(call, self.item, tables)
        self.place = queries_place(call, self.item)
        self.count = self._boxes.count

    def pair(self, number: Scalar) -> Pair:
        return Pair(self._boxes, self.item, self._boxes.first(number))


class OwnedKeys(Owned):
    """A tile of keys, which goes over the tiles of queries that see it, one query head after the other."""

    def __init__(self, call: Call, number: Scalar, tables: Sequence[Any]) -> None:
        self._call, self._item = call, call.key_item(number)
        self._boxes, seeing = tables[:KERNEL_RANK], tables[KERNEL_RANK:]
        self._first = [t * extent for t, extent in zip(self._item.tile, call.key_pieces.tile, strict=True)]
        # All tiles of queries of a group know the group of its keys.
        any_tile = dataclasses.replace(self._item, tile=(0,) * KERNEL_RANK)
        boxes = Boxes.of(call, any_tile, self._boxes)
        self.place = keys_place(boxes, self._item.batch, self._item.head, self._first)
        rows = [g * n + t for g, t, n in zip(self._item.group, self._item.tile, call.kv_tiles, strict=True)]
        self._firsts, self._counts = (
            [table[row * 2 + column] for table, row in zip(seeing, rows, strict=True)] for column in (0, 1)
        )
        self._of_head = functools.reduce(lambda so_far, n: so_far * n, self._counts)
        self.count = self._of_head * call.group_heads

    def pair(self, number: Scalar) -> Pair:
        head, rest = jax.lax.div(number, self._of_head), jax.lax.rem(number, self._of_head)
        _, y, z = self._counts
        rest, at_z = jax.lax.div(rest, z), jax.lax.rem(rest, z)
        at = jax.lax.div(rest, y), jax.lax.rem(rest, y), at_z
        tile = [first + each for first, each in zip(self._firsts, at, strict=True)]
        item = Item(self._item.batch, self._item.head * self._call.group_heads + head, self._item.group, tile)
        return Pair(Boxes.of(self._call, item, self._boxes), item, self._first)


def queries_place(call: Call, item: Item) -> Place:
    """Where a tile of queries lies."""
    first = [tile * extent for tile, extent in zip(item.tile, call.q_tile, strict=True)]
    return Place(item.batch, item.group, first, column_of(call.queries, item.group[-1], item.head))


def keys_place(boxes: Boxes, batch: Scalar, head: Scalar, first: Sequence[Scalar]) -> Place:
    """Where a box of keys lies, from others of its group."""
    return Place(batch, boxes.groups, first, column_of(boxes.call.keys, boxes.groups[-1], head))
