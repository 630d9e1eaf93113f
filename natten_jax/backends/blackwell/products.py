"""The warp that issues products: logits of the next box while weights of this one are worked out, half by half."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import Boxes, Call, Scalar
from natten_jax.backends.blackwell.memory import Memory, slot_of, wait


def multiply_item(call: Call, memory: Memory, tables: Sequence[Any], number: Scalar, before: Scalar) -> Scalar:
    """Issue the products of an item.

    Args:
        call: What runs.
        memory: Where tiles are.
        tables: References to the box tables.
        number: The item's.
        before: Boxes of keys of earlier items.

    Returns:
        The same, with this item's.
    """
    count = Boxes.of(call, call.item(number), tables).count
    for half in range(call.halves):
        wait(memory.query_is_in.at[half])

    @pl.when(count > 0)
    def _() -> None:
        slot = slot_of(before)
        wait(memory.key_is_in.at[slot])
        for half in range(call.halves):
            multiply_keys(call, memory, half, slot)
        plgpu.tcgen05_commit_arrive(memory.key_is_out.at[slot])

    def step(box: Scalar, none: None) -> None:
        slot, next_slot, goes_on = slot_of(before + box), slot_of(before + box + 1), box + 1 < count
        wait(memory.value_is_in.at[slot])
        pl.when(goes_on)(lambda: wait(memory.key_is_in.at[next_slot]))
        for half in range(call.halves):
            wait(memory.weights_are_in.at[half])
            multiply_values(call, memory, half, slot, box > 0)
            pl.when(goes_on)(functools.partial(_replace_weights, call, memory, half, next_slot))
        plgpu.tcgen05_commit_arrive(memory.value_is_out.at[slot])
        pl.when(goes_on)(lambda: plgpu.tcgen05_commit_arrive(memory.key_is_out.at[next_slot]))

    jax.lax.fori_loop(0, count, step, None)
    # Also where there was nothing to multiply: the output must not be written before the queries have come.
    for half in range(call.halves):
        plgpu.tcgen05_commit_arrive(memory.mixed_is_in.at[half])
    return before + count


def multiply_keys(call: Call, memory: Memory, half: int, slot: Scalar) -> None:
    """Logits of a half, ``[queries, keys]``."""
    for block in range(call.queries.blocks):
        plgpu.tcgen05_mma(
            memory.logits[half][0],
            memory.query.at[half, block],
            memory.key.at[slot, block].T,
            accumulate=block > 0,
        )
    plgpu.tcgen05_commit_arrive(memory.logits_are_in.at[half])


def multiply_values(call: Call, memory: Memory, half: int, slot: Scalar, accumulate: Scalar) -> None:
    """Add a half's weighted sums of values, or begin with them."""
    width = call.queries.block
    for block in range(call.queries.blocks):
        plgpu.tcgen05_mma(
            memory.mixed[half].at[:, pl.ds(block * width, width)],
            memory.logits[half][1],
            memory.value.at[slot, block],
            accumulate=accumulate,
        )


def _replace_weights(call: Call, memory: Memory, half: int, slot: Scalar) -> None:
    """Logits of the next box, once the product with the weights is done in whose place they go."""
    plgpu.tcgen05_commit_arrive(memory.weights_are_out.at[half])
    wait(memory.weights_are_out.at[half])
    multiply_keys(call, memory, half, slot)
