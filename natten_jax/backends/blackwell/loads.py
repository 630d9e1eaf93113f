"""The warp that copies tiles: queries once for an item, and the boxes of keys and values that they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.backends.blackwell.call import Boxes, Call, Item, Scalar, column_of, divided
from natten_jax.backends.blackwell.copies import Place, copy_in
from natten_jax.backends.blackwell.memory import STAGES, Memory, slot_of, wait, wait_if


def load_item(
    call: Call, memory: Memory, arrays: Sequence[Any], tables: Sequence[Any], number: Scalar, state: Sequence[Scalar]
) -> tuple[Scalar, Scalar]:
    """Copy the tiles of an item.

    Args:
        call: What runs.
        memory: Where tiles go.
        arrays: References to queries, keys and values.
        tables: References to the box tables.
        number: The item's.
        state: How many items, and how many boxes of keys, were copied before.

    Returns:
        The same, with this item's.
    """
    items, before = state
    item, (query, key, value) = call.item(number), arrays
    boxes = Boxes.of(call, item, tables)
    for half in range(call.halves):
        wait_if(items > 0, memory.query_is_out.at[half])
        _copy_queries(call, item, half, query, memory)
    column = column_of(call.keys, boxes.groups[-1], divided(item.head, call.group_heads)[0])

    def load(number: Scalar, none: None) -> None:
        slot, first = slot_of(before + number), boxes.first(number)
        for source, tiles, is_in, is_out in (
            (key, memory.key, memory.key_is_in, memory.key_is_out),
            (value, memory.value, memory.value_is_in, memory.value_is_out),
        ):
            wait_if(before + number >= STAGES, is_out.at[slot])
            place = Place(item.batch, boxes.groups, first, column)
            copy_in(call.keys, call.key_pieces, place, source, tiles.at[slot], is_in.at[slot])

    jax.lax.fori_loop(0, boxes.count, load, None)
    return items + 1, before + boxes.count


def drain(call: Call, memory: Memory, state: Sequence[Scalar]) -> None:
    """Wait for what nobody has waited for yet: a block must not end before."""
    items, loaded = state

    def finish(box: Scalar, none: None) -> None:
        for is_out in (memory.key_is_out, memory.value_is_out):
            wait(is_out.at[slot_of(box)])

    jax.lax.fori_loop(jnp.maximum(loaded - STAGES, 0), loaded, finish, None)
    for half in range(call.halves):
        wait_if(items > 0, memory.query_is_out.at[half])


def place_of_half(call: Call, item: Item, half: int) -> Place:
    """Where a half of an item's tile of queries lies."""
    first = [
        tile * extent + offset
        for tile, extent, offset in zip(item.tile, call.q_tile, call.half_offset(half), strict=True)
    ]
    return Place(item.batch, item.group, first, column_of(call.queries, item.group[-1], item.head))


def _copy_queries(call: Call, item: Item, half: int, query: Any, memory: Memory) -> None:
    place = place_of_half(call, item, half)
    copy_in(call.queries, call.query_pieces, place, query, memory.query.at[half], memory.query_is_in.at[half])
