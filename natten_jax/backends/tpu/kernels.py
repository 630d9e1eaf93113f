"""What the kernels share: the static facts of a call, the grids of their programs, and products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.arrays.avals import vary_alike
from natten_jax.arrays.operands import Operands
from natten_jax.arrays.remainders import LOG2_E as LOG2_E  # the kernels find it here
from natten_jax.backends.tpu.chunks import Chunks, together
from natten_jax.backends.tpu.layout import Layout
from natten_jax.backends.tpu.packs import LANES, Heads, of_heads, pack_of, stacked
from natten_jax.backends.tpu.visits import COLUMNS, KEY_GROUP, Lengths, Visits
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis

#: Indices of a program that owns queries.
INDICES = 2 + 2 * KERNEL_RANK

Semantics = Literal["parallel", "arbitrary"]
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


# Programs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program of a grid is: its head, dilation group and tile, and which tile of the other side its step has.

    Grids have these in this order, and for each of the last two as many dimensions as layouts have.
    """

    head: Scalar
    group: Scalar
    tile: Sequence[Scalar]
    step: Sequence[Scalar]

    @classmethod
    def of(cls, indices: Sequence[Scalar]) -> Place:
        """That of a program's indices."""
        head, group, *rest = indices
        return cls(head, group, rest[:KERNEL_RANK], rest[KERNEL_RANK : 2 * KERNEL_RANK])

    @classmethod
    def here(cls) -> Place:
        """That of the program that asks."""
        return cls.of([pl.program_id(axis) for axis in range(INDICES)])


def called(kernel: Callable[..., None], *, out_shape: Any, **facts: Any) -> Callable[..., Any]:
    """``pallas_call``, whose results vary over the same manual mesh axes as its operands do."""

    def run(*arrays: jax.Array) -> Any:
        arrays = vary_alike(arrays)
        over = jax.typeof(arrays[0]).manual_axis_type
        types = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, manual_axis_type=over), out_shape
        )
        return pl.pallas_call(kernel, out_shape=types, **facts)(*arrays)

    return run


def semantics(steps: int) -> pltpu.CompilerParams:
    """All programs may run at once but the steps of one, which follow each other."""
    of_tiles: list[Semantics] = ["parallel"] * (2 + KERNEL_RANK)
    of_steps: list[Semantics] = ["arbitrary"] * steps
    return pltpu.CompilerParams(dimension_semantics=(*of_tiles, *of_steps))


def spec(shape: Sequence[Any], index: Callable[..., tuple[Scalar, ...]]) -> pl.BlockSpec:
    """A block of an array, from a function of a program's place and its box tables, which come first."""
    return pl.BlockSpec(
        tuple(shape), lambda *indices: index(Place.of(indices), indices[INDICES : INDICES + KERNEL_RANK])
    )


def first_of(indices: Sequence[Scalar]) -> Scalar:
    """Whether all are zero."""
    return functools.reduce(jnp.logical_and, [index == 0 for index in indices])


def last_of(grid: Sequence[int], indices: Sequence[Scalar]) -> Scalar:
    """Whether all are the last ones of a grid."""
    return functools.reduce(jnp.logical_and, [index == n - 1 for index, n in zip(indices, grid, strict=True)])


# Arithmetic ----------------------------------------------------------------------------------------------------------


def contract(call: Call, left: jax.Array, right: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product of matrices over a dimension of each, in float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=call.precision,
        preferred_element_type=jnp.float32,
    )


def scale_of(call: Call, scales: Any, pack: Scalar, axis: int = 0) -> Any:
    """The factor of a pack's logits: that of all heads, or of each row its own, along an axis of them."""
    if scales.shape == (1,):
        return scales[0]
    return of_heads([scales[pack * call.pack + own] for own in range(call.pack)], call.queries.tile_tokens, axis)


def matrix(ref: Any) -> jax.Array:
    """A tile of tokens as ``[tokens, width]``."""
    array = ref[...]
    return array.reshape(-1, array.shape[-1])


def queries_of(call: Call, ref: Any) -> jax.Array:
    """A tile of queries, or what is alike, as ``[rows, width]``."""
    return stacked(matrix(ref), call.pack)


def across(columns: jax.Array, width: int) -> jax.Array:
    """Numbers of rows, which all lanes of ``[rows, LANES]`` hold, as ``[rows, width]``."""
    whole, rest = divmod(width, LANES)
    parts = [columns] * whole + ([columns[:, :rest]] if rest else [])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def rows_of_columns(numbers: Sequence[jax.Array]) -> jax.Array:
    """Some numbers of rows, each as :func:`across` wants them, as ``[LANES, rows]``, of which as many are filled."""
    found = numbers[0]
    lanes = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
    for at, each in enumerate(numbers[1:], start=1):
        found = jnp.where(lanes == at, each, found)
    return found.T


def columns(row: jax.Array) -> jax.Array:
    """Numbers ``[1, rows]`` as :func:`across` wants them, ``[rows, LANES]``."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T
