"""Static facts of a call of the Blackwell kernels: lines of tokens, visits, and work items."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends.pallas._common import Layout, Scalar, StaticCall, finite_scale, unravel, visits_of
from natten_jax.native.module import KERNEL_RANK, with_kernel_tiles
from natten_jax.plan.plan import Plan

#: Rows of a matrix of logits, which are the lanes of tensor memory, and its columns.
ROWS = 128
KEYS = 128
#: Tokens of a line that form one group of rows in the tensor cores' layout of shared memory.
PIECE = 8
#: Maximum elements of a block.
BLOCK = 64
#: Thread blocks of a persistent launch: the SMs of a B200 and of a B300. Other numbers also give correct results.
MULTIPROCESSORS = 148


@dataclasses.dataclass(frozen=True)
class Lines:
    """Layout of an array as lines of tokens along the last dimension, from which copies take pieces.

    ``[batch, x, y, z, heads, width]`` is ``[batch * x * y, z / dilation, columns, block]`` without a copy. A column is
    a block of at most 64 elements of a head of a dilation group. TMA copies a piece of a line, tokens that are
    ``dilation`` apart, as rows of a matrix, and fills rows after the end with zeros. The array is padded, and copied,
    only if its last extent is not a multiple of ``dilation`` times :data:`PIECE` tokens.

    Attributes:
        batch: Batch entries.
        extents: Tokens along each of three dimensions.
        dilation: Dilation groups of each dimension.
        heads: Heads.
        width: Elements of a head.
        rank: Dimensions of the problem.
    """

    batch: int
    extents: tuple[int, ...]
    dilation: tuple[int, ...]
    heads: int
    width: int
    rank: int

    @classmethod
    def for_array(cls, array: jax.Array, dilation: Sequence[int]) -> Lines:
        """Return the layout of ``[batch, *extents, heads, width]``."""
        batch, *extents, heads, width = array.shape
        missing = (1,) * (KERNEL_RANK - len(extents))
        return cls(batch, missing + tuple(extents), missing + tuple(dilation), heads, width, len(extents))

    @property
    def block(self) -> int:
        """Elements of a block."""
        return min(self.width, BLOCK)

    @property
    def blocks(self) -> int:
        return self.width // self.block

    @property
    def length(self) -> int:
        """Tokens of a line that belong to a dilation group, padded to whole pieces."""
        return -(-self.extents[-1] // (self.dilation[-1] * PIECE)) * PIECE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that kernels read: lines, tokens, columns, elements."""
        x, y, _ = self.extents
        return self.batch * x * y, self.length, self.dilation[-1] * self.heads * self.blocks, self.block

    def laid_out(self, array: jax.Array) -> jax.Array:
        """Convert ``[batch, *extents, heads, width]`` to :attr:`shape`."""
        x, y, z = self.extents
        lines = array.reshape(self.batch * x * y, z, self.heads * self.width)
        padding = self.length * self.dilation[-1] - z
        return jnp.pad(lines, [(0, 0), (0, padding), (0, 0)]).reshape(self.shape)

    def restored(self, array: jax.Array) -> jax.Array:
        """Invert :meth:`laid_out`."""
        lines = array.reshape(array.shape[0], -1, self.heads * self.width)[:, : self.extents[-1]]
        return lines.reshape(self.batch, *self.extents[KERNEL_RANK - self.rank :], self.heads, self.width)

    def line(self, batch: Scalar, tokens: Sequence[Scalar]) -> Scalar:
        """Return the line of a token. Tokens outside of the array map to the last line, and their logits are masked."""
        x, y = (jnp.minimum(token, extent - 1) for token, extent in zip(tokens, self.extents, strict=False))
        return (batch * self.extents[0] + x) * self.extents[1] + y

    def column(self, group: Scalar, head: Scalar) -> Scalar:
        """Return the first column of a head of a dilation group."""
        return (group * self.heads + head) * self.blocks


class Item(NamedTuple):
    """A work item: a tile of a head in a dilation group."""

    batch: Scalar
    head: Scalar
    group: Sequence[Scalar]
    tile: Sequence[Scalar]


@dataclasses.dataclass(frozen=True)
class Call(StaticCall):
    """Static facts of a call."""

    columns = "start", "count", "core_first", "core_end", "key_group"
    queries: Lines
    keys: Lines

    def scales(self, inputs: Inputs) -> jax.Array:
        """Return factors of the logits, float32 ``[batch, heads]``."""
        scale = finite_scale(self.plan.problem.scale, inputs.scale)
        return jnp.broadcast_to(scale, (self.queries.batch, self.queries.heads))

    @property
    def q_tile(self) -> tuple[int, ...]:
        """Queries of a tile along each of three dimensions."""
        return with_kernel_tiles(self.plan.problem, self.plan.tiles)[0]

    @property
    def box(self) -> tuple[int, ...]:
        """Keys of a box along each of three dimensions."""
        return with_kernel_tiles(self.plan.problem, self.plan.tiles)[1]

    @property
    def halves(self) -> int:
        """Matrices of logits in flight: parts of the tile of queries."""
        return math.prod(self.q_tile) // ROWS

    @property
    def half_tile(self) -> tuple[int, ...]:
        """Queries of a half of a tile along each of three dimensions."""
        x, y, z = self.q_tile
        if self.halves == 1:
            return self.q_tile
        return (x // 2, y, z) if x > 1 else (1, y // 2, z) if y > 1 else (1, 1, z // 2)

    @property
    def first_dim(self) -> int:
        """First of three dimensions that the problem has."""
        return KERNEL_RANK - self.plan.problem.rank

    @property
    def group_heads(self) -> int:
        """Query heads of a key head."""
        return self.queries.heads // self.keys.heads

    def extents(self, *, owns_keys: bool = False) -> list[int]:
        """Return the number of batch entries and heads, and of groups and tiles along each dimension.

        Args:
            owns_keys: True for work items that own a tile of keys, False for work items that own a tile of queries.
        """
        lines, tiles = (self.keys, "kv_tiles") if owns_keys else (self.queries, "q_tiles")
        return [lines.batch, lines.heads, *(v.groups for v in self.visits), *(getattr(v, tiles) for v in self.visits)]

    def items(self, *, owns_keys: bool = False) -> int:
        """Return the number of work items."""
        return math.prod(self.extents(owns_keys=owns_keys))

    def item(self, number: Scalar, *, owns_keys: bool = False) -> Item:
        """Return the work item with a number: tiles of a head follow each other. Groups are groups of queries."""
        found = unravel(number, self.extents(owns_keys=owns_keys))
        # JAX checks static bounds of slices, which padding exceeds.
        batch, head, *indices = (jnp.zeros_like(number) if isinstance(index, int) else index for index in found)
        return Item(batch, head, indices[:KERNEL_RANK], indices[KERNEL_RANK:])

    def number(self, item: Item) -> Scalar:
        """Return the number of a work item that owns queries."""
        number = item.batch
        for index, extent in zip((item.head, *item.group, *item.tile), self.extents()[1:], strict=True):
            number = number * extent + index
        return number

    def rows(self, item: Item) -> list[Scalar]:
        """Return the item's row in the tables of each dimension."""
        return [g * v.q_tiles + t for g, t, v in zip(item.group, item.tile, self.visits, strict=True)]

    def bounds(self) -> list[jax.Array]:
        """``[groups * tiles, 2, queries]`` per dimension. First and end of the keys that each query of a tile sees."""
        arrays = (v.bounds_of_tokens(dim, self.q_tile) for dim, v in enumerate(self.visits))
        return [array.reshape(-1, *array.shape[2:]) for array in arrays]

    @property
    def _rows_layout(self) -> Layout:
        """Layout of statistics of queries: tiles are in the order of work items."""
        extents = self.queries.extents[self.first_dim :]
        return Layout.for_queries(self.visits, extents, self.queries.heads, 1)

    def unpacked_items(self, statistics: jax.Array) -> list[jax.Array]:
        """Convert ``[items, arrays, queries]`` to arrays ``[batch, *tokens, heads]``."""
        layout, count = self._rows_layout, statistics.shape[1]
        leading = self.queries.batch * self.queries.heads, 1, math.prod(layout.groups)
        return layout.unpacked(statistics.reshape(*leading, *layout.grid, count, layout.tile_tokens))

    def in_items(self, arrays: Sequence[jax.Array], padding: float) -> jax.Array:
        """Invert :meth:`unpacked_items`, with a number for the padding of tiles."""
        return self._rows_layout.in_tiles(arrays, padding).reshape(self.items(), len(arrays), -1)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """The boxes of keys that a work item visits.

    Attributes:
        call: Static facts of the call.
        firsts: First key of the first box along each dimension.
        counts: Number of boxes along each dimension.
        core_firsts: First key along each dimension that all queries see.
        core_ends: End along each dimension of the keys that all queries see.
        groups: Dilation group of the keys.
    """

    call: Call
    firsts: Sequence[Scalar]
    counts: Sequence[Scalar]
    core_firsts: Sequence[Scalar]
    core_ends: Sequence[Scalar]
    groups: Sequence[Scalar]

    @classmethod
    def for_item(cls, call: Call, item: Item, tables: Sequence[Any]) -> Boxes:
        """Read the boxes of an item from the box tables, whose columns are in the order of the attributes."""
        rows = [call.columns_of(table, row) for table, row in zip(tables, call.rows(item), strict=True)]
        return cls(call, *([row(name) for row in rows] for name in call.columns))

    @property
    def count(self) -> Scalar:
        """Number of boxes in all."""
        return math.prod(self.counts[1:], start=self.counts[0])

    def first(self, number: Scalar) -> list[Scalar]:
        """Return the first key of a box along each dimension."""
        at = unravel(number, self.counts)
        return [start + n * extent for start, n, extent in zip(self.firsts, at, self.call.box, strict=True)]

    def is_full(self, first: Sequence[Scalar]) -> Scalar:
        """Return True if all queries see all keys of a box."""
        bounds = zip(first, self.call.box, self.core_firsts, self.core_ends, strict=True)
        inside = [(at >= core_first) & (at + extent <= core_end) for at, extent, core_first, core_end in bounds]
        return functools.reduce(jnp.logical_and, inside[self.call.first_dim :])


def call_of(plan: Plan, operands: Operands) -> Call:
    """Return the static facts of a call, with its visits."""
    inputs, dilation = operands.inputs, plan.problem.dilation
    visits = visits_of(plan, operands, PIECE, whole_boxes=True, pads=False)
    return Call(plan, Lines.for_array(inputs.query, dilation), Lines.for_array(inputs.key, dilation), visits)


def blocks_of(items: int) -> int:
    """Return the number of thread blocks of a persistent launch; with a symbolic batch size, some may be idle."""
    return MULTIPROCESSORS if export.is_symbolic_dim(items) else min(items, MULTIPROCESSORS)
