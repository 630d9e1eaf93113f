"""The softmax of the ``flex`` backend, for both passes: scores, sums over keys, and weights.

- A *row* is a query of one head.
- A *score* is the product of query and key times the sign of the scale. In calls with biases, it is the biased logit.
- A logit is the score times the *logit scale*: the magnitude of the scale, or 1 in calls with biases.
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

#: A factor for all heads, or an array of factors, ``[batch, heads]``.
_Factors = float | jax.Array


class Products:
    """Matrix products of a problem, with operands and results in the accumulator's element type.

    Args:
        plan: Plan of the call.
        scale: A separate scale of the logits for each head; ``None`` to use the problem's scale for all heads.
    """

    def __init__(self, plan: Plan, scale: Annotated[jax.Array, "batch heads"] | None = None):
        problem = plan.problem
        self.dtype = jnp.dtype(problem.element.accumulator)
        self._heads = problem.heads_kv, problem.heads // problem.heads_kv
        #: Factor of all logits; 1 if each head has a separate scale.
        self.scale = problem.scale if scale is None else 1.0
        # Replace infinite scales with NaN, which propagates to the output. An infinite scale would turn negative
        # products into -inf, which marks masked keys.
        self._scales = scale = None if scale is None else jnp.where(jnp.isfinite(scale), scale, jnp.nan)
        #: True if biases are added to the scaled products.
        self.adds = bool(problem.biases)
        self._sign = None if scale is None else jnp.where(scale < 0, -1, 1).astype(self.dtype)
        # Products of 16-bit operands can use reduced precision: TF32 represents float16 and bfloat16 values exactly,
        # and a bfloat16 pass represents bfloat16 values exactly. Reduced precision would round float32 operands, which
        # therefore use full precision unless the user chose a precision.
        uses_default = problem.element.bytes == 2 or plan.precision is not None
        self._precision = None if uses_default else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """Convert an array to the element type of the computation."""
        return array.astype(self.dtype)

    @property
    def factors(self) -> _Factors:
        """Scale of the logits, for all heads or per head."""
        return self.scale if self._scales is None else self._scales

    @property
    def logit_scale(self) -> _Factors:
        """Ratio of logits to scores; not negative."""
        if self.adds:
            return 1.0
        # Multiply by the sign, because ``abs`` is not differentiable at zero.
        return abs(self.scale) if self._scales is None or self._sign is None else self._scales * self._sign

    def factors_per_row(self, factors: _Factors, rows: int) -> _Factors:
        """Reshape factors to broadcast against ``[tiles, batch, heads_kv, rows, ...]``.

        Rows are ordered by head, then by token.
        """
        if not isinstance(factors, jax.Array):
            return factors
        heads_kv, repeats = self._heads
        per_head = factors.reshape(-1, heads_kv, repeats, 1)
        per_row = jnp.broadcast_to(per_head, (*per_head.shape[:-1], rows // repeats))
        return per_row.reshape(1, -1, heads_kv, rows, 1)

    @staticmethod
    def factors_per_token(factors: _Factors, rank: int) -> _Factors:
        """Reshape factors to broadcast against ``[batch, *layout, heads, width]``."""
        if not isinstance(factors, jax.Array):
            return factors
        return factors.reshape(factors.shape[0], *(1,) * rank, factors.shape[1], 1)

    def scaled(self, rows: RowTiles) -> RowTiles:
        """Multiply rows by the scales of their heads, if each head has a separate scale."""
        return rows if self._scales is None else self.factors_per_row(self._scales, rows.shape[-2]) * rows

    def constant(self) -> Products:
        """Return a copy that JAX does not differentiate with respect to its scales."""
        result = copy.copy(self)
        result._scales = lax.stop_gradient(self._scales)
        return result

    def with_constant_maximum(self, rows: Rows) -> Rows:
        """Return row statistics that make the maximum logit of each row a constant when JAX differentiates weights.

        The maximum logit is the maximum score times the logit scale. It therefore depends on the scale of the head,
        which JAX may differentiate. The function subtracts an expression with the value 0 from ``log_total``. The
        derivative of this expression with respect to the scale cancels the derivative of the maximum logit.
        """
        if self._scales is None or self.adds:
            return rows
        logit_scale = self.factors_per_row(self.logit_scale, rows.maximum.shape[-2])
        change = (logit_scale - lax.stop_gradient(logit_scale)) * reference(rows.maximum)
        return Rows(rows.maximum, rows.log_total - change)

    def scores(self, query: RowTiles, key: TokenTiles, bias: PairTiles | None = None) -> PairTiles:
        """Compute the scores. In calls with biases, they are the biased logits.

        In other calls, they are ``query key^T`` times the sign of the scale.
        """
        if self.adds:
            logits = self.scaled(self.scale * self.inner(query, key))
            return logits if bias is None else logits + bias
        if self._sign is not None:
            return self.inner(self.cast(query) * self.factors_per_row(self._sign, query.shape[-2]), key)
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: RowTiles, tokens: TokenTiles) -> PairTiles:
        """Compute ``rows tokens^T``, one inner product per pair of a row and a token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def mix(self, weights: PairTiles, value: TokenTiles) -> RowTiles:
        """Compute ``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: PairTiles, rows: RowTiles) -> TokenTiles:
        """Compute ``weights^T rows``, one weighted sum of rows per token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, self.cast(a), self.cast(b), precision=self._precision, preferred_element_type=self.dtype
        )


class Softmax(NamedTuple):
    """State of the online softmax of rows, over the keys that a sweep has processed so far.

    Attributes:
        maximum: Largest score; ``-inf`` if all keys so far were masked out.
        total: Sum over keys of ``exp(logit - largest logit)``.
        mixed: Sum of the values, weighted by these exponentials; ``None`` if it is not needed.
    """

    maximum: PerRow
    total: PerRow
    mixed: Annotated[jax.Array, "... width_v"] | None

    @property
    def rows(self) -> Rows:
        """The maxima, and the logarithms of the totals; 0 instead of the logarithm of 0."""
        return Rows(self.maximum, jnp.where(self.total == 0, 0, jnp.log(self.total)))

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim_v: int | None, dtype: jnp.dtype) -> Softmax:
        """Return the initial state of the softmax, before any key."""
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
        """Return the softmax updated with further keys; :func:`softmax_weights` describes ``carries_plan``."""
        scores = jnp.where(mask, products.scores(query, key, bias), -jnp.inf)
        maximum = jnp.maximum(self.maximum, scores.max(axis=-1, keepdims=True))
        logit_scale = products.factors_per_row(products.logit_scale, scores.shape[-2])
        decay = jnp.where(self.maximum == -jnp.inf, 0, jnp.exp(logit_scale * (self.maximum - reference(maximum))))
        weights = exponentials(products, scores, maximum, carries_plan=carries_plan)
        total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = self.mixed
        if mixed is not None and value is not None:
            mixed = mixed * decay + products.mix(weights, value)
        return Softmax(maximum, total, mixed)


class Rows(NamedTuple):
    """Softmax statistics of rows: the weight of a key is ``exp(logit - largest logit - log_total)``.

    Attributes:
        maximum: Largest score.
        log_total: Logarithm of the sum over keys of ``exp(logit - largest logit)``.
    """

    maximum: PerRow
    log_total: PerRow


def exponentials(products: Products, scores: PairTiles, maximum: PerRow, *, carries_plan: bool = False) -> PairTiles:
    """Compute ``exp(logit - largest logit)``, given the largest score ``maximum``; 0 for masked keys."""
    # Mask the logits in addition to the scores: a logit scale of 0 turns a score of -inf into NaN.
    logit_scale = products.factors_per_row(products.logit_scale, scores.shape[-2])
    return _exp(jnp.where(scores != -jnp.inf, logit_scale * (scores - reference(maximum)), -jnp.inf), carries_plan)


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

    If ``carries_plan`` is True, the plan is attached to the exponential as metadata. Callers set it in one sweep of a
    pass. The plan is attached to an exponential because XLA keeps exponentials in the compiled program.
    """
    logit_scale = products.factors_per_row(products.logit_scale, query.shape[-2])
    below = logit_scale * (products.scores(query, key, bias) - reference(rows.maximum))
    # Clip the difference to at most 0: recomputed scores are rounded differently from the scores of the sweep that
    # found the maximum, and may exceed it if they are large.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    return _exp(jnp.where(mask, below - rows.log_total, -jnp.inf), carries_plan)


def _exp(logits: PairTiles, carries_plan: bool) -> PairTiles:
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: PerRow) -> PerRow:
    """Return the number to subtract from a row's scores: their maximum, or 0 if the maximum is ``-inf``."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


#: A float32 logit of at most this magnitude has a rounding error below 2e-5. The error changes the weight of the key by
#: a factor that differs from 1 by less than about 2e-5.
LARGEST_RELIABLE_LOGIT = 256.0


class KnownRows(NamedTuple):
    """Row statistics of an earlier sweep, if there is one.

    Attributes:
        rows: The row statistics; zeros without an earlier sweep.
        is_unreliable: True if they must be recomputed before weights are computed.
    """

    rows: Rows
    is_unreliable: Scalar

    @classmethod
    def from_residuals(cls, products: Products, operands: Operands, residuals: jax.Array | None) -> KnownRows:
        """Return the row statistics that a forward pass saved as residuals. JAX does not differentiate them.

        Without residuals, return zeros that are marked as unreliable.
        """
        if residuals is None:
            per_row = (*operands.inputs.query.shape[:-1], 1)
            zeros = varying_like(jnp.zeros(per_row, products.dtype), operands)
            return cls(Rows(zeros, zeros), varying_like(jnp.array(True), operands))
        operands, residuals = lax.stop_gradient((operands, residuals))
        return cls(Rows(residuals[..., :1], residuals[..., 1:]), _may_be_large(products.constant(), operands))

    def rounds(self, count: int) -> Scalar:
        """Return the number of rounds to execute in a loop that recomputes statistics.

        This is ``count`` if the statistics are unreliable, otherwise 0.
        """
        return jnp.where(self.is_unreliable, count, 0).astype(jnp.int32)


def _may_be_large(products: Products, operands: Operands) -> Scalar:
    """Return True if the magnitude of a logit may exceed ``LARGEST_RELIABLE_LOGIT``.

    Elements that are not finite are ignored. Otherwise, such an element in one batch entry would cause row statistics
    to be recomputed for the whole batch, which changes the rounding of other entries. A row with a logit of NaN or
    ``inf`` has NaN weights, whether its statistics are recomputed or not.
    """

    def square(array: jax.Array) -> jax.Array:
        array = products.cast(array)
        array = jnp.where(jnp.isfinite(array), array, 0)
        return jnp.max(jnp.sum(array * array, axis=-1))

    keys = square(operands.inputs.key)
    if operands.inputs.additional_keys is not None:
        keys = jnp.maximum(keys, square(operands.inputs.additional_keys))
    # The comparisons are negated, so that an overflow to inf, or to NaN by ``0 * inf``, counts as exceeding the bound.
    scale = jnp.abs(jnp.asarray(products.factors, products.dtype))
    scale = jnp.max(jnp.where(jnp.isfinite(scale), scale, 0))
    largest = square(operands.inputs.query) * keys
    if not products.adds:
        return ~(scale**2 * largest <= LARGEST_RELIABLE_LOGIT**2)
    biases = [each for each in (operands.inputs.relative_bias, operands.inputs.key_bias) if each is not None]
    added = sum(jnp.max(jnp.abs(jnp.where(jnp.isfinite(bias), bias, 0))) for bias in biases)
    return ~(scale * jnp.sqrt(largest) + added <= LARGEST_RELIABLE_LOGIT)
