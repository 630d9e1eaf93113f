"""The ``flex`` backend: blockwise attention in plain JAX, for every device that XLA compiles for.

The passes consist of *sweeps*, which are loops over tiles (:mod:`natten_jax.backends.flex.geometry`). For each query
tile, the forward pass computes an online softmax over the range from the first to the last key that the tile's queries
see.

The derivative of the forward pass is an analytic rule, the usual backward pass of attention. Let ``P`` be the softmax
weights, and ``dP = dO V^T``. Let ``delta`` be ``rowsum(dO O)`` minus the cotangent of the logsumexp. The rule computes
``dS = P (dP - delta)``, and from it ``dQ = scale dS K``, ``dK = scale dS^T Q`` and ``dV = P^T dO``. These gradients are
linear in the cotangents. The transpose of this linear map computes the tangents of output and logsumexp.

The residuals of the rule are the output, the logsumexp, and two statistics per softmax row: the maximum, and the
logarithm of the sum. None of them is stored per key/value tile. The rule is plain JAX, so JAX can differentiate it to
any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.biases import products_of_heads
from natten_jax.arrays.boxes import without_padding
from natten_jax.arrays.operands import Cotangents, Differentiable, Gradients, Operands, Output, Saved, varying_like
from natten_jax.backends.base import Capabilities, PureJaxBackend
from natten_jax.backends.flex.geometry import PerRow, materialize, repeated, swept
from natten_jax.backends.flex.operands import AdditionalTiles, KeySweep, QuerySweep, summed_by_key, untiled
from natten_jax.backends.flex.softmax import KnownRows, Products, Rows, Softmax, softmax_weights
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import EDGES

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])

_LARGEST_TILE = 1024  # tokens

#: Pairs of query and key/value tiles, by number of token dimensions. The first pair is the recommended one.
_TILE_PAIRS: dict[int, list[TilePair]] = {
    1: [((64,), (64,)), ((128,), (128,)), ((64,), (128,)), ((128,), (64,)), ((256,), (256,))],
    2: [((8, 8), (8, 8)), ((4, 16), (4, 16)), ((4, 16), (8, 8)), ((16, 16), (16, 16))],
    3: [((4, 4, 4), (4, 4, 4)), ((2, 4, 8), (2, 4, 8)), ((2, 4, 8), (4, 4, 4)), ((4, 8, 8), (4, 8, 8))],
}


class FlexBackend(PureJaxBackend):
    """Blockwise attention in plain JAX; see :class:`natten_jax.backends.base.Backend`."""

    family = "flex"
    capabilities = Capabilities(
        dtypes=("float32", "float16", "bfloat16", "float64"),
        largest_tiles=lambda *_: (_LARGEST_TILE, _LARGEST_TILE),
        converts_float8_to="bfloat16",
        edges=EDGES,
        used_arguments=("backward_deterministic",),  # every run is deterministic
        features=("own_extents", "relative_bias", "key_bias", "additional_kv"),
        is_plain_jax=True,
        is_slow_fallback=True,
        residual_width=len(Rows._fields),
    )

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tiles to choose from, with the recommended pair first."""
        return list(_TILE_PAIRS[problem.rank])

    def attend(self, plan: Plan, operands: Operands) -> Output:
        out, logsumexp, _ = self.forward_differentiable(plan, operands)
        return Output(out.astype(plan.problem.output_dtype), logsumexp)

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        """Compute output, logsumexp, and two statistics per softmax row: the maximum, and the logarithm of the sum."""
        operands, problem = _without_padding(plan, operands, operands), plan.problem
        over = QuerySweep(plan, operands, "forward")

        def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Softmax]:
            positions, query = over.sweep.at(inputs[0]), over.products.cast(inputs[1])
            return None, over.softmax(positions, query, problem.head_dim_v, lambda rounds: rounds, carries_plan=True)[1]

        _, cut = swept(step, None, (over.positions, over.sweep.cut_outer(operands.inputs.query)))
        # Concatenate the three arrays before `join_outer`, which then transposes one array instead of three.
        joined = over.sweep.join_outer(jnp.concatenate(jax.tree.leaves(cut), axis=-1), problem.heads)
        softmax = over.nan_if_invalid(Softmax(joined[..., :1], joined[..., 1:2], joined[..., 2:]))
        assert softmax.mixed is not None
        logit_scale = over.products.factors_per_token(over.products.logit_scale, problem.rank)
        total, lse = softmax.total, logit_scale * softmax.maximum + jnp.log(softmax.total)
        if operands.is_placed or problem.biases:
            # A row sees no local key if all its keys are hidden (masked out) or on other devices, or if the row is
            # padding.
            is_empty = softmax.total == 0
            total, lse = jnp.where(is_empty, 1, total), jnp.where(is_empty, -jnp.inf, lse)
        return Differentiable(softmax.mixed / total, lse[..., 0], jnp.concatenate(softmax.rows, axis=-1))

    def tangents(self, plan: Plan, operands: Operands, result: Differentiable, tangents: Gradients) -> Output:
        """Compute the tangents of output and logsumexp by transposing :meth:`gradients`."""
        wanted = jax.tree.map(lambda _: True, operands.inputs)

        def gradients(*cotangents: jax.Array) -> Gradients:
            return _gradients(plan, operands, result, Cotangents(*cotangents), wanted, is_transposed=True)

        return Output(*jax.linear_transpose(gradients, *result[:2])(_without_padding(plan, operands, tangents)))

    def gradients(
        self, plan: Plan, operands: Operands, result: Differentiable, cotangents: Cotangents, wanted: Any
    ) -> Gradients:
        """Compute the gradients of the inputs from the cotangents of output and logsumexp."""
        return _gradients(plan, operands, result, cotangents, wanted, is_transposed=False)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients. Any backend may have computed the saved results."""
        # Pass no residuals, so that the row statistics are recomputed. They must match the scores of this backend, and
        # the kernels of another backend would have rounded them differently.
        wanted = jax.tree.map(lambda _: True, operands.inputs)
        return self.gradients(plan, operands, Differentiable(saved.out, saved.logsumexp), cotangents, wanted)


def _gradients(
    plan: Plan, operands: Operands, result: Differentiable, cotangents: Cotangents, wanted: Any, *, is_transposed: bool
) -> Gradients:
    """Compute gradients by the rule in the module's docstring.

    Args:
        plan: The plan of the forward or of the backward pass.
        operands: The operands.
        result: Output and logsumexp, which any backend may have computed. The residuals are ``None`` unless this
            backend computed them.
        cotangents: The cotangents of the output and the logsumexp.
        wanted: An :class:`Inputs` tuple of bools, True for each input whose gradient is needed.
        is_transposed: True if JAX will transpose this function. Arrays that are linear in the cotangents are then not
            concatenated with other arrays, and derivatives recompute each inner step instead of storing the step's
            residuals.

    Returns:
        The gradients, in the element types of the inputs. They may include gradients that are not needed.
    """
    cotangents = _without_padding(plan, operands, cotangents)
    operands = _without_padding(plan, operands, operands)
    products = Products(plan, operands.inputs.scale)
    # JAX treats the row statistics as constants when it differentiates. `change` is zero, and its derivative is the
    # derivative of the logsumexp. Adding `change` to the row statistics gives them the correct derivative.
    change = result.logsumexp - lax.stop_gradient(result.logsumexp)
    if operands.is_placed or plan.problem.biases:
        # If a row sees no local key, its logsumexp is -inf, and `change` is NaN. Use 0 instead. Any finite number would
        # do, because all logits of the row are masked and its weights are 0.
        change = jnp.where(result.logsumexp == -jnp.inf, 0, change)
    out_cotangent = products.cast(cotangents.out)
    delta = jnp.sum(out_cotangent * products.cast(result.out), axis=-1)
    if cotangents.logsumexp is not None:
        delta -= products.cast(cotangents.logsumexp)
    terms = [products.cast(change)[..., None], jnp.concatenate([delta[..., None], out_cotangent], axis=-1)]
    if not is_transposed:
        terms = [jnp.concatenate(terms, axis=-1)]
    known = KnownRows.from_residuals(products, operands, result.residuals)
    is_by_key = wanted.key or wanted.value or wanted.key_bias
    grads = Gradients._make([None] * len(Gradients._fields))
    additional: Softmax | None = None
    if any(wanted._replace(key=False, value=False, key_bias=False)) or operands.inputs.additional_keys is not None:
        grads, additional = _by_query(plan, operands, known, terms, carries_plan=not is_by_key)
    if is_by_key:
        key, value, key_bias = _by_key(plan, operands, known, additional, terms)
        grads = grads._replace(key=key, value=value, key_bias=key_bias)
    pairs = zip(grads, operands.inputs, strict=True)
    return Gradients._make([None if new is None or own is None else new.astype(own.dtype) for new, own in pairs])


def _without_padding(plan: Plan, operands: Operands, arrays: _Arrays) -> _Arrays:
    """Set padding to zero. It may contain NaN, and a weight of 0 times NaN would be NaN."""
    return without_padding(operands.layouts, arrays) if plan.problem.own_extents else arrays


class _RowTerms(NamedTuple):
    """Arrays from which gradients are computed, with an entry per row. A row is a query of one head.

    Attributes:
        rows: Statistics of the row's softmax.
        change: Zeros in value. Their tangent is the tangent of the logsumexp.
        delta: ``delta`` in the module's docstring.
        out_cotangent: Cotangent of the output.
    """

    rows: Rows
    change: PerRow
    delta: PerRow
    out_cotangent: jax.Array

    @classmethod
    def from_arrays(cls, arrays: Sequence[jax.Array]) -> _RowTerms:
        """Split concatenated terms.

        If there are two arrays, the second contains the terms that are linear in the cotangents: ``delta`` and
        ``out_cotangent``.
        """
        first, *linear = arrays
        delta_and_cotangent = linear[0] if linear else first[..., 3:]
        rows = Rows(first[..., :1], first[..., 1:2])
        return cls(rows, first[..., 2:3], delta_and_cotangent[..., :1], delta_and_cotangent[..., 1:])

    def changed_rows(self, products: Products, rows: Rows | None = None) -> Rows:
        """Return ``rows`` (default: ``self.rows``) with the derivative of the logsumexp as their derivative."""
        rows = self.rows if rows is None else rows
        return products.with_constant_maximum(rows._replace(log_total=rows.log_total + self.change))


class _Sums(NamedTuple):
    """Gradients that a sweep accumulates over all query tiles.

    Attributes:
        additional: Gradients of the additional keys and of the additional values, in tiles; ``None`` without additional
            tokens.
        tables: Gradients of the relative bias tables; ``None`` without a relative bias.
    """

    additional: tuple[jax.Array, jax.Array] | None
    tables: jax.Array | None


def _zeros_like(arrays: Any, products: Products, operands: Operands) -> Any:
    """Return initial values of sums: zeros with the shapes of ``arrays`` and the accumulator's element type."""
    return varying_like(jax.tree.map(lambda array: jnp.zeros(array.shape, products.dtype), arrays), operands)


def _by_query(
    plan: Plan, operands: Operands, known: KnownRows, terms: Sequence[jax.Array], *, carries_plan: bool
) -> tuple[Gradients, Softmax | None]:
    """Compute gradients by a sweep over query tiles.

    Returns:
        First, the gradients of queries, additional keys, additional values, scale and relative bias; other fields are
        ``None``. Second, the softmax over only the additional tokens; ``None`` without additional tokens.
    """
    problem, inputs = plan.problem, operands.inputs
    over = QuerySweep(plan, operands, "backward")
    products, sweep, additional = over.products, over.sweep, over.additional

    def step(sums: _Sums, inputs: tuple[jax.Array, ...]) -> tuple[_Sums, tuple[jax.Array, Softmax | None]]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        terms = _RowTerms.from_arrays(inputs[2:])
        rows, additional_softmax = over.rows(positions, query, known._replace(rows=terms.rows))
        rows = terms.changed_rows(products, rows)

        def visit(inner_step: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> tuple[Any, Any]:
            sum_, tables = carry
            key, value, mask, bias = over.inner_tiles(positions, inner_step)
            weights = softmax_weights(products, query, key, rows, mask, bias, carries_plan=carries_plan)
            gradients = weights * (products.inner(terms.out_cotangent, value) - terms.delta)
            if tables is not None:
                tables = tables + over.table_gradients(gradients, positions, inner_step)
            return sum_ + products.mix(gradients, key), tables

        def visit_additional(sum_: jax.Array, tile: AdditionalTiles) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            key, value, exists = tile.for_tiles(query)
            weights = softmax_weights(products, query, key, rows, exists)
            gradients = weights * (products.inner(terms.out_cotangent, value) - terms.delta)
            key_gradients = products.mix_rows(products.scaled(gradients), query)
            value_gradients = products.mix_rows(weights, terms.out_cotangent)
            return sum_ + products.mix(gradients, key), (key_gradients.sum(axis=0), value_gradients.sum(axis=0))

        sum_, additional_sums = _zeros_like(query, products, operands), sums.additional
        if additional is not None and additional_sums is not None:
            sum_, gradients = swept(visit_additional, sum_, additional)
            additional_sums = additional_sums[0] + gradients[0], additional_sums[1] + gradients[1]
        sum_, tables = repeated(
            sweep.inner_steps, visit, (sum_, sums.tables), over.is_needed(positions), recomputes=len(inputs) > 3
        )
        return _Sums(additional_sums, tables), (sum_, None if additional is None else additional_softmax)

    rows_and_terms = [jnp.concatenate([*known.rows, terms[0]], axis=-1), *terms[1:]]
    cut = map(sweep.cut_outer, (inputs.query, *rows_and_terms))
    zeros = _zeros_like(_Sums(None if additional is None else additional[:2], over.tables), products, operands)
    sums, (query, additional_softmax) = swept(step, zeros, (over.positions, *cut))
    query_products = over.nan_if_invalid(sweep.join_outer(query, problem.heads))
    scale = None
    if inputs.scale is not None:
        scale = products_of_heads(query_products, products.cast(inputs.query))
    tables = None if sums.tables is None else over.nan_if_invalid(sums.tables)
    gradients = Gradients._make([None] * len(Gradients._fields))._replace(
        query=products.factors_per_token(products.factors, problem.rank) * query_products,
        scale=scale,
        relative_bias=None if tables is None else tables.reshape(*tables.shape[:2], -1),
    )
    if sums.additional is None:
        return gradients, None
    assert inputs.additional_keys is not None
    joined = jax.tree.map(lambda array: sweep.join_outer(array, problem.heads), additional_softmax)
    additional_sums = over.nan_if_invalid((products.scale * sums.additional[0], sums.additional[1]))
    key_gradients, value_gradients = (untiled(each, inputs.additional_keys.shape[1]) for each in additional_sums)
    return gradients._replace(additional_keys=key_gradients, additional_values=value_gradients), joined


def _by_key(
    plan: Plan, operands: Operands, known: KnownRows, additional: Softmax | None, terms: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Compute the gradients of keys, values and key biases by a sweep over key/value tiles."""
    problem = plan.problem
    over = KeySweep(plan, operands, "backward")
    products, sweep = over.products, over.sweep
    first, *linear = map(sweep.split_inner, terms)
    rows_and_terms = [jnp.concatenate([over.rows(additional, known), first], axis=-1), *linear]
    Sums = tuple[jax.Array, jax.Array, jax.Array | None]

    def step(_: None, inputs: tuple[Any, ...]) -> tuple[None, Sums]:
        packed, key, value, key_bias = inputs
        positions, key, value = sweep.at(packed), products.cast(key), products.cast(value)

        def visit(inner_step: jax.Array, sums: Sums) -> Sums:
            query = sweep.load(over.queries, positions, inner_step)
            # Without materialize(), XLA would fuse these loads into the exponential, and repeat them for each logit.
            terms = _RowTerms.from_arrays(
                [materialize(sweep.load(each, positions, inner_step)) for each in rows_and_terms]
            )
            rows, mask = terms.changed_rows(products), sweep.mask(positions, inner_step)
            bias = over.bias(positions, inner_step, key_bias)
            weights = softmax_weights(products, query, key, rows, mask, bias, carries_plan=True)
            gradients = weights * (products.inner(terms.out_cotangent, value) - terms.delta)
            key_terms = products.mix_rows(products.scaled(gradients), query)
            key_bias_sum = None if sums[2] is None else sums[2] + summed_by_key(gradients, sweep.pair_tokens)
            return sums[0] + key_terms, sums[1] + products.mix_rows(weights, terms.out_cotangent), key_bias_sum

        sums = _zeros_like((key, value, key_bias), products, operands)
        needed = over.is_needed(positions)
        return None, repeated(sweep.inner_steps, visit, sums, needed, recomputes=bool(linear))

    tiles = over.positions, over.keys, sweep.cut_outer(operands.inputs.value), over.key_bias
    _, (key, value, key_bias_sums) = swept(step, None, tiles)
    key, value = (sweep.join_outer(array, problem.heads_kv) for array in (key, value))
    key_bias = None if key_bias_sums is None else sweep.join_outer(key_bias_sums, problem.heads)
    return over.nan_if_invalid((products.scale * key, value, key_bias))
