"""The forward pass: a program for each tile of queries, which goes over the boxes of keys that they see.

Logits are ``[queries, keys]``: values then need not be transposed to be multiplied with weights. Statistics of a query
stand in all lanes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.boxes import KeyBox, visit_keys
from natten_jax.backends.tpu.kernels import (
    LANES,
    LOG2_E,
    Call,
    Place,
    across,
    contract,
    first_of,
    matrix,
    row,
    semantics,
)
from natten_jax.backends.tpu.masks import (
    SMALLEST_MAXIMUM,
    QueryMask,
    keep_windows,
    key_coordinates,
    last_bounds,
    slab_bounds,
    window_scratch,
)
from natten_jax.backends.tpu.query_programs import common_specs, is_last, query_grid, query_spec, rows_spec


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: ``[batch * heads, groups, *lengths, head_dim]``.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``.
        value: Likewise, of ``head_dim_v``.
        scale: float32 ``[batch * heads, 1, 1]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[batch * heads, groups, *tiles, 2, tokens]``.
    """
    tokens, width = call.queries.tile_tokens, value.shape[-1]
    grid = query_grid(call, query.shape[0])

    def kernel(*refs: Any) -> None:
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows, maximum, total, mixed = rest
        place = Place.here()
        mask = QueryMask(call, place, bounds, coordinates, windows)

        @pl.when(first_of(place.step))
        def _() -> None:
            keep_windows(last, windows)
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        def add(boxes: Sequence[KeyBox] | None) -> None:
            logits = contract(call, matrix(q), matrix(k), (1, 1)) * (factor[...] * LOG2_E)
            logits = mask.apply(logits, boxes)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            weights, change = jnp.exp2(logits - across(now, logits.shape[1])), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=1, keepdims=True)
            values = matrix(v)
            mixed[...] = mixed[...] * across(change, width) + contract(
                call, weights.astype(values.dtype), values, (1, 0)
            )

        visit_keys(call, place, tables, add)

        @pl.when(is_last(call, place))
        def _() -> None:
            sums = total[...]
            result = mixed[...] / across(jnp.where(sums == 0, 1, sums), width)
            out[...] = result.reshape(out.shape).astype(out.dtype)
            statistics[0:1, :] = row(maximum[...])
            statistics[1:2, :] = row(sums)

    return list(
        pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=grid,
                in_specs=common_specs(call, query.shape[-1], width),
                out_specs=[query_spec(call, width), rows_spec(call, 2)],
                scratch_shapes=[
                    window_scratch(call),
                    pltpu.VMEM((tokens, LANES), jnp.float32),
                    pltpu.VMEM((tokens, LANES), jnp.float32),
                    pltpu.VMEM((tokens, width), jnp.float32),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*query.shape[:-1], width), query.dtype),
                jax.ShapeDtypeStruct((*grid[:5], 2, tokens), jnp.float32),
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
