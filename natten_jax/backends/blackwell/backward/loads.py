"""The warp that copies tiles: those that an item owns once, and those of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.backends.blackwell.backward.items import Owned
from natten_jax.backends.blackwell.backward.memory import Memory, slot_of, slots_of
from natten_jax.backends.blackwell.call import Call, Scalar
from natten_jax.backends.blackwell.copies import Place, copy_in
from natten_jax.backends.blackwell.memory import wait, wait_if


def load_item(
    call: Call, memory: Memory, arrays: Sequence[Any], owned: Owned, state: Sequence[Scalar], *, owns_keys: bool
) -> tuple[Scalar, Scalar]:
    """Copy the tiles of an item.

    Args:
        call: What runs.
        memory: Where tiles go.
        arrays: References to queries, cotangents of the output, keys and values.
        owned: The item.
        state: How many items, and how many pairs, there were before.
        owns_keys: Whether it owns keys and values.

    Returns:
        The same, with this item's.
    """
    items, before = state
    slots = slots_of(call, owns_keys=owns_keys)

    def copy_queries(place: Place, slot: Scalar, barrier: Any) -> None:
        for source, tiles in zip(arrays[:2], (memory.query, memory.out_gradient), strict=True):
            copy_in(call.queries, call.query_pieces, place, source, tiles.at[slot], barrier)

    def copy_keys(place: Place, slot: Scalar, barrier: Any) -> None:
        for source, tiles in zip(arrays[2:], (memory.key, memory.value), strict=True):
            copy_in(call.keys, call.key_pieces, place, source, tiles.at[slot], barrier)

    wait_if(items > 0, memory.owned_is_out)
    (copy_keys if owns_keys else copy_queries)(owned.place, 0, memory.owned_is_in)

    def load(number: Scalar, none: None) -> None:
        slot, pair = slot_of(call, before + number, owns_keys=owns_keys), owned.pair(number)
        wait_if(before + number >= slots, memory.other_is_out.at[slot])
        if owns_keys:
            copy_queries(pair.queries, slot, memory.other_is_in.at[slot])
        else:
            copy_keys(pair.keys, slot, memory.other_is_in.at[slot])

    jax.lax.fori_loop(0, owned.count, load, None)
    return items + 1, before + owned.count


def drain(call: Call, memory: Memory, state: Sequence[Scalar], *, owns_keys: bool) -> None:
    """Wait for what nobody has waited for yet: a block must not end before."""
    items, loaded = state
    slots = slots_of(call, owns_keys=owns_keys)

    def finish(number: Scalar, none: None) -> None:
        wait(memory.other_is_out.at[slot_of(call, number, owns_keys=owns_keys)])

    jax.lax.fori_loop(jnp.maximum(loaded - slots, 0), loaded, finish, None)
    wait_if(items > 0, memory.owned_is_out)
