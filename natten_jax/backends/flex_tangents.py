"""The derivative of the ``flex`` backend's attention: a rule for tangents, linear in them.

With ``P = exp(s - lse)`` and tangents marked by ``'``,

    ds = P * s'        lse' = rowsum(ds)        out' = ds V + P V' - out * lse'
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.backends.base import Gradients, Operands, Output
from natten_jax.backends.flex_blocks import materialize
from natten_jax.backends.flex_operands import (
    for_tiles,
    or_nan_for_parts,
    origins_of,
    sweep_of,
    tile_additional,
)
from natten_jax.backends.flex_rows import rows_of_sweeps
from natten_jax.backends.flex_softmax import Products, Rows, softmax_weights
from natten_jax.mesh.types import varying_like
from natten_jax.plan import Plan


def tangents_of(plan: Plan, operands: Operands, output: Output, rows: Rows, tangents: Gradients) -> Output:
    """The rule in this module's description; linear in ``tangents``.

    The contributions of the query tangents are gathered per query tile, those of the key and value tangents
    are scattered per key/value tile: so the transposed rule, where that is the other way round, only gathers.

    Args:
        plan: Of either pass.
        operands: The arrays.
        output: Output and logsumexp, from whatever computed them.
        rows: What a sweep over these operands found.
        tangents: Of the operands.
    """
    products = Products(plan.problem)
    # Zeros with the logsumexp's derivative: rows are constants.
    change = output.logsumexp - lax.stop_gradient(output.logsumexp)
    if operands.origins is not None:
        # A row that sees no local key has no weights, whatever is subtracted from its (masked) logits.
        change = jnp.where(output.logsumexp == -jnp.inf, 0, change)
    change = products.cast(change)[..., None]
    of_sweeps = rows_of_sweeps(plan, operands, rows)
    by_query, by_key = (Rows(each.maximum, each.log_total + change) for each in of_sweeps)
    query_mixed, query_total = _query_tangents(plan, operands, by_query, tangents)
    key_mixed, key_total = _key_tangents(plan, operands, by_key, tangents)
    mixed, total = query_mixed + key_mixed, query_total + key_total
    out = mixed - products.cast(output.out) * total
    return Output(out.astype(output.out.dtype), total[..., 0].astype(output.logsumexp.dtype))


def _query_tangents(plan: Plan, operands: Operands, rows: Rows, tangents: Gradients) -> tuple[jax.Array, jax.Array]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the queries and the additional keys and values."""
    problem = plan.problem
    products = Products(problem)
    sweep = sweep_of(plan, operands, "backward", outer_is_query=True)
    origins = origins_of(problem, operands)
    keys, values = sweep.split_inner(operands.key), sweep.split_inner(operands.value)
    extra = tile_additional(problem, operands.additional_keys, operands.additional_values, sweep)
    # Cast here, so that the transposed rule sums over query tiles in the accumulator's element type.
    extra_tangents = tile_additional(
        problem,
        None if tangents.additional_keys is None else products.cast(tangents.additional_keys),
        None if tangents.additional_values is None else products.cast(tangents.additional_values),
        sweep,
    )
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(_: None, inputs: tuple[jax.Array, jax.Array, Rows, jax.Array]) -> tuple[None, Sums]:
        index, query, tile_rows, query_tangent = inputs
        query, query_tangent = products.cast(query), products.cast(query_tangent)
        positions = sweep.position(index, origins)
        mixed = jnp.zeros((*query.shape[:-1], problem.head_dim_v), products.dtype)
        sums = varying_like((mixed, jnp.zeros((*query.shape[:-1], 1), products.dtype)), operands)

        @jax.checkpoint
        def contribution(query_tangent: jax.Array, inner_step: jax.Array) -> Sums:
            key = sweep.load(keys, positions, inner_step, problem.heads_kv)
            value = sweep.load(values, positions, inner_step, problem.heads_kv)
            mask = sweep.mask(positions, inner_step, repeats)
            ds = softmax_weights(products, query, key, tile_rows, mask) * products.logits(query_tangent, key)
            return products.mix(ds, value), ds.sum(axis=-1, keepdims=True)

        @jax.checkpoint
        def extra_contribution(
            query_tangent: jax.Array, tile: tuple[jax.Array, ...], tile_tangent: tuple[jax.Array, ...]
        ) -> Sums:
            key, value, mask = for_tiles(tile[0], query), for_tiles(tile[1], query), tile[2]
            key_tangent, value_tangent = for_tiles(tile_tangent[0], query), for_tiles(tile_tangent[1], query)
            weights = softmax_weights(products, query, key, tile_rows, mask)
            ds = weights * (products.logits(query_tangent, key) + products.logits(query, key_tangent))
            mixed = products.mix(ds, value) + products.mix(weights, value_tangent)
            return mixed, ds.sum(axis=-1, keepdims=True)

        def visit(sums: Sums, inner_step: jax.Array) -> tuple[Sums, None]:
            mixed, total = contribution(query_tangent, inner_step)
            return (sums[0] + mixed, sums[1] + total), None

        def visit_extra(sums: Sums, tile: tuple[tuple[jax.Array, ...], ...]) -> tuple[Sums, None]:
            mixed, total = extra_contribution(query_tangent, *tile)
            return (sums[0] + mixed, sums[1] + total), None

        if extra is not None and extra_tangents is not None:
            sums, _ = lax.scan(visit_extra, sums, (extra, extra_tangents[:2]))
        sums, _ = lax.scan(visit, sums, jnp.arange(sweep.inner_steps, dtype=jnp.int32))
        return None, sums

    cut = functools.partial(sweep.cut_outer, heads_kv=problem.heads_kv)
    inputs = (
        jnp.arange(sweep.steps, dtype=jnp.int32),
        cut(operands.query),
        Rows(*map(cut, rows)),
        cut(tangents.query),
    )
    _, (mixed, total) = lax.scan(jax.checkpoint(step), None, inputs)
    return or_nan_for_parts(
        sweep, origins, (sweep.join_outer(mixed, problem.heads), sweep.join_outer(total, problem.heads))
    )


def _key_tangents(plan: Plan, operands: Operands, rows: Rows, tangents: Gradients) -> tuple[jax.Array, jax.Array]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the keys and values."""
    problem = plan.problem
    products = Products(problem)
    sweep = sweep_of(plan, operands, "backward", outer_is_query=False)
    origins = origins_of(problem, operands)
    queries = sweep.split_inner(operands.query)
    row_terms = sweep.split_inner(jnp.concatenate(rows, axis=-1))
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(sums: Sums, inputs: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        index, key, value, key_tangent, value_tangent = inputs
        key_tangent, value_tangent = products.cast(key_tangent), products.cast(value_tangent)
        positions = sweep.position(index, origins)

        @jax.checkpoint
        def contribution(key_tangent: jax.Array, value_tangent: jax.Array, inner_step: jax.Array) -> Sums:
            query = sweep.load(queries, positions, inner_step, problem.heads_kv)
            # Fused into the exponential, it would be loaded once per logit.
            terms = materialize(sweep.load(row_terms, positions, inner_step, problem.heads_kv))
            tile_rows = Rows(terms[..., :1], terms[..., 1:])
            mask = sweep.mask(positions, inner_step, repeats)
            weights = softmax_weights(products, query, key, tile_rows, mask)
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

    cut = functools.partial(sweep.cut_outer, heads_kv=problem.heads_kv)
    inputs = (
        jnp.arange(sweep.steps, dtype=jnp.int32),
        cut(operands.key),
        cut(operands.value),
        cut(tangents.key),
        cut(tangents.value),
    )
    batch = operands.query.shape[0]
    sums = (
        sweep.empty_inner(batch, problem.heads, problem.head_dim_v, products.dtype),
        sweep.empty_inner(batch, problem.heads, 1, products.dtype),
    )
    (mixed, total), _ = lax.scan(jax.checkpoint(step), varying_like(sums, operands), inputs)
    return or_nan_for_parts(sweep, origins, (sweep.join_inner(mixed), sweep.join_inner(total)))
