"""The derivative of the ``flex`` backend's attention: a rule for tangents, linear in them.

With ``P = exp(s - lse)`` and tangents marked by ``'``,

    ds = P * s'        lse' = rowsum(ds)        out' = ds V + P V' - out * lse'
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Gradients, Operands, Output
from natten_jax.backends.flex.bias import TileBias
from natten_jax.backends.flex.blocks import materialize
from natten_jax.backends.flex.loops import swept
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, for_tiles
from natten_jax.backends.flex.query_sweep import QuerySweep
from natten_jax.backends.flex.rows import KnownRows, rows_by_key, rows_of_tile
from natten_jax.backends.flex.softmax import Products, Rows, Softmax, softmax_weights
from natten_jax.plan.plan import Plan


def tangents_of(plan: Plan, operands: Operands, output: Output, rows: Rows, tangents: Gradients) -> Output:
    """The rule in this module's description; linear in ``tangents``.

    The contributions of the query tangents are gathered per query tile, those of the key and value tangents
    are scattered per key/value tile: so the transposed rule, where that is the other way round, only gathers.

    Args:
        plan: The plan of either pass.
        operands: The arrays.
        output: Output and logsumexp, from whatever computed them.
        rows: What a sweep over these operands found.
        tangents: The tangents of the operands.
    """
    products = Products(plan, operands.inputs.scale)
    change = logsumexp_change(products, operands, output)
    known = KnownRows.of(plan, operands, rows)
    query_mixed, query_total, additional = _query_tangents(plan, operands, known, change, tangents)
    key_mixed, key_total = _key_tangents(plan, operands, known, change, additional, tangents)
    mixed, total = query_mixed + key_mixed, query_total + key_total
    out = mixed - products.cast(output.out) * total
    return Output(out.astype(output.out.dtype), total[..., 0].astype(output.logsumexp.dtype))


def logsumexp_change(
    products: Products, operands: Operands, output: Output
) -> Annotated[jax.Array, "batch *queries heads 1"]:
    """Zeros that have the logsumexp's derivative: rows are constants."""
    change = output.logsumexp - lax.stop_gradient(output.logsumexp)
    if operands.is_placed or operands.inputs.relative_bias is not None or operands.inputs.key_bias is not None:
        # A row that sees no local key has no weights, whatever is subtracted from its (masked) logits.
        change = jnp.where(output.logsumexp == -jnp.inf, 0, change)
    return products.cast(change)[..., None]


def _query_tangents(
    plan: Plan, operands: Operands, known: KnownRows, change: jax.Array, tangents: Gradients
) -> tuple[jax.Array, jax.Array, Softmax | None]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the queries and the additional keys and values.

    And the softmax over the latter alone.
    """
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    over = QuerySweep.of(plan, operands, "backward")
    placed, sweep, biases, additional = over.placed, over.placed.sweep, over.biases, over.additional
    bias_tangents = TileBias.of(problem, tangents, sweep)
    # Cast here, so that the transposed rule sums over query tiles in the accumulator's element type.
    additional_tangents = AdditionalTiles.of(
        None if tangents.additional_keys is None else products.cast(tangents.additional_keys),
        None if tangents.additional_values is None else products.cast(tangents.additional_values),
        sweep,
    )
    Sums = tuple[jax.Array, jax.Array]

    def step(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, tuple[Sums, Softmax | None]]:
        positions, query, query_tangent = sweep.at(inputs[0]), products.cast(inputs[1]), products.cast(inputs[2])
        given = known._replace(rows=Rows(inputs[3][..., :1], inputs[3][..., 1:]))
        tile_rows, of_additional = rows_of_tile(
            products, biases, placed, positions, query, over.keys, additional, given
        )
        tile_rows = products.with_constant_maximum(tile_rows._replace(log_total=tile_rows.log_total + inputs[4]))
        mixed = jnp.zeros((*query.shape[:-1], problem.head_dim_v), products.dtype)
        sums = varying_like((mixed, jnp.zeros((*query.shape[:-1], 1), products.dtype)), operands)

        @jax.checkpoint
        def contribution(
            query_tangent: jax.Array, scale_tangent: jax.Array | None, bias_tangents: TileBias, inner_step: jax.Array
        ) -> Sums:
            key, value, mask = over.inner_tiles(positions, inner_step)
            change = products.logits(query_tangent, key)
            if scale_tangent is not None:
                change = change + products.logit_tangents(scale_tangent, query, key)
            of_bias = bias_tangents.at(positions, inner_step)
            if of_bias is not None:
                change = change + of_bias
            bias = biases.at(positions, inner_step)
            ds = softmax_weights(products, query, key, tile_rows, mask, bias) * change
            return products.mix(ds, value), ds.sum(axis=-1, keepdims=True)

        @jax.checkpoint
        def additional_contribution(
            query_tangent: jax.Array,
            scale_tangent: jax.Array | None,
            tile: AdditionalTiles,
            tile_tangent: tuple[jax.Array, jax.Array],
        ) -> Sums:
            key, value = for_tiles(tile.keys, query), for_tiles(tile.values, query)
            key_tangent, value_tangent = for_tiles(tile_tangent[0], query), for_tiles(tile_tangent[1], query)
            weights = softmax_weights(products, query, key, tile_rows, tile.exists)
            change = products.logits(query_tangent, key) + products.logits(query, key_tangent)
            if scale_tangent is not None:
                change = change + products.logit_tangents(scale_tangent, query, key)
            ds = weights * change
            mixed = products.mix(ds, value) + products.mix(weights, value_tangent)
            return mixed, ds.sum(axis=-1, keepdims=True)

        def visit(sums: Sums, inner_step: jax.Array) -> tuple[Sums, None]:
            mixed, total = contribution(query_tangent, tangents.scale, bias_tangents, inner_step)
            return (sums[0] + mixed, sums[1] + total), None

        def visit_additional(
            sums: Sums, tiles: tuple[AdditionalTiles, tuple[jax.Array, jax.Array]]
        ) -> tuple[Sums, None]:
            mixed, total = additional_contribution(query_tangent, tangents.scale, *tiles)
            return (sums[0] + mixed, sums[1] + total), None

        if additional is not None and additional_tangents is not None:
            sums, _ = swept(visit_additional, sums, (additional, additional_tangents[:2]))
        sums, _ = lax.scan(visit, sums, jnp.arange(sweep.inner_steps, dtype=jnp.int32))
        return None, (sums, None if additional is None else of_additional)

    arrays = operands.inputs.query, tangents.query, jnp.concatenate(known.rows, axis=-1), change
    cut = [sweep.cut_outer(array, problem.heads_kv) for array in arrays]
    _, found = swept(step, None, (placed.positions, *cut))
    joined: tuple[Sums, Softmax | None] = jax.tree.map(lambda array: sweep.join_outer(array, problem.heads), found)
    return *placed.or_nan_for_parts(joined[0]), joined[1]


def _key_tangents(
    plan: Plan,
    operands: Operands,
    known: KnownRows,
    change: jax.Array,
    additional: Softmax | None,
    tangents: Gradients,
) -> tuple[jax.Array, jax.Array]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the keys and values."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    placed = PlacedSweep.of(plan, operands, "backward", outer_is_query=False)
    sweep = placed.sweep
    biases = TileBias.of(problem, operands.inputs, sweep)
    queries = sweep.split_inner(operands.inputs.query)
    cut = functools.partial(sweep.cut_outer, heads_kv=problem.heads_kv)
    keys = cut(operands.inputs.key)
    key_bias = None if operands.inputs.key_bias is None else cut(operands.inputs.key_bias)
    rows = rows_by_key(placed, operands, queries, keys, key_bias, additional, known)
    row_terms = jnp.concatenate([rows, sweep.split_inner(change)], axis=-1)
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(sums: Sums, inputs: tuple[Any, ...]) -> tuple[Sums, None]:
        packed, key, value, key_tangent, value_tangent, key_bias = inputs
        key_tangent, value_tangent = products.cast(key_tangent), products.cast(value_tangent)
        positions = sweep.at(packed)

        @jax.checkpoint
        def contribution(key_tangent: jax.Array, value_tangent: jax.Array, inner_step: jax.Array) -> Sums:
            query = sweep.load(queries, positions, inner_step, problem.heads_kv)
            # Fused into the exponential, it would be loaded once per logit.
            terms = materialize(sweep.load(row_terms, positions, inner_step, problem.heads_kv))
            tile_rows = products.with_constant_maximum(Rows(terms[..., :1], terms[..., 1:2] + terms[..., 2:]))
            mask = sweep.mask(positions, inner_step, repeats)
            bias = biases.at(positions, inner_step, key_bias)
            weights = softmax_weights(products, query, key, tile_rows, mask, bias, carries_plan=True)
            ds = weights * products.logits(query, key_tangent)
            mixed = products.mix(ds, value) + products.mix(weights, value_tangent)
            return mixed, ds.sum(axis=-1, keepdims=True)

        def visit(sums: Sums, inner_step: jax.Array) -> tuple[Sums, None]:
            mixed, total = contribution(key_tangent, value_tangent, inner_step)
            return (
                sweep.add(sums[0], positions, inner_step, mixed),
                sweep.add(sums[1], positions, inner_step, total),
            ), None

        sums, _ = lax.scan(visit, sums, jnp.arange(sweep.inner_steps, dtype=jnp.int32))
        return sums, None

    inputs = placed.positions, keys, cut(operands.inputs.value), cut(tangents.key), cut(tangents.value), key_bias
    batch = operands.inputs.query.shape[0]
    sums = (
        sweep.empty_inner(batch, problem.heads, problem.head_dim_v, products.dtype),
        sweep.empty_inner(batch, problem.heads, 1, products.dtype),
    )
    (mixed, total), _ = swept(step, varying_like(sums, operands), inputs)
    return placed.or_nan_for_parts((sweep.join_inner(mixed), sweep.join_inner(total)))
