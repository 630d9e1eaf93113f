"""Static facts of a call of the Blackwell kernels: lines of tokens, visits, and work items."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from natten_jax.arrays.operands import Operands
from natten_jax.backends.pallas._common import Table, TileWindows
from natten_jax.native.module import KERNEL_RANK
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis

#: Tokens of a line that the matrix units' layout of shared memory keeps together.
PIECE = 8
#: Most elements of a block.
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Lines:
    """How the tokens of one array lie.

    Attributes:
        batch: Batch entries.
        extents: Tokens along each of three dimensions.
        dilation: Dilation groups of each.
        heads: Heads.
        width: Elements of a head.
    """

    batch: int
    extents: tuple[int, ...]
    dilation: tuple[int, ...]
    heads: int
    width: int

    @classmethod
    def of(cls, array: jax.Array, dilation: Sequence[int]) -> Lines:
        """Those of ``[batch, *extents, heads, width]``."""
        batch, *extents, heads, width = array.shape
        missing = (1,) * (KERNEL_RANK - len(extents))
        return cls(batch, missing + tuple(extents), missing + tuple(dilation), heads, width)

    @property
    def block(self) -> int:
        """Elements of a block."""
        return min(self.width, BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return self.width // self.block

    @property
    def length(self) -> int:
        """Tokens of a line that belong to a dilation group, padded to whole pieces."""
        return -(-self.extents[-1] // (self.dilation[-1] * PIECE)) * PIECE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that kernels get: lines, tokens, columns, elements."""
        x, y, _ = self.extents
        return self.batch * x * y, self.length, self.dilation[-1] * self.heads * self.blocks, self.block

    def laid_out(self, array: jax.Array) -> jax.Array:
        """``[batch, *extents, heads, width]`` as :attr:`shape`."""
        x, y, z = self.extents
        lines = array.reshape(self.batch * x * y, z, self.heads * self.width)
        padding = self.length * self.dilation[-1] - z
        return jnp.pad(lines, [(0, 0), (0, padding), (0, 0)]).reshape(self.shape)

    def restored(self, array: jax.Array, rank: int) -> jax.Array:
        """The inverse of :meth:`laid_out`, for an array of so many token dimensions."""
        lines = array.reshape(array.shape[0], -1, self.heads * self.width)[:, : self.extents[-1]]
        return lines.reshape(self.batch, *self.extents[KERNEL_RANK - rank :], self.heads, self.width)


#: Columns of :attr:`Visits.boxes`.
START, COUNT, CORE_FIRST, CORE_END, KEY_GROUP = range(5)
COLUMNS = 5


@dataclasses.dataclass(frozen=True)
class Visits:
    """What one token dimension's tiles visit.

    Attributes:
        groups: Dilation groups.
        tiles: Tiles of queries in a group.
        bounds: ``[groups, tiles, 2, q_tile]``: first and end of the keys that each query sees; both 0 where there is no
            query.
        boxes: ``[groups, tiles, COLUMNS]``: where a tile's boxes of keys begin, how many there are, first and end of
            the keys that all of its queries see, and the keys' group.
        windows: Where both are from.
    """

    groups: int
    tiles: int
    bounds: Table
    boxes: Table
    windows: TileWindows

    @classmethod
    def of(
        cls, axis: Axis, q_tile: int, kv_tile: int, queries: int, keys: int, origins: Any, alignment: int = 1
    ) -> Visits:
        """Those of an axis.

        Args:
            axis: The axis.
            q_tile: Queries of a tile.
            kv_tile: Keys of a box.
            queries: Queries that the call has.
            keys: Keys that the call has.
            origins: Where they begin: two int32 scalars, or ``None`` where the call has all of them.
            alignment: Boxes begin at multiples of this.
        """
        xp: ModuleType = np if origins is None else jnp
        tiles = -(-queries // (axis.dilation * q_tile))
        windows = TileWindows.of(axis, q_tile, tiles, queries, keys, origins, before=0, most=keys)
        boxes = xp.stack((*windows.boxes(kv_tile, alignment), *windows.core, windows.key_group), axis=-1)
        return cls(axis.dilation, tiles, windows.bounds, boxes.astype(np.int32), windows)

    def seeing(self, kv_tile: int, kv_tiles: int) -> Table:
        """Which tiles of queries see tiles of keys: see :meth:`TileWindows.seeing`."""
        return self.windows.seeing(kv_tile, kv_tiles)


Scalar = Any  # int or traced int32 scalar

#: What items have, ``[batch, heads, *groups, *tiles, array, *queries]``, as an array of tokens has it.
_BY_TOKENS = 8, 0, 5, 9, 2, 6, 10, 3, 7, 11, 4, 1
#: Rows of a matrix of logits, which are the lanes of tensor memory, and its columns.
ROWS = 128
KEYS = 128
#: Blocks of a persistent launch: multiprocessors of a B200 and of a B300. Others are right, too.
MULTIPROCESSORS = 148


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A tile of :data:`ROWS` tokens, as pieces of lines.

    Attributes:
        tile: Tokens along each of three dimensions.
    """

    tile: tuple[int, ...]

    @property
    def count(self) -> int:
        """Pieces, each of another line."""
        return self.tile[0] * self.tile[1]

    @property
    def tokens(self) -> int:
        """Tokens of a piece."""
        return self.tile[2]

    def place(self, piece: Scalar) -> tuple[Scalar, Scalar]:
        """Where a piece lies in the tile, along all dimensions but the last."""
        return divided(piece, self.tile[1])


@dataclasses.dataclass(frozen=True)
class Item:
    """What a work item is: a tile of queries of a head, in a dilation group."""

    batch: Scalar
    head: Scalar
    group: Sequence[Scalar]
    tile: Sequence[Scalar]


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts of a call.

    Attributes:
        plan: What runs.
        queries: How queries lie; so does the output.
        keys: How keys and values lie.
        visits: Those of each of three token dimensions.
    """

    plan: Plan
    queries: Lines
    keys: Lines
    visits: tuple[Visits, ...]

    @property
    def q_tile(self) -> tuple[int, ...]:
        """Queries of a tile along each of three dimensions."""
        return with_kernel_rank(self.plan.tiles[0])

    @property
    def key_pieces(self) -> Pieces:
        """A box of keys."""
        return Pieces(with_kernel_rank(self.plan.tiles[1]))

    @property
    def halves(self) -> int:
        """Matrices of logits that are in flight: parts of the tile of queries."""
        return math.prod(self.q_tile) // ROWS

    @property
    def query_pieces(self) -> Pieces:
        """A half of the tile of queries."""
        x, y, z = self.q_tile
        if self.halves == 1:
            return Pieces(self.q_tile)
        return Pieces((x // 2, y, z) if x > 1 else (1, y // 2, z) if y > 1 else (1, 1, z // 2))

    @property
    def first_dim(self) -> int:
        """The first of three dimensions that the problem has."""
        return KERNEL_RANK - self.plan.problem.rank

    @property
    def group_heads(self) -> int:
        """Query heads of a key head."""
        return self.queries.heads // self.keys.heads

    @property
    def items(self) -> int:
        """Work items that own a tile of queries."""
        return self.queries.batch * self.queries.heads * math.prod(v.groups * v.tiles for v in self.visits)

    def item(self, number: Scalar) -> Item:
        """The item with a number: tiles of a head follow each other."""
        return self._item(number, self.queries.heads, [v.tiles for v in self.visits])

    def number(self, item: Item) -> Scalar:
        """The inverse of :meth:`item`."""
        number = item.batch * self.queries.heads + item.head
        for index, extent in zip((*item.group, *item.tile), self._extents([v.tiles for v in self.visits]), strict=True):
            number = number * extent + index
        return number

    @property
    def kv_tiles(self) -> list[int]:
        """Tiles of keys of a dilation group along each dimension."""
        extents = zip(self.keys.extents, self.keys.dilation, self.key_pieces.tile, strict=True)
        return [-(-tokens // (dilation * tile)) for tokens, dilation, tile in extents]

    @property
    def key_items(self) -> int:
        """Work items that own a tile of keys."""
        return self.keys.batch * self.keys.heads * math.prod(self._extents(self.kv_tiles))

    def key_item(self, number: Scalar) -> Item:
        """The item with a number of these: a key head, the group of its queries, and the tile of keys."""
        return self._item(number, self.keys.heads, self.kv_tiles)

    def _extents(self, tiles: Sequence[int]) -> list[int]:
        return [*(v.groups for v in self.visits), *tiles]

    def _item(self, number: Scalar, heads: int, tiles: Sequence[int]) -> Item:
        rest, found = number, []
        for extent in reversed(self._extents(tiles)):
            rest, index = divided(rest, extent)
            found.append(index)
        found.reverse()
        batch, head = divided(rest, heads)
        return Item(batch, head, found[:KERNEL_RANK], found[KERNEL_RANK:])

    def half_offset(self, half: int) -> tuple[int, ...]:
        """Where a half begins in its tile."""
        part = self.query_pieces.tile
        return tuple(half * p if p < whole else 0 for p, whole in zip(part, self.q_tile, strict=True))

    def rows(self, item: Item) -> list[Scalar]:
        """The item's row of the tables of each dimension."""
        return [g * v.tiles + t for g, t, v in zip(item.group, item.tile, self.visits, strict=True)]

    def arrays(self) -> list[jax.Array]:
        """The tables of all dimensions, one after another: boxes, and bounds of each query of a tile."""
        boxes = [jnp.asarray(v.boxes).reshape(-1) for v in self.visits]
        return [*boxes, *(_of_tokens(v.bounds, dim, self.q_tile) for dim, v in enumerate(self.visits))]

    def seeing(self) -> list[jax.Array]:
        """The tables of the tiles of queries that see tiles of keys, one after another."""
        tiles = zip(self.visits, self.key_pieces.tile, self.kv_tiles, strict=True)
        return [jnp.asarray(visits.seeing(*tile)).reshape(-1) for visits, *tile in tiles]

    def of_queries(self, statistics: jax.Array) -> list[jax.Array]:
        """Arrays ``[items, arrays, tokens]`` as ``[batch, *tokens, heads]`` each."""
        lines, groups, tiles = self.queries, [v.groups for v in self.visits], [v.tiles for v in self.visits]
        count = statistics.shape[1]
        array = statistics.reshape(lines.batch, lines.heads, *groups, *tiles, count, *self.q_tile)
        array = array.transpose(_BY_TOKENS)
        whole = [t * q * g for t, q, g in zip(tiles, self.q_tile, groups, strict=True)]
        array = array.reshape(count, lines.batch, *whole, lines.heads)
        x, y, z = lines.extents
        array = array[:, :, :x, :y, :z]
        return [each.reshape(lines.batch, *lines.extents[self.first_dim :], lines.heads) for each in array]

    def in_items(self, arrays: Sequence[jax.Array], padding: float) -> jax.Array:
        """The inverse of :meth:`of_queries`, with a number where items have no queries."""
        lines = self.queries
        array = jnp.stack(arrays).reshape(len(arrays), lines.batch, *lines.extents, lines.heads)
        split = [(v.tiles, tile, v.groups) for v, tile in zip(self.visits, self.q_tile, strict=True)]
        more = [(0, math.prod(each) - extent) for each, extent in zip(split, lines.extents, strict=True)]
        array = jnp.pad(array, [(0, 0), (0, 0), *more, (0, 0)], constant_values=padding)
        array = array.reshape(len(arrays), lines.batch, *itertools.chain(*split), lines.heads)
        return array.transpose(np.argsort(_BY_TOKENS)).reshape(self.items, len(arrays), -1)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """The boxes of keys that an item visits.

    Attributes:
        call: What runs.
        firsts: Where the boxes begin along each dimension.
        counts: How many there are along each.
        cores: First and end of the keys along each that all queries see.
        groups: The keys' dilation group.
    """

    call: Call
    firsts: Sequence[Scalar]
    counts: Sequence[Scalar]
    cores: Sequence[tuple[Scalar, Scalar]]
    groups: Sequence[Scalar]

    @classmethod
    def of(cls, call: Call, item: Item, tables: Sequence[Any]) -> Boxes:
        """Those of an item, by the box tables."""

        def column(number: int) -> list[Scalar]:
            return [table[row * COLUMNS + number] for table, row in zip(tables, call.rows(item), strict=True)]

        cores = list(zip(column(CORE_FIRST), column(CORE_END), strict=True))
        return cls(call, column(START), column(COUNT), cores, column(KEY_GROUP))

    @property
    def count(self) -> Scalar:
        """How many in all."""
        return functools.reduce(lambda so_far, n: so_far * n, self.counts)

    def first(self, number: Scalar) -> list[Scalar]:
        """First key of a box along each dimension."""
        rest, y_z = number, self.counts[1:]
        rest, z = jax.lax.div(rest, y_z[1]), jax.lax.rem(rest, y_z[1])
        x, y = jax.lax.div(rest, y_z[0]), jax.lax.rem(rest, y_z[0])
        tile = self.call.key_pieces.tile
        return [start + at * extent for start, at, extent in zip(self.firsts, (x, y, z), tile, strict=True)]

    def is_full(self, first: Sequence[Scalar]) -> Scalar:
        """Whether all queries see all keys of a box."""
        inside = [
            (at >= core_first) & (at + extent <= core_end)
            for at, extent, (core_first, core_end) in zip(first, self.call.key_pieces.tile, self.cores, strict=True)
        ]
        return functools.reduce(jnp.logical_and, inside[self.call.first_dim :])


def call_of(plan: Plan, operands: Operands) -> Call:
    """The static facts of a call, and its tables."""
    problem, inputs = plan.problem, operands.inputs
    queries, keys = (Lines.of(array, problem.dilation) for array in (inputs.query, inputs.key))
    axes = (Axis(1, 1, 1),) * (KERNEL_RANK - problem.rank) + problem.axes
    tiles = (with_kernel_rank(tile) for tile in plan.tiles)
    visits = []
    for dim, (axis, q_tile, kv_tile) in enumerate(zip(axes, *tiles, strict=True)):
        origins = None if operands.origins is None else tuple(operands.origins[:, dim])
        step = PIECE if dim == KERNEL_RANK - 1 else 1
        visits.append(Visits.of(axis, q_tile, kv_tile, queries.extents[dim], keys.extents[dim], origins, step))
    return Call(plan, queries, keys, tuple(visits))


def blocks_of(items: int) -> int:
    """Blocks of a persistent launch; where the batch size is a symbol, some may have nothing to do."""
    return MULTIPROCESSORS if export.is_symbolic_dim(items) else min(items, MULTIPROCESSORS)


def with_kernel_rank(tile: Sequence[int]) -> tuple[int, ...]:
    """A tile of three dimensions."""
    return (1,) * (KERNEL_RANK - len(tile)) + tuple(tile)


def divided(number: Scalar, by: int) -> tuple[Scalar, Scalar]:
    """Quotient and remainder of a number that is not negative; where it is traced, both are."""
    if isinstance(number, int):
        return divmod(number, by)
    if by == 1:
        return number, jnp.zeros_like(number)
    return jax.lax.div(number, np.int32(by)), jax.lax.rem(number, np.int32(by))


def line_of(lines: Lines, batch: Scalar, tokens: Sequence[Scalar]) -> Scalar:
    """The line of a token, and of the last one for those behind it: what is copied there is hidden."""
    x, y = (jnp.minimum(token, extent - 1) for token, extent in zip(tokens, lines.extents, strict=False))
    return (batch * lines.extents[0] + x) * lines.extents[1] + y


def column_of(lines: Lines, group: Scalar, head: Scalar) -> Scalar:
    """The first column of a head of a dilation group."""
    return (group * lines.heads + head) * lines.blocks


def _of_tokens(bounds: Any, dim: int, tile: Sequence[int]) -> jax.Array:
    """``[groups, tiles, 2, queries]`` of one dimension as ``[groups * tiles, 2, tokens]``."""
    array = jnp.asarray(bounds)
    spread: list[int] = [1] * KERNEL_RANK
    spread[dim] = array.shape[-1]
    array = jnp.broadcast_to(array.reshape(-1, 2, *spread), (array.shape[0] * array.shape[1], 2, *tile))
    return array.reshape(-1, 2, math.prod(tile))
