"""The forward kernel for Blackwell GPUs.

Two halves of a tile of 256 queries are in flight at a time, or one half of 128. Each half has a warpgroup, in which a
thread owns a row of logits. The matrix units work on one half while the warpgroup of the other half computes weights.
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
from natten_jax.backends.pallas import _blackwell_memory as gpu
from natten_jax.backends.pallas._blackwell_call import KEYS, ROWS, Boxes, Call, Item, blocks_of
from natten_jax.backends.pallas._common import SMALLEST_MAXIMUM, Scalar, divided

#: Boxes of keys, and of values, in shared memory at a time.
STAGES = 2
_SUMS_AT_A_TIME = 32  # columns of sums of values in registers


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> Sequence[jax.Array]:
    """Compute the output, and maxima and sums of the softmax.

    Args:
        call: What runs.
        query: In the layout of ``call.queries``.
        key: In the layout of ``call.keys``.
        value: In the layout of ``call.keys``.
        scale: float32 ``[batch * heads]``. Factors of the logits.

    Returns:
        The output in the layout of the query; maxima of the logits in base 2 and sums of the weights,
        ``[items, 2, queries]``.
    """
    statistics = jax.ShapeDtypeStruct((call.items, 2, call.halves * ROWS), jnp.float32)
    return gpu.launch(
        "natten_jax_blackwell_forward",
        lambda read, written, memory: ForwardBlock(call, memory, written, *read),
        [[query, key, value], scale * LOG2_E, call.box_tables, call.bounds()],
        [query, statistics],
        scratch_memory(call, query.dtype),
        items=call.items,
        blocks=blocks_of(call.items) if call.plan.performance.run_persistent_kernel else call.items,
        halves=call.halves,
    )


def scratch_memory(call: Call, dtype: Any) -> dict[str, Any]:
    """Return shared memory, tensor memory and barriers; box ``j`` of keys has slot ``j % STAGES``.

    - ``query``: ``[halves, blocks, rows, block]``. The tile of queries, and at the end of the output.
    - ``key``, ``value``: ``[stages, blocks, keys, block]``.
    - ``logits``: For each half, in tensor memory. Logits, and weights in the same place.
    - ``mixed``: For each half, in tensor memory. Weighted sums of values.
    - ``query_is_in``: For each half: its tile is copied. ``query_is_out``: the output has left the tile's place.
    - ``key_is_in``, ``value_is_in``: For each slot: its box is copied.
    - ``key_is_out``, ``value_is_out``: For each slot: the products with its box are done.
    - ``logits_are_in``: For each half: logits are complete.
    - ``weights_are_in``: For each half: weights are complete, and earlier sums are rescaled.
    - ``weights_are_out``: For each half: the product with the weights is done, and logits may replace them.
    - ``mixed_is_in``: For each half: the last product with values is done, if there is one.
    """
    lines, halves = call.queries, call.halves
    query_copies, key_copies = (shape[0] * shape[1] * lines.blocks for shape in (call.half_tile, call.box))

    def logits() -> Any:
        weights = plgpu.TMEM((ROWS, KEYS), dtype, packed=True)
        return plgpu.RefUnion(plgpu.TMEM((ROWS, KEYS), jnp.float32), weights)

    return {
        "query": gpu.tile_buffers(lines, halves, ROWS, dtype),
        "key": gpu.tile_buffers(lines, STAGES, KEYS, dtype),
        "value": gpu.tile_buffers(lines, STAGES, KEYS, dtype),
        "logits": [logits() for _ in range(halves)],
        "mixed": [plgpu.TMEM((ROWS, lines.width), jnp.float32) for _ in range(halves)],
        "query_is_in": gpu.barriers(halves, query_copies),
        "query_is_out": gpu.barriers(halves),
        "key_is_in": gpu.barriers(STAGES, key_copies),
        "key_is_out": gpu.barriers(STAGES, of_products=True),
        "value_is_in": gpu.barriers(STAGES, key_copies),
        "value_is_out": gpu.barriers(STAGES, of_products=True),
        "logits_are_in": gpu.barriers(halves, of_products=True),
        "weights_are_in": gpu.barriers(halves, of_products=True),
        "weights_are_out": gpu.barriers(halves, of_products=True),
        "mixed_is_in": gpu.barriers(halves, of_products=True),
    }


@dataclasses.dataclass(frozen=True)
class ForwardBlock:
    """Work of a block; see :class:`natten_jax.backends.pallas._blackwell_memory.Block`.

    Attributes:
        call: What runs.
        memory: References to :func:`scratch_memory`.
        results: References to the output, and to maxima and sums.
        arrays: References to queries, keys and values.
        scales: Reference to factors of the logits in base 2, for each batch entry and head.
        tables: References to box tables.
        bounds: References to bounds of windows.
    """

    call: Call
    memory: Any
    results: Sequence[Any]
    arrays: Sequence[Any]
    scales: Any
    tables: Sequence[Any]
    bounds: Sequence[Any]

    def load(self, number: Scalar, state: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
        """Copy the queries of an item, and the boxes of keys and values that they see."""
        items, before = state
        call, memory, (query, key, value) = self.call, self.memory, self.arrays
        item = call.item(number)
        boxes = Boxes.of(call, item, self.tables)
        for half in range(call.halves):
            gpu.wait_if(items > 0, memory.query_is_out.at[half])
            place = gpu.place_of_queries(call, item, half)
            gpu.copy_in(call.queries, call.half_tile, place, query, memory.query.at[half], memory.query_is_in.at[half])
        column = call.keys.column(boxes.groups[-1], divided(item.head, call.group_heads)[0])

        def load(number: Scalar, none: None) -> None:
            slot, first = _slot(before + number), boxes.first(number)
            for source, tiles, is_in, is_out in (
                (key, memory.key, memory.key_is_in, memory.key_is_out),
                (value, memory.value, memory.value_is_in, memory.value_is_out),
            ):
                gpu.wait_until_free(is_out.at[slot], before + number, STAGES)
                place = gpu.Place(item.batch, boxes.groups, first, column)
                gpu.copy_in(call.keys, call.box, place, source, tiles.at[slot], is_in.at[slot])

        jax.lax.fori_loop(0, boxes.count, load, None)
        return items + 1, before + boxes.count

    def drain(self, state: Sequence[Scalar]) -> None:
        """Wait for the last products and copies."""
        items, loaded = state
        gpu.drain((self.memory.key_is_out, self.memory.value_is_out), loaded, STAGES)
        for half in range(self.call.halves):
            gpu.wait_if(items > 0, self.memory.query_is_out.at[half])

    def multiply(self, number: Scalar, before: Scalar) -> Scalar:
        """Issue the products of an item: logits of the next box while warpgroups compute weights of this box."""
        call, memory = self.call, self.memory
        count = Boxes.of(call, call.item(number), self.tables).count
        for half in range(call.halves):
            gpu.wait(memory.query_is_in.at[half])

        @pl.when(count > 0)
        def _() -> None:
            slot = _slot(before)
            gpu.wait(memory.key_is_in.at[slot])
            for half in range(call.halves):
                self._multiply_keys(half, slot)
            plgpu.tcgen05_commit_arrive(memory.key_is_out.at[slot])

        def step(box: Scalar, none: None) -> None:
            slot, next_slot, goes_on = _slot(before + box), _slot(before + box + 1), box + 1 < count
            gpu.wait(memory.value_is_in.at[slot])
            pl.when(goes_on)(lambda: gpu.wait(memory.key_is_in.at[next_slot]))
            for half in range(call.halves):
                gpu.wait(memory.weights_are_in.at[half])
                weights, value = memory.logits[half][1], memory.value.at[slot]
                gpu.add_product(call.queries, memory.mixed[half], weights, value, box > 0)
                pl.when(goes_on)(functools.partial(self._replace_weights, half, next_slot))
            plgpu.tcgen05_commit_arrive(memory.value_is_out.at[slot])
            pl.when(goes_on)(lambda: plgpu.tcgen05_commit_arrive(memory.key_is_out.at[next_slot]))

        jax.lax.fori_loop(0, count, step, None)
        # Arrive even without products: the output must not be written before the queries are copied.
        for half in range(call.halves):
            plgpu.tcgen05_commit_arrive(memory.mixed_is_in.at[half])
        return before + count

    def _multiply_keys(self, half: int, slot: Scalar) -> None:
        """Multiply the queries of a half with keys."""
        memory = self.memory
        query, key = memory.query.at[half], memory.key.at[slot]
        gpu.multiply_tiles(self.call.queries, memory.logits[half][0], query, key)
        plgpu.tcgen05_commit_arrive(memory.logits_are_in.at[half])

    def _replace_weights(self, half: int, slot: Scalar) -> None:
        """Compute the logits of the next box when the product with the weights in their place is done."""
        plgpu.tcgen05_commit_arrive(self.memory.weights_are_out.at[half])
        gpu.wait(self.memory.weights_are_out.at[half])
        self._multiply_keys(half, slot)

    def weigh(self, half: int, number: Scalar) -> None:
        """Compute weights from logits, and the output from the weighted sums of a half."""
        call, memory = self.call, self.memory
        item = call.item(number)
        boxes = Boxes.of(call, item, self.tables)
        scale = self.scales[item.batch * call.queries.heads + item.head]
        windows = gpu.windows_of(call, item, half, self.bounds)

        def step(box: Scalar, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            before, total = state
            first = boxes.first(box)
            gpu.wait(memory.logits_are_in.at[half])
            logits = gpu.load_matrix(memory.logits[half][0])
            logits = gpu.mask(boxes, logits * scale, first, windows)
            maximum = jnp.maximum(before, jnp.max(logits, axis=1))
            weights, change = jnp.exp2(logits - gpu.columns(maximum, KEYS)), jnp.exp2(before - maximum)
            plgpu.async_store_tmem(memory.logits[half][1], weights.astype(memory.query.dtype))
            pl.when(box > 0)(lambda: self._rescale(half, change))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(memory.weights_are_in.at[half])
            return maximum, total * change + jnp.sum(weights, axis=1)

        begin = (gpu.every_row(SMALLEST_MAXIMUM), gpu.every_row(0.0))
        maximum, total = jax.lax.fori_loop(0, boxes.count, step, begin)
        gpu.wait(memory.mixed_is_in.at[half])
        self._write(item, half, total)
        rows = pl.ds(half * ROWS, ROWS)
        for row, numbers in enumerate((maximum, total)):
            plgpu.store(self.results[1].at[number, row, rows], numbers, optimized=False)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(memory.query_is_out.at[half])

    def _rescale(self, half: int, change: jax.Array) -> None:
        """Rescale earlier sums, which are complete: these logits were multiplied after them."""
        mixed = self.memory.mixed[half]
        for first in range(0, mixed.shape[1], _SUMS_AT_A_TIME):  # all columns exceed the registers
            part = mixed.at[:, pl.ds(first, _SUMS_AT_A_TIME)]
            plgpu.async_store_tmem(part, gpu.load_matrix(part) * gpu.columns(change, _SUMS_AT_A_TIME))

    def _write(self, item: Item, half: int, total: jax.Array) -> None:
        """Divide the sums of a half, and copy them out by way of the place of its queries."""
        call, tiles = self.call, self.memory.query.at[half]
        lines = call.queries
        mixed = gpu.load_matrix(self.memory.mixed[half])
        width = mixed.shape[1]
        sees_nothing = gpu.columns(total, width) == 0  # false for NaN
        mixed = jnp.where(sees_nothing, 0.0, mixed / gpu.columns(jnp.where(total == 0, 1.0, total), width))
        rounded = mixed.astype(tiles.dtype)
        for block in range(lines.blocks):
            part = rounded if lines.blocks == 1 else rounded[:, block * lines.block : (block + 1) * lines.block]
            plgpu.store(tiles.at[block], part, optimized=False)
        plgpu.commit_smem()
        blocks = {block: tiles.at[block] for block in range(lines.blocks)}
        gpu.copy_out(lines, call.half_tile, gpu.place_of_queries(call, item, half), blocks, self.results[0])


def _slot(box: Scalar) -> Scalar:
    """Return the slot of a box of keys; boxes are counted over all items of a block."""
    return jax.lax.rem(box, STAGES)
