"""The warp that copies tiles: queries once for an item, and the boxes of keys and values that they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import Boxes, Call, Item, Pieces, Scalar, column_of, line_of
from natten_jax.backends.blackwell.layout import PIECE, Lines
from natten_jax.backends.blackwell.memory import STAGES, Memory, slot_of, wait


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
        _wait_if(items > 0, memory.query_is_out.at[half])
        _copy_queries(call, item, half, query, memory)
    group_heads = call.plan.problem.heads // call.plan.problem.heads_kv
    head = jax.lax.div(item.head, group_heads) if group_heads > 1 else item.head
    column = column_of(call.keys, boxes.groups[-1], head)

    def load(number: Scalar, none: None) -> None:
        slot, first = slot_of(before + number), boxes.first(number)
        for source, tiles, is_in, is_out in (
            (key, memory.key, memory.key_is_in, memory.key_is_out),
            (value, memory.value, memory.value_is_in, memory.value_is_out),
        ):
            _wait_if(before + number >= STAGES, is_out.at[slot])
            copy_tile(
                call.keys,
                call.key_pieces,
                (item.batch, boxes.groups, first, column),
                source,
                tiles.at[slot],
                is_in.at[slot],
            )

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
        _wait_if(items > 0, memory.query_is_out.at[half])


def copy_tile(
    lines: Lines,
    pieces: Pieces,
    place: tuple[Scalar, Sequence[Scalar], Sequence[Scalar], Scalar],
    source: Any,
    tile: Any,
    barrier: Any,
) -> None:
    """Copy a tile of tokens into shared memory, ``[blocks, tokens, block]``.

    Args:
        lines: How the tokens lie.
        pieces: The tile.
        place: Batch entry, dilation group, first token inside the group, and column.
        source: Reference to the array.
        tile: Reference to the place.
        barrier: Who waits for it.
    """
    batch, group, first, column = place

    def copy(piece: Scalar, none: None) -> None:
        at = pieces.place(piece)
        tokens = [g + (f + a) * d for g, f, a, d in zip(group, first, at, lines.dilation, strict=False)]
        line = line_of(lines, batch, tokens)
        rows = pl.ds(piece * pieces.tokens, pieces.tokens)
        for block in range(lines.blocks):
            plgpu.copy_gmem_to_smem(
                source.at[line, tokens_of_piece(pieces, first[-1]), column + block], tile.at[block, rows], barrier
            )

    jax.lax.fori_loop(0, pieces.count, copy, None)


def tokens_of_piece(pieces: Pieces, first: Scalar) -> Any:
    """Those of a line, from ``first`` on: a multiple of :data:`PIECE`, which the product shows to the compiler."""
    return pl.ds(jax.lax.div(first, np.int32(PIECE)) * PIECE, pieces.tokens)


def first_of_half(call: Call, item: Item, half: int) -> list[Scalar]:
    """First query of a half of an item's tile, inside the dilation group."""
    return [
        tile * extent + offset
        for tile, extent, offset in zip(item.tile, call.q_tile, call.half_offset(half), strict=True)
    ]


def _copy_queries(call: Call, item: Item, half: int, query: Any, memory: Memory) -> None:
    place = (
        item.batch,
        item.group,
        first_of_half(call, item, half),
        column_of(call.queries, item.group[-1], item.head),
    )
    copy_tile(call.queries, call.query_pieces, place, query, memory.query.at[half], memory.query_is_in.at[half])


def _wait_if(condition: Scalar, barrier: Any) -> None:
    pl.when(condition)(lambda: wait(barrier))
