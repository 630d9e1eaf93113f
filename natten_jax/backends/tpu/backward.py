"""The backward pass: one kernel owns queries and goes over keys, the other owns keys and goes over queries."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.kernels import (
    PARAMETERS,
    Call,
    KeyBox,
    bounds_specs,
    box_spec,
    contract,
    divided,
    masked_logits,
    matrix,
    query_grid,
    query_spec,
    rows_spec,
    scale_spec,
    sees_all,
    step_coordinates,
    visit,
    visit_keys,
)

#: Rows of what a query's weights and their gradients are computed from.
LOGSUMEXP, REMAINDER, DELTA = range(3)


def _weights_and_gradients(
    logits: jax.Array, weights_gradients: jax.Array, statistics: Any
) -> tuple[jax.Array, jax.Array]:
    """Weights, and gradients of the logits, ``[keys, queries]``, from the logits in base 2."""

    def row(index: int) -> jax.Array:
        return statistics[index : index + 1, :]

    weights = jnp.exp2((logits - row(LOGSUMEXP)) - row(REMAINDER))
    return weights, weights * (weights_gradients - row(DELTA))


def query_gradient(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    statistics: jax.Array,
    scale: jax.Array,
    result: Any,
) -> jax.Array:
    """Compute the query's gradient, but for the scale; arrays as in :func:`natten_jax.backends.tpu.forward.forward`.

    Args:
        call: What runs.
        query: Queries.
        key: Keys.
        value: Values.
        out_gradient: Cotangent of the output.
        statistics: Rows of each query, ``[batch * heads, groups, tiles, 3, tokens]``.
        scale: Factors of the logits.
        result: Element type of the result.
    """
    width = query.shape[-1]

    def kernel(*refs: Any) -> None:
        tables, (scale_ref, q, k, v, do, stats, *bounds, dq, mixed) = refs[:3], refs[3:]
        place = [pl.program_id(axis) for axis in range(4)]
        step = place[3]

        @pl.when(step == 0)
        def _() -> None:
            mixed[...] = jnp.zeros_like(mixed)

        def add(boxes: Any) -> None:
            keys = matrix(k)
            logits = masked_logits(call, keys, matrix(q), scale_ref[...], boxes, bounds)
            products = contract(call, matrix(v), matrix(do), (1, 1))
            _, gradients = _weights_and_gradients(logits, products, stats)
            mixed[...] += contract(call, keys, gradients.astype(keys.dtype), (0, 0))

        visit_keys(call, place, tables, add)

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            dq[...] = mixed[...].T.reshape(dq.shape).astype(dq.dtype)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=query_grid(call, query.shape[0]),
            in_specs=[
                scale_spec(),
                query_spec(call, width),
                box_spec(call, width),
                box_spec(call, value.shape[-1]),
                query_spec(call, value.shape[-1]),
                rows_spec(call, 3),
                *bounds_specs(call),
            ],
            out_specs=query_spec(call, width),
            scratch_shapes=[pltpu.VMEM((width, call.queries.tile_tokens), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, result),
        compiler_params=PARAMETERS,
        name="natten_jax_tpu_query_gradient",
    )(*call.box_tables(), scale, query, key, value, out_gradient, statistics, *call.bounds())


def key_gradients(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    statistics: jax.Array,
    scale: jax.Array,
) -> list[jax.Array]:
    """Compute the gradients of keys and values; arguments as in :func:`query_gradient`.

    The query heads of a key head are gone over one after another.
    """
    tokens, heads = call.queries.tile_tokens, call.heads // call.heads_kv
    of_head = max(math.prod([visits.most_tiles for visits in call.visits]), 1)
    grid = key.shape[0], call.groups, math.prod([*call.keys.grid]), heads * of_head

    def seeing(group: Any, tile: Any, tables: Any) -> tuple[list[Any], list[Any]]:
        """First tile of queries along each dimension, and how many there are."""
        first, counts = [], []
        for lengths, g, t, table in zip(
            call.lengths, call.group_of(group), call.key_tile_of(tile), tables, strict=True
        ):
            row = (g * lengths.kv_tiles + t) * 2
            first.append(table[row])
            counts.append(table[row + 1])
        return first, counts

    def query_tile(group: Any, tile: Any, step: Any, tables: Any) -> list[Any]:
        first, counts = seeing(group, tile, tables)
        return [a + b for a, b in zip(first, step_coordinates(divided(step, of_head)[1], counts), strict=True)]

    def query_head(head: Any, step: Any) -> Any:
        batch, head = divided(head, call.heads_kv)
        return batch * call.heads + head * heads + divided(step, of_head)[0]

    def of_key(head: Any, group: Any, tile: Any, step: Any, *tables: Any) -> tuple[Any, ...]:
        return (head, call.key_group(group, tables[:3]), *call.key_tile_of(tile), 0)

    def of_query(head: Any, group: Any, tile: Any, step: Any, *tables: Any) -> tuple[Any, ...]:
        return (query_head(head, step), group, *query_tile(group, tile, step, tables[3:]), 0)

    def flat(tile: list[Any]) -> Any:
        x, y, z = tile
        return (x * call.queries.grid[1] + y) * call.queries.grid[2] + z

    def of_statistics(head: Any, group: Any, tile: Any, step: Any, *tables: Any) -> tuple[Any, ...]:
        return query_head(head, step), group, flat(query_tile(group, tile, step, tables[3:])), 0, 0

    def bounds_spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, 2, tokens),
            lambda h, g, t, s, *tables: (call.group_of(g)[dim], query_tile(g, t, s, tables[3:])[dim], 0, 0),
        )

    def kernel(*refs: Any) -> None:
        tables, (scale_ref, q, k, v, do, stats, *bounds, dk, dv, key_sum, value_sum) = refs[:6], refs[6:]
        _head, group, tile, step = map(pl.program_id, range(4))

        @pl.when(step == 0)
        def _() -> None:
            key_sum[...] = jnp.zeros_like(key_sum)
            value_sum[...] = jnp.zeros_like(value_sum)

        def add(boxes: Any) -> None:
            queries, outs = matrix(q), matrix(do)
            scale = scale_ref[...]
            logits = masked_logits(call, matrix(k), queries, scale, boxes, bounds)
            products = contract(call, matrix(v), outs, (1, 1))
            weights, gradients = _weights_and_gradients(logits, products, stats)
            value_sum[...] += contract(call, weights.astype(outs.dtype), outs, (1, 0))
            key_sum[...] += contract(call, gradients.astype(queries.dtype), queries, (1, 0)) * scale

        firsts = [t * extent for t, extent in zip(call.key_tile_of(tile), call.keys.tile, strict=True)]
        boxes = [KeyBox(first, first) for first in firsts]
        counts = seeing(group, tile, tables[3:])[1]
        rows = call.rows_of(group, flat(query_tile(group, tile, step, tables[3:])), tables[:3])
        is_step = divided(step, of_head)[1] < math.prod(counts)
        visit(add, is_step, sees_all(call, rows, boxes), boxes)

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            dk[...] = key_sum[...].reshape(dk.shape).astype(dk.dtype)
            dv[...] = value_sum[...].reshape(dv.shape).astype(dv.dtype)

    query_block, key_block = (None, None, *call.queries.tile), (None, None, *call.keys.tile)
    specs = [
        pl.BlockSpec((*key_block, key.shape[-1]), of_key),
        pl.BlockSpec((*key_block, value.shape[-1]), of_key),
    ]
    return list(
        pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=6,
                grid=grid,
                in_specs=[
                    pl.BlockSpec((None, 1, 1), lambda h, g, t, s, *tables: (query_head(h, s), 0, 0)),
                    pl.BlockSpec((*query_block, query.shape[-1]), of_query),
                    *specs,
                    pl.BlockSpec((*query_block, value.shape[-1]), of_query),
                    pl.BlockSpec((None, None, None, 3, tokens), of_statistics),
                    *map(bounds_spec, range(3)),
                ],
                out_specs=specs,
                scratch_shapes=[
                    pltpu.VMEM((call.keys.tile_tokens, key.shape[-1]), jnp.float32),
                    pltpu.VMEM((call.keys.tile_tokens, value.shape[-1]), jnp.float32),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)],
            compiler_params=PARAMETERS,
            name="natten_jax_tpu_key_gradients",
        )(
            *call.box_tables(),
            *call.tile_tables(),
            scale,
            query,
            key,
            value,
            out_gradient,
            statistics,
            *call.bounds(),
        )
    )
