"""Programs of the TPU kernels: their grids, the boxes of keys that they visit, and masks."""

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

from natten_jax.arrays.operands import vary_alike
from natten_jax.backends.pallas._tpu_call import (
    CORE_END,
    CORE_FIRST,
    COUNT,
    HULL_END,
    LANES,
    NOWHERE,
    START,
    Call,
    Scalar,
    divided,
    of_heads,
    stacked,
)
from natten_jax.native.module import KERNEL_RANK

#: Indices of a program that owns queries.
INDICES = 2 + 2 * KERNEL_RANK

Semantics = Literal["parallel", "arbitrary"]


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


@dataclasses.dataclass(frozen=True)
class KeyBox:
    """A box of keys along one dimension: its first key, and the first that no earlier box had."""

    first: Scalar
    own: Scalar


def key_boxes(call: Call, place: Place, tables: Sequence[Any]) -> list[KeyBox]:
    """Where a step's box of keys lies; that of the last step, where there are no more."""
    found = []
    rows = call.rows_of(place.group, place.tile, tables)
    for lengths, visits, row, step in zip(call.lengths, call.visits, rows, place.step, strict=True):
        if visits.most_boxes > 1:
            own = row(START) + jnp.maximum(jnp.minimum(step, row(COUNT) - 1), 0) * lengths.kv_tile
        else:
            own = row(START)
        found.append(KeyBox(jnp.minimum(own, lengths.keys - lengths.kv_tile), own))
    return found


def sees_all(rows: Sequence[Any], boxes: Sequence[KeyBox], shape: Sequence[Scalar]) -> jax.Array:
    """Whether all queries of a tile see all keys of boxes of a shape, none of which an earlier box had."""
    inside = [
        (box.first >= box.own) & (box.first >= row(CORE_FIRST)) & (box.first + extent <= row(CORE_END))
        for row, box, extent in zip(rows, boxes, shape, strict=True)
    ]
    return functools.reduce(jnp.logical_and, inside)


def visit(add: Callable[[bool], None], is_full: Any) -> None:
    """Add keys: with a mask, or without where nothing is hidden."""
    pl.when(is_full)(lambda: add(False))
    pl.when(~is_full)(lambda: add(True))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a box: its number, its first key in the order of the box's, and where the box lies."""

    number: Scalar
    start: Scalar
    boxes: Sequence[KeyBox]

    def of(self, call: Call, ref: Any) -> jax.Array:
        """Its keys, or their values, as ``[keys, width]``."""
        if call.chunks.count == 1:
            return matrix(ref)
        flat = ref.reshape(math.prod(ref.shape[:-1]), ref.shape[-1])
        return flat[pl.ds(pl.multiple_of(self.start, call.alignment), call.chunks.keys), :]


def visit_keys(call: Call, place: Place, tables: Sequence[Any], add: Callable[[Chunk, bool], None]) -> None:
    """Add the keys of a step of a program that owns queries, a chunk at a time.

    Args:
        call: What runs.
        place: The place of the program.
        tables: Its box tables.
        add: Adds a chunk, and is told whether some of its keys are hidden from some queries.
    """
    rows, boxes, chunks = call.rows_of(place.group, place.tile, tables), key_boxes(call, place, tables), call.chunks
    cut, stride = chunks.cut, chunks.stride
    box, extent = boxes[cut], chunks.box[cut]

    def one() -> None:
        visit(lambda is_masked: add(Chunk(0, 0, boxes), is_masked), sees_all(rows, boxes, chunks.box))

    def all_() -> None:
        # Chunks whose keys an earlier box had, and those behind the last key that is seen, are passed over.
        first = divided(jnp.minimum(box.own - box.first, extent) * stride, chunks.keys)[0]
        behind = jnp.clip(rows[cut](HULL_END) - box.first, 0, extent) * stride
        end = divided(behind + chunks.keys - 1, chunks.keys)[0]

        @pl.loop(first, end)
        def _(number: Any) -> None:
            start = jnp.minimum(number * chunks.keys, math.prod(chunks.box) - chunks.keys)
            of_cut = divided(start, stride)[0], divided(start + chunks.keys - 1, stride)[0] + 1
            parts, shape = [*boxes], [*chunks.box]
            parts[cut], shape[cut] = KeyBox(box.first + of_cut[0], box.own), of_cut[1] - of_cut[0]
            is_full = sees_all(rows, parts, shape) & (start == number * chunks.keys)
            visit(lambda is_masked: add(Chunk(number, start, boxes), is_masked), is_full)

    is_step = [
        step < row(COUNT)
        for visits, step, row in zip(call.visits, place.step, rows, strict=True)
        if visits.most_boxes > 1 or not visits.fewest_boxes
    ]
    visit_all = one if chunks.count == 1 else all_
    if is_step:
        pl.when(functools.reduce(jnp.logical_and, is_step))(visit_all)
    else:
        visit_all()


def box_spec(call: Call, width: int) -> pl.BlockSpec:
    """The box of keys or values of a step of a program that owns queries, wherever it begins."""

    def index(place: Place, tables: Sequence[Any]) -> tuple[Scalar, ...]:
        x, y, z = (box.first for box in key_boxes(call, place, tables))
        key_group = call.key_group(place.group, tables)
        first, last = call.block_of(place.head)
        first = call.kv_head(first) * call.together
        return first, key_group, x, y, pl.multiple_of(z, call.alignment), last * width

    return spec([*map(pl.Element, (call.together, 1, *call.keys.tile, width))], index)


#: Logit of a key that a query does not see; below what a maximum begins with, so that its weight is 0.
#: Both are below every finite logit in base 2 that a bias makes, which is above ``finfo.min / 2 * log2(e)``.
HIDDEN = -3.3e38
SMALLEST_MAXIMUM = -2.9e38


# Programs that own queries -------------------------------------------------------------------------------------------


def slab_bounds(call: Call) -> list[jax.Array]:
    """First and end of the keys that queries see along all dimensions but the last, one after another."""
    return [jnp.asarray(visits.bounds).reshape(-1) for visits in call.visits[:-1]]


def last_bounds(call: Call) -> jax.Array:
    """The same along the last dimension, ``[groups, tiles, 2, tokens]``."""
    return jnp.asarray(call.visits[-1].bounds)


def last_bounds_spec(call: Call) -> pl.BlockSpec:
    """Those of a tile."""
    return spec(
        (None, None, 2, call.queries.tile[-1]), lambda place, _: (call.group_of(place.group)[-1], place.tile[-1], 0, 0)
    )


def key_coordinates(call: Call) -> np.ndarray:
    """Coordinates of the keys of a box, ``[chunks, 3, keys]``."""
    return call.chunks.coordinates()


def key_coordinates_spec() -> pl.BlockSpec:
    """All of them, which are brought once."""
    return pl.BlockSpec(memory_space=pltpu.VMEM)


def window_scratch(call: Call) -> Any:
    """Room for what :func:`keep_windows` makes of a tile's bounds."""
    return pltpu.VMEM((2, call.queries.tile[-1], LANES), jnp.int32)


def keep_windows(bounds: Any, scratch: Any) -> None:
    """Write the bounds of a slab's queries as columns, once for a tile."""
    for side in (0, 1):
        scratch[side] = columns(bounds[side : side + 1, :])


@dataclasses.dataclass(frozen=True)
class QueryMask:
    """What hides keys of a step's box from a tile of queries.

    Attributes:
        call: What runs.
        place: The place of the program.
        bounds: References to :func:`slab_bounds`.
        coordinates: Reference to :func:`key_coordinates`.
        windows: Reference to what :func:`keep_windows` wrote.
    """

    call: Call
    place: Place
    bounds: Sequence[Any]
    coordinates: Any
    windows: Any

    def hidden(self, chunk: Chunk) -> jax.Array:
        """Which keys of a chunk rows of queries do not see, ``[rows, keys]``."""
        x_tile, y_tile, _ = self.call.queries.tile
        boxes = chunk.boxes
        keys = [self.coordinates[chunk.number, dim : dim + 1, :] + box.first for dim, box in enumerate(boxes)]
        along_z = jnp.where(keys[-1] >= boxes[-1].own, keys[-1], NOWHERE)
        first, end = (across(self.windows[side], along_z.shape[1]) for side in (0, 1))
        slabs = []
        for x in range(x_tile):
            of_x = self._seen(0, x, keys[0], boxes[0], along_z)
            for y in range(y_tile):
                seen = self._seen(1, y, keys[1], boxes[1], of_x)
                slabs.append((seen < first) | (seen >= end))
        slabs *= self.call.pack
        return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)

    def _seen(self, dim: int, query: int, keys: jax.Array, box: KeyBox, coordinates: jax.Array) -> jax.Array:
        """The coordinates along the last dimension, but those of keys that a slab does not see along another one."""
        if dim < KERNEL_RANK - self.call.plan.problem.rank:
            return coordinates
        lengths = self.call.lengths[dim]
        tile = self.call.group_of(self.place.group)[dim] * lengths.q_tiles + self.place.tile[dim]
        at = tile * (2 * lengths.q_tile) + query
        first = jnp.maximum(self.bounds[dim][at], box.own)
        return jnp.where((keys >= first) & (keys < self.bounds[dim][at + lengths.q_tile]), coordinates, NOWHERE)


# Programs that own keys ----------------------------------------------------------------------------------------------


def query_bounds(call: Call) -> list[jax.Array]:
    """First and end of the keys that each row of a tile sees, ``[groups, tiles, 2, rows]`` by dimension."""
    found = []
    for dim, visits in enumerate(call.visits):
        array = jnp.asarray(visits.bounds)
        shape = [1] * KERNEL_RANK
        shape[dim] = array.shape[-1]
        array = jnp.broadcast_to(array.reshape(*array.shape[:3], *shape), (*array.shape[:3], *call.queries.tile))
        array = array.reshape(*array.shape[:3], call.queries.tile_tokens)
        found.append(jnp.tile(array, call.pack))
    return found


def hidden_from(call: Call, logits: jax.Array, firsts_of_tile: Sequence[Scalar], bounds: Sequence[Any]) -> jax.Array:
    """Logits ``[keys, queries]``, with ``HIDDEN`` where a query does not see a key of a tile.

    Args:
        call: What runs.
        logits: The logits.
        firsts_of_tile: First key of the tile along each dimension.
        bounds: References to :func:`query_bounds` of the queries.
    """
    x_tile, y_tile, z_tile = call.keys.tile
    firsts, ends = ([bound[side : side + 1, :] for bound in bounds] for side in (0, 1))
    keys = jax.lax.broadcasted_iota(jnp.int32, (z_tile, logits.shape[1]), 0) + firsts_of_tile[-1]
    along_z = (keys >= firsts[-1]) & (keys < ends[-1])
    slabs = []
    for x in range(x_tile):
        for y in range(y_tile):
            visible = [
                (first + at >= firsts[dim]) & (first + at < ends[dim])
                for dim, (first, at) in enumerate(zip(firsts_of_tile, (x, y), strict=False))
                if dim >= KERNEL_RANK - call.plan.problem.rank
            ]
            start = (x * y_tile + y) * z_tile
            sees = functools.reduce(jnp.logical_and, visible, along_z)
            slabs.append(jnp.where(sees, logits[start : start + z_tile, :], HIDDEN))
    return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)


def query_grid(call: Call) -> tuple[Any, ...]:
    """Heads or packs of all batch entries, dilation groups, tiles, and boxes of keys."""
    programs = call.leading // call.together * call.queries.heads.blocks
    return programs, call.groups, *call.queries.grid, *_steps(call)


def _steps(call: Call) -> list[int]:
    return [max(visits.most_boxes, 1) for visits in call.visits]


def is_last(call: Call, place: Place) -> Any:
    """Whether a program's step is its last one."""
    return last_of(_steps(call), place.step)


def query_spec(call: Call, width: int) -> pl.BlockSpec:
    """The tile of a program, of rows of a pack's width."""

    def index(place: Place, _: Any) -> tuple[Any, ...]:
        first, last = call.block_of(place.head)
        return first, place.group, *place.tile, last

    return spec((call.together, None, *call.queries.tile, width), index)


def rows_spec(call: Call, count: int) -> pl.BlockSpec:
    """Numbers of its rows, ``[count, rows]``."""
    return spec(
        (call.together, *(None,) * 5, count, call.rows),
        lambda place, _: (*call.block_of(place.head), place.group, *place.tile, 0, 0),
    )


def common_specs(call: Call, width: int, width_v: int) -> list[pl.BlockSpec]:
    """Those of the head's scale, the coordinates of keys, the bounds of windows, and of query, key and value."""
    blocks: Sequence[pl.BlockSpec] = query_spec(call, width), box_spec(call, width), box_spec(call, width_v)
    return [pl.BlockSpec(memory_space=pltpu.SMEM), key_coordinates_spec(), last_bounds_spec(call), *blocks]
