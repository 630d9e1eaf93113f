"""The first derivative of the ``flex`` backend's attention in reverse mode: the transpose of its rule for tangents.

With ``P = exp(s - lse)`` and cotangents marked by ``~``,

    ds = P * (out~ V^T - delta)        delta = rowsum(out~ * out) - lse~
    q~ = scale ds K        k~ = scale ds^T Q        v~ = P^T out~        scale~ = sum(Q * ds K)

JAX would transpose :mod:`natten_jax.backends.flex.tangents` to the same sums, in several times as many operations, of
which XLA takes about 0.2 milliseconds each to compile. Written out it is plain JAX, which derivatives of higher orders
go through.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Gradients, Inputs, Operands, Output
from natten_jax.backends.flex.blocks import materialize
from natten_jax.backends.flex.loops import repeated, swept
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, for_tiles, untiled
from natten_jax.backends.flex.rows import KnownRows, rows_by_key, rows_of_tile
from natten_jax.backends.flex.softmax import Products, Rows, Softmax, softmax_weights
from natten_jax.backends.flex.tangents import logsumexp_change
from natten_jax.plan.plan import Plan

#: Sums of gradients of additional keys and values, tiled.
_AdditionalSums = tuple[jax.Array, jax.Array]


def gradients_of(
    plan: Plan, operands: Operands, output: Output, rows: Rows | None, cotangents: Output, wanted: Any
) -> Gradients:
    """The rule in this module's description.

    Args:
        plan: Of either pass.
        operands: The arrays.
        output: Output and logsumexp, from whatever computed them.
        rows: What a sweep over these operands found; ``None`` where that was another backend's.
        cotangents: Of the output and the logsumexp.
        wanted: :class:`Inputs` of bools: which gradients are asked for.

    Returns:
        The gradients in the inputs' element types, those that are wanted at least.
    """
    products = Products(plan, operands.inputs.scale)
    out_cotangent = products.cast(cotangents.out)
    delta = jnp.sum(out_cotangent * products.cast(output.out), axis=-1) - products.cast(cotangents.logsumexp)
    # All that is loaded of a row, in one array: the logsumexp's change, delta, and the output's cotangent.
    terms = jnp.concatenate([logsumexp_change(products, operands, output), delta[..., None], out_cotangent], axis=-1)
    known = KnownRows.of(plan, operands, rows)
    is_by_key = wanted.key or wanted.value
    found = Inputs._make([None] * len(Inputs._fields))
    additional: Softmax | None = None
    if any(wanted._replace(key=False, value=False)) or operands.inputs.additional_keys is not None:
        found, additional = _by_query(plan, operands, known, terms, carries_plan=not is_by_key)
    if is_by_key:
        key, value = _by_key(plan, operands, known, additional, terms)
        found = found._replace(key=key, value=value)
    pairs = zip(found, operands.inputs, strict=True)
    return Inputs._make([None if new is None or own is None else new.astype(own.dtype) for new, own in pairs])


def _by_query(
    plan: Plan, operands: Operands, known: KnownRows, terms: jax.Array, *, carries_plan: bool
) -> tuple[Gradients, Softmax | None]:
    """Gradients of queries, additional keys and values, and the scale; and the softmax over additional tokens alone."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    placed = PlacedSweep.of(plan, operands, "backward", outer_is_query=True)
    sweep = placed.sweep
    keys, values = sweep.split_inner(operands.inputs.key), sweep.split_inner(operands.inputs.value)
    additional = AdditionalTiles.of(operands.inputs.additional_keys, operands.inputs.additional_values, sweep)
    repeats = problem.heads // problem.heads_kv
    sums: _AdditionalSums | None = None
    if additional is not None:
        zeros = [jnp.zeros(array.shape, products.dtype) for array in additional[:2]]
        sums = varying_like((zeros[0], zeros[1]), operands)

    def step(
        sums: _AdditionalSums | None, inputs: tuple[jax.Array, ...]
    ) -> tuple[_AdditionalSums | None, tuple[jax.Array, Softmax | None]]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        given = known._replace(rows=Rows(inputs[2][..., :1], inputs[2][..., 1:2]))
        change, delta, out_cotangent = inputs[2][..., 2:3], inputs[2][..., 3:4], inputs[2][..., 4:]
        rows, of_additional = rows_of_tile(products, placed, positions, query, keys, additional, given)
        rows = products.with_constant_maximum(rows._replace(log_total=rows.log_total + change))

        def visit(inner_step: jax.Array, sum_: jax.Array) -> jax.Array:
            key = sweep.load(keys, positions, inner_step, problem.heads_kv)
            value = sweep.load(values, positions, inner_step, problem.heads_kv)
            mask = sweep.mask(positions, inner_step, repeats)
            weights = softmax_weights(products, query, key, rows, mask, carries_plan=carries_plan)
            return sum_ + products.mix(weights * (products.inner(out_cotangent, value) - delta), key)

        def visit_additional(sum_: jax.Array, tile: AdditionalTiles) -> tuple[jax.Array, _AdditionalSums]:
            key, value = for_tiles(tile.keys, query), for_tiles(tile.values, query)
            weights = softmax_weights(products, query, key, rows, tile.exists)
            gradients = weights * (products.inner(out_cotangent, value) - delta)
            of_tile = products.mix_rows(products.scaled(gradients), query), products.mix_rows(weights, out_cotangent)
            return sum_ + products.mix(gradients, key), (of_tile[0].sum(axis=0), of_tile[1].sum(axis=0))

        sum_ = varying_like(jnp.zeros(query.shape, products.dtype), operands)
        if additional is not None and sums is not None:
            sum_, found = swept(visit_additional, sum_, additional)
            sums = sums[0] + found[0], sums[1] + found[1]
        sum_ = repeated(sweep.inner_steps, visit, sum_, placed.is_needed(positions))
        return sums, (sum_, None if additional is None else of_additional)

    rows_and_terms = jnp.concatenate([*known.rows, terms], axis=-1)
    cut = (sweep.cut_outer(array, problem.heads_kv) for array in (operands.inputs.query, rows_and_terms))
    sums, (query, of_additional) = swept(step, sums, (placed.positions, *cut))
    of_products = placed.or_nan_for_parts(sweep.join_outer(query, problem.heads))
    query = products.scale_of_tokens(problem.rank) * of_products
    scale = None
    if operands.inputs.scale is not None:
        tokens_and_width = (*range(1, problem.rank + 1), problem.rank + 2)
        scale = jnp.sum(of_products * products.cast(operands.inputs.query), axis=tokens_and_width)
    found = Inputs._make([query, None, None, None, None, scale])
    if sums is None:
        return found, None
    assert operands.inputs.additional_keys is not None
    count = operands.inputs.additional_keys.shape[1]
    joined: Softmax = jax.tree.map(lambda array: sweep.join_outer(array, problem.heads), of_additional)
    sums = placed.or_nan_for_parts((products.scale * sums[0], sums[1]))
    of_keys, of_values = (untiled(each, count) for each in sums)
    return found._replace(additional_keys=of_keys, additional_values=of_values), joined


def _by_key(
    plan: Plan, operands: Operands, known: KnownRows, additional: Softmax | None, terms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the keys and values."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    placed = PlacedSweep.of(plan, operands, "backward", outer_is_query=False)
    sweep = placed.sweep
    queries = sweep.split_inner(operands.inputs.query)
    keys, values = (sweep.cut_outer(array, problem.heads_kv) for array in (operands.inputs.key, operands.inputs.value))
    rows = rows_by_key(placed, operands, queries, keys, additional, known)
    rows_and_terms = jnp.concatenate([rows, sweep.split_inner(terms)], axis=-1)
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(_: None, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, Sums]:
        positions, key, value = sweep.at(inputs[0]), products.cast(inputs[1]), products.cast(inputs[2])

        def visit(inner_step: jax.Array, sums: Sums) -> Sums:
            query = sweep.load(queries, positions, inner_step, problem.heads_kv)
            # Fused into the exponential, it would be loaded once per logit.
            loaded = materialize(sweep.load(rows_and_terms, positions, inner_step, problem.heads_kv))
            tile_rows = products.with_constant_maximum(Rows(loaded[..., :1], loaded[..., 1:2] + loaded[..., 2:3]))
            delta, out_cotangent = loaded[..., 3:4], loaded[..., 4:]
            mask = sweep.mask(positions, inner_step, repeats)
            weights = softmax_weights(products, query, key, tile_rows, mask, carries_plan=True)
            gradients = weights * (products.inner(out_cotangent, value) - delta)
            of_key = products.mix_rows(products.scaled(gradients), query)
            return sums[0] + of_key, sums[1] + products.mix_rows(weights, out_cotangent)

        zeros = jnp.zeros(key.shape, products.dtype), jnp.zeros(value.shape, products.dtype)
        sums = varying_like(zeros, operands)
        return None, repeated(sweep.inner_steps, visit, sums, placed.is_needed(positions))

    _, (key, value) = swept(step, None, (placed.positions, keys, values))
    joined = products.scale * sweep.join_outer(key, problem.heads_kv), sweep.join_outer(value, problem.heads_kv)
    return placed.or_nan_for_parts(joined)
