"""Static facts of a call of the TPU kernels: packed heads, chunks of keys, layouts and visits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Operands
from natten_jax.backends.pallas._common import Table, TileWindows
from natten_jax.native.module import KERNEL_RANK
from natten_jax.plan.plan import Plan
from natten_jax.problem import Shape
from natten_jax.windows import Axis

LANES = 128
#: The widest heads that are packed: XLA transposes wider ones with little effort.
_WIDEST = 32


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the heads of an array lie.

    Attributes:
        count: Heads of a batch entry.
        pack: How many lie side by side in a pack: all, or as many as fill the lanes; 1 if heads are first.
    """

    count: int
    pack: int

    @property
    def blocks(self) -> int:
        """Packs that lie side by side; 1 if heads are first."""
        return self.count // self.pack if self.pack > 1 else 1

    @property
    def leading(self) -> int:
        """Heads of a batch entry that do not lie side by side."""
        return self.count // (self.pack * self.blocks)


def pack_of(heads: int, heads_kv: int, widths: tuple[int, int]) -> int:
    """How many heads lie side by side.

    Args:
        heads: Query heads.
        heads_kv: Key/value heads.
        widths: Elements of a head of queries and keys, and of values.
    """
    if heads != heads_kv or max(widths) > _WIDEST:
        return 1
    most = LANES // max(widths)
    if heads <= most:
        return heads
    return most if heads % most == 0 and widths == (LANES // most,) * 2 else 1


def stacked(array: jax.Array, pack: int) -> jax.Array:
    """The heads of a pack ``[tokens, pack * width]`` one after another, ``[pack * tokens, pack * width]``."""
    if pack == 1:
        return array
    head = _head_of_lanes(array.shape, pack)
    return jnp.concatenate([jnp.where(head == own, array, jnp.zeros_like(array)) for own in range(pack)], axis=0)


def side_by_side(rows: jax.Array, pack: int) -> jax.Array:
    """The inverse of :func:`stacked`, whatever other lanes hold."""
    tokens = rows.shape[0] // pack
    found = rows[:tokens]
    head = _head_of_lanes(found.shape, pack)
    for own in range(1, pack):
        found = jnp.where(head == own, rows[own * tokens : (own + 1) * tokens], found)
    return found


def of_heads(numbers: list[Any], tokens: int, axis: int) -> Any:
    """A number for each head of a pack as one for each of its rows, along an axis of a matrix; one stays itself."""
    found = numbers[0]
    shape = [1, 1]
    shape[axis] = len(numbers) * tokens
    row = jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
    for own, number in enumerate(numbers[1:], start=1):
        found = jnp.where(row >= own * tokens, number, found)
    return found


def _head_of_lanes(shape: tuple[int, ...], pack: int) -> jax.Array:
    lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jax.lax.div(lanes, jnp.int32(shape[1] // pack))


#: Coordinate of a key that no query sees.
NOWHERE = -(2**30)
#: Keys of a chunk, for tiles of few and of many rows. Four matrix units take 128 each.
OF_FEW, OF_MANY, _FEW = 1024, 512, 128
#: Most logits of a chunk, and of the chunks of several heads or packs that go together; most of these.
MOST_LOGITS = 512 * 512
_MOST_OF_ALL, _MOST_TOGETHER = 2 * MOST_LOGITS, 16


def together(leading: int, logits: int) -> int:
    """How many heads or packs of so many go together, where each has one chunk of so many logits."""
    most = max(1, min(_MOST_TOGETHER, _MOST_OF_ALL // logits))
    return math.gcd(leading, 1 << (most.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a box, which rows of queries go over.

    Attributes:
        box: Keys of the box along each dimension.
        keys: Keys of a chunk. The last one has some of the one before, where they are not a divisor of the box's.
    """

    box: Shape
    keys: int

    @classmethod
    def of(cls, box: Shape, rows: int, alignment: int) -> Chunks:
        """Those of a box that so many rows go over; they begin at multiples of an alignment."""
        most = min(OF_FEW if rows <= _FEW else OF_MANY, MOST_LOGITS // rows // alignment * alignment)
        return cls(box, min(math.prod(box), max(most, alignment)))

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-math.prod(self.box) // self.keys)

    @property
    def cut(self) -> int:
        """The first dimension along which the box has more than one key."""
        return next((dim for dim, extent in enumerate(self.box) if extent > 1), len(self.box) - 1)

    @property
    def stride(self) -> int:
        """Keys of the box for each one along that dimension."""
        return math.prod(self.box[self.cut + 1 :])

    def coordinates(self) -> np.ndarray:
        """Those of the keys of each chunk in the box, ``[chunks, 3, keys]``, ``NOWHERE`` if an earlier one has them."""
        starts = np.arange(self.count)[:, None] * self.keys
        index = np.minimum(starts, math.prod(self.box) - self.keys) + np.arange(self.keys)
        found = np.stack(np.unravel_index(index, self.box), axis=1)
        return np.where((index >= starts)[:, None], found, NOWHERE).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tokens of one array lie.

    Attributes:
        heads: How heads lie.
        extents: Tokens along each dimension, as the caller has them.
        groups: Dilation groups of each of three dimensions.
        lengths: Tokens of a group along each, padded.
        tile: Tokens of a tile along each.
        before: Tokens of a group along each that are padding before the first.
    """

    heads: Heads
    extents: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    tile: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles of a group along each dimension."""
        return tuple(length // tile for length, tile in zip(self.lengths, self.tile, strict=True))

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return math.prod(self.tile)

    @property
    def _starts(self) -> list[int]:
        """Padding before the first token of all groups, along each dimension."""
        return [before * groups for before, groups in zip(self.before, self.groups, strict=True)]

    def laid_out(self, array: jax.Array) -> jax.Array:
        """``[batch, *extents, heads, width]`` as ``[batch * leading, groups, *lengths, width]``.

        Heads that lie side by side are one of their widths together.
        """
        batch, heads = array.shape[0], self.heads.leading
        width = array.shape[-2] * array.shape[-1] // heads
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        split = [(length, groups) for length, groups in zip(self.lengths, self.groups, strict=True)]
        padding = [
            (start, length * groups - n - start)
            for (length, groups), n, start in zip(split, extents, self._starts, strict=True)
        ]
        array = jnp.pad(array.reshape(batch, *extents, heads, width), [(0, 0), *padding, (0, 0), (0, 0)])
        array = array.reshape(batch, *(n for pair in split for n in pair), heads, width)
        array = array.transpose(0, 7, 2, 4, 6, 1, 3, 5, 8)
        return array.reshape(batch * heads, math.prod(self.groups), *self.lengths, width)

    def restored(self, array: jax.Array) -> jax.Array:
        """The inverse of :meth:`laid_out`."""
        heads, width = self.heads.leading, array.shape[-1]
        array = array.reshape(-1, heads, *self.groups, *self.lengths, width).transpose(0, 5, 2, 6, 3, 7, 4, 1, 8)
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        whole = [length * groups for length, groups in zip(self.lengths, self.groups, strict=True)]
        array = array.reshape(array.shape[0], *whole, heads, width)
        inside = (slice(start, start + n) for start, n in zip(self._starts, extents, strict=True))
        array = array[:, *inside]
        return array.reshape(array.shape[0], *self.extents, self.heads.count, -1)

    def in_tiles(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Arrays ``[batch, *extents, heads]`` as one, ``[batch * leading, blocks, groups, *tiles, arrays, rows]``.

        Rows are the tokens of a tile, of each head of a pack.
        """
        count, pack, (x, y, z), (tx, ty, tz) = len(rows), self.heads.pack, self.grid, self.tile
        array = self.laid_out(jnp.stack(rows, axis=-1))
        array = array.reshape(*array.shape[:2], x, tx, y, ty, z, tz, self.heads.blocks, pack, count)
        array = array.transpose(0, 8, 1, 2, 4, 6, 10, 9, 3, 5, 7)
        return array.reshape(*array.shape[:6], count, pack * self.tile_tokens)

    def of_tiles(self, array: jax.Array) -> list[jax.Array]:
        """The inverse of :meth:`in_tiles`."""
        array = array.reshape(*array.shape[:7], self.heads.pack, *self.tile)
        array = array.transpose(0, 2, 3, 8, 4, 9, 5, 10, 1, 7, 6)
        restored = self.restored(array.reshape(*array.shape[:2], *self.lengths, -1))
        return [restored[..., i] for i in range(restored.shape[-1])]


#: Columns of :attr:`Visits.boxes`.
START, COUNT, HULL_END, CORE_FIRST, CORE_END, KEY_GROUP = range(6)
COLUMNS = 6


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Static sizes of one token dimension, inside a dilation group.

    Attributes:
        groups: Dilation groups.
        q_tile: Queries of a tile.
        kv_tile: Keys of a box, or of a tile.
        queries: Queries of a group, padded to whole tiles.
        keys: Keys of a group, padded to whole tiles, or to one and to registers where only boxes are visited, which
            may begin anywhere.
        before: What of these is padded before the first key, so that windows of tiles begin where registers do.
    """

    groups: int
    q_tile: int
    kv_tile: int
    queries: int
    keys: int
    before: int

    @classmethod
    def of(
        cls, axis: Axis, queries: int, keys: int, q_tile: int, kv_tile: int, alignment: int, *, whole_tiles: bool
    ) -> Lengths:
        """Those of an axis, of whose tokens a call has some."""
        before = before_keys(axis, q_tile, alignment)
        queries, keys = (math.ceil(tokens / axis.dilation) for tokens in (queries, keys))
        step = kv_tile if whole_tiles else alignment
        padded = math.ceil(queries / q_tile) * q_tile, max(math.ceil((before + keys) / step) * step, kv_tile)
        return cls(axis.dilation, q_tile, kv_tile, *padded, before)

    @property
    def q_tiles(self) -> int:
        """Tiles of queries in a group."""
        return self.queries // self.q_tile

    @property
    def kv_tiles(self) -> int:
        """Tiles of keys in a group."""
        return self.keys // self.kv_tile


def before_keys(axis: Axis, q_tile: int, alignment: int) -> int:
    """What is padded before the first key, so that windows of most tiles begin at multiples of an alignment."""
    lengths = math.ceil(axis.query_extent / axis.dilation), math.ceil(axis.kv_extent / axis.dilation)
    middle = lengths[0] // (2 * q_tile) * q_tile
    first, _ = axis.bounds(np.arange(middle, min(middle + q_tile, lengths[0])), lengths)
    return -int(first.min()) % alignment


@dataclasses.dataclass(frozen=True)
class Visits:
    """What one token dimension's tiles visit.

    Attributes:
        lengths: The sizes.
        bounds: ``[groups, q_tiles, 2, q_tile]``: first and end of the keys that each query sees; both 0 where there is
            no query.
        boxes: ``[groups, q_tiles, COLUMNS]``: where a tile's boxes of keys begin, how many there are, the end of the
            keys that its queries see, first and end of those that all of them see, and the keys' group.
        tiles: ``[groups, kv_tiles, 2]``: the first tile of queries that sees some of a tile of keys, and how many do.
        most_boxes: The largest count of boxes.
        fewest_boxes: The smallest count; 0 where it is not known.
        most_tiles: The largest count of tiles.
    """

    lengths: Lengths
    bounds: Table
    boxes: Table
    tiles: Table
    most_boxes: int
    fewest_boxes: int
    most_tiles: int

    @classmethod
    def of(cls, axis: Axis, lengths: Lengths, queries: int, keys: int, origins: Any, alignment: int) -> Visits:
        """Those of an axis.

        Args:
            axis: The axis.
            lengths: Its sizes.
            queries: Queries that the call has.
            keys: Keys that the call has.
            origins: Where they begin: two int32 scalars, or ``None`` where the call has all of them.
            alignment: Boxes begin at multiples of this.
        """
        xp: ModuleType = np if origins is None else jnp
        q_tile, box = lengths.q_tile, lengths.kv_tile
        windows = TileWindows.of(
            axis, q_tile, lengths.q_tiles, queries, keys, origins, before=lengths.before, most=lengths.keys
        )
        start, count = windows.boxes(box, alignment)
        boxes = xp.stack((start, count, windows.hull[1], *windows.core, windows.key_group), axis=-1).astype(np.int32)
        tiles = windows.seeing(box, lengths.kv_tiles)
        if origins is None:
            most = int(count.max()), int(count.min()), int(tiles[..., 1].max())
        else:
            # Near an edge a key may be seen from half a window further.
            window = axis.kernel_size + axis.stride
            reach = min(lengths.keys, window + q_tile + alignment)
            seeing = min(lengths.queries, window + axis.kernel_size // 2 + box + q_tile)
            most = -(-reach // box), 0, -(-seeing // q_tile)
        return cls(lengths, windows.bounds, boxes, tiles, *most)


Scalar = Any  # int or traced int32 scalar


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts of a call.

    Attributes:
        plan: What runs.
        queries: How queries lie.
        keys: How keys lie.
        visits: Those of each of three token dimensions.
        alignment: Boxes of keys begin at multiples of it along the last dimension.
        leading: Extent of the first dimension of queries; may be a symbol.
    """

    plan: Plan
    queries: Layout
    keys: Layout
    visits: tuple[Visits, ...]
    alignment: int
    leading: Any

    @property
    def pack(self) -> int:
        """Heads of a pack."""
        return self.queries.heads.pack

    @property
    def rows(self) -> int:
        """Rows of a program's logits: queries of its tile, of each head of a pack."""
        return self.pack * self.queries.tile_tokens

    @functools.cached_property
    def together(self) -> int:
        """How many packs, or heads, a program of the forward pass has: several, where each has little to do."""
        heads = self.queries.heads
        if not (self.is_single and self.plan.pass_ == "forward" and heads == self.keys.heads):
            return 1
        of_all = self.leading if isinstance(self.leading, int) else heads.leading
        return together(of_all, self.rows * self.keys.tile_tokens)

    @property
    def lengths(self) -> list[Lengths]:
        """Sizes of each dimension."""
        return [visits.lengths for visits in self.visits]

    @property
    def chunks(self) -> Chunks:
        """How programs that own queries cut their boxes of keys."""
        return Chunks.of(self.keys.tile, self.rows, self.alignment)

    @property
    def is_single(self) -> bool:
        """Whether every tile of queries has all its keys in one chunk."""
        return self.chunks.count == 1 and all(visits.most_boxes <= 1 for visits in self.visits)

    @property
    def groups(self) -> int:
        """Dilation groups in all."""
        return math.prod(self.queries.groups)

    @functools.cached_property
    def precision(self) -> jax.lax.Precision | None:
        """How precise products of float32 are; ``None`` for other element types."""
        if self.plan.problem.dtype != "float32":
            return None
        wanted = self.plan.precision
        return jax.lax.Precision.HIGHEST if wanted in (None, "highest", "float32") else jax.lax.Precision.DEFAULT

    def laid_out(self, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value as the kernels have them."""
        inputs = operands.inputs
        return self.queries.laid_out(inputs.query), self.keys.laid_out(inputs.key), self.keys.laid_out(inputs.value)

    def box_tables(self) -> list[jax.Array]:
        """What kernels that own queries know of their boxes of keys, one array for each dimension."""
        return [jnp.asarray(visits.boxes).reshape(-1) for visits in self.visits]

    def tile_tables(self) -> list[jax.Array]:
        """What kernels that own keys know of their tiles of queries."""
        return [jnp.asarray(visits.tiles).reshape(-1) for visits in self.visits]

    def width(self, array: jax.Array) -> int:
        """That of a row of an array that a program reads."""
        return array.shape[-1] // self.queries.heads.blocks

    def block_of(self, head: Scalar) -> tuple[Scalar, Scalar]:
        """The first dimension's block of a program's heads, and the pack of its last one."""
        return divided(head, self.queries.heads.blocks)

    def pack_number(self, head: Scalar, own: int) -> Scalar:
        """The number among all of a pack, or head, of those that a program has."""
        first, last = self.block_of(head)
        return (first * self.together + own) * self.queries.heads.blocks + last

    def kv_head(self, head: Scalar) -> Scalar:
        """The key/value head, with its batch entry, of a query head with its own, where heads are first."""
        heads, heads_kv = self.queries.heads.count, self.keys.heads.count
        if heads == heads_kv:
            return head
        batch, head = divided(head, heads)
        return batch * heads_kv + divided(head, heads // heads_kv)[0]

    def group_of(self, group: Scalar) -> list[Scalar]:
        """A dilation group along each dimension."""
        x, y, z = self.queries.groups
        rest, of_z = divided(group, z)
        of_x, of_y = divided(rest, y)
        return [of_x if x > 1 else 0, of_y, of_z]

    def rows_of(self, group: Scalar, tile: Sequence[Scalar], tables: Sequence[Any]) -> list[Callable[[int], Any]]:
        """Functions that read a column of a tile's row of each box table."""
        found: list[Callable[[int], Any]] = []
        for lengths, g, t, table in zip(self.lengths, self.group_of(group), tile, tables, strict=True):
            found.append(functools.partial(_column, table, (g * lengths.q_tiles + t) * COLUMNS))
        return found

    def key_group(self, group: Scalar, tables: Sequence[Any]) -> Scalar:
        """The dilation group of the keys that a group of queries sees."""
        rows = self.rows_of(group, (0, 0, 0), tables)
        return functools.reduce(
            lambda so_far, pair: so_far * pair[1] + (pair[0](KEY_GROUP) if pair[1] > 1 else 0),
            zip(rows, self.keys.groups, strict=True),
            0,
        )


def call_of(plan: Plan, operands: Operands, alignment: int) -> Call:
    """The static facts of a call, and its tables."""
    problem, inputs = plan.problem, operands.inputs
    own, others = inputs.query.shape[1:-2], inputs.key.shape[1:-2]
    missing = KERNEL_RANK - problem.rank
    axes = (Axis(1, 1, 1),) * missing + problem.axes
    queries, keys, q_tile, kv_tile = ((1,) * missing + tuple(shape) for shape in (own, others, *plan.tiles))
    visits = []
    for dim, axis in enumerate(axes):
        step = alignment if dim == KERNEL_RANK - 1 else 1
        lengths = Lengths.of(
            axis, queries[dim], keys[dim], q_tile[dim], kv_tile[dim], step, whole_tiles=plan.pass_ == "backward"
        )
        origins = None if operands.origins is None else tuple(operands.origins[:, dim])
        visits.append(Visits.of(axis, lengths, queries[dim], keys[dim], origins, step))
    groups = tuple(each.lengths.groups for each in visits)
    heads, heads_kv = inputs.query.shape[-2], inputs.key.shape[-2]
    pack = pack_of(heads, heads_kv, (inputs.query.shape[-1], inputs.value.shape[-1]))
    q_lengths, kv_lengths = (tuple(getattr(each.lengths, name) for each in visits) for name in ("queries", "keys"))
    return Call(
        plan,
        Layout(Heads(heads, pack), tuple(own), groups, q_lengths, q_tile, (0, 0, 0)),
        Layout(
            Heads(heads_kv, pack), tuple(others), groups, kv_lengths, kv_tile, tuple(v.lengths.before for v in visits)
        ),
        tuple(visits),
        alignment,
        inputs.query.shape[0] * (1 if pack > 1 else heads),
    )


def divided(number: Scalar, by: int) -> tuple[Scalar, Scalar]:
    """Quotient and remainder of a number that is not negative."""
    if by == 1:
        return number, 0
    if isinstance(number, int):
        return divmod(number, by)
    return jax.lax.div(number, np.int32(by)), jax.lax.rem(number, np.int32(by))


def _column(table: Any, row: Scalar, column: int) -> Any:
    return table[row + column]
