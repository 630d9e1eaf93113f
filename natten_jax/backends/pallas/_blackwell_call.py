"""Array layouts and work items of a call of the Blackwell kernels, and the boxes of keys that a work item visits."""

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

#: Number of rows (lanes of tensor memory), and number of columns, of a matrix of logits.
ROWS = 128
KEYS = 128
#: Along the last dimension, tiles and boxes begin at multiples of this number of tokens, and have extents that are
#: multiples of it. This is the number of rows per tile in the tensor cores' layout of shared memory.
PIECE = 8
#: Maximum number of adjacent elements of a head in one block.
BLOCK = 64
#: Maximum number of thread blocks of a persistent launch, equal to the number of SMs of a B200 or B300. Results are
#: also correct on GPUs with a different number of SMs.
MULTIPROCESSORS = 148


@dataclasses.dataclass(frozen=True)
class Lines:
    """Layout of an array as lines of tokens along the last token dimension, ``z``.

    An array ``[batch, x, y, z, heads, width]`` is reshaped to ``[batch * x * y, z / dilation, columns, block]``. The
    first dimension indexes lines. A column is a block of at most 64 elements of one head, for one dilation group along
    ``z``.

    Each TMA copy transfers one column of consecutive tokens of one line and dilation group. In shared memory, each
    token is a row of a matrix. Rows after the end of the line are filled with zeros. The reshape is free if ``z`` is a
    multiple of ``dilation`` times :data:`PIECE`. Otherwise, the array is padded, which copies it.

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
        """Return the layout of an array ``[batch, *extents, heads, width]``."""
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
        """Tokens of a line in one dilation group, padded to a multiple of :data:`PIECE`."""
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
        """Return the index of the line that contains a token.

        For a coordinate outside of the array, use the last valid coordinate. The logits of such tokens are masked.
        """
        x, y = (jnp.minimum(token, extent - 1) for token, extent in zip(tokens, self.extents, strict=False))
        return (batch * self.extents[0] + x) * self.extents[1] + y

    def column(self, group: Scalar, head: Scalar) -> Scalar:
        """Return the index of the first column of a head in a dilation group."""
        return (group * self.heads + head) * self.blocks


class Item(NamedTuple):
    """A work item: one tile, of one head and one dilation group."""

    batch: Scalar
    head: Scalar
    group: Sequence[Scalar]
    tile: Sequence[Scalar]


@dataclasses.dataclass(frozen=True)
class Call(StaticCall):
    """Plan, array layouts and visited boxes of a call."""

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
        """Number of halves of a query tile, each with its own matrix of logits; 1 if the tile is not divided."""
        return math.prod(self.q_tile) // ROWS

    @property
    def half_tile(self) -> tuple[int, ...]:
        """Queries per half of a tile along each of three dimensions; all queries if the tile is not divided."""
        x, y, z = self.q_tile
        if self.halves == 1:
            return self.q_tile
        return (x // 2, y, z) if x > 1 else (1, y // 2, z) if y > 1 else (1, 1, z // 2)

    @property
    def first_dim(self) -> int:
        """Index of the problem's first token dimension among the kernels' three token dimensions."""
        return KERNEL_RANK - self.plan.problem.rank

    @property
    def group_heads(self) -> int:
        """Number of query heads per key/value head."""
        return self.queries.heads // self.keys.heads

    def extents(self, *, owns_keys: bool = False) -> list[int]:
        """Return the extents of the grid of work items.

        They are the number of batch entries, the number of heads, the number of dilation groups along each dimension,
        and the number of tiles along each dimension.

        Args:
            owns_keys: True for work items that own a key tile, False for work items that own a query tile.
        """
        lines, tiles = (self.keys, "kv_tiles") if owns_keys else (self.queries, "q_tiles")
        return [lines.batch, lines.heads, *(v.groups for v in self.visits), *(getattr(v, tiles) for v in self.visits)]

    def items(self, *, owns_keys: bool = False) -> int:
        """Return the number of work items."""
        return math.prod(self.extents(owns_keys=owns_keys))

    def item(self, number: Scalar, *, owns_keys: bool = False) -> Item:
        """Return a work item, given its number; the tiles of one head and dilation group have consecutive numbers.

        The item's group is a dilation group of queries, even if the item owns a key tile.
        """
        values = unravel(number, self.extents(owns_keys=owns_keys))
        # Convert static indices to traced ones: JAX rejects static slices that exceed an array, but a tile may extend
        # into padding.
        batch, head, *indices = (jnp.zeros_like(number) if isinstance(index, int) else index for index in values)
        return Item(batch, head, indices[:KERNEL_RANK], indices[KERNEL_RANK:])

    def number(self, item: Item) -> Scalar:
        """Return the number of a work item that owns queries."""
        number = item.batch
        for index, extent in zip((item.head, *item.group, *item.tile), self.extents()[1:], strict=True):
            number = number * extent + index
        return number

    def rows(self, item: Item) -> list[Scalar]:
        """Return the row of an item's query tile in the box table of each dimension."""
        return [g * v.q_tiles + t for g, t, v in zip(item.group, item.tile, self.visits, strict=True)]

    def bounds(self) -> list[jax.Array]:
        """Return the first key that each query sees, and the end of these keys: ``[groups * tiles, 2, queries]``.

        The list has one array per dimension.
        """
        arrays = (v.bounds_of_tokens(dim, self.q_tile) for dim, v in enumerate(self.visits))
        return [array.reshape(-1, *array.shape[2:]) for array in arrays]

    @property
    def _rows_layout(self) -> Layout:
        """Layout of query statistics, with tiles in the order of work items."""
        extents = self.queries.extents[self.first_dim :]
        return Layout.for_queries(self.visits, extents, self.queries.heads, 1)

    def unpacked_items(self, statistics: jax.Array) -> list[jax.Array]:
        """Convert an array ``[items, arrays, queries]`` to a list of arrays, ``[batch, *tokens, heads]`` each."""
        layout, count = self._rows_layout, statistics.shape[1]
        leading = self.queries.batch * self.queries.heads, 1, math.prod(layout.groups)
        return layout.unpacked(statistics.reshape(*leading, *layout.grid, count, layout.tile_tokens))

    def in_items(self, arrays: Sequence[jax.Array], padding: float) -> jax.Array:
        """Invert :meth:`unpacked_items`, and set the padding of tiles to the number ``padding``."""
        return self._rows_layout.in_tiles(arrays, padding).reshape(self.items(), len(arrays), -1)


@dataclasses.dataclass(frozen=True)
class Boxes:
    """The boxes of keys that a work item visits.

    Attributes:
        call: The call.
        firsts: Index of the first key of the first box, per dimension.
        counts: Number of boxes, per dimension.
        core_firsts: Index of the first key that all queries of the tile see, per dimension.
        core_ends: Exclusive end of the keys that all queries of the tile see, per dimension.
        groups: Dilation group of the keys, per dimension.
    """

    call: Call
    firsts: Sequence[Scalar]
    counts: Sequence[Scalar]
    core_firsts: Sequence[Scalar]
    core_ends: Sequence[Scalar]
    groups: Sequence[Scalar]

    @classmethod
    def for_item(cls, call: Call, item: Item, tables: Sequence[Any]) -> Boxes:
        """Read the boxes of an item's query tile from the box tables (:attr:`StaticCall.box_tables`)."""
        rows = [call.columns_of(table, row) for table, row in zip(tables, call.rows(item), strict=True)]
        return cls(call, *([row(name) for row in rows] for name in call.columns))

    @property
    def count(self) -> Scalar:
        """Total number of boxes."""
        return math.prod(self.counts[1:], start=self.counts[0])

    def first(self, number: Scalar) -> list[Scalar]:
        """Return the index of the first key of a box, per dimension, given the number of the box."""
        at = unravel(number, self.counts)
        return [start + n * extent for start, n, extent in zip(self.firsts, at, self.call.box, strict=True)]

    def is_full(self, first: Sequence[Scalar]) -> Scalar:
        """Return True if all queries of the tile see all keys of the box that begins at ``first``."""
        bounds = zip(first, self.call.box, self.core_firsts, self.core_ends, strict=True)
        inside = [(at >= core_first) & (at + extent <= core_end) for at, extent, core_first, core_end in bounds]
        return functools.reduce(jnp.logical_and, inside[self.call.first_dim :])


def call_of(plan: Plan, operands: Operands) -> Call:
    """Return the :class:`Call` of a pass."""
    inputs, dilation = operands.inputs, plan.problem.dilation
    visits = visits_of(plan, operands, PIECE, whole_boxes=True, pads=False)
    return Call(plan, Lines.for_array(inputs.query, dilation), Lines.for_array(inputs.key, dilation), visits)


def blocks_of(items: int) -> int:
    """Return the number of thread blocks of a persistent launch for ``items`` work items.

    If the number of items is symbolic, this is the maximum number of blocks, and some blocks may be idle.
    """
    return MULTIPROCESSORS if export.is_symbolic_dim(items) else min(items, MULTIPROCESSORS)
