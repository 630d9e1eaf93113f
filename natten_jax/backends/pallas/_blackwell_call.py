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

#: Rows (lanes of tensor memory) and columns of a matrix of logits.
ROWS = 128
KEYS = 128
#: Tokens per piece of a line: one group of rows in the tensor cores' layout of shared memory.
PIECE = 8
#: Maximum elements per block of a head.
BLOCK = 64
#: Thread blocks of a persistent launch: the number of SMs of a B200 or B300. Other numbers also give correct results.
MULTIPROCESSORS = 148


@dataclasses.dataclass(frozen=True)
class Lines:
    """Layout of an array as lines of tokens along the last token dimension. Kernels copy pieces of lines.

    ``[batch, x, y, z, heads, width]`` is reshaped to ``[batch * x * y, z / dilation, columns, block]`` without a copy.
    A column is a block of at most 64 elements, in one head and one dilation group. TMA copies a piece of a line, whose
    tokens are ``dilation`` apart, as rows of a matrix, and fills rows after the end with zeros. The array is padded,
    and copied, only if its last token extent is not a multiple of ``dilation`` times :data:`PIECE` tokens.

    Attributes:
        batch: Batch entries.
        extents: Tokens along each of three dimensions.
        dilation: Number of dilation groups along each dimension.
        heads: Heads.
        width: Elements per head.
        rank: Number of token dimensions of the problem.
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
        """Elements per block."""
        return min(self.width, BLOCK)

    @property
    def blocks(self) -> int:
        return self.width // self.block

    @property
    def length(self) -> int:
        """Tokens per line and dilation group, padded to whole pieces."""
        return -(-self.extents[-1] // (self.dilation[-1] * PIECE)) * PIECE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that kernels read: ``[lines, tokens, columns, elements]``."""
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
        """Return the line of a token. Tokens outside of the array map to the last line; their logits are masked."""
        x, y = (jnp.minimum(token, extent - 1) for token, extent in zip(tokens, self.extents, strict=False))
        return (batch * self.extents[0] + x) * self.extents[1] + y

    def column(self, group: Scalar, head: Scalar) -> Scalar:
        """Return the first column of a head in a dilation group."""
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
        """Return the scales of the logits, float32 ``[batch, heads]``."""
        scale = finite_scale(self.plan.problem.scale, inputs.scale)
        return jnp.broadcast_to(scale, (self.queries.batch, self.queries.heads))

    @property
    def q_tile(self) -> tuple[int, ...]:
        """Queries per tile along each of three dimensions."""
        return with_kernel_tiles(self.plan.problem, self.plan.tiles)[0]

    @property
    def box(self) -> tuple[int, ...]:
        """Keys per box along each of three dimensions."""
        return with_kernel_tiles(self.plan.problem, self.plan.tiles)[1]

    @property
    def halves(self) -> int:
        """Number of matrices of logits in flight: the parts (1 or 2) of a query tile."""
        return math.prod(self.q_tile) // ROWS

    @property
    def half_tile(self) -> tuple[int, ...]:
        """Queries per half of a tile along each of three dimensions; all queries of the tile if it is not divided."""
        x, y, z = self.q_tile
        if self.halves == 1:
            return self.q_tile
        return (x // 2, y, z) if x > 1 else (1, y // 2, z) if y > 1 else (1, 1, z // 2)

    @property
    def first_dim(self) -> int:
        """Index of the problem's first token dimension among the three dimensions."""
        return KERNEL_RANK - self.plan.problem.rank

    @property
    def group_heads(self) -> int:
        """Query heads per key head."""
        return self.queries.heads // self.keys.heads

    def extents(self, *, owns_keys: bool = False) -> list[int]:
        """Return the number of batch entries and heads, and of groups and tiles along each dimension.

        Args:
            owns_keys: True for work items that own a key tile, False for work items that own a query tile.
        """
        lines, tiles = (self.keys, "kv_tiles") if owns_keys else (self.queries, "q_tiles")
        return [lines.batch, lines.heads, *(v.groups for v in self.visits), *(getattr(v, tiles) for v in self.visits)]

    def items(self, *, owns_keys: bool = False) -> int:
        """Return the number of work items."""
        return math.prod(self.extents(owns_keys=owns_keys))

    def item(self, number: Scalar, *, owns_keys: bool = False) -> Item:
        """Return a work item by number. Tiles of a head have consecutive numbers. Groups are query dilation groups."""
        found = unravel(number, self.extents(owns_keys=owns_keys))
        # Make static indices traced: JAX checks the static bounds of slices, and slices of padding exceed these.
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
        """Return first and end of the keys that each query of a tile sees: ``[groups * tiles, 2, queries]`` arrays."""
        arrays = (v.bounds_of_tokens(dim, self.q_tile) for dim, v in enumerate(self.visits))
        return [array.reshape(-1, *array.shape[2:]) for array in arrays]

    @property
    def _rows_layout(self) -> Layout:
        """Layout of query statistics, in which tiles have the order of work items."""
        extents = self.queries.extents[self.first_dim :]
        return Layout.for_queries(self.visits, extents, self.queries.heads, 1)

    def unpacked_items(self, statistics: jax.Array) -> list[jax.Array]:
        """Convert ``[items, arrays, queries]`` to arrays ``[batch, *tokens, heads]``."""
        layout, count = self._rows_layout, statistics.shape[1]
        leading = self.queries.batch * self.queries.heads, 1, math.prod(layout.groups)
        return layout.unpacked(statistics.reshape(*leading, *layout.grid, count, layout.tile_tokens))

    def in_items(self, arrays: Sequence[jax.Array], padding: float) -> jax.Array:
        """Invert :meth:`unpacked_items`, and fill the padding of tiles with the number ``padding``."""
        return self._rows_layout.in_tiles(arrays, padding).reshape(self.items(), len(arrays), -1)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """The boxes of keys that a work item visits.

    Attributes:
        call: Static facts of the call.
        firsts: First key of the first box along each dimension.
        counts: Number of boxes along each dimension.
        core_firsts: First key that all queries see along each dimension.
        core_ends: End of the keys that all queries see along each dimension.
        groups: Dilation group of the keys along each dimension.
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
        """Total number of boxes."""
        return math.prod(self.counts[1:], start=self.counts[0])

    def first(self, number: Scalar) -> list[Scalar]:
        """Return the first key along each dimension of the box with a number."""
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
