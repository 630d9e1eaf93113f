"""The ``flex`` backend: blockwise attention in plain JAX, for every device that XLA compiles for.

The forward pass is an online softmax over the hull of each query tile's windows. Its derivative is given
as a rule for *tangents* (``jax.custom_jvp``) that starts from output and logsumexp, so that nothing is
kept per key/value tile: with ``P = exp(s - lse)`` and tangents marked by ``'``,

    ds = P * s'        lse' = rowsum(ds)        out' = ds V + P V' - out * lse'

The rule is linear in the tangents and plain JAX. Transposed by JAX it is the usual backward pass of
attention, and differentiated again it gives derivatives of any order, forwards or backwards.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.backends.base import Gradients, Operands, Output, Pass, TilePair, requested_pair
from natten_jax.backends.flex_blocks import Sweep, make_sweep, materialize
from natten_jax.devices import Device
from natten_jax.problem import Problem, TileConfig

_Tree = TypeVar("_Tree")

DTYPES = ("float32", "float16", "bfloat16", "float64")
MAX_TILE_TOKENS = 1024
_PRECISION_OPTION = "jax_default_matmul_precision"  # JAX's stubs know it in some releases only

_TILE_PAIRS: dict[int, list[TilePair]] = {
    1: [((64,), (64,)), ((128,), (128,)), ((64,), (128,)), ((128,), (64,)), ((256,), (256,))],
    2: [((8, 8), (8, 8)), ((4, 16), (4, 16)), ((4, 16), (8, 8)), ((16, 16), (16, 16))],
    3: [
        ((4, 4, 4), (4, 4, 4)),
        ((2, 4, 8), (2, 4, 8)),
        ((2, 4, 8), (4, 4, 4)),
        ((4, 8, 8), (4, 8, 8)),
    ],
}


class FlexBackend:
    """Blockwise attention in plain JAX; see :class:`natten_jax.backends.base.Backend`."""

    family = "flex"
    query_family = "flex"
    is_pure_jax = True
    fuses_additional_kv = True

    def rejection(self, problem: Problem, device: Device, which: Pass) -> str | None:
        """Why a pass of the problem cannot run; only the element type matters."""
        if problem.dtype not in DTYPES:
            return f"It computes in {', '.join(DTYPES)}, but the arrays are {problem.dtype}."
        return None

    def tile_pairs(self, problem: Problem, device: Device, which: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return list(_TILE_PAIRS[problem.rank])

    def offers(self, problem: Problem, device: Device, which: Pass, pair: TilePair) -> bool:
        """Whether a pair of tile shapes is accepted: any is, up to a bound on its tokens."""
        return all(len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= MAX_TILE_TOKENS for tile in pair)

    def forward(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Output:
        """Compute output and logsumexp; JAX differentiates this to any order, forwards and backwards."""
        output = _attend(problem, tiles, operands)
        return Output(output.out.astype(problem.dtype), output.logsumexp)

    def backward(
        self,
        problem: Problem,
        tiles: TileConfig,
        operands: Operands,
        output: Output,
        out_cotangent: jax.Array,
        logsumexp_cotangent: jax.Array,
    ) -> Gradients:
        """Compute the gradients, from whatever computed ``output``."""
        primals = Gradients(*operands[:5])
        transpose = jax.linear_transpose(
            lambda tangents: _tangents(problem, tiles, operands, output, tangents), primals
        )
        cotangents = Output(out_cotangent.astype(output.out.dtype), logsumexp_cotangent.astype(output.logsumexp.dtype))
        gradients: Gradients
        (gradients,) = transpose(cotangents)
        return gradients


class _Products:
    """The matrix products of a problem: operands and results in the accumulator's element type."""

    def __init__(self, problem: Problem):
        self.dtype = jnp.dtype(problem.accumulator_dtype)
        self.scale = problem.scale
        # Half-precision values are exact in TF32 and bfloat16 passes; float32 is not, so it takes full
        # precision unless the user chose one.
        is_half = problem.dtype in ("float16", "bfloat16")
        is_chosen = is_half or getattr(jax.config, _PRECISION_OPTION) is not None
        self.precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """``array`` in the element type of the computation."""
        return array.astype(self.dtype)

    def logits(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """``scale * query key^T``."""
        return self.scale * self._product("cbhqd,cbhkd->cbhqk", query, key)

    def mix(self, weights: jax.Array, value: jax.Array) -> jax.Array:
        """``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts,
            self.cast(a),
            self.cast(b),
            precision=self.precision,
            preferred_element_type=self.dtype,
        )


class _Softmax(NamedTuple):
    """Running softmax of rows: maximum, sum of exponentials and their mix of values, each ``[..., rows, width]``."""

    maximum: jax.Array
    total: jax.Array
    mixed: jax.Array


def _update(
    products: _Products, state: _Softmax, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> _Softmax:
    logits = products.logits(query, key)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    maximum = jnp.maximum(state.maximum, logits.max(axis=-1, keepdims=True))
    # A row that has seen no key yet has no maximum to subtract.
    reference = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(logits - reference)
    decay = jnp.exp(state.maximum - reference)
    total = state.total * decay + weights.sum(axis=-1, keepdims=True)
    return _Softmax(maximum, total, state.mixed * decay + products.mix(weights, value))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, tiles: TileConfig, operands: Operands) -> Output:
    """Output and logsumexp, both in the accumulator's element type: the derivative is the more accurate for it."""
    products = _Products(problem)
    sweep = _sweep(problem, tiles, operands, "forward", home_is_query=True)
    origins = _origins(problem, operands)
    keys, values = sweep.split_away(operands.key), sweep.split_away(operands.value)
    extra = _tile_additional(problem, operands.additional_keys, operands.additional_values, sweep)
    repeats = problem.heads // problem.heads_kv

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, query = inputs
        query = products.cast(query)
        positions = sweep.position(index, origins)
        rows = (*query.shape[:-1], 1)
        state = _Softmax(
            jnp.full(rows, -jnp.inf, products.dtype),
            jnp.zeros(rows, products.dtype),
            jnp.zeros((*query.shape[:-1], problem.head_dim_v), products.dtype),
        )
        state = _varying(state, operands)

        def visit(state: _Softmax, away_step: jax.Array) -> tuple[_Softmax, None]:
            key = sweep.load(keys, positions, away_step, problem.heads_kv)
            value = sweep.load(values, positions, away_step, problem.heads_kv)
            mask = sweep.mask(positions, away_step, repeats)
            return _update(products, state, query, key, value, mask), None

        def visit_extra(state: _Softmax, tile: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[_Softmax, None]:
            key, value, mask = tile
            return _update(products, state, query, _for_tiles(key, query), _for_tiles(value, query), mask), None

        if extra is not None:
            state, _ = lax.scan(visit_extra, state, extra)
        state, _ = lax.scan(visit, state, jnp.arange(sweep.away_steps, dtype=jnp.int32))
        is_empty = state.total == 0
        total = jnp.where(is_empty, 1, state.total)
        return None, (state.mixed / total, jnp.where(is_empty, -jnp.inf, state.maximum + jnp.log(total)))

    queries = sweep.cut_home(operands.query, problem.heads_kv)
    _, (out, lse) = lax.scan(step, None, (jnp.arange(sweep.steps, dtype=jnp.int32), queries))
    out, lse = sweep.join_home(out, problem.heads), sweep.join_home(lse, problem.heads)[..., 0]
    return _guard(sweep, origins, Output(out, lse))


@_attend.defjvp
def _attend_jvp(
    problem: Problem, tiles: TileConfig, primals: tuple[Operands], tangents: tuple[Operands]
) -> tuple[Output, Output]:
    (operands,), (operand_tangents,) = primals, tangents
    output = _attend(problem, tiles, operands)
    return output, _tangents(problem, tiles, operands, output, Gradients(*operand_tangents[:5]))


def _tangents(problem: Problem, tiles: TileConfig, operands: Operands, output: Output, tangents: Gradients) -> Output:
    """The rule in this module's description; linear in ``tangents``.

    The contributions of the query tangents are gathered per query tile, those of the key and value tangents
    are scattered per key/value tile: so the transposed rule, where that is the other way round, only gathers.
    """
    products = _Products(problem)
    lse = output.logsumexp.astype(products.dtype)
    # A row without keys has no weights, whatever is subtracted from its (masked) logits.
    lse = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    by_query = _query_tangents(problem, tiles, operands, lse, tangents)
    by_key = _key_tangents(problem, tiles, operands, lse, tangents)
    mixed, total = by_query[0] + by_key[0], by_query[1] + by_key[1]
    out = mixed - products.cast(output.out) * total
    return Output(out.astype(output.out.dtype), total[..., 0].astype(output.logsumexp.dtype))


def _weights(
    products: _Products, query: jax.Array, key: jax.Array, lse: jax.Array, mask: jax.Array | None
) -> jax.Array:
    logits = products.logits(query, key) - lse
    # Masked before the exponential: it could overflow, and infinity times zero is no derivative.
    return jnp.exp(logits if mask is None else jnp.where(mask, logits, -jnp.inf))


def _query_tangents(
    problem: Problem, tiles: TileConfig, operands: Operands, lse: jax.Array, tangents: Gradients
) -> tuple[jax.Array, jax.Array]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the queries and the additional keys and values."""
    products = _Products(problem)
    sweep = _sweep(problem, tiles, operands, "backward", home_is_query=True)
    origins = _origins(problem, operands)
    keys, values = sweep.split_away(operands.key), sweep.split_away(operands.value)
    extra = _tile_additional(problem, operands.additional_keys, operands.additional_values, sweep)
    # Cast here, so that the transposed rule sums over query tiles in the accumulator's element type.
    extra_tangents = _tile_additional(
        problem,
        None if tangents.additional_keys is None else products.cast(tangents.additional_keys),
        None if tangents.additional_values is None else products.cast(tangents.additional_values),
        sweep,
    )
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Sums]:
        index, query, row_lse, query_tangent = inputs
        query, query_tangent = products.cast(query), products.cast(query_tangent)
        positions = sweep.position(index, origins)
        mixed = jnp.zeros((*query.shape[:-1], problem.head_dim_v), products.dtype)
        sums = _varying((mixed, jnp.zeros((*query.shape[:-1], 1), products.dtype)), operands)

        @jax.checkpoint
        def contribution(query_tangent: jax.Array, away_step: jax.Array) -> Sums:
            key = sweep.load(keys, positions, away_step, problem.heads_kv)
            value = sweep.load(values, positions, away_step, problem.heads_kv)
            mask = sweep.mask(positions, away_step, repeats)
            ds = _weights(products, query, key, row_lse, mask) * products.logits(query_tangent, key)
            return products.mix(ds, value), ds.sum(axis=-1, keepdims=True)

        @jax.checkpoint
        def extra_contribution(
            query_tangent: jax.Array, tile: tuple[jax.Array, ...], tile_tangent: tuple[jax.Array, ...]
        ) -> Sums:
            key, value, mask = _for_tiles(tile[0], query), _for_tiles(tile[1], query), tile[2]
            key_tangent, value_tangent = _for_tiles(tile_tangent[0], query), _for_tiles(tile_tangent[1], query)
            weights = _weights(products, query, key, row_lse, mask)
            ds = weights * (products.logits(query_tangent, key) + products.logits(query, key_tangent))
            mixed = products.mix(ds, value) + products.mix(weights, value_tangent)
            return mixed, ds.sum(axis=-1, keepdims=True)

        def visit(sums: Sums, away_step: jax.Array) -> tuple[Sums, None]:
            mixed, total = contribution(query_tangent, away_step)
            return (sums[0] + mixed, sums[1] + total), None

        def visit_extra(sums: Sums, tile: tuple[tuple[jax.Array, ...], ...]) -> tuple[Sums, None]:
            mixed, total = extra_contribution(query_tangent, *tile)
            return (sums[0] + mixed, sums[1] + total), None

        if extra is not None and extra_tangents is not None:
            sums, _ = lax.scan(visit_extra, sums, (extra, extra_tangents[:2]))
        sums, _ = lax.scan(visit, sums, jnp.arange(sweep.away_steps, dtype=jnp.int32))
        return None, sums

    cut = functools.partial(sweep.cut_home, heads_kv=problem.heads_kv)
    inputs = (
        jnp.arange(sweep.steps, dtype=jnp.int32),
        cut(operands.query),
        cut(lse),
        cut(tangents.query),
    )
    _, (mixed, total) = lax.scan(jax.checkpoint(step), None, inputs)
    return _guard(sweep, origins, (sweep.join_home(mixed, problem.heads), sweep.join_home(total, problem.heads)))


def _key_tangents(
    problem: Problem, tiles: TileConfig, operands: Operands, lse: jax.Array, tangents: Gradients
) -> tuple[jax.Array, jax.Array]:
    """Contributions to ``ds V + P V'`` and ``rowsum(ds)`` of the keys and values."""
    products = _Products(problem)
    sweep = _sweep(problem, tiles, operands, "backward", home_is_query=False)
    origins = _origins(problem, operands)
    queries, row_lse = sweep.split_away(operands.query), sweep.split_away(lse)
    repeats = problem.heads // problem.heads_kv
    Sums = tuple[jax.Array, jax.Array]

    def step(sums: Sums, inputs: tuple[jax.Array, ...]) -> tuple[Sums, None]:
        index, key, value, key_tangent, value_tangent = inputs
        key_tangent, value_tangent = products.cast(key_tangent), products.cast(value_tangent)
        positions = sweep.position(index, origins)

        @jax.checkpoint
        def contribution(key_tangent: jax.Array, value_tangent: jax.Array, away_step: jax.Array) -> Sums:
            query = sweep.load(queries, positions, away_step, problem.heads_kv)
            # Fused into the exponential, it would be loaded once per logit.
            tile_lse = materialize(sweep.load(row_lse, positions, away_step, problem.heads_kv))
            mask = sweep.mask(positions, away_step, repeats)
            weights = _weights(products, query, key, tile_lse, mask)
            ds = weights * products.logits(query, key_tangent)
            mixed = products.mix(ds, value) + products.mix(weights, value_tangent)
            return mixed, ds.sum(axis=-1, keepdims=True)

        def visit(sums: Sums, away_step: jax.Array) -> tuple[Sums, None]:
            mixed, total = contribution(key_tangent, value_tangent, away_step)
            return (
                sweep.add(sums[0], positions, away_step, mixed),
                sweep.add(sums[1], positions, away_step, total),
            ), None

        sums, _ = lax.scan(visit, sums, jnp.arange(sweep.away_steps, dtype=jnp.int32))
        return sums, None

    cut = functools.partial(sweep.cut_home, heads_kv=problem.heads_kv)
    inputs = (
        jnp.arange(sweep.steps, dtype=jnp.int32),
        cut(operands.key),
        cut(operands.value),
        cut(tangents.key),
        cut(tangents.value),
    )
    batch = operands.query.shape[0]
    sums = (
        sweep.empty_away(batch, problem.heads, problem.head_dim_v, products.dtype),
        sweep.empty_away(batch, problem.heads, 1, products.dtype),
    )
    (mixed, total), _ = lax.scan(jax.checkpoint(step), _varying(sums, operands), inputs)
    return _guard(sweep, origins, (sweep.join_away(mixed), sweep.join_away(total)))


def _sweep(problem: Problem, tiles: TileConfig, operands: Operands, which: Pass, *, home_is_query: bool) -> Sweep:
    pair = requested_pair(tiles, which) or _TILE_PAIRS[problem.rank][0]
    return make_sweep(
        problem,
        operands.query.shape[1:-2],
        operands.key.shape[1:-2],
        *pair,
        rows=operands.query.shape[0] * problem.heads,
        home_is_query=home_is_query,
    )


def _varying(carry: _Tree, operands: Operands) -> _Tree:
    """``carry``, varying over the manual mesh axes of ``operands`` too, as ``jax.shard_map`` asks of a scan's carry.

    Adding a zero computed from the operands does it; XLA folds that away.
    """
    never = jnp.asarray(False)
    for leaf in jax.tree.leaves(operands):
        element = leaf[(0,) * leaf.ndim]
        never = never | ((element == element) & False)
    varying: _Tree = jax.tree.map(lambda array: array + never.astype(array.dtype), carry)
    return varying


def _origins(problem: Problem, operands: Operands) -> jax.Array:
    if operands.origins is None:
        return jnp.zeros((2, problem.rank), jnp.int32)
    return operands.origins[:, 3 - problem.rank :].astype(jnp.int32)


def _guard(sweep: Sweep, origins: jax.Array, results: _Tree) -> _Tree:
    """``results``, or NaN where a pass that was planned for whole arrays is given a part: not a wrong result."""
    axes = [i for i, axis in enumerate(sweep.axes) if axis.assumes_whole]
    if not axes:
        return results
    is_whole = jnp.all(origins[:, jnp.array(axes)] == 0)
    guarded: _Tree = jax.tree.map(lambda array: array * jnp.where(is_whole, 1, jnp.nan).astype(array.dtype), results)
    return guarded


def _tile_additional(
    problem: Problem, keys: jax.Array | None, values: jax.Array | None, sweep: Sweep
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Additional keys and values as ``[tiles, batch, heads_kv, tokens, width]``, and which of them exist."""
    if keys is None or values is None:
        return None
    count = keys.shape[1]
    tiles = -(-count // max(sweep.away_tokens, 64))
    tokens = -(-count // tiles)

    def tile(array: jax.Array) -> jax.Array:
        array = jnp.pad(jnp.moveaxis(array, 1, 2), [(0, 0), (0, 0), (0, tiles * tokens - count), (0, 0)])
        array = array.reshape(*array.shape[:2], tiles, tokens, array.shape[-1])
        return jnp.moveaxis(array, 2, 0)

    exists = jnp.arange(tiles * tokens) < count
    return tile(keys), tile(values), exists.reshape(tiles, 1, 1, 1, 1, tokens)


def _for_tiles(array: jax.Array, query: jax.Array) -> jax.Array:
    """``array`` once more for each of the query tiles of a step."""
    return jnp.broadcast_to(array, (query.shape[0], *array.shape))
