"""The TPU kernels of the forward and the backward pass.

A program computes the results of one tile, which it *owns*. In the forward kernel and the query gradient kernel, a
program owns a query tile and visits boxes of keys. In the key/value gradient kernel, a program owns a key tile and
visits query tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.arrays.remainders import LOG2_E
from natten_jax.backends.pallas import _tpu_grid as grid
from natten_jax.backends.pallas._common import HIDDEN, SMALLEST_MAXIMUM, STATISTICS, Scalar, divided
from natten_jax.backends.pallas._tpu_call import LANES, Call, unstack_heads
from natten_jax.backends.pallas._tpu_grid import Chunk, GridIndices, KeyBox, QueryMask, contract, query_rows, scale_of
from natten_jax.native.module import KERNEL_RANK

#: Lower bound of softmax denominators. If a query sees no key, its weights sum to 0, and this bound makes its output 0.
_SMALLEST_SUM = 1e-30
#: Number of tables in scalar memory if programs own query tiles: three box tables, and two tables of window bounds,
#: which are for the first two dimensions.
_TABLES = 5
#: Number of tables in scalar memory if programs own key tiles: three box tables, and three tables of the query tiles
#: that visit a key tile.
_KEY_TABLES = 2 * KERNEL_RANK


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and per query the maximum logit and the sum of the weights.

    Logits are ``[rows, keys]``, so that products with values need no transpose. While a tile is processed, each
    statistic is an array ``[rows, LANES]``, with the same number in all lanes of a row.

    Args:
        call: Plan, array layouts and visited boxes of the call.
        query: ``[batch * heads, groups, *lengths, head_dim]``, or packed; see :class:`Layout`.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``, or packed.
        value: ``[batch * heads_kv, groups, *lengths, head_dim_v]``, or packed.
        scale: float32 ``[batch * heads]``, or ``[1]`` if all heads share one scale. Factor on the logits.

    Returns:
        Two arrays. The first one is the output, in the layout of the query. The second one contains, for each row, the
        maximum logit in base 2 and the sum of the weights: ``[batch * leading, blocks, groups, *tiles, 2, rows]``.
    """
    width, together = call.width(value), call.together

    def finish(out: Any, statistics: Any, results: Sequence[Sequence[jax.Array]]) -> None:
        """Write the results of each pack: divide its weighted sum of values by its sum of weights."""
        rows = grid.rows_of_columns([column for maxima, sums, _ in results for column in (maxima, sums)])
        for pack, (_, sums, mix) in enumerate(results):
            inverse = jnp.reciprocal(jnp.maximum(sums, _SMALLEST_SUM))
            mixed = unstack_heads(mix * grid.across(inverse, width), call.pack)
            out[pack] = mixed.reshape(out.shape[1:]).astype(out.dtype)
            statistics[pack] = rows[2 * pack : 2 * pack + 2, :]

    def with_one_chunk(*refs: Any) -> None:
        """Process a query tile that visits at most one chunk of keys. All packs of the program use the same mask."""
        factor, coordinates, last, q, k, v, out, statistics, windows = refs[_TABLES:]
        cell = GridIndices.here()
        mask = QueryMask(call, cell, refs[3:5], coordinates, windows)
        mask.keep_windows(last)
        chunk = Chunk(0, 0, grid.key_boxes(call, cell, refs[:3]))
        hidden = mask.hidden(chunk)
        # Issue the query-key products of all packs first, so that the compiler overlaps their latencies.
        packs, results = range(together), []
        products = [
            contract(call, query_rows(call, q.at[pack]), chunk.read(call, k.at[pack]), (1, 1)) for pack in packs
        ]
        for pack in packs:
            values = chunk.read(call, v.at[pack])
            scaled = products[pack] * (scale_of(call, factor, call.pack_number(cell.head, pack)) * LOG2_E)
            logits = jnp.where(hidden, HIDDEN, scaled)
            maxima = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), SMALLEST_MAXIMUM)
            weights = jnp.exp2(logits - maxima)
            sums = jnp.sum(weights, axis=1, keepdims=True)
            mix = contract(call, weights.astype(values.dtype), values, (1, 0))
            in_all_lanes = [jnp.broadcast_to(column, (call.rows, LANES)) for column in (maxima, sums)]
            results.append((*in_all_lanes, mix))
        finish(out, statistics, results)

    def with_chunks(*refs: Any) -> None:
        """Process a query tile that may visit several chunks of keys. Accumulate its results in scratch memory."""
        factor, coordinates, last, q, k, v, out, statistics, windows, maximum, total, mixed = refs[_TABLES:]
        cell = GridIndices.here()
        mask = QueryMask(call, cell, refs[3:5], coordinates, windows)
        to_base_2 = scale_of(call, factor, cell.head) * LOG2_E

        def add(chunk: Chunk, is_masked: bool) -> None:
            logits = contract(call, query_rows(call, q.at[0]), chunk.read(call, k.at[0]), (1, 1)) * to_base_2
            if is_masked:
                logits = jnp.where(mask.hidden(chunk), HIDDEN, logits)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            weights, change = jnp.exp2(logits - grid.across(now, logits.shape[1])), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=1, keepdims=True)
            values = chunk.read(call, v.at[0])
            mixed[...] = mixed[...] * grid.across(change, width) + contract(
                call, weights.astype(values.dtype), values, (1, 0)
            )

        @pl.when(grid.are_first(cell.step))
        def _() -> None:
            mask.keep_windows(last)
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        grid.visit_keys(call, cell, refs[:3], add)

        @pl.when(grid.are_last(grid.steps(call), cell.step))
        def _() -> None:
            finish(out, statistics, [(maximum[...], total[...], mixed[...])])

    state = [pltpu.VMEM((call.rows, lanes), jnp.float32) for lanes in (LANES, LANES, width)]
    statistics_shape = query.shape[0], call.queries.blocks, *grid.query_grid(call)[1:5], 2, call.rows
    results = grid.pallas_call(
        with_one_chunk if call.is_single else with_chunks,
        "natten_jax_tpu_forward",
        [*grid.query_operands(call, scale), query, key, value],
        tables=_TABLES,
        grid=grid.query_grid(call),
        in_specs=grid.query_specs(call, call.width(query), width),
        out_specs=[grid.query_spec(call, width), grid.rows_spec(call, 2)],
        scratch_shapes=[QueryMask.scratch(call), *([] if call.is_single else state)],
        out_shape=[
            jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype),
            jax.ShapeDtypeStruct(statistics_shape, jnp.float32),
        ],
    )
    return list(results)


def query_gradient(call: Call, arrays: Sequence[jax.Array]) -> jax.Array:
    """Compute the query gradient in float32. The caller multiplies it by the scale.

    Args:
        call: Plan, array layouts and visited boxes of the call.
        arrays: Query, key, value, cotangent of the output, statistics, and scale. The statistics of each row are the
            logsumexp, its remainder, and delta: ``[batch * leading, blocks, groups, *tiles, STATISTICS, rows]``. The
            cotangent has the shape of the output. The other shapes are those of the arguments of :func:`forward`.
    """
    query, _, value, _, _, scale = arrays
    width, width_v = call.width(query), call.width(value)

    def kernel(*refs: Any) -> None:
        factor, coordinates, last, q, k, v, do, stats, dq, windows, query_columns, mixed = refs[_TABLES:]
        cell = GridIndices.here()
        mask = QueryMask(call, cell, refs[3:5], coordinates, windows)

        @pl.when(grid.are_first(cell.step))
        def _() -> None:
            mask.keep_windows(last)
            for index in range(STATISTICS):
                query_columns[index] = grid.columns(stats[0, index : index + 1, :])
            mixed[...] = jnp.zeros_like(mixed)

        def add(chunk: Chunk, is_masked: bool) -> None:
            keys = chunk.read(call, k.at[0])
            logits = contract(call, query_rows(call, q.at[0]), keys, (1, 1))
            logits *= scale_of(call, factor, cell.head) * LOG2_E
            if is_masked:
                logits = jnp.where(mask.hidden(chunk), HIDDEN, logits)
            products = contract(call, query_rows(call, do.at[0]), chunk.read(call, v.at[0]), (1, 1))
            logsumexp, remainder, delta = (grid.across(query_columns[i], logits.shape[1]) for i in range(STATISTICS))
            gradients = _weights(logits, logsumexp, remainder) * (products - delta)
            mixed[...] += contract(call, gradients.astype(keys.dtype), keys, (1, 0))

        grid.visit_keys(call, cell, refs[:3], add)

        @pl.when(grid.are_last(grid.steps(call), cell.step))
        def _() -> None:
            dq[...] = unstack_heads(mixed[...], call.pack).reshape(dq.shape)

    row_specs = [grid.query_spec(call, width_v), grid.rows_spec(call, STATISTICS)]
    state = (STATISTICS, call.rows, LANES), (call.rows, width)
    return grid.pallas_call(
        kernel,
        "natten_jax_tpu_query_gradient",
        [*grid.query_operands(call, scale), *arrays[:-1]],
        tables=_TABLES,
        grid=grid.query_grid(call),
        in_specs=[*grid.query_specs(call, width, width_v), *row_specs],
        out_specs=grid.query_spec(call, width),
        scratch_shapes=[QueryMask.scratch(call), *(pltpu.VMEM(shape, jnp.float32) for shape in state)],
        out_shape=jax.ShapeDtypeStruct(query.shape, jnp.float32),
    )


def _weights(logits: jax.Array, logsumexp: jax.Array, remainder: jax.Array) -> jax.Array:
    """Compute softmax weights from logits in base 2."""
    # The forward pass rounds a logit before it subtracts the maximum, so this function must also round the logit before
    # it subtracts the logsumexp. `jnp.maximum` does not change the logit. Without it, a compiler may fuse the
    # subtraction with the product that computes the logit, and skip the rounding.
    return jnp.exp2(jnp.minimum((jnp.maximum(logits, HIDDEN) - logsumexp) - remainder, 0))


def _query_head(call: Call, cell: GridIndices) -> Scalar:
    """Return the query head or pack that a step processes, if the program owns a key tile.

    The returned index counts the heads or packs of all batch entries.
    """
    heads, heads_kv = call.queries.heads, call.keys.heads
    if heads == heads_kv:
        return cell.head
    batch, head = divided(cell.head, heads_kv)
    return batch * heads + head * (heads // heads_kv) + cell.query_head


def _visitor(call: Call, cell: GridIndices, tables: Sequence[Any]) -> tuple[list[Scalar], Scalar]:
    """Return the query tile of a step, and True if the step visits it.

    A step after the last visited tile returns the last tile, and False.
    """
    tiles, is_step = [], []
    results = call.visitors(tables, call.group_of(cell.group), cell.tile)
    for visits, step, (first, count) in zip(call.visits, cell.step, results, strict=True):
        tiles.append(first + jnp.maximum(jnp.minimum(step, count - 1), 0) if visits.most_tiles > 1 else first)
        is_step.append(step < count)
    return tiles, functools.reduce(jnp.logical_and, is_step)


def key_gradients(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Compute the gradients of keys and values. The arguments are those of :func:`query_gradient`.

    Logits are ``[keys, rows]``, so that products with queries and cotangents need no transpose. The query heads that
    share a key head are processed one after the other, by the same program.
    """
    _, key, value, _, _, scale = arrays
    # A program owns a key tile. For each query head that shares the key head, it has one step per query tile.
    heads = call.queries.heads // call.keys.heads
    steps = [heads, *(max(visits.most_tiles, 1) for visits in call.visits)]
    programs = call.leading // heads * call.queries.blocks, call.groups, *call.keys.grid, *steps
    spec = functools.partial(grid.spec, indices=len(programs), tables=_KEY_TABLES)

    def key_block(cell: GridIndices, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, last = call.block_of(cell.head)
        return (first, call.key_group(cell.group, tables[:KERNEL_RANK]), *cell.tile, last)

    def query_block(cell: GridIndices, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, last = call.block_of(_query_head(call, cell))
        return (first, cell.group, *_visitor(call, cell, tables[KERNEL_RANK:])[0], last)

    def statistics_block(cell: GridIndices, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, *tile, last = query_block(cell, tables)
        return (first, last, *tile, 0, 0)

    def bounds_spec(dim: int) -> pl.BlockSpec:
        def index(cell: GridIndices, tables: Sequence[Any]) -> tuple[Any, ...]:
            return call.group_of(cell.group)[dim], _visitor(call, cell, tables[KERNEL_RANK:])[0][dim], 0, 0

        return spec((None, None, 2, call.rows), index)

    def kernel(*refs: Any) -> None:
        tables, refs = refs[:_KEY_TABLES], refs[_KEY_TABLES:]
        factor, q, k, v, do, stats, *bounds, dk, dv, key_sum, value_sum = refs
        cell = GridIndices.here(len(programs))
        step = cell.query_head, *cell.step

        @pl.when(grid.are_first(step))
        def _() -> None:
            key_sum[...] = jnp.zeros_like(key_sum)
            value_sum[...] = jnp.zeros_like(value_sum)

        def add(is_masked: bool) -> None:
            queries, outs = query_rows(call, q), query_rows(call, do)
            scale_of_head = scale_of(call, factor, _query_head(call, cell), axis=1)
            logits = contract(call, grid.matrix(k), queries, (1, 1)) * (scale_of_head * LOG2_E)
            if is_masked:
                logits = grid.hide_keys(call, logits, firsts, bounds)
            products = contract(call, grid.matrix(v), outs, (1, 1))
            logsumexp, remainder, delta = (stats[i : i + 1, :] for i in range(STATISTICS))
            weights = _weights(logits, logsumexp, remainder)
            gradients = weights * (products - delta)
            if call.pack > 1:
                gradients, scale_of_head = gradients * scale_of_head, 1
            value_sum[...] += contract(call, weights.astype(outs.dtype), outs, (1, 0))
            key_sum[...] += contract(call, gradients.astype(queries.dtype), queries, (1, 0)) * scale_of_head

        firsts = [t * extent for t, extent in zip(cell.tile, call.keys.tile, strict=True)]
        tile, is_step = _visitor(call, cell, tables[KERNEL_RANK:])
        rows = call.rows_of(cell.group, tile, tables[:KERNEL_RANK])
        is_full = grid.sees_all(rows, [KeyBox(first, first) for first in firsts], call.keys.tile)
        pl.when(is_step)(lambda: grid.visit(add, is_full))

        @pl.when(grid.are_last(steps, step))
        def _() -> None:
            dk[...] = key_sum[...].reshape(dk.shape).astype(dk.dtype)
            dv[...] = value_sum[...].reshape(dv.shape).astype(dv.dtype)

    widths = [call.width(array) for array in (key, value)]
    query_specs = [spec((None, None, *call.queries.tile, width), query_block) for width in widths]
    key_specs = [spec((None, None, *call.keys.tile, width), key_block) for width in widths]
    statistics_spec = spec((*(None,) * 6, STATISTICS, call.rows), statistics_block)
    bounds = (visits.bounds_of_tokens(dim, call.queries.tile) for dim, visits in enumerate(call.visits))
    scales = pl.BlockSpec(memory_space=pltpu.SMEM)
    results = grid.pallas_call(
        kernel,
        "natten_jax_tpu_key_gradients",
        [*call.box_tables, *call.tile_tables, scale, *arrays[:-1], *(jnp.tile(each, call.pack) for each in bounds)],
        tables=_KEY_TABLES,
        grid=programs,
        in_specs=[scales, query_specs[0], *key_specs, query_specs[1], statistics_spec, *map(bounds_spec, range(3))],
        out_specs=key_specs,
        scratch_shapes=[pltpu.VMEM((call.keys.tile_tokens, width), jnp.float32) for width in widths],
        out_shape=[key, value],
    )
    return list(results)
