"""Array layouts, packs of narrow heads, and chunks of keys for a call of the TPU kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Operands
from natten_jax.backends.pallas._common import Layout, Scalar, StaticCall, divided, unravel, visits_of
from natten_jax.plan.plan import Plan
from natten_jax.problem import Shape

LANES = 128
#: Maximum head dimension for which heads are packed. Wider heads are not packed, because XLA transposes their arrays
#: efficiently.
_WIDEST_PACKED = 32
#: Coordinate of keys that every query must mask out.
NOWHERE = -(2**30)
#: Keys per chunk: ``FEW_ROWS_CHUNK`` for tiles of at most ``_FEW_ROWS`` rows, ``MANY_ROWS_CHUNK`` for tiles of more
#: rows. Each of four matrix units processes 128 keys at a time.
FEW_ROWS_CHUNK, MANY_ROWS_CHUNK, _FEW_ROWS = 1024, 512, 128
#: Maximum number of logits per chunk.
MAX_LOGITS = 512 * 512
#: Maximum number of logits per program, summed over its heads or packs; and maximum number of heads or packs per
#: program.
_MAX_LOGITS_OF_PROGRAM, _MAX_PACKS_OF_PROGRAM = 2 * MAX_LOGITS, 16


# Packs ---------------------------------------------------------------------------------------------------------------
#
# If heads were the first dimension, heads of width 32 would be padded to four times their memory, and XLA would
# transpose them slowly. Packs avoid both problems. In the arrays of a call, the heads of a token are adjacent, and four
# heads of width 32 fill the lanes of a register. The kernels treat such a pack as one head with more queries. Each
# query becomes one row per head, with zeros in the lanes of the other heads. The product of this row and the keys of
# the pack therefore includes only the lanes of the row's head. The product of weights and values fills the lanes of all
# heads, but only the lanes of the row's head are read.


def pack_size(heads: int, heads_kv: int, widths: tuple[int, int]) -> int:
    """Return the number of heads per pack; 1 if heads are not packed.

    Args:
        heads: Query heads.
        heads_kv: Key/value heads.
        widths: Width of query and key heads, and width of value heads, in elements.
    """
    if heads != heads_kv or max(widths) > _WIDEST_PACKED:
        return 1
    limit = LANES // max(widths)
    if heads <= limit:
        return heads
    return limit if heads % limit == 0 and widths == (LANES // limit,) * 2 else 1


def stack_heads(array: jax.Array, pack: int) -> jax.Array:
    """Convert ``[tokens, pack * width]`` to ``[pack * tokens, pack * width]``.

    Each row of the result belongs to one head, and has zeros in the lanes of the other heads.
    """
    if pack == 1:
        return array
    head = _head_of_lanes(array.shape, pack)
    return jnp.concatenate([jnp.where(head == i, array, jnp.zeros_like(array)) for i in range(pack)], axis=0)


def unstack_heads(rows: jax.Array, pack: int) -> jax.Array:
    """Invert :func:`stack_heads`. In each row, only the lanes of the row's head are read."""
    tokens = rows.shape[0] // pack
    result = rows[:tokens]
    head = _head_of_lanes(result.shape, pack)
    for i in range(1, pack):
        result = jnp.where(head == i, rows[i * tokens : (i + 1) * tokens], result)
    return result


def repeat_for_rows(numbers: list[Any], tokens: int, axis: int) -> Any:
    """Return a vector that contains each of the numbers ``tokens`` times, or the number itself if there is only one.

    Args:
        numbers: A number for each head of a pack.
        tokens: Rows per head.
        axis: 0 to return a column vector, 1 to return a row vector.
    """
    result = numbers[0]
    shape = [1, 1]
    shape[axis] = len(numbers) * tokens
    row = jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
    for i, number in enumerate(numbers[1:], start=1):
        result = jnp.where(row >= i * tokens, number, result)
    return result


def _head_of_lanes(shape: tuple[int, ...], pack: int) -> jax.Array:
    lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jax.lax.div(lanes, jnp.int32(shape[1] // pack))


# Chunks --------------------------------------------------------------------------------------------------------------


def packs_of_program(leading: int, logits: int) -> int:
    """Return the number of heads or packs that one program processes, if each has one chunk of ``logits`` logits.

    The number is a divisor of ``leading``, the total number of heads or packs.
    """
    limit = max(1, min(_MAX_PACKS_OF_PROGRAM, _MAX_LOGITS_OF_PROGRAM // logits))
    return math.gcd(leading, 1 << (limit.bit_length() - 1))


class Chunks(NamedTuple):
    """The chunks of a box of keys. A program multiplies its queries with one chunk at a time.

    A grid step copies one box. Boxes are large, because a grid step has an overhead of hundreds of instruction bundles.
    The overhead of a chunk is smaller than that of a grid step. A chunk is a range of the box's keys in row-major
    order. Its size is independent of the shape of the box, and can be chosen to keep all matrix units busy.

    Attributes:
        box: Keys of the box along each dimension.
        keys: Keys per chunk. If the number of keys in the box is not a multiple of this number, the last chunk repeats
            keys of the previous chunk.
    """

    box: Shape
    keys: int

    @classmethod
    def for_rows(cls, box: Shape, rows: int, alignment: int) -> Chunks:
        """Return the chunks of a box for query tiles of ``rows`` rows; chunks begin at multiples of ``alignment``."""
        wanted = FEW_ROWS_CHUNK if rows <= _FEW_ROWS else MANY_ROWS_CHUNK
        limit = min(wanted, MAX_LOGITS // rows // alignment * alignment)
        return cls(box, min(math.prod(box), max(limit, alignment)))

    @property
    def number(self) -> int:
        """Number of chunks."""
        return -(-math.prod(self.box) // self.keys)

    @property
    def cut(self) -> int:
        """The first dimension along which the box has more than one key; the last dimension if the box has one key."""
        return next((dim for dim, extent in enumerate(self.box) if extent > 1), len(self.box) - 1)

    @property
    def stride(self) -> int:
        """Number of keys in the box per coordinate along the dimension :attr:`cut`."""
        return math.prod(self.box[self.cut + 1 :])

    def coordinates(self) -> np.ndarray:
        """Return the coordinates of the keys of each chunk, relative to the box: ``[chunks, 3, keys]``.

        All coordinates of a key are ``NOWHERE`` if the previous chunk also contains the key.
        """
        starts = np.arange(self.number)[:, None] * self.keys
        index = np.minimum(starts, math.prod(self.box) - self.keys) + np.arange(self.keys)
        coordinates = np.stack(np.unravel_index(index, self.box), axis=1)
        return np.where((index >= starts)[:, None], coordinates, NOWHERE).astype(np.int32)


# Calls ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call(StaticCall):
    """Plan, array layouts and visited boxes of a call.

    Attributes:
        alignment: Boxes of keys begin at multiples of this number of keys along the last dimension.
        leading: Extent of the first dimension of the query array; symbolic if the batch size is symbolic.
    """

    columns = "start", "count", "hull_end", "core_first", "core_end", "key_group"
    queries: Layout
    keys: Layout
    alignment: int
    leading: Any

    @property
    def pack(self) -> int:
        """Heads per pack."""
        return self.queries.pack

    @property
    def rows(self) -> int:
        """Rows of a matrix of logits: the number of queries per tile times the number of heads per pack."""
        return self.pack * self.queries.tile_tokens

    @functools.cached_property
    def together(self) -> int:
        """Number of packs or heads per program.

        The number can exceed 1 only in the forward pass, if :attr:`is_single` is True and query heads do not share key
        heads. Each pack or head then has little work.
        """
        if not (self.is_single and self.plan.pass_ == "forward" and self.queries.heads == self.keys.heads):
            return 1
        leading = self.leading if isinstance(self.leading, int) else self.queries.leading
        return packs_of_program(leading, self.rows * self.keys.tile_tokens)

    @property
    def chunks(self) -> Chunks:
        """Chunks of a box of keys, for programs that own query tiles and visit boxes."""
        return Chunks.for_rows(self.keys.tile, self.rows, self.alignment)

    @property
    def is_single(self) -> bool:
        """True if every query tile visits at most one box of keys, and boxes consist of one chunk."""
        return self.chunks.number == 1 and all(visits.most_boxes <= 1 for visits in self.visits)

    @property
    def groups(self) -> int:
        return math.prod(self.queries.groups)

    @functools.cached_property
    def precision(self) -> jax.lax.Precision | None:
        """Precision of matrix products if elements are float32; ``None`` for other element types."""
        if self.plan.problem.dtype != "float32":
            return None
        wanted = self.plan.precision
        return jax.lax.Precision.HIGHEST if wanted in (None, "highest", "float32") else jax.lax.Precision.DEFAULT

    def width(self, array: jax.Array) -> int:
        """Return the number of elements per row that a program reads from an array in a kernel's layout."""
        return array.shape[-1] // self.queries.blocks

    def block_of(self, head: Scalar) -> tuple[Scalar, Scalar]:
        """Return the indices of a program's block along the first and the last dimension of an array.

        ``head`` is the program's index along the grid's dimension of heads or packs.
        """
        return divided(head, self.queries.blocks)

    def pack_number(self, head: Scalar, local: int) -> Scalar:
        """Return the index of a pack or head, counted over all batch entries.

        ``local`` is its index among the packs or heads of the program.
        """
        first, last = self.block_of(head)
        return (first * self.together + local) * self.queries.blocks + last

    def kv_head(self, head: Scalar) -> Scalar:
        """Return the index of the key/value head that a query head uses, if heads are not packed.

        Both indices count the heads of all batch entries.
        """
        heads, heads_kv = self.queries.heads, self.keys.heads
        if heads == heads_kv:
            return head
        batch, head = divided(head, heads)
        return batch * heads_kv + divided(head, heads // heads_kv)[0]

    def group_of(self, group: Scalar) -> list[Scalar]:
        """Return the index of a dilation group along each dimension, given its flat index."""
        x, y, z = unravel(group, self.queries.groups)
        return [x if self.queries.groups[0] > 1 else 0, y, z]

    def rows_of(self, group: Scalar, tile: Sequence[Scalar], tables: Sequence[Any]) -> list[Callable[[str], Any]]:
        """Return, per dimension, a function that reads a query tile's row of the box table.

        The function maps the name of a column to the column's value.
        """
        rows = zip(self.visits, self.group_of(group), tile, tables, strict=True)
        return [self.columns_of(table, g * visits.q_tiles + t) for visits, g, t, table in rows]

    def key_group(self, group: Scalar, tables: Sequence[Any]) -> Scalar:
        """Return the flat index of the dilation group of keys that a dilation group of queries sees."""
        index: Scalar = 0
        for row, groups in zip(self.rows_of(group, (0, 0, 0), tables), self.keys.groups, strict=True):
            index = index * groups + (row("key_group") if groups > 1 else 0)
        return index


def call_of(plan: Plan, operands: Operands, alignment: int) -> Call:
    """Return the :class:`Call` of a pass."""
    inputs = operands.inputs
    visits = visits_of(plan, operands, alignment, whole_boxes=plan.pass_ == "backward", pads=True)
    (batch, *extents, heads, width), (_, *kv_extents, heads_kv, _) = inputs.query.shape, inputs.key.shape
    pack = pack_size(heads, heads_kv, (width, inputs.value.shape[-1]))
    queries = Layout.for_queries(visits, extents, heads, pack)
    keys = Layout.for_keys(visits, kv_extents, heads_kv, pack)
    return Call(plan, queries, keys, visits, alignment, batch * (1 if pack > 1 else heads))
