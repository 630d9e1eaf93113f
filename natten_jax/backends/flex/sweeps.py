"""The passes of the ``flex`` backend as sweeps over tiles: forward, tangents, and their transpose."""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Output, varying_like
from natten_jax.backends.flex.geometry import (
    MaskTiles,
    Scalar,
    TilePositions,
    TokenTiles,
    ValueTiles,
    materialize,
    repeated,
    swept,
)
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, TileBias, for_tiles, summed_by_key, untiled
from natten_jax.backends.flex.softmax import (
    KnownRows,
    Products,
    Rows,
    Softmax,
    rows_by_key,
    rows_of_tile,
    softmax_weights,
)
from natten_jax.performance import Pass
from natten_jax.plan.plan import Plan


class QuerySweep(NamedTuple):
    """A sweep whose outer tiles are queries.

    Attributes:
        placed: The sweep, and where its tiles lie.
        biases: What is added to logits.
        keys: The keys, as they are loaded.
        values: The values, likewise.
        additional: Additional keys and values; ``None`` where a call has none.
    """

    placed: PlacedSweep
    biases: TileBias
    keys: Annotated[jax.Array, "batch heads_kv *coordinates head_dim"]
    values: Annotated[jax.Array, "batch heads_kv *coordinates head_dim_v"]
    additional: AdditionalTiles | None

    @classmethod
    def of(cls, plan: Plan, operands: Operands, pass_: Pass) -> QuerySweep:
        """That of a pass."""
        inputs, placed = operands.inputs, PlacedSweep.of(plan, operands, pass_, outer_is_query=True)
        sweep = placed.sweep
        biases = TileBias.of(plan.problem, inputs, sweep)
        keys, values = sweep.split_inner(inputs.key), sweep.split_inner(inputs.value)
        additional = AdditionalTiles.of(inputs.additional_keys, inputs.additional_values, sweep)
        return cls(placed, biases, keys, values, additional)

    def inner_tiles(self, positions: TilePositions, inner_step: Scalar) -> tuple[TokenTiles, ValueTiles, MaskTiles]:
        """Keys and values of a step, and which of them each row sees."""
        problem, sweep = self.placed.plan.problem, self.placed.sweep
        key = sweep.load(self.keys, positions, inner_step, problem.heads_kv)
        value = sweep.load(self.values, positions, inner_step, problem.heads_kv)
        return key, value, sweep.mask(positions, inner_step, problem.heads // problem.heads_kv)


def softmax_of(plan: Plan, operands: Operands) -> Softmax:
    """The softmax of every row, whose arrays are ``[batch, *query_layout, heads, width]``."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    over = QuerySweep.of(plan, operands, "forward")
    placed, sweep, additional = over.placed, over.placed.sweep, over.additional

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Softmax]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        softmax = Softmax.of_no_key(query.shape[:-1], problem.head_dim_v, products.dtype)
        softmax = varying_like(softmax, operands)

        def visit(inner_step: jax.Array, softmax: Softmax) -> Softmax:
            key, value, mask = over.inner_tiles(positions, inner_step)
            bias = over.biases.at(positions, inner_step)
            return softmax.over(products, query, key, value, mask, bias, carries_plan=True)

        def visit_additional(softmax: Softmax, tile: AdditionalTiles) -> tuple[Softmax, None]:
            key, value = for_tiles(tile.keys, query), for_tiles(tile.values, query)
            return softmax.over(products, query, key, value, tile.exists), None

        if additional is not None:
            softmax, _ = swept(visit_additional, softmax, additional)
        return None, repeated(sweep.inner_steps, visit, softmax, placed.is_needed(positions))

    queries = sweep.cut_outer(operands.inputs.query, problem.heads_kv)
    _, cut = swept(step, None, (placed.positions, queries))
    # One array, which is put together once.
    joined = sweep.join_outer(jnp.concatenate(jax.tree.leaves(cut), axis=-1), problem.heads)
    return placed.or_nan_for_parts(Softmax(joined[..., :1], joined[..., 1:2], joined[..., 2:]))


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
