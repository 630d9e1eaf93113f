"""The forward pass: a program for each tile of queries, which goes over the boxes of keys that they see.

Logits are ``[queries, keys]``: values then need not be transposed to be multiplied with weights. Statistics of a query
stand in all lanes of a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.boxes import Chunk, key_boxes, visit_keys
from natten_jax.backends.tpu.kernels import (
    LANES,
    LOG2_E,
    Call,
    Place,
    across,
    called,
    contract,
    first_of,
    matrix,
    rows_of_columns,
    scale_of,
    semantics,
)
from natten_jax.backends.tpu.masks import (
    HIDDEN,
    SMALLEST_MAXIMUM,
    QueryMask,
    keep_windows,
    key_coordinates,
    last_bounds,
    slab_bounds,
    window_scratch,
)
from natten_jax.backends.tpu.query_programs import common_specs, is_last, query_grid, query_spec, rows_spec

#: What sums of weights are taken for, at least: those of queries that see nothing are 0, and so is what they mix.
_SMALLEST_SUM = 1e-30


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: ``[batch * heads, groups, *lengths, head_dim]``.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``.
        value: Likewise, of ``head_dim_v``.
        scale: float32 ``[batch * heads]`` or ``[1]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[batch * heads, groups, *tiles, 2, tokens]``.
    """
    tokens, width, together = call.queries.tile_tokens, value.shape[-1], call.heads_of_program
    grid = query_grid(call, query.shape[0])

    def finish(head: int, out: Any, statistics: Any, maxima: jax.Array, sums: jax.Array, mix: jax.Array) -> None:
        inverse = jnp.reciprocal(jnp.maximum(sums, _SMALLEST_SUM))
        out[head] = (mix * across(inverse, width)).reshape(out.shape[1:]).astype(out.dtype)
        statistics[head] = rows_of_columns(maxima, sums)

    def with_one_chunk(*refs: Any) -> None:
        """For tiles that have all their keys in one chunk: of several heads at a time, which share the mask."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows = rest
        place = Place.here()
        keep_windows(last, windows)
        mask = QueryMask(call, place, bounds, coordinates, windows)
        chunk = Chunk(0, 0, key_boxes(call, place, tables))
        hidden = mask.hidden(chunk)
        # In this order the compiler overlaps what the heads have to wait for.
        heads, found = range(together), []
        products = [contract(call, matrix(q.at[head]), chunk.of(call, k.at[head]), (1, 1)) for head in heads]
        for head in heads:
            values = chunk.of(call, v.at[head])
            scaled = products[head] * (scale_of(factor, place.head * together + head) * LOG2_E)
            logits = jnp.where(hidden, HIDDEN, scaled)
            maxima = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), SMALLEST_MAXIMUM)
            weights = jnp.exp2(logits - maxima)
            sums = jnp.sum(weights, axis=1, keepdims=True)
            mix = contract(call, weights.astype(values.dtype), values, (1, 0))
            found.append((*(jnp.broadcast_to(each, (tokens, LANES)) for each in (maxima, sums)), mix))
        for head in heads:
            finish(head, out, statistics, *found[head])

    def with_chunks(*refs: Any) -> None:
        """For all others: a chunk after another one, and what they come to in scratch memory."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows, maximum, total, mixed = rest
        place = Place.here()
        mask = QueryMask(call, place, bounds, coordinates, windows)
        to_base_2 = scale_of(factor, place.head) * LOG2_E

        def add(chunk: Chunk, is_masked: bool) -> None:
            logits = contract(call, matrix(q.at[0]), chunk.of(call, k.at[0]), (1, 1)) * to_base_2
            if is_masked:
                logits = jnp.where(mask.hidden(chunk), HIDDEN, logits)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            weights, change = jnp.exp2(logits - across(now, logits.shape[1])), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=1, keepdims=True)
            values = chunk.of(call, v.at[0])
            mixed[...] = mixed[...] * across(change, width) + contract(
                call, weights.astype(values.dtype), values, (1, 0)
            )

        @pl.when(first_of(place.step))
        def _() -> None:
            keep_windows(last, windows)
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        visit_keys(call, place, tables, add)

        @pl.when(is_last(call, place))
        def _() -> None:
            finish(0, out, statistics, maximum[...], total[...], mixed[...])

    state = [pltpu.VMEM((tokens, lanes), jnp.float32) for lanes in (LANES, LANES, width)]
    return list(
        called(
            with_one_chunk if call.is_single else with_chunks,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=grid,
                in_specs=common_specs(call, query.shape[-1], width),
                out_specs=[query_spec(call, width), rows_spec(call, 2)],
                scratch_shapes=[window_scratch(call), *([] if call.is_single else state)],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*query.shape[:-1], width), query.dtype),
                jax.ShapeDtypeStruct((query.shape[0], *grid[1:5], 2, tokens), jnp.float32),
            ],
            compiler_params=semantics(3),
            name="natten_jax_tpu_forward",
        )(
            *call.box_tables(),
            *slab_bounds(call),
            scale,
            key_coordinates(call),
            last_bounds(call),
            query,
            key,
            value,
        )
    )
