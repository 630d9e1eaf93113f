"""The forward pass: a program for each tile of queries, which goes over the boxes of keys that they see.

Logits are ``[keys, queries]``: sums over keys are then sums over rows, which vector units add up without moving lanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.kernels import (
    PARAMETERS,
    SMALLEST_MAXIMUM,
    Call,
    bounds_specs,
    box_spec,
    contract,
    masked_logits,
    matrix,
    query_grid,
    query_spec,
    rows_spec,
    scale_spec,
    visit_keys,
)


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
        ``[batch * heads, groups, tiles, 2, tokens]``.
    """
    tokens, width = call.queries.tile_tokens, value.shape[-1]
    grid = query_grid(call, query.shape[0])

    def kernel(*refs: Any) -> None:
        tables, (scale_ref, q, k, v, *bounds, out, statistics, maximum, total, mixed) = refs[:3], refs[3:]
        place = [pl.program_id(axis) for axis in range(4)]
        step = place[3]

        @pl.when(step == 0)
        def _() -> None:
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        def add(boxes: Any) -> None:
            logits = masked_logits(call, matrix(k), matrix(q), scale_ref[...], boxes, bounds)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
            weights, change = jnp.exp2(logits - now), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=0, keepdims=True)
            values = matrix(v)
            mixed[...] = mixed[...] * change + contract(call, values, weights.astype(values.dtype), (0, 0))

        visit_keys(call, place, tables, add)

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            sums = total[...]
            result = mixed[...] / jnp.where(sums == 0, 1, sums)
            out[...] = result.T.reshape(out.shape).astype(out.dtype)
            statistics[0:1, :] = maximum[...]
            statistics[1:2, :] = sums

    return list(
        pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=grid,
                in_specs=[
                    scale_spec(),
                    query_spec(call, query.shape[-1]),
                    box_spec(call, key.shape[-1]),
                    box_spec(call, width),
                    *bounds_specs(call),
                ],
                out_specs=[
                    query_spec(call, width),
                    rows_spec(call, 2),
                ],
                scratch_shapes=[
                    pltpu.VMEM((1, tokens), jnp.float32),
                    pltpu.VMEM((1, tokens), jnp.float32),
                    pltpu.VMEM((width, tokens), jnp.float32),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*query.shape[:-1], width), query.dtype),
                jax.ShapeDtypeStruct((*grid[:3], 2, tokens), jnp.float32),
            ],
            compiler_params=PARAMETERS,
            name="natten_jax_tpu_forward",
        )(*call.box_tables(), scale, query, key, value, *call.bounds())
    )
