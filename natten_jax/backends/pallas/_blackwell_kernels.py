"""The kernels for Blackwell GPUs.

In the forward kernel, a thread block processes one query tile at a time. A tile of 256 queries has two halves, which
are processed concurrently; a tile of 128 queries counts as one half. Each half has a warpgroup, in which each thread
owns a row of logits. The tensor cores work on one half while the warpgroup of the other half computes weights.

There are two backward kernels. In the query gradient kernel, a thread block owns one query tile at a time, and visits
boxes of keys. In the key/value gradient kernel, it owns one key tile at a time, and visits query tiles. A thread block
of a backward kernel has three warpgroups. In two of them, each thread owns half a row of logits.

In all kernels, the last warpgroup has one warp that copies tiles, and one warp that issues matrix products. Sums over
pairs of tiles are always accumulated in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.arrays.remainders import LOG2_E
from natten_jax.backends.pallas import _blackwell_memory as gpu
from natten_jax.backends.pallas import _common as common
from natten_jax.backends.pallas._blackwell_call import KEYS, ROWS, Boxes, Call, Item, blocks_of, call_of
from natten_jax.backends.pallas._common import STATISTICS, Scalar, divided, unravel
from natten_jax.native.module import KERNEL_RANK
from natten_jax.plan.plan import Plan

#: Number of slots in shared memory for boxes of keys. Boxes of values have equally many slots.
STAGES = 2
_RESCALED_COLUMNS = 32  # columns of the weighted sums of values that are in registers at a time
#: Number of warpgroups that share a matrix of logits; each warpgroup owns half of the columns.
HALVES = 2
_COLUMNS = KEYS // HALVES
#: Columns per tile of the shared-memory layout, for matrices that the tensor cores read transposed.
_TRANSPOSED = 64
#: Maximum head dimension for which the key/value gradient kernel has two slots in shared memory for query tiles. The
#: tiles of output cotangents then also have two slots.
_WIDEST_OF_TWO_SLOTS = 64


# The forward pass ----------------------------------------------------------------------------------------------------


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> Sequence[jax.Array]:
    """Compute the output, and the maxima and sums of the softmax.

    Args:
        call: The call.
        query: The query, in the layout of ``call.queries``.
        key: The key, in the layout of ``call.keys``.
        value: The value, in the layout of ``call.keys``.
        scale: float32 ``[batch * heads]``. Scales of the logits.

    Returns:
        The output, in the layout of the query; and an array ``[items, 2, queries]``, which contains the maximum of each
        query's logits in base 2, and the sum of the query's weights.
    """
    statistics = jax.ShapeDtypeStruct((call.items(), 2, call.halves * ROWS), jnp.float32)
    return gpu.launch(
        "natten_jax_blackwell_forward",
        lambda read, written, memory: ForwardBlock(call, memory, written, *read),
        [[query, key, value], scale * LOG2_E, call.box_tables, call.bounds()],
        [query, statistics],
        forward_memory(call, query.dtype),
        items=call.items(),
        blocks=blocks_of(call.items()) if call.plan.performance.run_persistent_kernel else call.items(),
        halves=call.halves,
    )


def forward_memory(call: Call, dtype: Any) -> dict[str, Any]:
    """Return the shared memory, tensor memory and barriers of a thread block, by name.

    Memory:

    - ``query``: Shared memory, ``[halves, blocks, rows, block]``. Queries; later, the output overwrites them.
    - ``key``, ``value``: Shared memory, ``[stages, blocks, keys, block]``. Box ``j`` uses slot ``j % STAGES``.
    - ``logits``: Tensor memory per half. Logits, which weights overwrite.
    - ``mixed``: Tensor memory per half. Weighted sums of values.

    Barriers, with the event that each signals:

    - ``query_is_in``, per half: the queries have been copied to shared memory.
    - ``query_is_out``, per half: the output has been copied from shared memory.
    - ``key_is_in``, ``value_is_in``, per slot: the box has been copied to shared memory.
    - ``key_is_out``, ``value_is_out``, per slot: the products with the box are complete.
    - ``logits_are_in``, per half: the logits are complete.
    - ``weights_are_in``, per half: the weights are complete, and the sums over earlier boxes have been rescaled.
    - ``weights_are_out``, per half: the product with the weights is complete, so that logits can overwrite the weights.
    - ``mixed_is_in``, per half: all products of the item are complete.
    """
    lines, halves = call.queries, call.halves
    query_copies, key_copies = (shape[0] * shape[1] * lines.blocks for shape in (call.half_tile, call.box))
    weights = plgpu.TMEM((ROWS, KEYS), dtype, packed=True)
    logits = plgpu.RefUnion(plgpu.TMEM((ROWS, KEYS), jnp.float32), weights)
    return {
        "query": gpu.tile_buffers(lines, halves, ROWS, dtype),
        "key": gpu.tile_buffers(lines, STAGES, KEYS, dtype),
        "value": gpu.tile_buffers(lines, STAGES, KEYS, dtype),
        "logits": [logits] * halves,
        "mixed": [plgpu.TMEM((ROWS, lines.width), jnp.float32)] * halves,
        "query_is_in": gpu.barriers(halves, query_copies),
        "query_is_out": gpu.barriers(halves),
        "key_is_in": gpu.barriers(STAGES, key_copies),
        "key_is_out": gpu.barriers(STAGES, for_products=True),
        "value_is_in": gpu.barriers(STAGES, key_copies),
        "value_is_out": gpu.barriers(STAGES, for_products=True),
        "logits_are_in": gpu.barriers(halves, for_products=True),
        "weights_are_in": gpu.barriers(halves, for_products=True),
        "weights_are_out": gpu.barriers(halves, for_products=True),
        "mixed_is_in": gpu.barriers(halves, for_products=True),
    }


@dataclasses.dataclass(frozen=True)
class ForwardBlock:
    """A thread block of the forward kernel.

    The documentation of :func:`natten_jax.backends.pallas._blackwell_memory.launch` describes the methods.

    Attributes:
        call: The call.
        memory: References to the memory and barriers of :func:`forward_memory`.
        results: References to the output, and to the array of maxima and sums.
        arrays: References to queries, keys and values.
        scales: Reference to the scales of the logits in base 2, one per batch entry and head.
        tables: References to the box tables.
        bounds: References to the arrays of :meth:`Call.bounds`.
    """

    call: Call
    memory: Any
    results: Sequence[Any]
    arrays: Sequence[Any]
    scales: Any
    tables: Sequence[Any]
    bounds: Sequence[Any]

    def load(self, number: Scalar, state: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
        """Start copies of an item's queries, and of the boxes of keys and values that they visit."""
        items, before = state
        call, memory, (query, key, value) = self.call, self.memory, self.arrays
        owned = owned_queries(call, number, self.tables)
        for half in range(call.halves):
            gpu.wait_if(items > 0, memory.query_is_out.at[half])
            origin = gpu.query_tile_origin(call, owned.item, half)
            gpu.copy_in(call.queries, call.half_tile, origin, query, memory.query.at[half], memory.query_is_in.at[half])

        def load(number: Scalar, none: None) -> None:
            slot, origin = _slot(before + number), owned.pair(number).keys
            for source, tiles, is_in, is_out in (
                (key, memory.key, memory.key_is_in, memory.key_is_out),
                (value, memory.value, memory.value_is_in, memory.value_is_out),
            ):
                gpu.wait_if(before + number >= STAGES, is_out.at[slot])
                gpu.copy_in(call.keys, call.box, origin, source, tiles.at[slot], is_in.at[slot])

        jax.lax.fori_loop(0, owned.count, load, None)
        return items + 1, before + owned.count

    def drain(self, state: Sequence[Scalar]) -> None:
        """Wait until the last products and copies of the thread block are complete."""
        items, loaded = state
        gpu.drain((self.memory.key_is_out, self.memory.value_is_out), loaded, STAGES)
        for half in range(self.call.halves):
            gpu.wait_if(items > 0, self.memory.query_is_out.at[half])

    def multiply(self, number: Scalar, before: Scalar) -> Scalar:
        """Issue the matrix products of an item.

        For each half, the product of a box's weights and values precedes the product of queries and the next box's
        keys.
        """
        call, memory = self.call, self.memory
        count = Boxes.for_item(call, call.item(number), self.tables).count
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
        # Arrive at the barrier even if the item visits no box. The warpgroups wait for this barrier before the output
        # overwrites the queries. The wait ensures that the copy of the queries is complete.
        for half in range(call.halves):
            plgpu.tcgen05_commit_arrive(memory.mixed_is_in.at[half])
        return before + count

    def _multiply_keys(self, half: int, slot: Scalar) -> None:
        """Issue the product of the queries of a half and the keys in a slot."""
        memory = self.memory
        query, key = memory.query.at[half], memory.key.at[slot]
        gpu.multiply_tiles(self.call.queries, memory.logits[half][0], query, key)
        plgpu.tcgen05_commit_arrive(memory.logits_are_in.at[half])

    def _replace_weights(self, half: int, slot: Scalar) -> None:
        """Wait until the product with values has read the weights, then issue the product that overwrites them.

        This is the product of the queries of a half and the next box's keys, which are in ``slot``.
        """
        plgpu.tcgen05_commit_arrive(self.memory.weights_are_out.at[half])
        gpu.wait(self.memory.weights_are_out.at[half])
        self._multiply_keys(half, slot)

    def weigh(self, half: int, number: Scalar) -> None:
        """Compute the weights of a half for each box, and then the output of the half."""
        call, memory = self.call, self.memory
        item = call.item(number)
        boxes = Boxes.for_item(call, item, self.tables)
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

        begin = (gpu.every_row(common.SMALLEST_MAXIMUM), gpu.every_row(0.0))
        maximum, total = jax.lax.fori_loop(0, boxes.count, step, begin)
        gpu.wait(memory.mixed_is_in.at[half])
        self._write(item, half, total)
        rows = pl.ds(half * ROWS, ROWS)
        for row, numbers in enumerate((maximum, total)):
            plgpu.store(self.results[1].at[number, row, rows], numbers, optimized=False)
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(memory.query_is_out.at[half])

    def _rescale(self, half: int, change: jax.Array) -> None:
        """Multiply the weighted sums over earlier boxes by ``change``, a factor per row.

        These sums are complete when the current box's logits are complete, because the products that update the sums
        were issued before the product that computes these logits.
        """
        mixed = self.memory.mixed[half]
        for first in range(0, mixed.shape[1], _RESCALED_COLUMNS):  # the registers cannot store all columns
            part = mixed.at[:, pl.ds(first, _RESCALED_COLUMNS)]
            plgpu.async_store_tmem(part, gpu.load_matrix(part) * gpu.columns(change, _RESCALED_COLUMNS))

    def _write(self, item: Item, half: int, total: jax.Array) -> None:
        """Divide the weighted sums of a half by ``total``, and start to copy the quotients to the output.

        The copy reads shared memory, in which the quotients overwrite the queries of the half.
        """
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
        gpu.copy_out(lines, call.half_tile, gpu.query_tile_origin(call, item, half), blocks, self.results[0])


def _slot(box: Scalar) -> Scalar:
    """Return the slot of a box of keys, given the number of the box.

    A thread block numbers the boxes of all its items consecutively.
    """
    return jax.lax.rem(box, STAGES)


# The backward pass ---------------------------------------------------------------------------------------------------


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    call, inputs = call_of(plan, operands), operands.inputs
    query, *keys = call.laid_out(inputs)
    arrays = [query, call.queries.laid_out(cotangents.out.astype(inputs.query.dtype)), *keys]
    statistics = call.in_items(common.saved_statistics(saved, cotangents), common.NO_KEY_SEEN)
    scale = call.scales(inputs)
    boxes, bounds, logit_scales = call.box_tables, call.bounds(), scale.reshape(-1) * LOG2_E
    sums_type = jax.ShapeDtypeStruct((call.items(), HALVES, ROWS), jnp.float32)
    shared = arrays, bounds, statistics, logit_scales

    results = [query] if inputs.scale is None else [query, sums_type]
    query_gradient, *sums = _launch(call, results, *shared, boxes, None, scale.reshape(-1))
    factors, key_scale = None, scale[:, :: call.group_heads]
    if inputs.scale is not None and call.group_heads > 1:
        factors, key_scale = _split_scale(call, scale)
    tables = *boxes, *call.tile_tables
    key_sums = _launch(call, keys, *shared, tables, factors, key_scale.reshape(-1), owns_keys=True)
    scale_gradient = (
        jnp.sum(jnp.stack(call.unpacked_items(sums[0])), axis=(0, *range(2, 2 + plan.problem.rank))) if sums else None
    )
    key_gradient, value_gradient = map(call.keys.restored, key_sums)
    return Gradients(call.queries.restored(query_gradient), key_gradient, value_gradient, scale=scale_gradient)


def _split_scale(call: Call, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split the scales of the logits, ``[batch, heads]``, into factors of query heads and of key heads.

    The factor of a key head, ``[batch, heads_kv]``, is the largest magnitude of the scales of its query heads. The
    factor of a query head is its scale divided by the factor of its key head. The first result is a flat array of the
    factors of query heads. Logit gradients are multiplied by these factors. The products are then rounded, and summed
    over the query heads of a key head. The division prevents small scales from making these products so small that they
    lose digits.
    """
    groups = scale.reshape(call.keys.batch, call.keys.heads, call.group_heads)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    return (groups / jnp.where(largest == 0, 1, largest)[..., None]).reshape(-1), largest


def _launch(call: Call, results: Sequence[Any], *operands: Any, owns_keys: bool = False) -> Sequence[jax.Array]:
    """Launch a backward kernel. ``operands`` are the last attributes of :class:`BackwardBlock`, from ``arrays`` on."""
    items = call.items(owns_keys=owns_keys)
    slots = 1 if owns_keys and call.queries.width > _WIDEST_OF_TWO_SLOTS else 2
    return gpu.launch(
        f"natten_jax_blackwell_{'key_gradients' if owns_keys else 'query_gradient'}",
        lambda read, written, memory: BackwardBlock(call, slots, owns_keys, memory, written, *read),
        operands,
        results,
        backward_memory(call, operands[0][0].dtype, slots, owns_keys=owns_keys),
        items=items,
        blocks=blocks_of(items),
        halves=HALVES,
    )


# Pairs of tiles ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A pair of a query tile and a box of keys.

    Attributes:
        boxes: All boxes that the query tile visits.
        item: The work item that owns the query tile.
        first: Index of the first key of this pair's box, per dimension.
    """

    boxes: Boxes
    item: Item
    first: Sequence[Scalar]

    @property
    def queries(self) -> gpu.TileOrigin:
        return gpu.query_tile_origin(self.boxes.call, self.item)

    @property
    def keys(self) -> gpu.TileOrigin:
        head, _ = divided(self.item.head, self.boxes.call.group_heads)
        return _key_tile_origin(self.boxes, self.item.batch, head, self.first)


class Owned(NamedTuple):
    """A query tile or key tile that a work item owns.

    Attributes:
        item: The work item.
        origin: Position of the tile in its array.
        count: Number of pairs of the owned tile and a visited tile.
        pair: Function that returns the pair with a given number.
    """

    item: Item
    origin: gpu.TileOrigin
    count: Scalar
    pair: Callable[[Scalar], Pair]


def owned_queries(call: Call, number: Scalar, tables: Sequence[Any]) -> Owned:
    """Return the query tile that an item owns, paired with the boxes of keys that the tile visits."""
    item = call.item(number)
    boxes = Boxes.for_item(call, item, tables)
    origin = gpu.query_tile_origin(call, item)
    return Owned(item, origin, boxes.count, lambda pair: Pair(boxes, item, boxes.first(pair)))


def owned_keys(call: Call, number: Scalar, tables: Sequence[Any]) -> Owned:
    """Return the key tile that an item owns, paired with the query tiles that visit it, in order of query heads."""
    item = call.item(number, owns_keys=True)
    box_tables, tile_tables = tables[:KERNEL_RANK], tables[KERNEL_RANK:]
    first_key = [t * extent for t, extent in zip(item.tile, call.box, strict=True)]
    # All query tiles of a dilation group visit keys of the same dilation group. Therefore, read the group of the keys
    # from the row of query tile 0.
    boxes = Boxes.for_item(call, item._replace(tile=(0,) * KERNEL_RANK), box_tables)
    origin = _key_tile_origin(boxes, item.batch, item.head, first_key)
    firsts, counts = zip(*call.visitors(tile_tables, item.group, item.tile), strict=True)
    tiles_of_head = math.prod(counts[1:], start=counts[0])

    def pair(number: Scalar) -> Pair:
        head, rest = divided(number, tiles_of_head)
        tile = [first + each for first, each in zip(firsts, unravel(rest, counts), strict=True)]
        queries = Item(item.batch, item.head * call.group_heads + head, item.group, tile)
        return Pair(Boxes.for_item(call, queries, box_tables), queries, first_key)

    return Owned(item, origin, tiles_of_head * call.group_heads, pair)


def _key_tile_origin(boxes: Boxes, batch: Scalar, head: Scalar, first: Sequence[Scalar]) -> gpu.TileOrigin:
    """Return the position of the box of keys that begins at ``first``, in the dilation group of ``boxes``."""
    return gpu.TileOrigin(batch, boxes.groups, first, boxes.call.keys.column(boxes.groups[-1], head))


# Memory --------------------------------------------------------------------------------------------------------------


def backward_memory(call: Call, dtype: Any, slots: int, *, owns_keys: bool) -> dict[str, Any]:
    """Return the shared memory, tensor memory and barriers of a thread block, by name.

    A work item owns a query tile, or owns a key tile if ``owns_keys`` is True. In shared memory, each array of
    owned tiles has one slot, and each array of visited tiles has ``slots`` slots.

    Memory:

    - ``query``, ``out_gradient``: Shared memory, ``[1 or slots, blocks, rows, block]``. Queries and output cotangents.
    - ``key``, ``value``: Shared memory, ``[1 or slots, blocks, keys, block]``.
    - ``logits``: Tensor memory. Products of queries and keys.
    - ``products``: Tensor memory. Products of output cotangents and values.
    - ``gradients``: Rounded gradients of logits; in tensor memory if queries are owned, otherwise in shared memory.
    - ``weights``: Shared memory. Only if keys are owned.
    - ``sums``: Tensor memory. Gradients of the owned queries, or of the owned keys and values.

    Barriers, with the event that each signals:

    - ``owned_is_in``: the owned tiles have been copied to shared memory.
    - ``owned_is_out``: the results have been copied from the shared memory of the owned tiles.
    - ``visited_is_in``, per slot: the visited tiles have been copied to shared memory.
    - ``other_is_out``, per slot: the products with the visited tiles are complete.
    - ``logits_are_in``: ``logits`` and ``products`` are complete.
    - ``gradients_are_in``: ``gradients`` and ``weights`` are complete, and ``logits`` and ``products`` have been read.
    - ``gradients_are_out``: the products with ``gradients`` and ``weights`` are complete, so that the next pair can
      overwrite these matrices.
    - ``sums_are_in``: all products of the item are complete.
    """
    lines = call.queries
    query_copies, key_copies = (2 * shape[0] * shape[1] * lines.blocks for shape in (call.half_tile, call.box))
    query_slots, key_slots = (slots, 1) if owns_keys else (1, slots)
    copies = (key_copies, query_copies) if owns_keys else (query_copies, key_copies)
    matrix = plgpu.TMEM((ROWS, KEYS), jnp.float32)
    shared = gpu.shared_matrix((ROWS, KEYS), dtype, _TRANSPOSED)
    return {
        "query": gpu.tile_buffers(lines, query_slots, ROWS, dtype),
        "out_gradient": gpu.tile_buffers(lines, query_slots, ROWS, dtype),
        "key": gpu.tile_buffers(lines, key_slots, KEYS, dtype),
        "value": gpu.tile_buffers(lines, key_slots, KEYS, dtype),
        "logits": matrix,
        "products": matrix,
        "sums": [plgpu.TMEM((ROWS, lines.width), jnp.float32)] * (2 if owns_keys else 1),
        "owned_is_in": gpu.barriers(1, copies[0]),
        "owned_is_out": gpu.barriers(1, HALVES),
        "visited_is_in": gpu.barriers(slots, copies[1]),
        "other_is_out": gpu.barriers(slots, for_products=True),
        "logits_are_in": gpu.barriers(1, for_products=True),
        "gradients_are_in": gpu.barriers(1, HALVES, for_products=True),
        "gradients_are_out": gpu.barriers(1, for_products=True),
        "sums_are_in": gpu.barriers(1, for_products=True),
        "gradients": shared if owns_keys else plgpu.TMEM((ROWS, KEYS), dtype, packed=True),
        **({"weights": shared} if owns_keys else {}),
    }


# Blocks --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BackwardBlock:
    """A thread block of a backward kernel.

    The documentation of :func:`natten_jax.backends.pallas._blackwell_memory.launch` describes the methods.

    Attributes:
        call: The call.
        slots: Number of slots in shared memory for visited tiles.
        owns_keys: True if items own keys and values, False if they own queries.
        memory: References to the memory and barriers of :func:`backward_memory`.
        results: References to the results. If keys are owned, these are the gradients of keys and of values. If queries
            are owned, the first result is the query gradients. A second result, ``[items, HALVES, queries]``, exists
            only if the scale is an array. Its elements are sums over keys of the unscaled logit times the logit
            gradient. Each half of the columns has a separate sum.
        arrays: References to queries, output cotangents, keys and values.
        bounds: References to the arrays of :meth:`Call.bounds`.
        statistics: Reference to query statistics, ``[items, STATISTICS, queries]``.
        logit_scales: Reference to the scales of the logits in base 2, one per batch entry and query head.
        tables: References to the box tables and, if keys are owned, to the tables of query tiles.
        factors: Reference to one factor per batch entry and query head, which multiplies logit gradients in the
            key/value gradient kernel (:func:`_split_scale`); ``None`` if all factors are 1.
        result_scales: Reference to one factor per batch entry and owned head, which multiplies query or key gradients.
    """

    call: Call
    slots: int
    owns_keys: bool
    memory: Any
    results: Sequence[Any]
    arrays: Sequence[Any]
    bounds: Sequence[Any]
    statistics: Any
    logit_scales: Any
    tables: Sequence[Any]
    factors: Any
    result_scales: Any

    def _slot(self, number: Scalar) -> Scalar:
        """Return the slot of a pair, given the number of the pair.

        A thread block numbers the pairs of all its items consecutively.
        """
        return jax.lax.rem(number, self.slots)

    def _owned(self, number: Scalar) -> Owned:
        return (owned_keys if self.owns_keys else owned_queries)(self.call, number, self.tables)

    def load(self, number: Scalar, state: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
        """Start copies of the tiles that an item owns, and of the tiles that it visits."""
        owned, (items, before) = self._owned(number), state
        memory = self.memory
        gpu.wait_if(items > 0, memory.owned_is_out)
        copies = self._copy_queries, self._copy_keys
        copy_owned, copy_other = reversed(copies) if self.owns_keys else copies
        copy_owned(owned.origin, 0, memory.owned_is_in)

        def load(number: Scalar, none: None) -> None:
            slot, pair = self._slot(before + number), owned.pair(number)
            gpu.wait_if(before + number >= self.slots, memory.other_is_out.at[slot])
            copy_other(pair.queries if self.owns_keys else pair.keys, slot, memory.visited_is_in.at[slot])

        jax.lax.fori_loop(0, owned.count, load, None)
        return items + 1, before + owned.count

    def _copy_queries(self, origin: gpu.TileOrigin, slot: Scalar, barrier: Any) -> None:
        for source, tiles in zip(self.arrays[:2], (self.memory.query, self.memory.out_gradient), strict=True):
            gpu.copy_in(self.call.queries, self.call.half_tile, origin, source, tiles.at[slot], barrier)

    def _copy_keys(self, origin: gpu.TileOrigin, slot: Scalar, barrier: Any) -> None:
        for source, tiles in zip(self.arrays[2:], (self.memory.key, self.memory.value), strict=True):
            gpu.copy_in(self.call.keys, self.call.box, origin, source, tiles.at[slot], barrier)

    def drain(self, state: Sequence[Scalar]) -> None:
        """Wait until the last products and copies of the thread block are complete."""
        items, loaded = state
        gpu.drain([self.memory.other_is_out], loaded, self.slots)
        gpu.wait_if(items > 0, self.memory.owned_is_out)

    def multiply(self, number: Scalar, before: Scalar) -> Scalar:
        """Issue the matrix products of an item.

        If there are two slots, the products for the logits of the next pair precede the products that update the sums
        for this pair.
        """
        owned, memory = self._owned(number), self.memory
        count = owned.count

        def begin(number: Scalar) -> None:
            slot = self._slot(before + number)
            gpu.wait(memory.visited_is_in.at[slot])
            self._multiply_logits(*((slot, 0) if self.owns_keys else (0, slot)))

        def finish(number: Scalar) -> None:
            slot = self._slot(before + number)
            products = [(memory.gradients, memory.key)]
            if self.owns_keys:
                products = [(memory.gradients.T, memory.query), (memory.weights.T, memory.out_gradient)]
            for sums, (matrix, tiles) in zip(memory.sums, products, strict=True):
                gpu.add_product(self.call.queries, sums, matrix, tiles.at[slot], number > 0)
            plgpu.tcgen05_commit_arrive(memory.gradients_are_out)
            plgpu.tcgen05_commit_arrive(memory.other_is_out.at[slot])

        gpu.wait(memory.owned_is_in)
        pl.when(count > 0)(lambda: begin(0))

        def step(number: Scalar, none: None) -> None:
            gpu.wait(memory.gradients_are_in)
            if self.slots == 1:
                finish(number)
            pl.when(number + 1 < count)(lambda: begin(number + 1))
            if self.slots > 1:
                finish(number)

        jax.lax.fori_loop(0, count, step, None)
        # Arrive at the barrier even if the item visits no tile. The warpgroups wait for this barrier before the results
        # overwrite the owned tiles. The wait ensures that the copies of these tiles are complete.
        plgpu.tcgen05_commit_arrive(memory.sums_are_in)
        return before + count

    def _multiply_logits(self, query_slot: Scalar, key_slot: Scalar) -> None:
        """Issue two products, ``[queries, keys]`` each: queries by keys, and output cotangents by values."""
        lines, memory = self.call.queries, self.memory
        gpu.multiply_tiles(lines, memory.logits, memory.query.at[query_slot], memory.key.at[key_slot])
        gpu.multiply_tiles(lines, memory.products, memory.out_gradient.at[query_slot], memory.value.at[key_slot])
        plgpu.tcgen05_commit_arrive(memory.logits_are_in)

    def weigh(self, half: int, number: Scalar) -> None:
        """Compute the weights and logit gradients of an item in half of the columns, and write half of the results."""
        owned = self._owned(number)
        compute, lines = self._compute_query_gradients, self.call.queries
        if self.owns_keys:
            compute, lines = self._compute_key_gradients, self.call.keys
        compute(half, owned, self.result_scales[owned.item.batch * lines.heads + owned.item.head])
        # After the results have been copied from shared memory, the next item can overwrite this memory.
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.memory.owned_is_out)

    def _compute_query_gradients(self, half: int, owned: Owned, scale: Scalar) -> None:
        """Compute the gradients of a query tile; multiply the sums over boxes by ``scale``."""
        call, memory = self.call, self.memory
        rows = self._rows(owned.item)
        has_sums = len(self.results) > 1

        def step(number: Scalar, sums: jax.Array) -> jax.Array:
            logits, _, gradients = self._logit_gradients(half, owned.pair(number), rows)
            self._wait_for_free_slot(number)
            plgpu.async_store_tmem(memory.gradients.at[:, _half_columns(half)], gradients.astype(memory.query.dtype))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(memory.gradients_are_in)
            return sums + jnp.sum(logits * gradients, axis=1) if has_sums else sums

        sums = jax.lax.fori_loop(0, owned.count, step, gpu.every_row(0.0))
        self._write(half, owned, [(memory.sums[0], scale, memory.query, self.results[0])])
        if has_sums:
            plgpu.store(self.results[1].at[call.number(owned.item), half], sums, optimized=False)

    def _compute_key_gradients(self, half: int, owned: Owned, scale: Scalar) -> None:
        """Compute the gradients of a tile of keys and values; multiply the sums of the key gradients by ``scale``."""
        memory = self.memory

        def step(number: Scalar, none: None) -> None:
            pair = owned.pair(number)
            _, weights, gradients = self._logit_gradients(half, pair, self._rows(pair.item))
            if self.factors is not None:
                gradients *= self.factors[self._head(pair.item)]
            self._wait_for_free_slot(number)
            for matrix, numbers in ((memory.weights, weights), (memory.gradients, gradients)):
                plgpu.store(matrix.at[:, _half_columns(half)], numbers.astype(memory.query.dtype), optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.gradients_are_in)

        jax.lax.fori_loop(0, owned.count, step, None)
        (key_sums, value_sums), (keys, values) = memory.sums, self.results
        self._write(half, owned, [(key_sums, scale, memory.key, keys), (value_sums, None, memory.value, values)])

    def _head(self, item: Item) -> Scalar:
        """Return the index of an item's query head among the query heads of all batch entries."""
        return item.batch * self.call.queries.heads + item.head

    def _rows(self, item: Item) -> tuple[gpu.Windows, Sequence[jax.Array], Scalar]:
        """Read the windows and statistics of the queries of a tile, and the scale of their logits in base 2."""
        number = self.call.number(item)
        statistics = [gpu.load_row(self.statistics, number, index, 0) for index in range(STATISTICS)]
        return gpu.windows_of(self.call, item, 0, self.bounds), statistics, self.logit_scales[self._head(item)]

    def _logit_gradients(self, half: int, pair: Pair, rows: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return unscaled logits, weights, and gradients of the scaled logits, for half of the columns of a pair."""
        memory, (windows, statistics, scale) = self.memory, rows
        gpu.wait(memory.logits_are_in)
        matrices = (matrix.at[:, _half_columns(half)] for matrix in (memory.logits, memory.products))
        logits, products = (plgpu.async_load_tmem(matrix, layout=gpu.BY_ROWS) for matrix in matrices)
        plgpu.wait_load_tmem()
        scaled = gpu.mask(pair.boxes, logits * scale, pair.first, windows, half * _COLUMNS)
        logsumexp, remainder, delta = (gpu.columns(numbers, _COLUMNS) for numbers in statistics)
        weights = jnp.exp2((scaled - logsumexp) - remainder)
        return logits, weights, weights * (products - delta)

    def _wait_for_free_slot(self, number: Scalar) -> None:
        """Wait until products have read the weights and gradients of the previous pair, if there is one.

        Pair ``number`` can then overwrite them.
        """
        gpu.wait_if(number > 0, self.memory.gradients_are_out)

    def _write(self, half: int, owned: Owned, sums: Sequence[tuple[Any, Scalar | None, Any, Any]]) -> None:
        """Multiply sums by factors, and start to copy the products to the results.

        The copies read shared memory, in which the products overwrite the owned tiles. The two warpgroups process
        alternate blocks of the head dimension.

        Args:
            half: Index of the warpgroup.
            owned: The tile that the item owns.
            sums: A list with a tuple per result: a reference to the sums in tensor memory, an optional factor, a
                reference to the owned tile in shared memory, and a reference to the result.
        """
        call = self.call
        lines, shape = (call.keys, call.box) if self.owns_keys else (call.queries, call.half_tile)
        self._wait_for_free_slot(owned.count)  # also after the last pair, because each barrier phase needs one wait
        gpu.wait(self.memory.sums_are_in)
        parts = [(*each, block) for each in sums for block in range(lines.blocks)][half::HALVES]
        for numbers, factor, tiles, _, block in parts:
            part = gpu.load_matrix(numbers.at[:, pl.ds(block * lines.block, lines.block)])
            part = part if factor is None else part * factor
            part = jax.lax.cond(owned.count > 0, lambda part: part, jnp.zeros_like, part)
            plgpu.store(tiles.at[0, block], part.astype(tiles.dtype), optimized=False)
        plgpu.commit_smem()
        for _, _, tiles, result, block in parts:
            gpu.copy_out(lines, shape, owned.origin, {block: tiles.at[0, block]}, result)


def _half_columns(half: int) -> Any:
    return pl.ds(half * _COLUMNS, _COLUMNS)
