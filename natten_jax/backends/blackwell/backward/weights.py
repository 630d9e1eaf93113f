"""A warpgroup of which each thread owns a row of logits: weights, and gradients of logits, from what was saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.backward.items import Owned, OwnedKeys, OwnedQueries, Pair
from natten_jax.backends.blackwell.backward.memory import Memory
from natten_jax.backends.blackwell.call import KEYS, Call, Item, Scalar
from natten_jax.backends.blackwell.copies import copy_out
from natten_jax.backends.blackwell.layout import Lines
from natten_jax.backends.blackwell.masks import BY_ROWS, Windows, columns, every_row, hide, load_row, windows_of
from natten_jax.backends.blackwell.memory import wait, wait_if

#: Numbers of queries.
LOGSUMEXP, REMAINDER, DELTA = range(3)
STATISTICS = 3
#: Columns of logits that are in registers at a time, beside as many products.
_AT_A_TIME = 64


class Tables(NamedTuple):
    """References to what is known of queries, in device memory.

    Attributes:
        bounds: Of windows, along each dimension.
        statistics: ``[items, STATISTICS, queries]``.
        scales: Factors of the logits, in base 2, of each batch entry and head.
        factors: Of each batch entry and head: what gradients of keys are multiplied by before they are summed over the
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


def query_gradients(
    call: Call, memory: Memory, owned: OwnedQueries, tables: Tables, scale: Scalar, results: Sequence[Any]
) -> None:
    """Work out the gradients of a tile of queries.

    Args:
        call: What runs.
        memory: Where logits are.
        owned: The tile.
        tables: What is known of queries.
        scale: What they are multiplied by.
        results: References to the gradients, and to sums of products of logits and their gradients,
            ``[items, 1, queries]``, where the scale is an array.
    """
    rows = Rows.of(call, owned.item, tables)
    has_sums = len(results) > 1

    def step(number: Scalar, sums: jax.Array) -> jax.Array:
        for part, logits, _, gradients in _parts(call, memory, owned.pair(number), rows, number):
            plgpu.async_store_tmem(memory.gradients.at[:, part], gradients.astype(memory.query.dtype))
            sums = sums + jnp.sum(logits * gradients, axis=1) if has_sums else sums
        plgpu.commit_tmem()
        plgpu.barrier_arrive(memory.gradients_are_in)
        return sums

    sums = jax.lax.fori_loop(0, owned.count, step, every_row(0.0))
    _wait_for_sums(memory, owned)
    tile = memory.query.at[0]
    _put(call.queries, memory.sums[0], scale, owned.count, tile)
    plgpu.commit_smem()
    copy_out(call.queries, call.query_pieces, owned.place, tile, results[0])
    if has_sums:
        plgpu.store(results[1].at[call.number(owned.item), 0], sums, optimized=False)
    _leave(memory)


def key_gradients(
    call: Call, memory: Memory, owned: OwnedKeys, tables: Tables, scale: Scalar, results: Sequence[Any]
) -> None:
    """Work out the gradients of a tile of keys and of values.

    Args:
        call: What runs.
        memory: Where logits are.
        owned: The tile.
        tables: What is known of queries.
        scale: What gradients of keys are multiplied by in the end.
        results: References to the gradients of keys, and of values.
    """

    def step(number: Scalar, none: None) -> None:
        pair = owned.pair(number)
        rows = Rows.of(call, pair.item, tables)
        for part, _, weights, gradients in _parts(call, memory, pair, rows, number):
            if rows.factor is not None:
                gradients *= rows.factor
            for matrix, numbers in ((memory.weights, weights), (memory.gradients, gradients)):
                plgpu.store(matrix.at[:, part], numbers.astype(memory.query.dtype), optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.gradients_are_in)

    jax.lax.fori_loop(0, owned.count, step, None)
    _wait_for_sums(memory, owned)
    tiles = memory.key.at[0], memory.value.at[0]
    for sums, factor, tile in zip(memory.sums, (scale, None), tiles, strict=True):
        _put(call.keys, sums, factor, owned.count, tile)
    plgpu.commit_smem()
    for tile, result in zip(tiles, results, strict=True):
        copy_out(call.keys, call.key_pieces, owned.place, tile, result)
    _leave(memory)


def _parts(
    call: Call, memory: Memory, pair: Pair, rows: Rows, number: Scalar
) -> Iterator[tuple[Any, jax.Array, jax.Array, jax.Array]]:
    """Columns of a pair, and of them products of queries and keys, weights, and gradients of logits."""
    wait(memory.logits_are_in)
    wait_if(number > 0, memory.gradients_are_out)
    is_full = pair.is_full
    logsumexp, remainder, delta = (columns(numbers, _AT_A_TIME) for numbers in rows.statistics)
    for first in range(0, KEYS, _AT_A_TIME):
        part = pl.ds(first, _AT_A_TIME)
        logits = plgpu.async_load_tmem(memory.logits.at[:, part], layout=BY_ROWS)
        products = plgpu.async_load_tmem(memory.products.at[:, part], layout=BY_ROWS)
        plgpu.wait_load_tmem()
        scaled = jax.lax.cond(
            is_full,
            lambda scaled: scaled,
            functools.partial(_hide, call, pair, rows, first),
            logits * rows.scale,
        )
        weights = jnp.exp2((scaled - logsumexp) - remainder)
        yield part, logits, weights, weights * (products - delta)


def _hide(call: Call, pair: Pair, rows: Rows, first_column: int, logits: jax.Array) -> jax.Array:
    return hide(call, logits, pair.first, rows.windows, first_column)


def _wait_for_sums(memory: Memory, owned: Owned) -> None:
    wait_if(owned.count > 0, memory.gradients_are_out)  # of the last pair: each phase is waited for once
    wait(memory.sums_are_in)


def _put(lines: Lines, sums: Any, factor: Scalar | None, count: Scalar, tile: Any) -> None:
    """Sums of so many pairs, multiplied by a factor, in the place of a tile of tokens."""
    for block in range(lines.blocks):
        numbers = plgpu.async_load_tmem(sums.at[:, pl.ds(block * lines.block, lines.block)], layout=BY_ROWS)
        plgpu.wait_load_tmem()
        numbers = numbers if factor is None else numbers * factor
        numbers = jax.lax.cond(count > 0, lambda numbers: numbers, jnp.zeros_like, numbers)
        plgpu.store(tile.at[block], numbers.astype(tile.dtype), optimized=False)


def _leave(memory: Memory) -> None:
    """Let the place of the results be overwritten, when they have left it."""
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(memory.owned_is_out)
