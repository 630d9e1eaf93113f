"""A warpgroup of which each thread owns a row of logits: it makes weights of them, and the output of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import KEYS, ROWS, Boxes, Call, Item, Scalar
from natten_jax.backends.blackwell.copies import copy_out
from natten_jax.backends.blackwell.loads import place_of_half
from natten_jax.backends.blackwell.masks import BY_ROWS, columns, every_row, hide, windows_of
from natten_jax.backends.blackwell.memory import Memory, wait

#: Initial maximum. It exceeds the logit of a hidden key, whose weight is then 0.
SMALLEST_MAXIMUM = -2.9e38
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
    windows = windows_of(call, item, half, bounds)

    def step(box: Scalar, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, total = state
        first = boxes.first(box)
        wait(memory.logits_are_in.at[half])
        logits = plgpu.async_load_tmem(memory.logits[half][0], layout=BY_ROWS)
        plgpu.wait_load_tmem()
        logits = jax.lax.cond(
            boxes.is_full(first),
            lambda logits: logits,
            lambda logits: hide(call, logits, first, windows),
            logits * scale,
        )
        maximum = jnp.maximum(before, jnp.max(logits, axis=1))
        weights, change = jnp.exp2(logits - columns(maximum, KEYS)), jnp.exp2(before - maximum)
        plgpu.async_store_tmem(memory.logits[half][1], weights.astype(memory.query.dtype))
        pl.when(box > 0)(lambda: _rescale(memory, half, change))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(memory.weights_are_in.at[half])
        return maximum, total * change + jnp.sum(weights, axis=1)

    begin = (every_row(SMALLEST_MAXIMUM), every_row(0.0))
    maximum, total = jax.lax.fori_loop(0, boxes.count, step, begin)
    wait(memory.mixed_is_in.at[half])
    _write(call, memory, item, half, total, results[0])
    rows = pl.ds(half * ROWS, ROWS)
    for row, numbers in enumerate((maximum, total)):
        plgpu.store(results[1].at[number, row, rows], numbers, optimized=False)
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(memory.query_is_out.at[half])


def _rescale(memory: Memory, half: int, change: jax.Array) -> None:
    """Multiply the sums so far: the product before has written them, as these logits came after it."""
    mixed = memory.mixed[half]
    for first in range(0, mixed.shape[1], _AT_A_TIME):  # all at once are more than there are registers
        part = mixed.at[:, pl.ds(first, _AT_A_TIME)]
        sums = plgpu.async_load_tmem(part, layout=BY_ROWS)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(part, sums * columns(change, _AT_A_TIME))


def _write(call: Call, memory: Memory, item: Item, half: int, total: jax.Array, out: Any) -> None:
    """Divide the sums of a half, and copy them out in the place of its queries."""
    lines, tiles = call.queries, memory.query.at[half]
    mixed = plgpu.async_load_tmem(memory.mixed[half], layout=BY_ROWS)
    plgpu.wait_load_tmem()
    width = mixed.shape[1]
    sees_nothing = columns(total, width) == 0  # false for NaN
    mixed = jnp.where(sees_nothing, 0.0, mixed / columns(jnp.where(total == 0, 1.0, total), width))
    rounded = mixed.astype(tiles.dtype)
    for block in range(lines.blocks):
        part = rounded if lines.blocks == 1 else rounded[:, block * lines.block : (block + 1) * lines.block]
        plgpu.store(tiles.at[block], part, optimized=False)
    plgpu.commit_smem()
    copy_out(
        lines, call.query_pieces, place_of_half(call, item, half), {b: tiles.at[b] for b in range(lines.blocks)}, out
    )
