"""The softmax of the ``flex`` backend in each pass: scores, sums over keys, and weights.

A *score* is the product of query and key times the sign of the scale; if there are biases, the score is the logit. A
logit is the score times the *steepness*, which is not negative. A *row* is a query of one head.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Operands, varying_like
from natten_jax.backends.flex.geometry import MaskTiles, PairTiles, PerRow, RowTiles, Scalar, TokenTiles, ValueTiles
from natten_jax.plan.plan import Plan, carrying_plan

#: One number for all heads, or an array ``[batch, heads]``.
_Factors = float | jax.Array


class Products:
    """Matrix products of a problem. Operands and results have the accumulator's element type.

    Args:
        plan: Plan of the call.
        scale: Scales of the logits per head, which replace the problem's scale; ``None`` to use the problem's scale.
    """

    def __init__(self, plan: Plan, scale: Annotated[jax.Array, "batch heads"] | None = None):
        problem = plan.problem
        self.dtype = jnp.dtype(problem.element.accumulator)
        self._heads = problem.heads_kv, problem.heads // problem.heads_kv
        #: Factor of all logits; 1 if each head has a separate scale.
        self.scale = problem.scale if scale is None else 1.0
        # With a scale of inf, negative products would give -inf, the value of masked keys. Use NaN, which propagates.
        self._scales = scale = None if scale is None else jnp.where(jnp.isfinite(scale), scale, jnp.nan)
        #: True if biases are added to the scaled products.
        self.adds = bool(problem.biases)
        self._sign = None if scale is None else jnp.where(scale < 0, -1, 1).astype(self.dtype)
        # TF32 represents float16 and bfloat16 values exactly, and a bfloat16 pass represents bfloat16 values exactly.
        # Both would round float32 values, so these use full precision unless the user chose a precision.
        is_chosen = problem.element.bytes == 2 or plan.precision is not None
        self._precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """Convert an array to the element type of the computation."""
        return array.astype(self.dtype)

    @property
    def factors(self) -> _Factors:
        """Scale of the logits, for all heads or per head."""
        return self.scale if self._scales is None else self._scales

    @property
    def steepness(self) -> _Factors:
        """Ratio of logits to scores; not negative."""
        if self.adds:
            return 1.0
        # Multiply by the sign, because ``abs`` is not differentiable at zero.
        return abs(self.scale) if self._scales is None or self._sign is None else self._scales * self._sign

    def factors_per_row(self, factors: _Factors, rows: int) -> _Factors:
        """Reshape factors for ``[tiles, batch, heads_kv, rows, ...]``; rows are ordered by head, then by token."""
        if not isinstance(factors, jax.Array):
            return factors
        heads_kv, repeats = self._heads
        per_head = factors.reshape(-1, heads_kv, repeats, 1)
        per_row = jnp.broadcast_to(per_head, (*per_head.shape[:-1], rows // repeats))
        return per_row.reshape(1, -1, heads_kv, rows, 1)

    @staticmethod
    def factors_per_token(factors: _Factors, rank: int) -> _Factors:
        """Reshape factors for ``[batch, *layout, heads, width]``."""
        if not isinstance(factors, jax.Array):
            return factors
        return factors.reshape(factors.shape[0], *(1,) * rank, factors.shape[1], 1)

    def scaled(self, rows: RowTiles) -> RowTiles:
        """Multiply rows by the scales of their heads, if each head has a separate scale."""
        return rows if self._scales is None else self.factors_per_row(self._scales, rows.shape[-2]) * rows

    def constant(self) -> Products:
        """Return a copy whose scales are constants for derivatives."""
        result = copy.copy(self)
        result._scales = lax.stop_gradient(self._scales)
        return result

    def with_constant_maximum(self, rows: Rows) -> Rows:
        """Make the maximum logit of each row a constant for derivatives, even if the scale per head is differentiable.

        The maximum logit is the maximum score times the steepness. The number subtracted from ``log_total`` is zero,
        and its derivative cancels the derivative of that product.
        """
        if self._scales is None or self.adds:
            return rows
        steepness = self.factors_per_row(self.steepness, rows.maximum.shape[-2])
        change = (steepness - lax.stop_gradient(steepness)) * reference(rows.maximum)
        return Rows(rows.maximum, rows.log_total - change)

    def scores(self, query: RowTiles, key: TokenTiles, bias: PairTiles | None = None) -> PairTiles:
        """Compute the scores: ``query key^T`` times the sign of the scale or, with biases, the biased logits."""
        if self.adds:
            logits = self.scaled(self.scale * self.inner(query, key))
            return logits if bias is None else logits + bias
        if self._sign is not None:
            return self.inner(self.cast(query) * self.factors_per_row(self._sign, query.shape[-2]), key)
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: RowTiles, tokens: TokenTiles) -> PairTiles:
        """Compute ``rows tokens^T``: a number per row and token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def mix(self, weights: PairTiles, value: TokenTiles) -> RowTiles:
        """Compute ``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: PairTiles, rows: RowTiles) -> TokenTiles:
        """Compute ``weights^T rows``: a sum over rows per token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, self.cast(a), self.cast(b), precision=self._precision, preferred_element_type=self.dtype
        )


class Softmax(NamedTuple):
    """Softmax of rows over the keys seen so far.

    Attributes:
        maximum: Largest score; ``-inf`` if the row has seen no key.
        total: Sum over keys of ``exp(logit - largest logit)``.
        mixed: Sum of the values, weighted by these exponentials; ``None`` if it is not needed.
    """

    maximum: PerRow
    total: PerRow
    mixed: Annotated[jax.Array, "... width_v"] | None

    @property
    def rows(self) -> Rows:
        """Row statistics: maxima, and logarithms of the totals."""
        return Rows(self.maximum, jnp.where(self.total == 0, 0, jnp.log(self.total)))

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim_v: int | None, dtype: jnp.dtype) -> Softmax:
        """Return the initial softmax of rows, before they have seen a key."""
        mixed = None if head_dim_v is None else jnp.zeros((*rows, head_dim_v), dtype)
        return cls(jnp.full((*rows, 1), -jnp.inf, dtype), jnp.zeros((*rows, 1), dtype), mixed)

    def over(
        self,
        products: Products,
        query: RowTiles,
        key: TokenTiles,
        value: ValueTiles | None,
        mask: MaskTiles,
        bias: PairTiles | None = None,
        *,
        carries_plan: bool = False,
    ) -> Softmax:
        """Return the softmax updated with further keys; for ``carries_plan`` see :func:`softmax_weights`."""
        scores = jnp.where(mask, products.scores(query, key, bias), -jnp.inf)
        maximum = jnp.maximum(self.maximum, scores.max(axis=-1, keepdims=True))
        steepness = products.factors_per_row(products.steepness, scores.shape[-2])
        decay = jnp.where(self.maximum == -jnp.inf, 0, jnp.exp(steepness * (self.maximum - reference(maximum))))
        weights = exponentials(products, scores, maximum, carries_plan=carries_plan)
        total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = self.mixed
        if mixed is not None and value is not None:
            mixed = mixed * decay + products.mix(weights, value)
        return Softmax(maximum, total, mixed)


class Rows(NamedTuple):
    """Statistics of rows, from which weights are computed.

    Attributes:
        maximum: Largest score.
        log_total: Logarithm of the sum over keys of ``exp(logit - largest logit)``.
    """

    maximum: PerRow
    log_total: PerRow


def exponentials(products: Products, scores: PairTiles, maximum: PerRow, *, carries_plan: bool = False) -> PairTiles:
    """Compute ``exp(logit - largest logit)``, given the largest score ``maximum``; 0 for masked keys."""
    # Mask again: with a scale of 0, masked logits would not be -inf.
    steepness = products.factors_per_row(products.steepness, scores.shape[-2])
    return _exp(jnp.where(scores != -jnp.inf, steepness * (scores - reference(maximum)), -jnp.inf), carries_plan)


def softmax_weights(
    products: Products,
    query: RowTiles,
    key: TokenTiles,
    rows: Rows,
    mask: MaskTiles,
    bias: PairTiles | None = None,
    *,
    carries_plan: bool = False,
) -> PairTiles:
    """Compute softmax weights; 0 for keys that a row does not see.

    ``carries_plan`` is set in one sweep of a pass: the exponential then carries the plan as metadata, because XLA keeps
    exponentials in the compiled program.
    """
    steepness = products.factors_per_row(products.steepness, query.shape[-2])
    below = steepness * (products.scores(query, key, bias) - reference(rows.maximum))
    # A recomputed score may exceed the maximum by rounding, which matters for large scores: limit the difference to 0.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    return _exp(jnp.where(mask, below - rows.log_total, -jnp.inf), carries_plan)


def _exp(logits: PairTiles, carries_plan: bool) -> PairTiles:
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: PerRow) -> PerRow:
    """Return the number to subtract from scores: the maximum, or 0 for a row that has seen no key."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


#: A float32 logit of at most this magnitude has a rounding error below 2e-5, and so the relative error of its weight is
#: below 2e-5.
LARGEST_RELIABLE_LOGIT = 256.0


class KnownRows(NamedTuple):
    """Row statistics that are available before a sweep.

    Attributes:
        rows: Row statistics of another sweep.
        is_unreliable: True if the sweep must recompute them.
    """

    rows: Rows
    is_unreliable: Scalar

    @classmethod
    def from_residuals(cls, products: Products, operands: Operands, residuals: jax.Array | None) -> KnownRows:
        """Return the row statistics in residuals as constants for derivatives; unreliable zeros without residuals."""
        if residuals is None:
            per_row = (*operands.inputs.query.shape[:-1], 1)
            nothing = varying_like(jnp.zeros(per_row, products.dtype), operands)
            return cls(Rows(nothing, nothing), varying_like(jnp.array(True), operands))
        operands, residuals = lax.stop_gradient((operands, residuals))
        return cls(Rows(residuals[..., :1], residuals[..., 1:]), _may_be_large(products.constant(), operands))

    def rounds(self, count: int) -> Scalar:
        """Return the number of rounds of a loop to run: ``count`` if the rows are unreliable, otherwise 0."""
        return jnp.where(self.is_unreliable, count, 0).astype(jnp.int32)


def _may_be_large(products: Products, operands: Operands) -> Scalar:
    """Return True if the magnitude of a logit of finite numbers may exceed ``LARGEST_RELIABLE_LOGIT``.

    Rows are recomputed for the whole batch or not at all, and recomputed rows round differently. Numbers that are not
    finite are ignored, so that they do not affect other batch entries. Their rows have NaN weights in both cases.
    """

    def square(array: jax.Array) -> jax.Array:
        array = products.cast(array)
        array = jnp.where(jnp.isfinite(array), array, 0)
        return jnp.max(jnp.sum(array * array, axis=-1))

    keys = square(operands.inputs.key)
    if operands.inputs.additional_keys is not None:
        keys = jnp.maximum(keys, square(operands.inputs.additional_keys))
    # If the product overflows, it counts as exceeding the bound.
    scale = jnp.abs(jnp.asarray(products.factors, products.dtype))
    scale = jnp.max(jnp.where(jnp.isfinite(scale), scale, 0))
    largest = square(operands.inputs.query) * keys
    if not products.adds:
        return ~(scale**2 * largest <= LARGEST_RELIABLE_LOGIT**2)
    biases = [each for each in (operands.inputs.relative_bias, operands.inputs.key_bias) if each is not None]
    added = sum(jnp.max(jnp.abs(jnp.where(jnp.isfinite(bias), bias, 0))) for bias in biases)
    return ~(scale * jnp.sqrt(largest) + added <= LARGEST_RELIABLE_LOGIT)
