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
    LOG2_E,
    SMALLEST_MAXIMUM,
    Call,
    box_spec,
    contract,
    key_boxes,
    matrix,
    sees_all,
    steps_of,
    without_hidden,
)
from natten_jax.backends.tpu.visits import COUNT


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: ``[batch * heads, groups, *lengths, head_dim]``.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``.
        value: Likewise, of ``head_dim_v``.
        scale: float32 ``[batch * heads]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[batch * heads, groups, tiles, 2, tokens]``.
    """
    tokens, width = call.queries.tile_tokens, value.shape[-1]
    tiles = [*call.queries.grid]
    steps = steps_of([visits.most_boxes for visits in call.visits])
    grid = query.shape[0], call.groups, steps_of(tiles), max(steps, 1)

    def of_query(head: Any, group: Any, tile: Any, step: Any, *tables: Any) -> tuple[Any, ...]:
        return (head, group, *call.query_tile_of(tile), 0)

    def of_key(head: Any, group: Any, tile: Any, step: Any, *tables: Any) -> tuple[Any, ...]:
        return key_index(call, call.kv_head(head), group, tile, step, tables)

    def kernel(*refs: Any) -> None:
        tables, (scales, q, k, v, *bounds, out, statistics, maximum, total, mixed) = refs[:3], refs[3:]
        head, group, tile, step = map(pl.program_id, range(4))
        rows = call.rows_of(group, tile, tables)

        @pl.when(step == 0)
        def _() -> None:
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        def add(boxes: Any) -> None:
            logits = contract(call, matrix(k), matrix(q), (1, 1)) * (scales[head] * LOG2_E)
            if boxes is not None:
                logits = without_hidden(call, logits, boxes, bounds)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
            weights, change = jnp.exp2(logits - now), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=0, keepdims=True)
            values = matrix(v)
            mixed[...] = mixed[...] * change + contract(call, values, weights.astype(values.dtype), (0, 0))

        boxes = key_boxes(call, group, tile, step, tables)
        is_step = step < steps_of([row(COUNT) for row in rows])
        is_full = sees_all(call, rows, boxes)
        pl.when(is_step & is_full)(lambda: add(None))
        pl.when(is_step & ~is_full)(lambda: add(boxes))

        @pl.when(step == pl.num_programs(3) - 1)
        def _() -> None:
            sums = total[...]
            result = mixed[...] / jnp.where(sums == 0, 1, sums)
            out[...] = result.T.reshape(out.shape).astype(out.dtype)
            statistics[0:1, :] = maximum[...]
            statistics[1:2, :] = sums

    query_block = (None, None, *call.queries.tile)
    return list(
        pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=grid,
                in_specs=[
                    pl.BlockSpec(memory_space=pltpu.SMEM),
                    pl.BlockSpec((*query_block, query.shape[-1]), of_query),
                    box_spec(call, key.shape[-1], of_key),
                    box_spec(call, width, of_key),
                    *bounds_specs(call),
                ],
                out_specs=[
                    pl.BlockSpec((*query_block, width), of_query),
                    pl.BlockSpec((None, None, None, 2, tokens), lambda h, g, t, s, *tables: (h, g, t, 0, 0)),
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
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            name="natten_jax_tpu_forward",
        )(*call.box_tables(), scale, query, key, value, *call.bounds())
    )


def key_index(call: Call, head: Any, group: Any, tile: Any, step: Any, tables: Any) -> tuple[Any, ...]:
    """Where a step's box of keys begins, in elements."""
    x, y, z = (box.first for box in key_boxes(call, group, tile, step, tables))
    return head, call.key_group(group, tables), x, y, pl.multiple_of(z, call.alignment), 0


def bounds_specs(call: Call) -> list[pl.BlockSpec]:
    """Of :meth:`Call.bounds`, where a program has a tile of queries."""

    def spec(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, 2, call.queries.tile_tokens),
            lambda h, g, t, s, *tables: (call.group_of(g)[dim], call.query_tile_of(t)[dim], 0, 0),
        )

    return [spec(dim) for dim in range(3)]
