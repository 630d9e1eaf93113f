"""The warp that issues products: logits and what their gradients are made of, and the sums that these go into."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.backward.items import Owned
from natten_jax.backends.blackwell.backward.memory import Memory, slot_of, slots_of
from natten_jax.backends.blackwell.call import Call, Scalar
from natten_jax.backends.blackwell.memory import wait


def multiply_item(call: Call, memory: Memory, owned: Owned, before: Scalar, *, owns_keys: bool) -> Scalar:
    """Issue the products of an item.

    Where there are two slots, logits of the next pair come before the sums of this one, so that they are there when
    the sums are.

    Args:
        call: What runs.
        memory: Where tiles are.
        owned: The item.
        before: Pairs of earlier items.
        owns_keys: Whether it owns keys and values.

    Returns:
        The same, with this item's.
    """
    slots, count = slots_of(call, owns_keys=owns_keys), owned.count

    def begin(number: Scalar) -> None:
        slot = slot_of(call, before + number, owns_keys=owns_keys)
        wait(memory.other_is_in.at[slot])
        _multiply_logits(call, memory, *((slot, 0) if owns_keys else (0, slot)))

    def finish(number: Scalar) -> None:
        slot = slot_of(call, before + number, owns_keys=owns_keys)
        if owns_keys:
            of_keys, of_values = memory.sums
            _add(call, of_keys, memory.gradients.T, memory.query.at[slot], number > 0)
            _add(call, of_values, memory.weights.T, memory.out_gradient.at[slot], number > 0)
        else:
            _add(call, memory.sums[0], memory.gradients, memory.key.at[slot], number > 0)
        plgpu.tcgen05_commit_arrive(memory.gradients_are_out)
        plgpu.tcgen05_commit_arrive(memory.other_is_out.at[slot])

    wait(memory.owned_is_in)
    pl.when(count > 0)(lambda: begin(0))

    def step(number: Scalar, none: None) -> None:
        wait(memory.gradients_are_in)
        if slots == 1:
            finish(number)
        pl.when(number + 1 < count)(lambda: begin(number + 1))
        if slots > 1:
            finish(number)

    jax.lax.fori_loop(0, count, step, None)
    # Also where there was nothing to multiply: results must not be written before what is owned has come.
    plgpu.tcgen05_commit_arrive(memory.sums_are_in)
    return before + count


def _multiply_logits(call: Call, memory: Memory, query_slot: Scalar, key_slot: Scalar) -> None:
    """Logits, and products of the output's cotangents with values, ``[queries, keys]``."""
    for result, of_queries, of_keys in (
        (memory.logits, memory.query, memory.key),
        (memory.products, memory.out_gradient, memory.value),
    ):
        for block in range(call.queries.blocks):
            plgpu.tcgen05_mma(
                result, of_queries.at[query_slot, block], of_keys.at[key_slot, block].T, accumulate=block > 0
            )
    plgpu.tcgen05_commit_arrive(memory.logits_are_in)


def _add(call: Call, sums: Any, matrix: Any, tile: Any, accumulate: Scalar) -> None:
    """Add the product of a matrix with a tile, or begin with it."""
    width = call.queries.block
    for block in range(call.queries.blocks):
        plgpu.tcgen05_mma(sums.at[:, pl.ds(block * width, width)], matrix, tile.at[block], accumulate=accumulate)
