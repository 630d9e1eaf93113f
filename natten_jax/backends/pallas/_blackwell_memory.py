"""What the warps of the Blackwell kernels share: barriers, copies of tiles, and masks of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.pallas._blackwell_call import (
    PIECE,
    ROWS,
    Call,
    Item,
    Lines,
    Pieces,
    Scalar,
    divided,
    line_of,
)

#: Registers of a thread that owns a row of logits, and of others, of a block of three warpgroups: of 3 x 168.
REGISTERS_OF_ROWS, REGISTERS_OF_OTHERS = 232, 40


def tile_buffers(lines: Lines, count: int, tokens: int, dtype: Any) -> Any:
    """Places for tiles of tokens, ``[count, blocks, tokens, block]``."""
    layout = plgpu.TilingTransform((8, lines.block)), plgpu.SwizzleTransform(lines.block * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM((count, lines.blocks, tokens, lines.block), dtype, transforms=layout)


def barriers(count: int, arrivals: int = 1, *, of_products: bool = False) -> Any:
    """Barriers, each of so many arrivals in a phase."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count, orders_tensor_core=of_products)


def wait(barrier: Any) -> None:
    """Wait for the next phase of a barrier."""
    plgpu.barrier_wait(barrier)


def wait_until_free(barrier: Any, number: Any, slots: int) -> None:
    """Wait until the slot of a tile may be overwritten, given its barrier and the number of the tile in the ring."""
    wait_if(number >= slots, barrier)


def wait_if(condition: Any, barrier: Any) -> None:
    """Wait where a condition holds."""
    pl.when(condition)(lambda: wait(barrier))


class Place(NamedTuple):
    """Where a tile lies: batch entry, dilation group, first token inside the group, and column."""

    batch: Scalar
    group: Sequence[Scalar]
    first: Sequence[Scalar]
    column: Scalar


def copy_in(lines: Lines, pieces: Pieces, place: Place, source: Any, tile: Any, barrier: Any) -> None:
    """Copy a tile of tokens into shared memory, ``[blocks, tokens, block]``.

    Args:
        lines: How the tokens lie.
        pieces: The tile.
        place: Where it lies.
        source: Reference to the array.
        tile: Reference to shared memory.
        barrier: Who waits for it.
    """

    def copy(piece: Scalar, none: None) -> None:
        line, rows = line_of(lines, place.batch, _outer_tokens(lines, pieces, place, piece)), _rows(pieces, piece)
        for block in range(lines.blocks):
            plgpu.copy_gmem_to_smem(
                source.at[line, _tokens(pieces, place), place.column + block], tile.at[block, rows], barrier
            )

    jax.lax.fori_loop(0, pieces.count, copy, None)


def copy_out(lines: Lines, pieces: Pieces, place: Place, blocks: dict[int, Any], target: Any) -> None:
    """Begin to copy a tile out of shared memory, where there are tokens.

    Args:
        lines: How the tokens lie.
        pieces: The tile.
        place: Where it lies.
        blocks: References to shared memory, ``[tokens, block]``, by number of the block.
        target: Reference to the array.
    """

    def copy(piece: Scalar, none: None) -> None:
        x, y = _outer_tokens(lines, pieces, place, piece)
        rows = _rows(pieces, piece)

        @pl.when((x < lines.extents[0]) & (y < lines.extents[1]) & (place.first[-1] < lines.length))
        def _() -> None:
            line = line_of(lines, place.batch, (x, y))
            for block, tile in blocks.items():
                plgpu.copy_smem_to_gmem(tile.at[rows], target.at[line, _tokens(pieces, place), place.column + block])

    jax.lax.fori_loop(0, pieces.count, copy, None)


def _outer_tokens(lines: Lines, pieces: Pieces, place: Place, piece: Scalar) -> list[Scalar]:
    """The tokens of a piece's line along all dimensions but the last."""
    at = pieces.place(piece)
    return [g + (f + a) * d for g, f, a, d in zip(place.group, place.first, at, lines.dilation, strict=False)]


def _rows(pieces: Pieces, piece: Scalar) -> Any:
    """The rows of a piece in the tile."""
    return pl.ds(piece * pieces.tokens, pieces.tokens)


def _tokens(pieces: Pieces, place: Place) -> Any:
    """The tokens of a piece in its line: a multiple of :data:`PIECE`, which the product shows to the compiler."""
    return pl.ds(jax.lax.div(place.first[-1], np.int32(PIECE)) * PIECE, pieces.tokens)


#: A row is a thread's, in all of its columns.
BY_ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE
OF_ROW = BY_ROWS.reduce(1)
#: Logit of a key that a query does not see.
HIDDEN = -3.3e38

#: First and end of the keys that each row's query sees, along the dimensions of the problem.
Windows = Sequence[tuple[jax.Array, jax.Array]]


def windows_of(call: Call, item: Item, half: int, bounds: Sequence[Any]) -> Windows:
    """Those of a half of an item's tile, from references to the bounds of windows."""
    rows = list(zip(bounds, call.rows(item), strict=True))[call.first_dim :]
    return [(load_row(array, row, 0, half), load_row(array, row, 1, half)) for array, row in rows]


def load_row(array: Any, row: Scalar, index: int, half: int) -> jax.Array:
    """Numbers of a half's rows, of an array ``[rows, indices, tokens]``."""
    return plgpu.load(array.at[row, index, pl.ds(half * ROWS, ROWS)], layout=OF_ROW, optimized=False)


def hide(call: Call, logits: jax.Array, first: Sequence[Scalar], windows: Windows, first_column: int = 0) -> jax.Array:
    """Logits, with ``HIDDEN`` where a query does not see a key of a box.

    Args:
        call: What runs.
        logits: Some columns of them.
        first: The first key of the box along each dimension.
        windows: What queries see.
        first_column: Where the columns begin.
    """
    width = logits.shape[1]
    rest: Any = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=BY_ROWS)
    if first_column:
        rest += first_column
    keys = []
    for extent in reversed(call.key_pieces.tile[call.first_dim + 1 :]):
        rest, key = divided(rest, extent)
        keys.append(key)
    keys.append(rest)
    dims = range(call.first_dim, len(call.visits))
    for dim, key, (first_seen, end_seen) in zip(dims, reversed(keys), windows, strict=True):
        if call.key_pieces.tile[dim] == 1:
            sees = columns((first[dim] >= first_seen) & (first[dim] < end_seen), width)
        else:
            sees = (key >= columns(first_seen - first[dim], width)) & (key < columns(end_seen - first[dim], width))
        logits = jnp.where(sees, logits, HIDDEN)
    return logits


def columns(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers of rows in as many columns."""
    return jax.lax.broadcast_in_dim(numbers, (numbers.shape[0], width), (0,))


def every_row(number: float) -> jax.Array:
    """A number for each row."""
    return plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), OF_ROW)
