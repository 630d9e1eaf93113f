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
from natten_jax.backends.row_statistics import LOG2_E as LOG2_E  # the kernels find it here
from natten_jax.backends.tpu.chunks import Chunks
from natten_jax.backends.tpu.layout import Layout
from natten_jax.backends.tpu.visits import COLUMNS, KEY_GROUP, Lengths, Visits
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis

LANES = 128

#: Most queries of all heads of a program that has several.
_TOGETHER = 1024

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
        visits: Of each of three token dimensions.
        heads: Query heads.
        heads_kv: Key/value heads.
        alignment: Boxes of keys begin at multiples of it along the last dimension.
        batch_heads: Query heads of all batch entries; may be a symbol.
    """

    plan: Plan
    queries: Layout
    keys: Layout
    visits: tuple[Visits, ...]
    heads: int
    heads_kv: int
    alignment: int
    batch_heads: Any

    @functools.cached_property
    def heads_of_program(self) -> int:
        """How many heads a program of the forward pass has, and a block: several, where each has little to do."""
        if not (self.is_single and self.plan.pass_ == "forward" and self.heads == self.heads_kv):
            return 1
        of_all = self.batch_heads if isinstance(self.batch_heads, int) else self.heads
        tokens = max(self.queries.tile_tokens, self.keys.tile_tokens // 2)
        return max(
            count for count in (1, 2, 4, 8) if of_all % count == 0 and (count == 1 or count * tokens <= _TOGETHER)
        )

    @property
    def lengths(self) -> list[Lengths]:
        """Sizes of each dimension."""
        return [visits.lengths for visits in self.visits]

    @property
    def chunks(self) -> Chunks:
        """How programs that own queries cut their boxes of keys."""
        return Chunks.of(self.keys.tile, self.queries.tile_tokens, self.alignment)

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
        """Of products of float32."""
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

    def kv_head(self, head: Scalar) -> Scalar:
        """The key/value head, with its batch entry, of a query head with its own."""
        if self.heads == self.heads_kv:
            return head
        batch, head = divided(head, self.heads)
        return batch * self.heads_kv + divided(head, self.heads // self.heads_kv)[0]

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
    return Call(
        plan,
        Layout(tuple(own), groups, tuple(each.lengths.queries for each in visits), q_tile, (0, 0, 0)),
        Layout(
            tuple(others),
            groups,
            tuple(each.lengths.keys for each in visits),
            kv_tile,
            tuple(each.lengths.before for each in visits),
        ),
        tuple(visits),
        inputs.query.shape[-2],
        inputs.key.shape[-2],
        alignment,
        inputs.query.shape[0] * inputs.query.shape[-2],
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


def scale_of(scales: Any, head: Scalar) -> Any:
    """The factor of a head's logits: that of all heads, or its own."""
    return scales[0 if scales.shape == (1,) else head]


def matrix(ref: Any) -> jax.Array:
    """A tile of tokens as ``[tokens, width]``."""
    array = ref[...]
    return array.reshape(-1, array.shape[-1])


def across(columns: jax.Array, width: int) -> jax.Array:
    """Numbers of rows, which all lanes of ``[rows, LANES]`` hold, as ``[rows, width]``."""
    whole, rest = divmod(width, LANES)
    parts = [columns] * whole + ([columns[:, :rest]] if rest else [])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def rows_of_columns(first: jax.Array, second: jax.Array) -> jax.Array:
    """Two numbers of rows, each as :func:`across` wants them, as ``[2, rows]``."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    return jnp.where(lanes == 0, first, second).T[0:2, :]


def columns(row: jax.Array) -> jax.Array:
    """Numbers ``[1, rows]`` as :func:`across` wants them, ``[rows, LANES]``."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T
