"""Static facts of a call of the TPU kernels: packs of narrow heads, chunks of keys, layouts and visits."""

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
#: Maximum head dimension for which heads are packed: XLA transposes arrays with wider heads efficiently.
_WIDEST_PACKED = 32
#: Coordinate that marks a key that no query sees.
NOWHERE = -(2**30)
#: Keys per chunk for tiles of at most ``_FEW_ROWS`` rows, and for tiles of more rows. Each of four matrix units
#: processes 128 keys at a time.
FEW_ROWS_CHUNK, MANY_ROWS_CHUNK, _FEW_ROWS = 1024, 512, 128
#: Maximum logits per chunk.
MOST_LOGITS = 512 * 512
#: Maximum logits of all heads or packs of a program, and maximum number of heads or packs per program.
_MOST_LOGITS_OF_PROGRAM, _MOST_PACKS_OF_PROGRAM = 2 * MOST_LOGITS, 16


# Packs ---------------------------------------------------------------------------------------------------------------
#
# If heads were the first dimension, heads of width 32 would be padded to four times their memory, and XLA would
# transpose them slowly. In the arrays of a call, the heads of a token are adjacent, and four heads of width 32 fill the
# lanes of a register. The kernels treat such a pack as one head with more queries: each head contributes the pack's
# queries as rows, with zeros in the lanes of other heads. A row's product with the keys of the pack is then its head's
# product. Of the product with values, a row uses only the lanes of its head.


def pack_size(heads: int, heads_kv: int, widths: tuple[int, int]) -> int:
    """Return the number of heads per pack; 1 if heads are not packed.

    Args:
        heads: Query heads.
        heads_kv: Key/value heads.
        widths: Elements per head of queries and keys, and per head of values.
    """
    if heads != heads_kv or max(widths) > _WIDEST_PACKED:
        return 1
    most = LANES // max(widths)
    if heads <= most:
        return heads
    return most if heads % most == 0 and widths == (LANES // most,) * 2 else 1


def stack_heads(array: jax.Array, pack: int) -> jax.Array:
    """Convert ``[tokens, pack * width]`` to ``[pack * tokens, pack * width]``, with zeros in lanes of other heads."""
    if pack == 1:
        return array
    head = _head_of_lanes(array.shape, pack)
    return jnp.concatenate([jnp.where(head == own, array, jnp.zeros_like(array)) for own in range(pack)], axis=0)


def unstack_heads(rows: jax.Array, pack: int) -> jax.Array:
    """Invert :func:`stack_heads`. The lanes of other heads may contain any number."""
    tokens = rows.shape[0] // pack
    found = rows[:tokens]
    head = _head_of_lanes(found.shape, pack)
    for own in range(1, pack):
        found = jnp.where(head == own, rows[own * tokens : (own + 1) * tokens], found)
    return found


def repeat_for_rows(numbers: list[Any], tokens: int, axis: int) -> Any:
    """Repeat one number per head of a pack for the head's rows, along an axis; return a single number unchanged."""
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


# Chunks --------------------------------------------------------------------------------------------------------------


def packs_of_program(leading: int, logits: int) -> int:
    """Return the number of heads or packs per program if each has one chunk of ``logits`` logits.

    The number divides ``leading``.
    """
    most = max(1, min(_MOST_PACKS_OF_PROGRAM, _MOST_LOGITS_OF_PROGRAM // logits))
    return math.gcd(leading, 1 << (most.bit_length() - 1))


class Chunks(NamedTuple):
    """The chunks of a box of keys. A program multiplies its queries with one chunk at a time.

    Boxes are the unit of copies. They are large, because a grid step has an overhead of hundreds of instruction
    bundles, and a chunk has less overhead. Chunks divide the keys in row-major order, for any shape of the box, so that
    a chunk keeps all matrix units busy.

    Attributes:
        box: Keys of the box along each dimension.
        keys: Keys per chunk. If this number does not divide the keys of the box, the last chunk repeats keys of the
            previous chunk.
    """

    box: Shape
    keys: int

    @classmethod
    def for_rows(cls, box: Shape, rows: int, alignment: int) -> Chunks:
        """Return the chunks of a box for tiles of ``rows`` rows; chunks begin at multiples of the alignment."""
        wanted = FEW_ROWS_CHUNK if rows <= _FEW_ROWS else MANY_ROWS_CHUNK
        most = min(wanted, MOST_LOGITS // rows // alignment * alignment)
        return cls(box, min(math.prod(box), max(most, alignment)))

    @property
    def number(self) -> int:
        """Number of chunks."""
        return -(-math.prod(self.box) // self.keys)

    @property
    def cut(self) -> int:
        """First dimension along which the box has more than one key."""
        return next((dim for dim, extent in enumerate(self.box) if extent > 1), len(self.box) - 1)

    @property
    def stride(self) -> int:
        """Keys of the box per coordinate along the dimension :attr:`cut`."""
        return math.prod(self.box[self.cut + 1 :])

    def coordinates(self) -> np.ndarray:
        """Return the keys' coordinates in the box, ``[chunks, 3, keys]``; ``NOWHERE`` for keys of an earlier chunk."""
        starts = np.arange(self.number)[:, None] * self.keys
        index = np.minimum(starts, math.prod(self.box) - self.keys) + np.arange(self.keys)
        found = np.stack(np.unravel_index(index, self.box), axis=1)
        return np.where((index >= starts)[:, None], found, NOWHERE).astype(np.int32)


# Calls ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call(StaticCall):
    """Static facts of a call.

    Attributes:
        alignment: Boxes of keys begin at multiples of this number of keys along the last dimension.
        leading: Extent of the first dimension of queries; may be symbolic.
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
        """Rows of a program's logits: the queries of its tile times the heads of a pack."""
        return self.pack * self.queries.tile_tokens

    @functools.cached_property
    def together(self) -> int:
        """Packs or heads per program. Forward programs process several if each of these has little work."""
        if not (self.is_single and self.plan.pass_ == "forward" and self.queries.heads == self.keys.heads):
            return 1
        leading = self.leading if isinstance(self.leading, int) else self.queries.leading
        return packs_of_program(leading, self.rows * self.keys.tile_tokens)

    @property
    def chunks(self) -> Chunks:
        """Chunks of the boxes of keys that programs which own queries visit."""
        return Chunks.for_rows(self.keys.tile, self.rows, self.alignment)

    @property
    def is_single(self) -> bool:
        """True if one chunk contains all keys that a query tile sees, for every query tile."""
        return self.chunks.number == 1 and all(visits.most_boxes <= 1 for visits in self.visits)

    @property
    def groups(self) -> int:
        return math.prod(self.queries.groups)

    @functools.cached_property
    def precision(self) -> jax.lax.Precision | None:
        """Precision of float32 products; ``None`` for other element types."""
        if self.plan.problem.dtype != "float32":
            return None
        wanted = self.plan.precision
        return jax.lax.Precision.HIGHEST if wanted in (None, "highest", "float32") else jax.lax.Precision.DEFAULT

    def width(self, array: jax.Array) -> int:
        """Return the width of the rows that a program reads from an array."""
        return array.shape[-1] // self.queries.blocks

    def block_of(self, head: Scalar) -> tuple[Scalar, Scalar]:
        """Return the index of a program's heads in the first dimension, and of its pack in the last dimension."""
        return divided(head, self.queries.blocks)

    def pack_number(self, head: Scalar, own: int) -> Scalar:
        """Return the index of a pack or head in the whole batch, given its index ``own`` in the program."""
        first, last = self.block_of(head)
        return (first * self.together + own) * self.queries.blocks + last

    def kv_head(self, head: Scalar) -> Scalar:
        """Return the key/value head of a query head; both indices include the batch entry. Heads are not packed."""
        heads, heads_kv = self.queries.heads, self.keys.heads
        if heads == heads_kv:
            return head
        batch, head = divided(head, heads)
        return batch * heads_kv + divided(head, heads // heads_kv)[0]

    def group_of(self, group: Scalar) -> list[Scalar]:
        """Return the index of a dilation group along each dimension."""
        x, y, z = unravel(group, self.queries.groups)
        return [x if self.queries.groups[0] > 1 else 0, y, z]

    def rows_of(self, group: Scalar, tile: Sequence[Scalar], tables: Sequence[Any]) -> list[Callable[[str], Any]]:
        """Return, per dimension, a function that reads a named column in a tile's row of the box table."""
        rows = zip(self.visits, self.group_of(group), tile, tables, strict=True)
        return [self.columns_of(table, g * visits.q_tiles + t) for visits, g, t, table in rows]

    def key_group(self, group: Scalar, tables: Sequence[Any]) -> Scalar:
        """Return the dilation group of the keys that a dilation group of queries sees."""
        found: Scalar = 0
        for row, groups in zip(self.rows_of(group, (0, 0, 0), tables), self.keys.groups, strict=True):
            found = found * groups + (row("key_group") if groups > 1 else 0)
        return found


def call_of(plan: Plan, operands: Operands, alignment: int) -> Call:
    """Return the static facts of a call, with its visits."""
    inputs = operands.inputs
    visits = visits_of(plan, operands, alignment, whole_boxes=plan.pass_ == "backward", pads=True)
    (batch, *extents, heads, width), (_, *kv_extents, heads_kv, _) = inputs.query.shape, inputs.key.shape
    pack = pack_size(heads, heads_kv, (width, inputs.value.shape[-1]))
    queries = Layout.for_queries(visits, extents, heads, pack)
    keys = Layout.for_keys(visits, kv_extents, heads_kv, pack)
    return Call(plan, queries, keys, visits, alignment, batch * (1 if pack > 1 else heads))
