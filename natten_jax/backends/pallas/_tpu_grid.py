"""Grids, block specs, boxes of keys and masks of the TPU kernels, and arithmetic on their tiles.

A program computes the results of one tile, which it *owns*. It visits other tiles, or boxes of keys, one per step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.arrays.operands import vary_alike
from natten_jax.backends.pallas._common import HIDDEN, Scalar, divided
from natten_jax.backends.pallas._tpu_call import LANES, NOWHERE, Call, repeat_for_rows, stack_heads
from natten_jax.native.module import KERNEL_RANK

#: Number of grid dimensions of the kernels whose programs own query tiles.
INDICES = 2 + 2 * KERNEL_RANK


# Grids ---------------------------------------------------------------------------------------------------------------


class GridIndices(NamedTuple):
    """Grid indices of a program's step: head, dilation group, owned tile, query head, and number of the step.

    The grid dimensions have this order. ``tile`` and ``step`` contain three indices each, one per token dimension. If
    programs own query tiles, the grid has no dimension for ``query_head``, and ``query_head`` is 0.
    """

    head: Scalar
    group: Scalar
    tile: Sequence[Scalar]
    query_head: Scalar
    step: Sequence[Scalar]

    @classmethod
    def from_indices(cls, indices: Sequence[Scalar]) -> GridIndices:
        head, group, *rest = indices
        query_head = rest[KERNEL_RANK] if len(rest) > 2 * KERNEL_RANK else 0
        return cls(head, group, rest[:KERNEL_RANK], query_head, rest[-KERNEL_RANK:])

    @classmethod
    def here(cls, indices: int = INDICES) -> GridIndices:
        """Return the grid indices of the current step."""
        return cls.from_indices([pl.program_id(axis) for axis in range(indices)])


def pallas_call(
    kernel: Callable[..., None], name: str, operands: Sequence[Any], *, tables: int, out_shape: Any, **grid: Any
) -> Any:
    """Run a kernel whose first ``tables`` operands are int32 tables in scalar memory.

    The results vary over the same manual mesh axes (``jax.shard_map``) as the operands. The grid dimensions of the
    head, the dilation group and the owned tile are declared parallel. The remaining dimensions count the steps of a
    program, which run in order.
    """
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=tables, **grid)
    parallel = 2 + KERNEL_RANK
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(spec.grid) - parallel)
    parameters = pltpu.CompilerParams(dimension_semantics=semantics)
    arrays = vary_alike(operands)
    over = jax.typeof(arrays[0]).manual_axis_type
    types = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, manual_axis_type=over), out_shape)
    return pl.pallas_call(kernel, out_shape=types, grid_spec=spec, compiler_params=parameters, name=name)(*arrays)


def spec(
    shape: Sequence[Any], index: Callable[..., tuple[Scalar, ...]], indices: int = INDICES, tables: int = KERNEL_RANK
) -> pl.BlockSpec:
    """Return a block spec. Its index map ``index`` receives the grid indices and the first ``tables`` scalar tables."""
    return pl.BlockSpec(
        tuple(shape), lambda *found: index(GridIndices.from_indices(found[:indices]), found[indices : indices + tables])
    )


def are_first(indices: Sequence[Scalar]) -> Scalar:
    """Return True if all indices are zero."""
    return functools.reduce(jnp.logical_and, [index == 0 for index in indices])


def are_last(grid: Sequence[int], indices: Sequence[Scalar]) -> Scalar:
    """Return True if every index is the last one of its grid dimension."""
    return functools.reduce(jnp.logical_and, [index == n - 1 for index, n in zip(indices, grid, strict=True)])


# Programs that own queries -------------------------------------------------------------------------------------------


def query_grid(call: Call) -> tuple[Any, ...]:
    """Return the grid of the kernels whose programs own query tiles.

    Its dimensions are heads or packs of all batch entries (``call.together`` per program), dilation groups, query
    tiles, and steps. A step visits one box of keys.
    """
    programs = call.leading // call.together * call.queries.blocks
    return programs, call.groups, *call.queries.grid, *steps(call)


def steps(call: Call) -> list[int]:
    """Return the number of steps along each token dimension: the maximum number of boxes that a query tile visits."""
    return [max(visits.most_boxes, 1) for visits in call.visits]


def query_spec(call: Call, width: int) -> pl.BlockSpec:
    def index(cell: GridIndices, _: Any) -> tuple[Any, ...]:
        first, last = call.block_of(cell.head)
        return first, cell.group, *cell.tile, last

    return spec((call.together, None, *call.queries.tile, width), index)


def rows_spec(call: Call, count: int) -> pl.BlockSpec:
    """Return the block spec, ``[count, rows]``, of the statistics of a query tile's rows."""

    def index(cell: GridIndices, _: Any) -> tuple[Any, ...]:
        return *call.block_of(cell.head), cell.group, *cell.tile, 0, 0

    return spec((call.together, *(None,) * 5, count, call.rows), index)


def box_spec(call: Call, width: int) -> pl.BlockSpec:
    """Return the block spec of the box of keys or values that a step visits.

    The index map returns the position of the box's first key as an element offset (``pl.Element``), not as a block
    index.
    """

    def index(cell: GridIndices, tables: Sequence[Any]) -> tuple[Scalar, ...]:
        x, y, z = (box.first for box in key_boxes(call, cell, tables))
        key_group = call.key_group(cell.group, tables)
        first, last = call.block_of(cell.head)
        first = call.kv_head(first) * call.together
        return first, key_group, x, y, pl.multiple_of(z, call.alignment), last * width

    return spec([*map(pl.Element, (call.together, 1, *call.keys.tile, width))], index)


def query_operands(call: Call, scale: jax.Array) -> list[Any]:
    """Return the operands that precede the query in kernels whose programs own query tiles.

    In order, they are:

    - three box tables and two tables of window bounds, all in scalar memory,
    - the scales,
    - for masks, the key coordinates and the window bounds along the last dimension.
    """
    slab_bounds = [jnp.asarray(visits.bounds).reshape(-1) for visits in call.visits[:-1]]
    last_bounds = jnp.asarray(call.visits[-1].bounds)
    return [*call.box_tables, *slab_bounds, scale, call.chunks.coordinates(), last_bounds]


def query_specs(call: Call, width: int, width_v: int) -> list[pl.BlockSpec]:
    """Return the block specs of scales, key coordinates, window bounds (last dimension), query, key and value."""
    last_bounds = spec(
        (None, None, 2, call.queries.tile[-1]), lambda cell, _: (call.group_of(cell.group)[-1], cell.tile[-1], 0, 0)
    )
    scales, coordinates = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    blocks = query_spec(call, width), box_spec(call, width), box_spec(call, width_v)
    return [scales, coordinates, last_bounds, *blocks]


# Boxes of keys -------------------------------------------------------------------------------------------------------


class KeyBox(NamedTuple):
    """The position of a box of keys along one dimension.

    Attributes:
        first: First key of the box.
        first_new: First key that is in this box, but in no earlier box of the query tile.
    """

    first: Scalar
    first_new: Scalar


def key_boxes(call: Call, cell: GridIndices, tables: Sequence[Any]) -> list[KeyBox]:
    """Return the box that a step visits: its position along each dimension. Steps after the last box repeat it."""
    boxes = []
    rows = call.rows_of(cell.group, cell.tile, tables)
    for visits, row, step in zip(call.visits, rows, cell.step, strict=True):
        first_new = row("start")
        if visits.most_boxes > 1:
            first_new += jnp.maximum(jnp.minimum(step, row("count") - 1), 0) * visits.box
        boxes.append(KeyBox(jnp.minimum(first_new, visits.keys - visits.box), first_new))
    return boxes


def sees_all(rows: Sequence[Any], boxes: Sequence[KeyBox], shape: Sequence[Scalar]) -> jax.Array:
    """Return True if all queries of a tile see all keys of a box, and the tile's earlier boxes lack these keys.

    Args:
        rows: Functions that read the tile's row of each box table (:meth:`Call.rows_of`).
        boxes: Position of the box along each dimension.
        shape: Number of keys of the box along each dimension.
    """
    inside = [
        (box.first >= box.first_new) & (box.first >= row("core_first")) & (box.first + extent <= row("core_end"))
        for row, box, extent in zip(rows, boxes, shape, strict=True)
    ]
    return functools.reduce(jnp.logical_and, inside)


def visit(add: Callable[[bool], None], is_full: Any) -> None:
    """Call ``add(False)`` if all queries see all keys (``is_full``). Otherwise call ``add(True)``, which masks."""
    pl.when(is_full)(lambda: add(False))
    pl.when(~is_full)(lambda: add(True))


class Chunk(NamedTuple):
    """A chunk of a box of keys.

    Attributes:
        number: Index of the chunk in the box.
        start: Flat index of the chunk's first key in the box.
        boxes: Position of the box along each dimension.
    """

    number: Scalar
    start: Scalar
    boxes: Sequence[KeyBox]

    def read(self, call: Call, ref: Any) -> jax.Array:
        """Read the keys or values of the chunk as ``[keys, width]``."""
        if call.chunks.number == 1:
            return matrix(ref)
        flat = ref.reshape(math.prod(ref.shape[:-1]), ref.shape[-1])
        return flat[pl.ds(pl.multiple_of(self.start, call.alignment), call.chunks.keys), :]


def visit_keys(call: Call, cell: GridIndices, tables: Sequence[Any], add: Callable[[Chunk, bool], None]) -> None:
    """Process the box of keys that a step visits, one chunk at a time. The program owns a query tile.

    Args:
        call: Plan, array layouts and visited boxes of the call.
        cell: Grid indices of the current step.
        tables: References to the box tables.
        add: Function that processes a chunk. Its second argument is True if the chunk needs a mask.
    """
    rows, boxes, chunks = call.rows_of(cell.group, cell.tile, tables), key_boxes(call, cell, tables), call.chunks
    cut, stride = chunks.cut, chunks.stride
    box, extent = boxes[cut], chunks.box[cut]

    def visit_one() -> None:
        visit(lambda is_masked: add(Chunk(0, 0, boxes), is_masked), sees_all(rows, boxes, chunks.box))

    def visit_all() -> None:
        # Skip chunks if an earlier box includes all their keys, and chunks after the last key that the tile sees.
        first = divided(jnp.minimum(box.first_new - box.first, extent) * stride, chunks.keys)[0]
        behind = jnp.clip(rows[cut]("hull_end") - box.first, 0, extent) * stride
        end = divided(behind + chunks.keys - 1, chunks.keys)[0]

        @pl.loop(first, end)
        def _(number: Any) -> None:
            start = jnp.minimum(number * chunks.keys, math.prod(chunks.box) - chunks.keys)
            cut_range = divided(start, stride)[0], divided(start + chunks.keys - 1, stride)[0] + 1
            parts, shape = [*boxes], [*chunks.box]
            parts[cut], shape[cut] = KeyBox(box.first + cut_range[0], box.first_new), cut_range[1] - cut_range[0]
            is_full = sees_all(rows, parts, shape) & (start == number * chunks.keys)
            visit(lambda is_masked: add(Chunk(number, start, boxes), is_masked), is_full)

    visit_chunks = visit_one if chunks.number == 1 else visit_all
    has_box = [
        step < row("count")
        for visits, step, row in zip(call.visits, cell.step, rows, strict=True)
        if visits.most_boxes > 1 or not visits.fewest_boxes
    ]
    if has_box:
        pl.when(functools.reduce(jnp.logical_and, has_box))(visit_chunks)
    else:
        visit_chunks()


# Masks ---------------------------------------------------------------------------------------------------------------
#
# Masks are computed per slab. A slab consists of the queries, or keys, of a tile that have equal coordinates along the
# first two dimensions. Along these dimensions, keys are compared with window bounds only once per slab, not once per
# query or key of the slab. So these comparisons cost little.


@dataclasses.dataclass(frozen=True)
class QueryMask:
    """The mask for the queries of a tile and the keys that a step visits.

    Attributes:
        call: Plan, array layouts and visited boxes of the call.
        cell: Grid indices of the current step.
        bounds: References to the tables of window bounds, one for each dimension except the last. A table contains the
            first key and the end of the keys that each query sees.
        coordinates: Reference to the coordinates of the keys of each chunk, relative to the box.
        windows: Reference to scratch memory for the window bounds along the last dimension.
    """

    call: Call
    cell: GridIndices
    bounds: Sequence[Any]
    coordinates: Any
    windows: Any

    @staticmethod
    def scratch(call: Call) -> Any:
        return pltpu.VMEM((2, call.queries.tile[-1], LANES), jnp.int32)

    def keep_windows(self, bounds: Any) -> None:
        """Write the bounds along the last dimension to scratch memory, as columns. Called once per query tile."""
        for side in (0, 1):
            self.windows[side] = columns(bounds[side : side + 1, :])

    def hidden(self, chunk: Chunk) -> jax.Array:
        """Return the mask of a chunk, ``[rows, keys]``: True if the query of the row does not see the key."""
        x_tile, y_tile, _ = self.call.queries.tile
        boxes = chunk.boxes
        keys = [self.coordinates[chunk.number, dim : dim + 1, :] + box.first for dim, box in enumerate(boxes)]
        along_z = jnp.where(keys[-1] >= boxes[-1].first_new, keys[-1], NOWHERE)
        first, end = (across(self.windows[side], along_z.shape[1]) for side in (0, 1))
        slabs = []
        for x in range(x_tile):
            seen_x = self._hide_outside(0, x, keys[0], boxes[0], along_z)
            for y in range(y_tile):
                seen = self._hide_outside(1, y, keys[1], boxes[1], seen_x)
                slabs.append((seen < first) | (seen >= end))
        slabs *= self.call.pack
        return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)

    def _hide_outside(self, dim: int, query: int, keys: jax.Array, box: KeyBox, coordinates: jax.Array) -> jax.Array:
        """Return ``coordinates``, with ``NOWHERE`` for keys that the slab does not see along dimension ``dim``."""
        if dim < KERNEL_RANK - self.call.plan.problem.rank:
            return coordinates
        visits = self.call.visits[dim]
        tile = self.call.group_of(self.cell.group)[dim] * visits.q_tiles + self.cell.tile[dim]
        at = tile * (2 * visits.q_tile) + query
        first = jnp.maximum(self.bounds[dim][at], box.first_new)
        return jnp.where((keys >= first) & (keys < self.bounds[dim][at + visits.q_tile]), coordinates, NOWHERE)


def hide_keys(call: Call, logits: jax.Array, first_keys: Sequence[Scalar], bounds: Sequence[Any]) -> jax.Array:
    """Mask the logits of a key tile, ``[keys, rows]``: set a logit to ``HIDDEN`` if the query does not see the key.

    Args:
        call: Plan, array layouts and visited boxes of the call.
        logits: The logits of the key tile.
        first_keys: First key of the key tile along each dimension.
        bounds: One reference per dimension, ``[2, rows]``. First key and end of the keys that the query of each row
            sees.
    """
    x_tile, y_tile, z_tile = call.keys.tile
    firsts, ends = ([bound[side : side + 1, :] for bound in bounds] for side in (0, 1))
    keys = jax.lax.broadcasted_iota(jnp.int32, (z_tile, logits.shape[1]), 0) + first_keys[-1]
    along_z = (keys >= firsts[-1]) & (keys < ends[-1])
    slabs = []
    for x in range(x_tile):
        for y in range(y_tile):
            visible = [
                (first + at >= firsts[dim]) & (first + at < ends[dim])
                for dim, (first, at) in enumerate(zip(first_keys, (x, y), strict=False))
                if dim >= KERNEL_RANK - call.plan.problem.rank
            ]
            start = (x * y_tile + y) * z_tile
            sees = functools.reduce(jnp.logical_and, visible, along_z)
            slabs.append(jnp.where(sees, logits[start : start + z_tile, :], HIDDEN))
    return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)


# Arithmetic ----------------------------------------------------------------------------------------------------------


def contract(call: Call, left: jax.Array, right: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """Return a matrix product in float32. Contract dimension ``dims[0]`` of ``left`` and ``dims[1]`` of ``right``."""
    contracted = ((dims[0],), (dims[1],)), ((), ())
    return jax.lax.dot_general(left, right, contracted, precision=call.precision, preferred_element_type=jnp.float32)


def scale_of(call: Call, scales: Any, pack: Scalar, axis: int = 0) -> Any:
    """Return the scale of a pack's logits: a scalar if its heads share one scale, otherwise a vector along ``axis``."""
    if scales.shape == (1,):
        return scales[0]
    head_scales = [scales[pack * call.pack + first_new] for first_new in range(call.pack)]
    return repeat_for_rows(head_scales, call.queries.tile_tokens, axis)


def matrix(ref: Any) -> jax.Array:
    """Read a tile as ``[tokens, width]``."""
    array = ref[...]
    return array.reshape(-1, array.shape[-1])


def query_rows(call: Call, ref: Any) -> jax.Array:
    """Read a tile of queries or output cotangents as ``[rows, width]``: each head of the pack has one row per token."""
    return stack_heads(matrix(ref), call.pack)


def across(columns: jax.Array, width: int) -> jax.Array:
    """Convert ``[rows, LANES]`` to ``[rows, width]``. All lanes of a row contain the same number."""
    whole, rest = divmod(width, LANES)
    parts = [columns] * whole + ([columns[:, :rest]] if rest else [])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def rows_of_columns(numbers: Sequence[jax.Array]) -> jax.Array:
    """Convert columns to rows: row ``i`` of the result ``[LANES, rows]`` contains ``numbers[i]``.

    The remaining rows of the result are unspecified. Each column is ``[rows, LANES]``, with the same number in all
    lanes of a row.
    """
    result = numbers[0]
    lanes = jax.lax.broadcasted_iota(jnp.int32, result.shape, 1)
    for at, each in enumerate(numbers[1:], start=1):
        result = jnp.where(lanes == at, each, result)
    return result.T


def columns(row: jax.Array) -> jax.Array:
    """Convert ``[1, rows]`` to ``[rows, LANES]``: all lanes of a row contain the same number."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T
