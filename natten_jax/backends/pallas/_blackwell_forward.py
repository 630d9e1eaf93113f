"""The forward pass: a block for each work item, or blocks that take one after another.

Two halves of a tile of 256 queries are in flight at a time, or one of 128. A warpgroup for each makes weights of its
logits; one warp of another warpgroup copies tiles, and one issues products, so that the matrix units work on one half
while the other's weights are worked out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.arrays.remainders import LOG2_E
from natten_jax.backends.pallas._blackwell_call import (
    KEYS,
    ROWS,
    Boxes,
    Call,
    Item,
    Scalar,
    blocks_of,
    column_of,
    divided,
)
from natten_jax.backends.pallas._blackwell_memory import (
    BY_ROWS,
    REGISTERS_OF_OTHERS,
    REGISTERS_OF_ROWS,
    Place,
    barriers,
    columns,
    copy_in,
    copy_out,
    every_row,
    hide,
    tile_buffers,
    wait,
    wait_if,
    wait_until_free,
    windows_of,
)
from natten_jax.native.module import KERNEL_RANK

#: Boxes of keys, and of values, that are in shared memory at a time.
STAGES = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """References to it; a box of keys ``j`` is in the slot ``j % STAGES``.

    Attributes:
        query: Halves of the tile of queries, ``[halves, blocks, rows, block]``; in the end, of the output.
        key: ``[stages, blocks, keys, block]``.
        value: Likewise.
        logits: For each half, in tensor memory: logits, and in their place the weights that they become.
        mixed: For each half, in tensor memory: the weighted sums of values.
        query_is_in: For each half: its tile has been copied.
        query_is_out: For each half: its place may be overwritten, as the output has left it.
        key_is_in: For each slot: the keys have been copied.
        key_is_out: For each slot: products with its keys are done.
        value_is_in: As of keys.
        value_is_out: As of keys.
        logits_are_in: For each half: logits are there.
        weights_are_in: For each half: weights are there, and the sums so far are multiplied by what they change by.
        weights_are_out: For each half: the product with the weights is done, so that logits may take their place.
        mixed_is_in: For each half: the last product with values is done, if there was any.
    """

    query: Any
    key: Any
    value: Any
    logits: Any
    mixed: Any
    query_is_in: Any
    query_is_out: Any
    key_is_in: Any
    key_is_out: Any
    value_is_in: Any
    value_is_out: Any
    logits_are_in: Any
    weights_are_in: Any
    weights_are_out: Any
    mixed_is_in: Any

    @staticmethod
    def types(call: Call, dtype: Any) -> dict[str, Any]:
        """What to allocate, by attribute."""
        lines, halves = call.queries, call.halves

        def logits() -> Any:
            weights = plgpu.TMEM((ROWS, KEYS), dtype, packed=True)
            return plgpu.RefUnion(plgpu.TMEM((ROWS, KEYS), jnp.float32), weights)

        of_queries, of_keys = (pieces.count * lines.blocks for pieces in (call.query_pieces, call.key_pieces))
        return {
            "query": tile_buffers(lines, halves, ROWS, dtype),
            "key": tile_buffers(lines, STAGES, KEYS, dtype),
            "value": tile_buffers(lines, STAGES, KEYS, dtype),
            "logits": [logits() for _ in range(halves)],
            "mixed": [plgpu.TMEM((ROWS, lines.blocks * lines.block), jnp.float32) for _ in range(halves)],
            "query_is_in": barriers(halves, of_queries),
            "query_is_out": barriers(halves),
            "key_is_in": barriers(STAGES, of_keys),
            "key_is_out": barriers(STAGES, of_products=True),
            "value_is_in": barriers(STAGES, of_keys),
            "value_is_out": barriers(STAGES, of_products=True),
            "logits_are_in": barriers(halves, of_products=True),
            "weights_are_in": barriers(halves, of_products=True),
            "weights_are_out": barriers(halves, of_products=True),
            "mixed_is_in": barriers(halves, of_products=True),
        }


def slot_of(box: Any) -> Any:
    """The slot of a box of keys, which are counted over all items of a block."""
    return jax.lax.rem(box, STAGES)


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
            wait_until_free(is_out.at[slot], before + number, STAGES)
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


_LOADS, _PRODUCTS = 0, 1  # warps


def forward(
    call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: As ``call.queries`` has it.
        key: As ``call.keys`` has it.
        value: Likewise.
        scale: float32 ``[batch * heads]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[items, 2, tokens]``.
    """
    is_persistent = call.plan.performance.run_persistent_kernel
    blocks = blocks_of(call.items) if is_persistent else call.items
    tables = call.arrays()
    results = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((call.items, 2, call.halves * ROWS), jnp.float32),
    ]

    def kernel(*refs: Any, **scratch: Any) -> None:
        arrays, scales, tables, bounds, results = refs[:3], refs[3], refs[4:7], refs[7:10], refs[10:]
        memory = Memory(**scratch)
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        count = jax.lax.div(call.items - 1 - block, blocks) + 1

        def for_each_item(body: Any, state: Any) -> Any:
            """Carry a state over the items of this block."""
            return jax.lax.fori_loop(0, count, lambda i, state: body(block + i * blocks, state), state)

        def weigh(half: int) -> None:
            if call.halves > 1:
                plgpu.set_max_registers(REGISTERS_OF_ROWS, action="increase")

            def body(number: Scalar, none: None) -> None:
                weigh_item(call, memory, half, tables, bounds, scales, results, number)

            for_each_item(body, None)

        for half in range(call.halves):
            pl.when(warpgroup == half)(functools.partial(weigh, half))

        @pl.when(warpgroup == call.halves)
        def _() -> None:
            if call.halves > 1:
                plgpu.set_max_registers(REGISTERS_OF_OTHERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADS)
                def _() -> None:
                    def body(number: Scalar, state: Any) -> Any:
                        return load_item(call, memory, arrays, tables, number, state)

                    drain(call, memory, for_each_item(body, (jnp.int32(0), jnp.int32(0))))

                @pl.when(warp == _PRODUCTS)
                def _() -> None:
                    def body(number: Scalar, before: Scalar) -> Scalar:
                        return multiply_item(call, memory, tables, number, before)

                    for_each_item(body, jnp.int32(0))

    assert len(tables) == 2 * KERNEL_RANK
    out, statistics = plgpu.kernel(
        kernel,
        out_type=results,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=call.halves + 1,
        thread_name="warpgroup",
        scratch_types=Memory.types(call, query.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="natten_jax_blackwell_forward",
    )(query, key, value, scale * LOG2_E, *tables)
    return out, statistics
