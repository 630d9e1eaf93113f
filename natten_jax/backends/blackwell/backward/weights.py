"""Weights, and gradients of logits, from what was saved.

Two warpgroups have a half of the columns each, and each thread of one a row of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.backward.items import Owned, OwnedKeys, OwnedQueries, Pair
from natten_jax.backends.blackwell.backward.memory import HALVES, Memory
from natten_jax.backends.blackwell.call import KEYS, Call, Item, Pieces, Scalar
from natten_jax.backends.blackwell.copies import copy_out
from natten_jax.backends.blackwell.layout import Lines
from natten_jax.backends.blackwell.masks import BY_ROWS, Windows, columns, every_row, hide, load_row, windows_of
from natten_jax.backends.blackwell.memory import wait, wait_if

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
