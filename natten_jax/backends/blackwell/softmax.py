"""A warpgroup of which each thread owns a row of logits: it makes weights of them, and the output of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import KEYS, ROWS, Boxes, Call, Item, Scalar, column_of, divided, line_of
from natten_jax.backends.blackwell.loads import first_of_half, tokens_of_piece
from natten_jax.backends.blackwell.memory import Memory, wait

#: A row is a thread's, in all of its columns.
_BY_ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE
_OF_ROW = _BY_ROWS.reduce(1)
#: Logit of a key that a query does not see; below what a maximum begins with, so that its weight is 0.
HIDDEN = -1e30
SMALLEST_MAXIMUM = -1e29
_AT_A_TIME = 32  # columns of sums


def weigh_item(
    call: Call,
    memory: Memory,
    half: int,
    tables: Sequence[Any],
    bounds: Sequence[Any],
    scales: Any,
    results: Sequence[Any],
    number: Scalar,
) -> None:
    """Work out the output of a half of an item.

    Args:
        call: What runs.
        memory: Where logits are.
        half: Which half.
        tables: References to the box tables.
        bounds: References to the bounds of windows.
        scales: Reference to factors of the logits, in base 2, of each batch entry and head.
        results: References to the output, and to maxima and sums.
        number: The item's.
    """
    item = call.item(number)
    boxes = Boxes.of(call, item, tables)
    scale = scales[item.batch * call.queries.heads + item.head]
    windows = _windows(call, item, half, bounds)

    def step(box: Scalar, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, total = state
        first = boxes.first(box)
        wait(memory.logits_are_in.at[half])
        logits = plgpu.async_load_tmem(memory.logits[half][0], layout=_BY_ROWS)
        plgpu.wait_load_tmem()
        logits = jax.lax.cond(
            boxes.is_full(first),
            lambda logits: logits,
            lambda logits: hide(call, logits, first, windows),
            logits * scale,
        )
        maximum = jnp.maximum(before, jnp.max(logits, axis=1))
        weights, change = jnp.exp2(logits - _columns(maximum, KEYS)), jnp.exp2(before - maximum)
        plgpu.async_store_tmem(memory.logits[half][1], weights.astype(memory.query.dtype))
        pl.when(box > 0)(lambda: _rescale(memory, half, change))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(memory.weights_are_in.at[half])
        return maximum, total * change + jnp.sum(weights, axis=1)

    begin = (_every_row(SMALLEST_MAXIMUM), _every_row(0.0))
    maximum, total = jax.lax.fori_loop(0, boxes.count, step, begin)
    wait(memory.mixed_is_in.at[half])
    _write(call, memory, item, half, total, results[0])
    rows = pl.ds(half * ROWS, ROWS)
    for row, numbers in enumerate((maximum, total)):
        plgpu.store(results[1].at[number, row, rows], numbers, optimized=False)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(memory.query_is_out.at[half])


def hide(call: Call, logits: jax.Array, first: Sequence[Scalar], windows: Sequence[Any]) -> jax.Array:
    """Logits, with ``HIDDEN`` where a query does not see a key of the box that begins at ``first``."""
    rest: Any = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=_BY_ROWS)
    keys = []
    for extent in reversed(call.key_pieces.tile[call.first_dim + 1 :]):
        rest, key = divided(rest, extent)
        keys.append(key)
    keys.append(rest)
    dims = range(call.first_dim, len(call.visits))
    for dim, key, (first_seen, end_seen) in zip(dims, reversed(keys), windows, strict=True):
        if call.key_pieces.tile[dim] == 1:
            sees = _columns((first[dim] >= first_seen) & (first[dim] < end_seen), KEYS)
        else:
            sees = (key >= _columns(first_seen - first[dim], KEYS)) & (key < _columns(end_seen - first[dim], KEYS))
        logits = jnp.where(sees, logits, HIDDEN)
    return logits


def _windows(call: Call, item: Item, half: int, bounds: Sequence[Any]) -> list[tuple[jax.Array, jax.Array]]:
    """First and end of the keys that each row's query sees, along the dimensions of the problem."""
    rows = list(zip(bounds, call.rows(item), strict=True))[call.first_dim :]

    def load(array: Any, row: Scalar, side: int) -> jax.Array:
        return plgpu.load(array.at[row, side, pl.ds(half * ROWS, ROWS)], layout=_OF_ROW, optimized=False)

    return [(load(array, row, 0), load(array, row, 1)) for array, row in rows]


def _rescale(memory: Memory, half: int, change: jax.Array) -> None:
    """Multiply the sums so far: the product before has written them, as these logits came after it."""
    mixed = memory.mixed[half]
    for first in range(0, mixed.shape[1], _AT_A_TIME):  # all at once are more than there are registers
        part = mixed.at[:, pl.ds(first, _AT_A_TIME)]
        sums = plgpu.async_load_tmem(part, layout=_BY_ROWS)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(part, sums * _columns(change, _AT_A_TIME))


def _write(call: Call, memory: Memory, item: Item, half: int, total: jax.Array, out: Any) -> None:
    """Divide the sums of a half, and copy them out in the place of its queries."""
    lines, pieces, tiles = call.queries, call.query_pieces, memory.query.at[half]
    mixed = plgpu.async_load_tmem(memory.mixed[half], layout=_BY_ROWS)
    plgpu.wait_load_tmem()
    width = mixed.shape[1]
    sees_something = _columns(total, width) > 0
    mixed = jnp.where(sees_something, mixed / _columns(jnp.where(total > 0, total, 1.0), width), 0.0)
    rounded = mixed.astype(tiles.dtype)
    for block in range(lines.blocks):
        part = rounded if lines.blocks == 1 else rounded[:, block * lines.block : (block + 1) * lines.block]
        plgpu.store(tiles.at[block], part, optimized=False)
    plgpu.commit_smem()
    first, column = first_of_half(call, item, half), column_of(lines, item.group[-1], item.head)

    def copy(piece: Scalar, none: None) -> None:
        at = pieces.place(piece)
        x, y = (g + (f + a) * d for g, f, a, d in zip(item.group, first, at, lines.dilation, strict=False))
        rows = pl.ds(piece * pieces.tokens, pieces.tokens)

        @pl.when((x < lines.extents[0]) & (y < lines.extents[1]) & (first[-1] < lines.length))
        def _() -> None:
            line = line_of(lines, item.batch, (x, y))
            for block in range(lines.blocks):
                plgpu.copy_smem_to_gmem(
                    tiles.at[block, rows], out.at[line, tokens_of_piece(pieces, first[-1]), column + block]
                )

    jax.lax.fori_loop(0, pieces.count, copy, None)


def _columns(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers of rows in as many columns."""
    return jax.lax.broadcast_in_dim(numbers, (numbers.shape[0], width), (0,))


def _every_row(number: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), _OF_ROW)
