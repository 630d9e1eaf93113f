"""The kernels of the backward pass, and how their results become gradients.

A block has three warpgroups: each thread of two owns half a row of logits; of the third, one warp copies tiles, and one
issues products. Blocks take one item after another. Sums go over pairs in an order that is always the same.
"""

from __future__ import annotations

import abc
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
from natten_jax.arrays.remainders import LOG2_E, base2_parts
from natten_jax.backends.ffi import delta
from natten_jax.backends.pallas._blackwell_call import (
    KEYS,
    ROWS,
    Boxes,
    Call,
    Item,
    Lines,
    Pieces,
    Scalar,
    blocks_of,
    call_of,
    column_of,
    divided,
)
from natten_jax.backends.pallas._blackwell_memory import (
    BY_ROWS,
    REGISTERS_OF_OTHERS,
    REGISTERS_OF_ROWS,
    Place,
    Windows,
    barriers,
    columns,
    copy_in,
    copy_out,
    every_row,
    hide,
    load_row,
    tile_buffers,
    wait,
    wait_if,
    wait_until_free,
    windows_of,
)
from natten_jax.backends.pallas._common import finite_scale
from natten_jax.native.module import KERNEL_RANK
from natten_jax.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tile of queries, and a box of keys.

    Attributes:
        boxes: Those that the queries see.
        item: The tile of queries.
        first: First key of the box along each dimension.
    """

    boxes: Boxes
    item: Item
    first: Sequence[Scalar]

    @property
    def call(self) -> Call:
        """What runs."""
        return self.boxes.call

    @property
    def queries(self) -> Place:
        """Where the queries lie."""
        return queries_place(self.call, self.item)

    @property
    def keys(self) -> Place:
        """Where the keys lie."""
        head, _ = divided(self.item.head, self.call.group_heads)
        return keys_place(self.boxes, self.item.batch, head, self.first)

    @property
    def is_full(self) -> Scalar:
        """Whether all queries see all keys."""
        return self.boxes.is_full(self.first)


class Owned(abc.ABC):
    """What an item owns, and the pairs that it goes over.

    Attributes:
        place: Where it lies.
        count: How many pairs there are.
    """

    place: Place
    count: Scalar

    @abc.abstractmethod
    def pair(self, number: Scalar) -> Pair:
        """One of them."""


class OwnedQueries(Owned):
    """A tile of queries, which goes over the boxes of keys that it sees."""

    def __init__(self, call: Call, number: Scalar, tables: Sequence[Any]) -> None:
        self.item = call.item(number)
        self._boxes = Boxes.of(call, self.item, tables)
        self.place = queries_place(call, self.item)
        self.count = self._boxes.count

    def pair(self, number: Scalar) -> Pair:
        return Pair(self._boxes, self.item, self._boxes.first(number))


class OwnedKeys(Owned):
    """A tile of keys, which goes over the tiles of queries that see it, one query head after the other."""

    def __init__(self, call: Call, number: Scalar, tables: Sequence[Any]) -> None:
        self._call, self._item = call, call.key_item(number)
        self._boxes, seeing = tables[:KERNEL_RANK], tables[KERNEL_RANK:]
        self._first = [t * extent for t, extent in zip(self._item.tile, call.key_pieces.tile, strict=True)]
        # All tiles of queries of a group know the group of its keys.
        any_tile = dataclasses.replace(self._item, tile=(0,) * KERNEL_RANK)
        boxes = Boxes.of(call, any_tile, self._boxes)
        self.place = keys_place(boxes, self._item.batch, self._item.head, self._first)
        rows = [g * n + t for g, t, n in zip(self._item.group, self._item.tile, call.kv_tiles, strict=True)]
        self._firsts, self._counts = (
            [table[row * 2 + column] for table, row in zip(seeing, rows, strict=True)] for column in (0, 1)
        )
        self._of_head = functools.reduce(lambda so_far, n: so_far * n, self._counts)
        self.count = self._of_head * call.group_heads

    def pair(self, number: Scalar) -> Pair:
        head, rest = jax.lax.div(number, self._of_head), jax.lax.rem(number, self._of_head)
        _, y, z = self._counts
        rest, at_z = jax.lax.div(rest, z), jax.lax.rem(rest, z)
        at = jax.lax.div(rest, y), jax.lax.rem(rest, y), at_z
        tile = [first + each for first, each in zip(self._firsts, at, strict=True)]
        item = Item(self._item.batch, self._item.head * self._call.group_heads + head, self._item.group, tile)
        return Pair(Boxes.of(self._call, item, self._boxes), item, self._first)


def queries_place(call: Call, item: Item) -> Place:
    """Where a tile of queries lies."""
    first = [tile * extent for tile, extent in zip(item.tile, call.q_tile, strict=True)]
    return Place(item.batch, item.group, first, column_of(call.queries, item.group[-1], item.head))


def keys_place(boxes: Boxes, batch: Scalar, head: Scalar, first: Sequence[Scalar]) -> Place:
    """Where a box of keys lies, from others of its group."""
    return Place(batch, boxes.groups, first, column_of(boxes.call.keys, boxes.groups[-1], head))


#: Warpgroups that share a matrix of logits, a half of its columns each.
HALVES = 2


@dataclasses.dataclass(frozen=True)
class Memory:
    """References to it. Of queries and of keys one kind is owned, in one slot; pairs bring others to the other's slots.

    Attributes:
        query: ``[slots, blocks, rows, block]``.
        out_gradient: Cotangents of the output, likewise.
        key: ``[slots, blocks, keys, block]``.
        value: Likewise.
        logits: In tensor memory.
        products: In tensor memory: products of the output's cotangents with values.
        gradients: Those of the logits, rounded: in tensor memory where queries are owned, or in shared memory.
        weights: In shared memory, where keys are owned.
        sums: In tensor memory: gradients of what is owned; of keys, and of values.
        owned_is_in: The tiles that are owned have been copied.
        owned_is_out: Their place may be overwritten, as the results have left it.
        other_is_in: For each slot: the others have been copied.
        other_is_out: For each slot: products with them are done.
        logits_are_in: Logits and products are there.
        gradients_are_in: Gradients, and weights, are there; logits and products are read.
        gradients_are_out: The products with them are done, so that others may take their place.
        sums_are_in: The last product is done, if there was any.
    """

    query: Any
    out_gradient: Any
    key: Any
    value: Any
    logits: Any
    products: Any
    gradients: Any
    sums: Any
    owned_is_in: Any
    owned_is_out: Any
    other_is_in: Any
    other_is_out: Any
    logits_are_in: Any
    gradients_are_in: Any
    gradients_are_out: Any
    sums_are_in: Any
    weights: Any = None

    @staticmethod
    def types(call: Call, dtype: Any, *, owns_keys: bool) -> dict[str, Any]:
        """What to allocate, by attribute."""
        lines, slots = call.queries, slots_of(call, owns_keys=owns_keys)
        width = lines.blocks * lines.block
        of_queries, of_keys = (2 * pieces.count * lines.blocks for pieces in (call.query_pieces, call.key_pieces))
        query_slots, key_slots = (slots, 1) if owns_keys else (1, slots)
        copies = (of_keys, of_queries) if owns_keys else (of_queries, of_keys)
        matrix = plgpu.TMEM((ROWS, KEYS), jnp.float32)
        types = {
            "query": tile_buffers(lines, query_slots, ROWS, dtype),
            "out_gradient": tile_buffers(lines, query_slots, ROWS, dtype),
            "key": tile_buffers(lines, key_slots, KEYS, dtype),
            "value": tile_buffers(lines, key_slots, KEYS, dtype),
            "logits": matrix,
            "products": matrix,
            "sums": [plgpu.TMEM((ROWS, width), jnp.float32) for _ in range(2 if owns_keys else 1)],
            "owned_is_in": barriers(1, copies[0]),
            "owned_is_out": barriers(1, HALVES),
            "other_is_in": barriers(slots, copies[1]),
            "other_is_out": barriers(slots, of_products=True),
            "logits_are_in": barriers(1, of_products=True),
            "gradients_are_in": barriers(1, HALVES, of_products=True),
            "gradients_are_out": barriers(1, of_products=True),
            "sums_are_in": barriers(1, of_products=True),
        }
        if not owns_keys:
            return {**types, "gradients": plgpu.TMEM((ROWS, KEYS), dtype, packed=True)}
        layout = plgpu.TilingTransform((8, TRANSPOSED)), plgpu.SwizzleTransform(TRANSPOSED * jnp.dtype(dtype).itemsize)
        shared = plgpu.SMEM((ROWS, KEYS), dtype, transforms=layout)
        return {**types, "gradients": shared, "weights": shared}


#: Columns of a tile of what the matrix units transpose.
TRANSPOSED = 64
#: Most elements of a head whose tiles of queries and cotangents have two slots beside keys, values, and two matrices.
_WIDEST_OF_TWO = 64


def slots_of(call: Call, *, owns_keys: bool) -> int:
    """How many tiles of what is not owned are in shared memory at a time."""
    return 1 if owns_keys and call.queries.width > _WIDEST_OF_TWO else 2


def slot_of(call: Call, number: Any, *, owns_keys: bool) -> Any:
    """The slot of what a pair brings; pairs are counted over all items of a block."""
    return jax.lax.rem(number, slots_of(call, owns_keys=owns_keys))


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
        wait_until_free(memory.other_is_out.at[slot], before + number, slots)
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


#: Numbers of queries.
LOGSUMEXP, REMAINDER, DELTA = range(3)
STATISTICS = 3
#: Columns of logits that a warpgroup has, beside as many products.
_COLUMNS = KEYS // HALVES


class Tables(NamedTuple):
    """References to what is known of queries, in device memory.

    Attributes:
        bounds: The bounds of windows, along each dimension.
        statistics: ``[items, STATISTICS, queries]``.
        scales: Factors of the logits, in base 2, of each batch entry and head.
        factors: For each batch entry and head, what gradients of keys are multiplied by before they are summed over the
            query heads of a key head; ``None`` where it is 1.
    """

    bounds: Sequence[Any]
    statistics: Any
    scales: Any
    factors: Any = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a warpgroup knows of a tile of queries, a number in each row."""

    windows: Windows
    statistics: Sequence[jax.Array]
    scale: Scalar
    factor: Scalar | None

    @classmethod
    def of(cls, call: Call, item: Item, tables: Tables) -> Rows:
        """Those of a tile."""
        number, head = call.number(item), item.batch * call.queries.heads + item.head
        statistics = [load_row(tables.statistics, number, index, 0) for index in range(STATISTICS)]
        factor = None if tables.factors is None else tables.factors[head]
        return cls(windows_of(call, item, 0, tables.bounds), statistics, tables.scales[head], factor)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """One of the two that own rows of logits.

    Attributes:
        call: What runs.
        memory: Where logits are.
        half: Which half of the columns it has.
        tables: What is known of queries.
        results: References to the results: for tiles of queries to their gradients, and to sums of products of logits
            and their gradients, ``[items, HALVES, queries]``, where the scale is an array; for tiles of keys to the
            gradients of keys, and of values.
    """

    call: Call
    memory: Memory
    half: int
    tables: Tables
    results: Sequence[Any]

    def query_gradients(self, owned: OwnedQueries, scale: Scalar) -> None:
        """Work out the gradients of a tile of queries, multiplied by ``scale`` in the end."""
        call, memory = self.call, self.memory
        rows = Rows.of(call, owned.item, self.tables)
        has_sums = len(self.results) > 1

        def step(number: Scalar, sums: jax.Array) -> jax.Array:
            logits, _, gradients = self._worked_out(owned.pair(number), rows)
            self._wait_for_place(number)
            plgpu.async_store_tmem(memory.gradients.at[:, self._columns], gradients.astype(memory.query.dtype))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(memory.gradients_are_in)
            return sums + jnp.sum(logits * gradients, axis=1) if has_sums else sums

        sums = jax.lax.fori_loop(0, owned.count, step, every_row(0.0))
        of_queries = memory.sums[0], scale, memory.query, self.results[0]
        self._write(call.queries, call.query_pieces, owned, [of_queries])
        if has_sums:
            plgpu.store(self.results[1].at[call.number(owned.item), self.half], sums, optimized=False)
        self._leave()

    def key_gradients(self, owned: OwnedKeys, scale: Scalar) -> None:
        """Work out the gradients of a tile of keys, multiplied by ``scale`` in the end, and of values."""
        call, memory = self.call, self.memory

        def step(number: Scalar, none: None) -> None:
            pair = owned.pair(number)
            rows = Rows.of(call, pair.item, self.tables)
            _, weights, gradients = self._worked_out(pair, rows)
            if rows.factor is not None:
                gradients *= rows.factor
            self._wait_for_place(number)
            for matrix, numbers in ((memory.weights, weights), (memory.gradients, gradients)):
                plgpu.store(matrix.at[:, self._columns], numbers.astype(memory.query.dtype), optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.gradients_are_in)

        jax.lax.fori_loop(0, owned.count, step, None)
        (of_keys, of_values), (keys, values) = memory.sums, self.results
        sums = [(of_keys, scale, memory.key, keys), (of_values, None, memory.value, values)]
        self._write(call.keys, call.key_pieces, owned, sums)
        self._leave()

    @property
    def _columns(self) -> Any:
        return pl.ds(self.half * _COLUMNS, _COLUMNS)

    def _worked_out(self, pair: Pair, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Products of queries and keys, weights, and gradients of logits, in the columns of a pair."""
        memory = self.memory
        wait(memory.logits_are_in)
        logits, products = (
            plgpu.async_load_tmem(matrix.at[:, self._columns], layout=BY_ROWS)
            for matrix in (memory.logits, memory.products)
        )
        plgpu.wait_load_tmem()
        scaled = jax.lax.cond(
            pair.is_full,
            lambda scaled: scaled,
            lambda scaled: hide(self.call, scaled, pair.first, rows.windows, self.half * _COLUMNS),
            logits * rows.scale,
        )
        logsumexp, remainder, delta = (columns(numbers, _COLUMNS) for numbers in rows.statistics)
        weights = jnp.exp2((scaled - logsumexp) - remainder)
        return logits, weights, weights * (products - delta)

    def _wait_for_place(self, number: Scalar) -> None:
        """Wait for the products with what the pair before has put where a pair's weights and gradients go."""
        wait_if(number > 0, self.memory.gradients_are_out)

    def _write(
        self, lines: Lines, pieces: Pieces, owned: Owned, sums: Sequence[tuple[Any, Scalar | None, Any, Any]]
    ) -> None:
        """Copy sums out, multiplied by factors, by way of the tiles that are owned; warpgroups take blocks in turns.

        Args:
            lines: How the results lie.
            pieces: Their tile.
            owned: Whose they are.
            sums: References to sums, with a factor, and references to a tile and to the result.
        """
        self._wait_for_place(owned.count)  # also where no pair comes: each phase is waited for once
        wait(self.memory.sums_are_in)
        parts = [(*each, block) for each in sums for block in range(lines.blocks)][self.half :: HALVES]
        for numbers, factor, tiles, _, block in parts:
            part = plgpu.async_load_tmem(numbers.at[:, pl.ds(block * lines.block, lines.block)], layout=BY_ROWS)
            plgpu.wait_load_tmem()
            part = part if factor is None else part * factor
            part = jax.lax.cond(owned.count > 0, lambda part: part, jnp.zeros_like, part)
            plgpu.store(tiles.at[0, block], part.astype(tiles.dtype), optimized=False)
        plgpu.commit_smem()
        for _, _, tiles, result, block in parts:
            copy_out(lines, pieces, owned.place, {block: tiles.at[0, block]}, result)

    def _leave(self) -> None:
        """Let the place of the results be overwritten, when they have left it."""
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(self.memory.owned_is_out)


#: Logsumexp in base 2 of queries that see nothing, and of rows that are no queries: their weights are zero.
_NOTHING_SEEN = 1e30
_LOADS, _PRODUCTS = 0, 1  # warps


class _Inputs(NamedTuple):
    """What a kernel reads.

    Attributes:
        arrays: Queries, cotangents of the output, keys and values.
        tables: Tables of boxes, and where keys are owned, of the tiles of queries that see them.
        rows: What is known of queries.
        scales: float32: what gradients of queries, or of keys, are multiplied by in the end, of each of their heads.
    """

    arrays: Sequence[Any]
    tables: Sequence[Any]
    rows: Tables
    scales: Any


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Compute the gradients of the inputs."""
    call, inputs = call_of(plan, operands), operands.inputs
    arrays = [
        call.queries.laid_out(inputs.query),
        call.queries.laid_out(cotangents.out.astype(inputs.query.dtype)),
        call.keys.laid_out(inputs.key),
        call.keys.laid_out(inputs.value),
    ]
    reference, remainder = base2_parts(saved.logsumexp, saved.remainder)
    logsumexp = jnp.where(saved.logsumexp == -jnp.inf, _NOTHING_SEEN, reference)
    statistics = call.in_items([logsumexp, remainder, delta(saved.out, *cotangents)], _NOTHING_SEEN)
    scale = finite_scale(plan.problem.scale, inputs.scale)
    scale = jnp.broadcast_to(scale, (call.queries.batch, call.queries.heads))
    tables = call.arrays()
    boxes, bounds = tables[:KERNEL_RANK], tables[KERNEL_RANK:]
    rows = Tables(bounds, statistics, scale.reshape(-1) * LOG2_E)
    like = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]

    of_query, *sums = _launched(
        call,
        "natten_jax_blackwell_query_gradient",
        call.items,
        OwnedQueries,
        Warpgroup.query_gradients,
        _Inputs(arrays, boxes, rows, scale.reshape(-1)),
        [like[0]] if inputs.scale is None else [like[0], jax.ShapeDtypeStruct((call.items, HALVES, ROWS), jnp.float32)],
    )
    of_key_heads = scale[:, :: call.group_heads]
    if inputs.scale is not None and call.group_heads > 1:
        factors, of_key_heads = _over_query_heads(call, scale)
        rows = rows._replace(factors=factors.reshape(-1))
    of_key, of_value = _launched(
        call,
        "natten_jax_blackwell_key_gradients",
        call.key_items,
        OwnedKeys,
        Warpgroup.key_gradients,
        _Inputs(arrays, [*boxes, *call.seeing()], rows, of_key_heads.reshape(-1)),
        like[2:],
    )
    rank = plan.problem.rank
    of_scale = None
    if sums:
        of_halves = jnp.stack(call.of_queries(sums[0]))
        of_scale = jnp.sum(of_halves, axis=(0, *range(2, 2 + rank)))
    return Gradients(
        call.queries.restored(of_query, rank),
        call.keys.restored(of_key, rank),
        call.keys.restored(of_value, rank),
        scale=of_scale,
    )


def _over_query_heads(call: Call, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales ``[batch, heads]`` as factors of at most 1, and what these are multiplied by, ``[batch, heads_kv]``.

    Gradients of the logits are rounded before they are summed over the query heads of a key head: what they are
    multiplied by before must not make them small.
    """
    groups = scale.reshape(call.keys.batch, call.keys.heads, call.group_heads)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    return groups / jnp.where(largest == 0, 1, largest)[..., None], largest


def _launched(
    call: Call,
    name: str,
    items: int,
    owner: Callable[..., Owned],
    weigh: Callable[..., None],
    inputs: _Inputs,
    results: Sequence[jax.ShapeDtypeStruct],
) -> Sequence[jax.Array]:
    """The results of a kernel.

    Args:
        call: What runs.
        name: Its name.
        items: Its work items.
        owner: What an item owns, of the call, its number, and the tables.
        weigh: What a warpgroup does that owns rows: a method of :class:`Warpgroup`.
        inputs: What it reads.
        results: Shapes and types of the results.
    """
    owns_keys = owner is OwnedKeys
    blocks, items_of_head = blocks_of(items), items // math.prod(inputs.scales.shape)
    leaves, structure = jax.tree.flatten(inputs)

    def kernel(*refs: Any, **scratch: Any) -> None:
        read: _Inputs = jax.tree.unflatten(structure, refs[: len(leaves)])
        written, memory = refs[len(leaves) :], Memory(**scratch)
        block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
        count = jax.lax.div(items - 1 - block, blocks) + 1

        def for_each_item(body: Callable[[Owned, Scalar, Any], Any], state: Any) -> Any:
            """Carry a state over the items of this block."""

            def visit(index: Scalar, state: Any) -> Any:
                number = block + index * blocks
                return body(owner(call, number, read.tables), number, state)

            return jax.lax.fori_loop(0, count, visit, state)

        def weigh_half(half: int) -> None:
            plgpu.set_max_registers(REGISTERS_OF_ROWS, action="increase")
            own = Warpgroup(call, memory, half, read.rows, written)

            def body(owned: Owned, number: Scalar, none: None) -> None:
                scale = read.scales[divided(number, items_of_head)[0]]
                weigh(own, owned, scale)

            for_each_item(body, None)

        for half in range(HALVES):
            pl.when(warpgroup == half)(functools.partial(weigh_half, half))

        @pl.when(warpgroup == HALVES)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS_OF_OTHERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Scalar) -> None:
                @pl.when(warp == _LOADS)
                def _() -> None:
                    def body(owned: Owned, number: Scalar, state: Any) -> Any:
                        return load_item(call, memory, read.arrays, owned, state, owns_keys=owns_keys)

                    state = for_each_item(body, (jnp.int32(0), jnp.int32(0)))
                    drain(call, memory, state, owns_keys=owns_keys)

                @pl.when(warp == _PRODUCTS)
                def _() -> None:
                    def body(owned: Owned, number: Scalar, before: Scalar) -> Scalar:
                        return multiply_item(call, memory, owned, before, owns_keys=owns_keys)

                    for_each_item(body, jnp.int32(0))

    return plgpu.kernel(
        kernel,
        out_type=list(results),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        scratch_types=Memory.types(call, inputs.arrays[0].dtype, owns_keys=owns_keys),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*leaves)
