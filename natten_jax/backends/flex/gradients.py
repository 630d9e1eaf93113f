"""The first derivative of the ``flex`` backend's attention in reverse mode: the transpose of its rule for tangents.

With ``P = exp(s - lse)`` and cotangents marked by ``~``,

    ds = P * (out~ V^T - delta)        delta = rowsum(out~ * out) - lse~
    q~ = scale ds K        k~ = scale ds^T Q        v~ = P^T out~        scale~ = sum(Q * ds K)

and those of biases are sums of ds, over the pairs of an offset and over the queries that see a key.

JAX would transpose :mod:`natten_jax.backends.flex.tangents` to the same sums, in several times as many operations, of
which XLA takes about 0.2 milliseconds each to compile. Written out it is plain JAX, which derivatives of higher orders
go through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Output
from natten_jax.backends.flex.bias import TileBias, summed_by_key
from natten_jax.backends.flex.blocks import materialize
from natten_jax.backends.flex.loops import repeated, swept
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, for_tiles, untiled
from natten_jax.backends.flex.query_sweep import QuerySweep
from natten_jax.backends.flex.rows import KnownRows, rows_by_key, rows_of_tile
from natten_jax.backends.flex.softmax import Products, Rows, Softmax, softmax_weights
from natten_jax.backends.flex.tangents import logsumexp_change
from natten_jax.plan.plan import Plan


class _Sums(NamedTuple):
    """Sums over query tiles.

    Attributes:
        additional: Gradients of additional keys and values, tiled; ``None`` without any.
        tables: Gradients of the relative biases of heads; ``None`` without any.
    """

    additional: tuple[jax.Array, jax.Array] | None
    tables: jax.Array | None


def gradients_of(
    plan: Plan, operands: Operands, output: Output, rows: Rows | None, cotangents: Cotangents, wanted: Any
) -> Gradients:
    """The rule in this module's description.

    Args:
        plan: The plan of either pass.
        operands: The arrays.
        output: Output and logsumexp, from whatever computed them.
        rows: What a sweep over these operands found; ``None`` where that was another backend's.
        cotangents: The cotangents of the output and the logsumexp.
        wanted: :class:`Inputs` of bools: which gradients are asked for.

    Returns:
        The gradients in the inputs' element types, those that are wanted at least.
    """
    products = Products(plan, operands.inputs.scale)
    out_cotangent = products.cast(cotangents.out)
    delta = jnp.sum(out_cotangent * products.cast(output.out), axis=-1)
    if cotangents.logsumexp is not None:
        delta -= products.cast(cotangents.logsumexp)
    # All that is loaded of a row, in one array: the logsumexp's change, delta, and the output's cotangent.
    terms = jnp.concatenate([logsumexp_change(products, operands, output), delta[..., None], out_cotangent], axis=-1)
    known = KnownRows.of(plan, operands, rows)
    is_by_key = wanted.key or wanted.value or wanted.key_bias
    found = Inputs._make([None] * len(Inputs._fields))
    additional: Softmax | None = None
    if any(wanted._replace(key=False, value=False, key_bias=False)) or operands.inputs.additional_keys is not None:
        found, additional = _by_query(plan, operands, known, terms, carries_plan=not is_by_key)
    if is_by_key:
        key, value, key_bias = _by_key(plan, operands, known, additional, terms)
        found = found._replace(key=key, value=value, key_bias=key_bias)
    pairs = zip(found, operands.inputs, strict=True)
    return Inputs._make([None if new is None or own is None else new.astype(own.dtype) for new, own in pairs])


def _by_query(
    plan: Plan, operands: Operands, known: KnownRows, terms: jax.Array, *, carries_plan: bool
) -> tuple[Gradients, Softmax | None]:
    """Gradients of queries, additional keys and values, scale and relative bias.

    And the softmax over additional tokens alone.
    """
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    over = QuerySweep.of(plan, operands, "backward")
    placed, sweep, biases, additional = over.placed, over.placed.sweep, over.biases, over.additional
    of_tables = biases.tables
    zeros: _Sums = jax.tree.map(
        lambda array: jnp.zeros(array.shape, products.dtype),
        _Sums(None if additional is None else (additional.keys, additional.values), of_tables),
    )
    sums = varying_like(zeros, operands)

    def step(sums: _Sums, inputs: tuple[jax.Array, ...]) -> tuple[_Sums, tuple[jax.Array, Softmax | None]]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        given = known._replace(rows=Rows(inputs[2][..., :1], inputs[2][..., 1:2]))
        change, delta, out_cotangent = inputs[2][..., 2:3], inputs[2][..., 3:4], inputs[2][..., 4:]
        rows, of_additional = rows_of_tile(products, biases, placed, positions, query, over.keys, additional, given)
        rows = products.with_constant_maximum(rows._replace(log_total=rows.log_total + change))

        def visit(inner_step: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> tuple[Any, Any]:
            sum_, tables = carry
            key, value, mask = over.inner_tiles(positions, inner_step)
            bias = biases.at(positions, inner_step)
            weights = softmax_weights(products, query, key, rows, mask, bias, carries_plan=carries_plan)
            gradients = weights * (products.inner(out_cotangent, value) - delta)
            if tables is not None:
                tables = tables + biases.table_gradients(gradients, positions, inner_step)
            return sum_ + products.mix(gradients, key), tables

        def visit_additional(sum_: jax.Array, tile: AdditionalTiles) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            key, value = for_tiles(tile.keys, query), for_tiles(tile.values, query)
            weights = softmax_weights(products, query, key, rows, tile.exists)
            gradients = weights * (products.inner(out_cotangent, value) - delta)
            of_tile = products.mix_rows(products.scaled(gradients), query), products.mix_rows(weights, out_cotangent)
            return sum_ + products.mix(gradients, key), (of_tile[0].sum(axis=0), of_tile[1].sum(axis=0))

        sum_ = varying_like(jnp.zeros(query.shape, products.dtype), operands)
        of_tokens = sums.additional
        if additional is not None and of_tokens is not None:
            sum_, found = swept(visit_additional, sum_, additional)
            of_tokens = of_tokens[0] + found[0], of_tokens[1] + found[1]
        start = sum_, sums.tables
        sum_, tables = repeated(sweep.inner_steps, visit, start, placed.is_needed(positions))
        return _Sums(of_tokens, tables), (sum_, None if additional is None else of_additional)

    rows_and_terms = jnp.concatenate([*known.rows, terms], axis=-1)
    cut = (sweep.cut_outer(array, problem.heads_kv) for array in (operands.inputs.query, rows_and_terms))
    sums, (query, of_additional) = swept(step, sums, (placed.positions, *cut))
    of_products = placed.or_nan_for_parts(sweep.join_outer(query, problem.heads))
    query = products.scale_of_tokens(problem.rank) * of_products
    scale = None
    if operands.inputs.scale is not None:
        tokens_and_width = (*range(1, problem.rank + 1), problem.rank + 2)
        scale = jnp.sum(of_products * products.cast(operands.inputs.query), axis=tokens_and_width)
    tables = None if sums.tables is None else placed.or_nan_for_parts(sums.tables)
    tables = None if tables is None else tables.reshape(*tables.shape[:2], -1)
    found = Inputs._make([None] * len(Inputs._fields))._replace(query=query, scale=scale, relative_bias=tables)
    if sums.additional is None:
        return found, None
    assert operands.inputs.additional_keys is not None
    count = operands.inputs.additional_keys.shape[1]
    joined: Softmax = jax.tree.map(lambda array: sweep.join_outer(array, problem.heads), of_additional)
    of_tokens = placed.or_nan_for_parts((products.scale * sums.additional[0], sums.additional[1]))
    of_keys, of_values = (untiled(each, count) for each in of_tokens)
    return found._replace(additional_keys=of_keys, additional_values=of_values), joined


def _by_key(
    plan: Plan, operands: Operands, known: KnownRows, additional: Softmax | None, terms: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Gradients of the keys, the values and the biases of keys."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    placed = PlacedSweep.of(plan, operands, "backward", outer_is_query=False)
    sweep = placed.sweep
    biases = TileBias.of(problem, operands.inputs, sweep)
    queries = sweep.split_inner(operands.inputs.query)
    keys, values = (sweep.cut_outer(array, problem.heads_kv) for array in (operands.inputs.key, operands.inputs.value))
    key_bias = operands.inputs.key_bias
    key_biases = None if key_bias is None else sweep.cut_outer(key_bias, problem.heads_kv)
    rows = rows_by_key(placed, operands, queries, keys, key_biases, additional, known)
    rows_and_terms = jnp.concatenate([rows, sweep.split_inner(terms)], axis=-1)
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array, jax.Array | None]

    def step(_: None, inputs: tuple[Any, ...]) -> tuple[None, Sums]:
        positions, key, value = sweep.at(inputs[0]), products.cast(inputs[1]), products.cast(inputs[2])
        of_keys = inputs[3]

        def visit(inner_step: jax.Array, sums: Sums) -> Sums:
            query = sweep.load(queries, positions, inner_step, problem.heads_kv)
            # Fused into the exponential, it would be loaded once per logit.
            loaded = materialize(sweep.load(rows_and_terms, positions, inner_step, problem.heads_kv))
            tile_rows = products.with_constant_maximum(Rows(loaded[..., :1], loaded[..., 1:2] + loaded[..., 2:3]))
            delta, out_cotangent = loaded[..., 3:4], loaded[..., 4:]
            mask = sweep.mask(positions, inner_step, repeats)
            bias = biases.at(positions, inner_step, of_keys)
            weights = softmax_weights(products, query, key, tile_rows, mask, bias, carries_plan=True)
            gradients = weights * (products.inner(out_cotangent, value) - delta)
            of_key = products.mix_rows(products.scaled(gradients), query)
            of_bias = None if sums[2] is None else sums[2] + summed_by_key(gradients, sweep.pair_tokens)
            return sums[0] + of_key, sums[1] + products.mix_rows(weights, out_cotangent), of_bias

        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, products.dtype), (key, value, of_keys))
        sums = varying_like(zeros, operands)
        return None, repeated(sweep.inner_steps, visit, sums, placed.is_needed(positions))

    _, (key, value, of_keys) = swept(step, None, (placed.positions, keys, values, key_biases))
    of_bias = None if of_keys is None else sweep.join_outer(of_keys, problem.heads)
    joined = (
        products.scale * sweep.join_outer(key, problem.heads_kv),
        sweep.join_outer(value, problem.heads_kv),
        of_bias,
    )
    return placed.or_nan_for_parts(joined)
