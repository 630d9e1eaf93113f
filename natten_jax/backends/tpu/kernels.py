"""What the kernels share: where a step's tiles lie, what hides a key, and products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.arrays.operands import Operands
from natten_jax.backends.tpu.layout import Layout
from natten_jax.backends.tpu.visits import COLUMNS, CORE_END, CORE_FIRST, COUNT, KEY_GROUP, START, Lengths, Visits
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis

#: Logit of a key that a query does not see; below what a maximum begins with, so that its weight is 0.
HIDDEN = -1e30
SMALLEST_MAXIMUM = -1e29
LOG2_E = math.log2(math.e)
#: All programs may run at once but the steps of one, which follow each other.
PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))

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
    """

    plan: Plan
    queries: Layout
    keys: Layout
    visits: tuple[Visits, ...]
    heads: int
    heads_kv: int
    alignment: int

    @property
    def lengths(self) -> list[Lengths]:
        """Sizes of each dimension."""
        return [visits.lengths for visits in self.visits]

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

    def bounds(self) -> list[jax.Array]:
        """First and end of the keys that each query of a tile sees, ``[groups, tiles, 2, tokens]`` by dimension."""
        found = []
        for dim, visits in enumerate(self.visits):
            array = jnp.asarray(visits.bounds)
            shape = [1] * KERNEL_RANK
            shape[dim] = array.shape[-1]
            array = array.reshape(*array.shape[:3], *shape)
            array = jnp.broadcast_to(array, (*array.shape[:3], *self.queries.tile))
            found.append(array.reshape(*array.shape[:3], self.queries.tile_tokens))
        return found

    def kv_head(self, head: Scalar) -> Scalar:
        """The key/value head, with its batch entry, of a query head with its own."""
        batch, head = divided(head, self.heads)
        return batch * self.heads_kv + divided(head, self.heads // self.heads_kv)[0]

    def group_of(self, group: Scalar) -> list[Scalar]:
        """A dilation group along each dimension."""
        return _unraveled(group, self.queries.groups)

    def query_tile_of(self, tile: Scalar) -> list[Scalar]:
        """A tile of queries along each dimension."""
        return _unraveled(tile, self.queries.grid)

    def key_tile_of(self, tile: Scalar) -> list[Scalar]:
        """A tile of keys along each dimension."""
        return _unraveled(tile, self.keys.grid)

    def rows_of(self, group: Scalar, tile: Scalar, tables: Sequence[Any]) -> list[Any]:
        """Functions that read a column of a tile's row of each box table."""
        found = []
        for lengths, g, t, table in zip(
            self.lengths, self.group_of(group), self.query_tile_of(tile), tables, strict=True
        ):
            row = (g * lengths.q_tiles + t) * COLUMNS
            found.append(lambda column, table=table, row=row: table[row + column])
        return found

    def key_group(self, group: Scalar, tables: Sequence[Any]) -> Scalar:
        """The dilation group of the keys that a group of queries sees."""
        rows = self.rows_of(group, 0, tables)
        return functools.reduce(
            lambda so_far, pair: so_far * pair[1] + pair[0](KEY_GROUP), zip(rows, self.keys.groups, strict=True), 0
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
        lengths = Lengths.of(axis, queries[dim], keys[dim], q_tile[dim], kv_tile[dim])
        origins = None if operands.origins is None else tuple(operands.origins[:, dim])
        step = alignment if dim == KERNEL_RANK - 1 else 1
        visits.append(Visits.of(axis, lengths, queries[dim], keys[dim], origins, step))
    groups = tuple(each.lengths.groups for each in visits)
    return Call(
        plan,
        Layout(tuple(own), groups, tuple(each.lengths.queries for each in visits), q_tile),
        Layout(tuple(others), groups, tuple(each.lengths.keys for each in visits), kv_tile),
        tuple(visits),
        inputs.query.shape[-2],
        inputs.key.shape[-2],
        alignment,
    )


def _unraveled(index: Scalar, shape: Sequence[int]) -> list[Scalar]:
    *leading, last = shape
    if not leading:
        return [index]
    if math.prod(shape) == 1:
        return [0] * len(shape)
    index, along_last = divided(index, last)
    return [*_unraveled(index, leading), along_last]


def divided(number: Scalar, by: int) -> tuple[Scalar, Scalar]:
    """Quotient and remainder of a number that is not negative."""
    if by == 1:
        return number, 0
    if isinstance(number, int):
        return divmod(number, by)
    return jax.lax.div(number, np.int32(by)), jax.lax.rem(number, np.int32(by))


def step_coordinates(step: Scalar, counts: Sequence[Scalar]) -> list[Scalar]:
    """Which of each dimension's boxes a step has; that of the last step, where there are no more."""
    step = jnp.maximum(jnp.minimum(step, math.prod(counts) - 1), 0)
    found: list[Scalar] = []
    for count in reversed(counts[1:]):
        count = jnp.maximum(count, 1)
        found.insert(0, jax.lax.rem(step, count))
        step = jax.lax.div(step, count)
    return [step, *found]


@dataclasses.dataclass(frozen=True)
class KeyBox:
    """A box of keys along one dimension: its first key, and the first that no earlier box had."""

    first: Scalar
    own: Scalar


def key_boxes(call: Call, group: Scalar, tile: Scalar, step: Scalar, tables: Sequence[Any]) -> list[KeyBox]:
    """Where a step's box of keys lies."""
    rows = call.rows_of(group, tile, tables)
    coordinates = step_coordinates(step, [row(COUNT) for row in rows])
    found = []
    for lengths, row, coordinate in zip(call.lengths, rows, coordinates, strict=True):
        own = row(START) + coordinate * lengths.kv_tile
        found.append(KeyBox(jnp.minimum(own, lengths.keys - lengths.kv_tile), own))
    return found


def sees_all(call: Call, rows: Sequence[Any], boxes: Sequence[KeyBox]) -> jax.Array:
    """Whether all queries of a tile see all keys of a box, none of which an earlier box had."""
    inside = [
        (box.first == box.own) & (box.first >= row(CORE_FIRST)) & (box.first + lengths.kv_tile <= row(CORE_END))
        for lengths, row, box in zip(call.lengths, rows, boxes, strict=True)
    ]
    return functools.reduce(jnp.logical_and, inside)


def without_hidden(call: Call, logits: jax.Array, boxes: Sequence[KeyBox], bounds: Sequence[Any]) -> jax.Array:
    """Logits ``[keys, queries]``, with ``HIDDEN`` where a query does not see a key.

    Keys of the last dimension differ from row to row, so that what hides them is worked out once; those of others are
    the same for all rows of a slab.
    """
    x_tile, y_tile, z_tile = call.keys.tile
    firsts, ends = ([bound[side : side + 1, :] for bound in bounds] for side in (0, 1))
    firsts = [jnp.maximum(first, box.own) for first, box in zip(firsts, boxes, strict=True)]
    keys = jax.lax.broadcasted_iota(jnp.int32, (z_tile, logits.shape[1]), 0) + boxes[2].first
    along_z = (keys >= firsts[2]) & (keys < ends[2])
    slabs = []
    for x in range(x_tile):
        for y in range(y_tile):
            key = boxes[0].first + x, boxes[1].first + y
            visible = [(at >= firsts[dim]) & (at < ends[dim]) for dim, at in enumerate(key)]
            start = (x * y_tile + y) * z_tile
            sees = along_z & visible[0] & visible[1]
            slabs.append(jnp.where(sees, logits[start : start + z_tile, :], HIDDEN))
    return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)


def contract(call: Call, left: jax.Array, right: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """A product of matrices over a dimension of each, in float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=call.precision,
        preferred_element_type=jnp.float32,
    )


def matrix(ref: Any) -> jax.Array:
    """A tile of tokens as ``[tokens, width]``."""
    array = ref[...]
    return array.reshape(-1, array.shape[-1])


def box_spec(call: Call, width: int) -> pl.BlockSpec:
    """The box of keys or values of a step of a program that owns queries, wherever it begins."""

    def index(head: Scalar, group: Scalar, tile: Scalar, step: Scalar, *tables: Any) -> tuple[Scalar, ...]:
        x, y, z = (box.first for box in key_boxes(call, group, tile, step, tables))
        return call.kv_head(head), call.key_group(group, tables), x, y, pl.multiple_of(z, call.alignment), 0

    return pl.BlockSpec((*map(pl.Element, (1, 1, *call.keys.tile, width)),), index)


def masked_logits(
    call: Call,
    keys: jax.Array,
    queries: jax.Array,
    scale: jax.Array,
    boxes: Sequence[KeyBox] | None,
    bounds: Sequence[Any],
) -> jax.Array:
    """Logits in base 2, ``[keys, queries]``; ``boxes`` are given where some queries do not see all keys."""
    logits = contract(call, keys, queries, (1, 1)) * (scale * LOG2_E)
    return logits if boxes is None else without_hidden(call, logits, boxes, bounds)


def visit(add: Callable[[Sequence[KeyBox] | None], None], is_step: Any, is_full: Any, boxes: Sequence[KeyBox]) -> None:
    """Add a step's box, where there is one: without a mask where nothing is hidden."""
    pl.when(is_step & is_full)(lambda: add(None))
    pl.when(is_step & ~is_full)(lambda: add(boxes))


def visit_keys(
    call: Call, place: Sequence[Scalar], tables: Sequence[Any], add: Callable[[Sequence[KeyBox] | None], None]
) -> None:
    """Add the box of keys of a program that owns queries, at its place in :func:`query_grid`."""
    _, group, tile, step = place
    rows = call.rows_of(group, tile, tables)
    boxes = key_boxes(call, group, tile, step, tables)
    visit(add, step < math.prod([row(COUNT) for row in rows]), sees_all(call, rows, boxes), boxes)


def query_grid(call: Call, heads: int) -> tuple[int, ...]:
    """Programs that own queries: heads of all batch entries, dilation groups, tiles, and boxes of keys."""
    steps = math.prod(visits.most_boxes for visits in call.visits)
    return heads, call.groups, math.prod(call.queries.grid), max(steps, 1)


def query_spec(call: Call, width: int) -> pl.BlockSpec:
    """The tile of such a program."""
    return pl.BlockSpec(
        (None, None, *call.queries.tile, width), lambda h, g, t, s, *tables: (h, g, *call.query_tile_of(t), 0)
    )


def scale_spec() -> pl.BlockSpec:
    """The factor of a head's logits."""
    return pl.BlockSpec((None, 1, 1), lambda h, g, t, s, *tables: (h, 0, 0))


def rows_spec(call: Call, count: int) -> pl.BlockSpec:
    """Numbers of its queries, ``[count, tokens]``."""
    shape = None, None, None, count, call.queries.tile_tokens
    return pl.BlockSpec(shape, lambda h, g, t, s, *tables: (h, g, t, 0, 0))


def bounds_specs(call: Call) -> list[pl.BlockSpec]:
    """Of :meth:`Call.bounds`."""

    def spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, 2, call.queries.tile_tokens),
            lambda h, g, t, s, *tables: (call.group_of(g)[dim], call.query_tile_of(t)[dim], 0, 0),
        )

    return [spec(dim) for dim in range(KERNEL_RANK)]
