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

from natten_jax.backends.tpu.boxes import Chunk, key_boxes, visit_keys
from natten_jax.backends.tpu.kernels import (
    LOG2_E,
    Call,
    Place,
    across,
    called,
    contract,
    first_of,
    queries_of,
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
from natten_jax.backends.tpu.packs import LANES, side_by_side
from natten_jax.backends.tpu.query_programs import common_specs, is_last, query_grid, query_spec, rows_spec

#: What sums of weights are taken for, at least: those of queries that see nothing are 0, and so is what they mix.
_SMALLEST_SUM = 1e-30


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: ``[batch * heads, groups, *lengths, head_dim]``, or packed, as :class:`Layout` has it.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``, likewise.
        value: Likewise, of ``head_dim_v``.
        scale: float32 ``[batch * heads]`` or ``[1]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[batch * leading, blocks, groups, *tiles, 2, rows]``.
    """
    width, together = call.width(value), call.together
    grid = query_grid(call)

    def finish(out: Any, statistics: Any, found: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> None:
        """Write maxima, sums and sums of values of each pack."""
        rows = rows_of_columns([column for maxima, sums, _ in found for column in (maxima, sums)])
        for pack, (_, sums, mix) in enumerate(found):
            inverse = jnp.reciprocal(jnp.maximum(sums, _SMALLEST_SUM))
            mixed = side_by_side(mix * across(inverse, width), call.pack)
            out[pack] = mixed.reshape(out.shape[1:]).astype(out.dtype)
            statistics[pack] = rows[2 * pack : 2 * pack + 2, :]

    def in_all_lanes(column: jax.Array) -> jax.Array:
        return jnp.broadcast_to(column, (call.rows, LANES))

    def with_one_chunk(*refs: Any) -> None:
        """For tiles that have all their keys in one chunk: of several packs at a time, which share the mask."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows = rest
        place = Place.here()
        keep_windows(last, windows)
        mask = QueryMask(call, place, bounds, coordinates, windows)
        chunk = Chunk(0, 0, key_boxes(call, place, tables))
        hidden = mask.hidden(chunk)
        # In this order the compiler overlaps what the packs have to wait for.
        packs, found = range(together), []
        products = [contract(call, queries_of(call, q.at[pack]), chunk.of(call, k.at[pack]), (1, 1)) for pack in packs]
        for pack in packs:
            values = chunk.of(call, v.at[pack])
            scaled = products[pack] * (scale_of(call, factor, call.pack_number(place.head, pack)) * LOG2_E)
            logits = jnp.where(hidden, HIDDEN, scaled)
            maxima = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), SMALLEST_MAXIMUM)
            weights = jnp.exp2(logits - maxima)
            sums = jnp.sum(weights, axis=1, keepdims=True)
            mix = contract(call, weights.astype(values.dtype), values, (1, 0))
            found.append((in_all_lanes(maxima), in_all_lanes(sums), mix))
        finish(out, statistics, found)

    def with_chunks(*refs: Any) -> None:
        """For all others: a chunk after another one, and what they come to in scratch memory."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows, maximum, total, mixed = rest
        place = Place.here()
        mask = QueryMask(call, place, bounds, coordinates, windows)
        to_base_2 = scale_of(call, factor, place.head) * LOG2_E

        def add(chunk: Chunk, is_masked: bool) -> None:
            logits = contract(call, queries_of(call, q.at[0]), chunk.of(call, k.at[0]), (1, 1)) * to_base_2
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
            finish(out, statistics, [(maximum[...], total[...], mixed[...])])

    state = [pltpu.VMEM((call.rows, lanes), jnp.float32) for lanes in (LANES, LANES, width)]
    return list(
        called(
            with_one_chunk if call.is_single else with_chunks,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=grid,
                in_specs=common_specs(call, call.width(query), width),
                out_specs=[query_spec(call, width), rows_spec(call, 2)],
                scratch_shapes=[window_scratch(call), *([] if call.is_single else state)],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype),
                jax.ShapeDtypeStruct(
                    (query.shape[0], call.queries.heads.blocks, *grid[1:5], 2, call.rows), jnp.float32
                ),
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
