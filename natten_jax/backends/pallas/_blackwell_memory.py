"""Functions that the Blackwell kernels share: launches, barriers, products, copies of tiles, and masks of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.pallas._blackwell_call import PIECE, ROWS, Boxes, Call, Item, Lines
from natten_jax.backends.pallas._common import HIDDEN, Scalar, divided, unravel

#: Register layout of a matrix, with one row per thread.
BY_ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE
ROW_LAYOUT = BY_ROWS.reduce(1)
#: Registers per thread in thread blocks of three warpgroups. The two warpgroups that own rows of logits have 232 each,
#: and the third warpgroup has 40. The total, 2 x 232 + 40, equals the initial total of 3 x 168.
_REGISTERS_OF_ROWS, _REGISTERS_OF_OTHERS = 232, 40
_LOADS, _PRODUCTS = 0, 1  # warps

#: Per dimension of the problem, the first key that each row's query sees, and the exclusive end of these keys.
Windows = Sequence[tuple[jax.Array, jax.Array]]


# Launches ------------------------------------------------------------------------------------------------------------


def launch(
    name: str,
    block_of: Callable[[Any, Sequence[Any], Any], Any],
    operands: Any,
    results: Sequence[Any],
    scratch: dict[str, Any],
    *,
    items: int,
    blocks: int,
    halves: int,
) -> Sequence[jax.Array]:
    """Launch a kernel in which each thread block processes work items with specialized warpgroups.

    ``halves`` warpgroups own rows of logits. The last warpgroup has a warp for copies, and a warp for matrix products.
    The function ``block_of`` returns an object with these methods:

    - ``weigh(half, number)`` runs in the warpgroup that owns a half of an item's logits. It computes the weights of
      these logits, and writes the results of the half.
    - ``load(number, state)`` runs in the warp for copies. It starts to copy an item's tiles, and returns the next
      state. The state contains the number of items and the number of visited tiles that were loaded so far.
    - ``drain(state)`` runs in the warp for copies after the last item. It waits for the phases of barriers that
      ``load`` has not waited for, because a thread block must not end before they complete.
    - ``multiply(number, before)`` runs in the warp for matrix products. It issues the products of an item. ``before``
      is the number of tiles that the thread block's previous items visited. The method returns the sum of ``before``
      and the number of tiles that this item visits.

    Args:
        name: Name of the kernel.
        block_of: Function that returns the object with the methods above. It receives references to the operands, the
            results and the scratch memory.
        operands: A pytree of arrays.
        results: Arrays or abstract types with the shapes and types of the results.
        scratch: Scratch memory and barriers by name.
        items: Number of work items.
        blocks: Number of thread blocks; block ``i`` processes items ``i``, ``i + blocks``, ...
        halves: Number of warpgroups that own rows of logits.
    """
    leaves, structure = jax.tree.flatten(operands)

    def kernel(*refs: Any, **memory: Any) -> None:
        read = jax.tree.unflatten(structure, refs[: len(leaves)])
        work = block_of(read, refs[len(leaves) :], SimpleNamespace(**memory))
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        count = jax.lax.div(items - 1 - block, blocks) + 1

        def for_each_item(body: Callable[[Scalar, Any], Any], state: Any) -> Any:
            """Call ``body`` for each item of this block, with the state that the previous call returned."""
            return jax.lax.fori_loop(0, count, lambda i, state: body(block + i * blocks, state), state)

        def set_registers(registers: int, action: Any) -> None:
            if halves > 1:
                plgpu.set_max_registers(registers, action=action)

        def weigh(half: int) -> None:
            set_registers(_REGISTERS_OF_ROWS, "increase")
            for_each_item(lambda number, none: work.weigh(half, number), None)

        for half in range(halves):
            pl.when(warpgroup == half)(functools.partial(weigh, half))

        @pl.when(warpgroup == halves)
        def _() -> None:
            set_registers(_REGISTERS_OF_OTHERS, "decrease")

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADS)
                def _() -> None:
                    work.drain(for_each_item(work.load, (jnp.int32(0), jnp.int32(0))))

                @pl.when(warp == _PRODUCTS)
                def _() -> None:
                    for_each_item(work.multiply, jnp.int32(0))

    types = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    grid = {"grid": (blocks,), "grid_names": ("block",), "num_threads": halves + 1, "thread_name": "warpgroup"}
    options = {"compiler_params": plgpu.CompilerParams(approx_math=True), "kernel_name": name}
    return plgpu.kernel(kernel, out_type=types, scratch_types=scratch, **grid, **options)(*leaves)


# Memory and barriers -------------------------------------------------------------------------------------------------


def tile_buffers(lines: Lines, count: int, tokens: int, dtype: Any) -> Any:
    """Return shared memory for tiles of tokens, ``[count, blocks, tokens, block]``."""
    return shared_matrix((count, lines.blocks, tokens, lines.block), dtype)


def shared_matrix(shape: Sequence[int], dtype: Any, columns: int | None = None) -> Any:
    """Return shared memory in the layout that tensor cores read: swizzled tiles of 8 rows and ``columns`` columns.

    By default, a tile contains all columns.
    """
    width = shape[-1] if columns is None else columns
    layout = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(tuple(shape), dtype, transforms=layout)


def barriers(count: int, arrivals: int = 1, *, for_products: bool = False) -> Any:
    """Return ``count`` barriers. Each phase of a barrier completes after ``arrivals`` arrivals."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count, orders_tensor_core=for_products)


def wait(barrier: Any) -> None:
    """Wait until the next phase of a barrier completes."""
    plgpu.barrier_wait(barrier)


def wait_if(condition: Any, barrier: Any) -> None:
    """If a condition is true, wait until the next phase of a barrier completes."""
    pl.when(condition)(lambda: wait(barrier))


def drain(free: Sequence[Any], loaded: Scalar, slots: int) -> None:
    """Wait until all slots of ring buffers are free again.

    Args:
        free: Arrays of barriers, one array per ring buffer, and one barrier per slot. When a slot becomes free, a phase
            of its barrier completes.
        loaded: Number of tiles loaded into each ring buffer so far.
        slots: Number of slots per ring buffer.
    """

    def finish(number: Scalar, none: None) -> None:
        for barrier in free:
            wait(barrier.at[jax.lax.rem(number, slots)])

    jax.lax.fori_loop(jnp.maximum(loaded - slots, 0), loaded, finish, None)


# Products ------------------------------------------------------------------------------------------------------------


def multiply_tiles(lines: Lines, result: Any, left: Any, right: Any) -> None:
    """Compute ``left right^T`` for two tiles in shared memory, ``[blocks, tokens, block]`` each."""
    for block in range(lines.blocks):
        plgpu.tcgen05_mma(result, left.at[block], right.at[block].T, accumulate=block > 0)


def add_product(lines: Lines, sums: Any, matrix: Any, tile: Any, accumulate: Scalar) -> None:
    """Add ``matrix tile`` to ``sums``, or overwrite ``sums`` if ``accumulate`` is False.

    The tile is in shared memory, ``[blocks, tokens, block]``.
    """
    for block in range(lines.blocks):
        columns = sums.at[:, pl.ds(block * lines.block, lines.block)]
        plgpu.tcgen05_mma(columns, matrix, tile.at[block], accumulate=accumulate)


# Copies --------------------------------------------------------------------------------------------------------------


class TileOrigin(NamedTuple):
    """Position of a tile: batch entry, dilation group, index of the first token in this group, and first column.

    :class:`Lines` defines columns.
    """

    batch: Scalar
    group: Sequence[Scalar]
    first: Sequence[Scalar]
    column: Scalar


def query_tile_origin(call: Call, item: Item, half: int = 0) -> TileOrigin:
    """Return the position of one half of the query tile that an item owns."""
    sizes = zip(item.tile, call.q_tile, call.half_tile, strict=True)
    first = [tile * extent + (half * part if part < extent else 0) for tile, extent, part in sizes]
    return TileOrigin(item.batch, item.group, first, call.queries.column(item.group[-1], item.head))


def copy_in(lines: Lines, shape: Sequence[int], origin: TileOrigin, source: Any, tile: Any, barrier: Any) -> None:
    """Start asynchronous copies of a tile from an array to shared memory.

    Args:
        lines: Layout of the array.
        shape: Tokens of the tile along each dimension.
        origin: Position of the tile in the array.
        source: Reference to the array.
        tile: Reference to shared memory, ``[blocks, tokens, block]``.
        barrier: Barrier at which each copy arrives when it is complete.
    """

    def copy(x: Scalar, y: Scalar, rows: Any) -> None:
        line = lines.line(origin.batch, (x, y))
        for block in range(lines.blocks):
            piece = source.at[line, _tokens(shape, origin), origin.column + block]
            plgpu.copy_gmem_to_smem(piece, tile.at[block, rows], barrier)

    _for_each_piece(lines, shape, origin, copy)


def copy_out(lines: Lines, shape: Sequence[int], origin: TileOrigin, blocks: dict[int, Any], target: Any) -> None:
    """Start asynchronous copies of a tile, except its padding, from shared memory to an array.

    Args:
        lines: Layout of the array.
        shape: Tokens of the tile along each dimension.
        origin: Position of the tile in the array.
        blocks: References to shared memory, ``[tokens, block]``, by index of the block in the head dimension.
        target: Reference to the array.
    """

    def copy(x: Scalar, y: Scalar, rows: Any) -> None:
        @pl.when((x < lines.extents[0]) & (y < lines.extents[1]) & (origin.first[-1] < lines.length))
        def _() -> None:
            line = lines.line(origin.batch, (x, y))
            for block, tile in blocks.items():
                piece = target.at[line, _tokens(shape, origin), origin.column + block]
                plgpu.copy_smem_to_gmem(tile.at[rows], piece)

    _for_each_piece(lines, shape, origin, copy)


def _tokens(shape: Sequence[int], origin: TileOrigin) -> Any:
    """Return the slice of the tile's tokens in a line.

    The start is computed as a product with ``PIECE``, which shows the compiler that it is a multiple of ``PIECE``.
    """
    return pl.ds(jax.lax.div(origin.first[-1], np.int32(PIECE)) * PIECE, shape[-1])


def _for_each_piece(lines: Lines, shape: Sequence[int], origin: TileOrigin, copy: Callable[..., None]) -> None:
    """Call ``copy`` for each piece of a tile; a piece consists of the tokens in one line.

    The arguments of ``copy`` are the first two coordinates of the line, and the slice of the piece's rows in the tile.
    """

    def visit(piece: Scalar, none: None) -> None:
        offsets = zip(origin.group, origin.first, divided(piece, shape[1]), lines.dilation, strict=False)
        x, y = (group + (first + at) * dilation for group, first, at, dilation in offsets)
        copy(x, y, pl.ds(piece * shape[-1], shape[-1]))

    jax.lax.fori_loop(0, shape[0] * shape[1], visit, None)


# Rows of logits ------------------------------------------------------------------------------------------------------


def windows_of(call: Call, item: Item, half: int, bounds: Sequence[Any]) -> Windows:
    """Read the windows of the queries in one half of an item's query tile.

    ``bounds`` are references to the arrays of :meth:`Call.bounds`.
    """
    rows = list(zip(bounds, call.rows(item), strict=True))[call.first_dim :]
    return [(load_row(array, row, 0, half), load_row(array, row, 1, half)) for array, row in rows]


def load_row(array: Any, row: Scalar, index: int, half: int) -> jax.Array:
    """Read ``array[row, index]`` for the tokens in one half of a query tile, one number per row of logits."""
    return plgpu.load(array.at[row, index, pl.ds(half * ROWS, ROWS)], layout=ROW_LAYOUT, optimized=False)


def load_matrix(matrix: Any) -> jax.Array:
    """Read a matrix from tensor memory."""
    numbers = plgpu.async_load_tmem(matrix, layout=BY_ROWS)
    plgpu.wait_load_tmem()
    return numbers


def mask(boxes: Boxes, logits: jax.Array, first: Sequence[Scalar], windows: Windows, first_column: int = 0) -> Any:
    """Mask logits out: if a query does not see a key, set the logit of this pair to ``HIDDEN``.

    Args:
        boxes: All boxes that the queries visit.
        logits: A range of columns of a matrix of logits. The columns are the keys of one box.
        first: Index of the first key of this box, per dimension.
        windows: Windows of the queries.
        first_column: Index of the first column in the range.
    """
    first_dim, width = boxes.call.first_dim, logits.shape[1]
    box = boxes.call.box[first_dim:]

    def hide(logits: jax.Array) -> jax.Array:
        column: Any = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=BY_ROWS)
        if first_column:
            column += first_column
        keys = unravel(column, box)
        for extent, key, start, (first_seen, end_seen) in zip(box, keys, first[first_dim:], windows, strict=True):
            if extent == 1:
                sees = columns((start >= first_seen) & (start < end_seen), width)
            else:
                sees = (key >= columns(first_seen - start, width)) & (key < columns(end_seen - start, width))
            logits = jnp.where(sees, logits, HIDDEN)
        return logits

    return jax.lax.cond(boxes.is_full(first), lambda logits: logits, hide, logits)


def columns(numbers: jax.Array, width: int) -> jax.Array:
    """Broadcast ``numbers``, one per row, to a matrix with ``width`` equal columns."""
    return jax.lax.broadcast_in_dim(numbers, (numbers.shape[0], width), (0,))


def every_row(number: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), ROW_LAYOUT)
