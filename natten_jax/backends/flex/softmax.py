"""Softmax as the ``flex`` backend computes it, in each pass: scores, sums over keys, and weights."""

from __future__ import annotations

import contextlib
import copy
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Operands, varying_like
from natten_jax.backends.flex.geometry import (
    MaskTiles,
    PairTiles,
    PerHead,
    PerRow,
    RowTiles,
    Scalar,
    TokenTiles,
    ValueTiles,
)
from natten_jax.plan.plan import Plan, carrying_plan

#: A number for all heads, or an array ``[batch, heads]``.
_Factors = float | jax.Array


class Products:
    """The matrix products of a problem: operands and results in the accumulator's element type.

    Args:
        plan: How the problem is computed.
        scale: The factors of the logits, in place of the problem's; or ``None``.
    """

    def __init__(self, plan: Plan, scale: PerHead | None = None):
        problem = plan.problem
        self.dtype = jnp.dtype(problem.element.accumulator)
        self._heads = problem.heads_kv, problem.heads // problem.heads_kv
        #: The factor of all logits; 1 where heads have scales of their own.
        self.scale = problem.scale if scale is None else 1.0
        # A scale of inf would hide keys whose products are negative, and NaN is never hidden.
        self._scales = scale = None if scale is None else jnp.where(jnp.isfinite(scale), scale, jnp.nan)
        #: Whether something is added to the scaled products.
        self.adds = bool(problem.biases)
        self._sign = None if scale is None else jnp.where(scale < 0, -1, 1).astype(self.dtype)
        # Half-precision values are exact in TF32 and bfloat16 passes; float32 is not, so it takes full
        # precision unless the user chose one.
        is_chosen = problem.element.bytes == 2 or plan.precision is not None
        self._precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """``array`` in the element type of the computation."""
        return array.astype(self.dtype)

    @property
    def factors(self) -> _Factors:
        """The factors of logits."""
        return self.scale if self._scales is None else self._scales

    @property
    def steepness(self) -> _Factors:
        """Factors from scores to logits, never negative."""
        if self.adds:
            return 1.0
        # Products with the sign, since ``abs`` has a kink at zero.
        return abs(self.scale) if self._scales is None or self._sign is None else self._scales * self._sign

    def of_rows(self, factors: _Factors, rows: int) -> _Factors:
        """Factors for ``[tiles, batch, heads_kv, rows, ...]``: rows are tokens, head by head."""
        if not isinstance(factors, jax.Array):
            return factors
        heads_kv, repeats = self._heads
        per_head = factors.reshape(-1, heads_kv, repeats, 1)
        per_row = jnp.broadcast_to(per_head, (*per_head.shape[:-1], rows // repeats))
        return per_row.reshape(1, -1, heads_kv, rows, 1)

    @staticmethod
    def of_tokens(factors: _Factors, rank: int) -> _Factors:
        """Factors for ``[batch, *layout, heads, width]``."""
        if not isinstance(factors, jax.Array):
            return factors
        return factors.reshape(factors.shape[0], *(1,) * rank, factors.shape[1], 1)

    def scaled(self, rows: RowTiles) -> RowTiles:
        """Rows times the scales of heads, where these have their own."""
        return rows if self._scales is None else self.of_rows(self._scales, rows.shape[-2]) * rows

    def constant(self) -> Products:
        """The same, without derivatives with respect to the scales."""
        result = copy.copy(self)
        result._scales = lax.stop_gradient(self._scales)
        return result

    def with_constant_maximum(self, rows: Rows) -> Rows:
        """Rows of tiles whose maximum times the scale is a constant for derivatives, as it is without scales of heads.

        What is added to the logarithm of the total is zero, and has the derivative of that product.
        """
        if self._scales is None or self.adds:
            return rows
        steepness = self.of_rows(self.steepness, rows.maximum.shape[-2])
        change = (steepness - lax.stop_gradient(steepness)) * reference(rows.maximum)
        return Rows(rows.maximum, rows.log_total - change)

    def scores(self, query: RowTiles, key: TokenTiles, bias: PairTiles | None = None) -> PairTiles:
        """``query key^T``, in the order of the logits; these, with what is added, where something may be."""
        if self.adds:
            logits = self.scaled(self.scale * self.inner(query, key))
            return logits if bias is None else logits + bias
        if self._sign is not None:
            return self.inner(self.cast(query) * self.of_rows(self._sign, query.shape[-2]), key)
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: RowTiles, tokens: TokenTiles) -> PairTiles:
        """``rows tokens^T``: a number for each row and token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def mix(self, weights: PairTiles, value: TokenTiles) -> RowTiles:
        """``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: PairTiles, rows: RowTiles) -> TokenTiles:
        """``weights^T rows``: a sum over rows for each token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, self.cast(a), self.cast(b), precision=self._precision, preferred_element_type=self.dtype
        )


class Softmax(NamedTuple):
    """Softmax of rows over the keys seen so far.

    Attributes:
        maximum: Largest score; ``-inf`` where no key was seen.
        total: Sum of the exponentials of the logits less the largest.
        mixed: Values mixed with these exponentials; ``None`` where nobody asks for them.
    """

    maximum: PerRow
    total: PerRow
    mixed: Annotated[jax.Array, "... width_v"] | None

    @property
    def rows(self) -> Rows:
        """Maxima, and logarithms of the sums."""
        return Rows(self.maximum, jnp.where(self.total == 0, 0, jnp.log(self.total)))

    @classmethod
    def of_no_key(cls, rows: tuple[int, ...], head_dim_v: int | None, dtype: jnp.dtype) -> Softmax:
        """The softmax of rows that have seen no key yet."""
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
        """Over more keys; ``carries_plan`` as in :func:`softmax_weights`."""
        scores = jnp.where(mask, products.scores(query, key, bias), -jnp.inf)
        maximum = jnp.maximum(self.maximum, scores.max(axis=-1, keepdims=True))
        steepness = products.of_rows(products.steepness, scores.shape[-2])
        decay = jnp.where(self.maximum == -jnp.inf, 0, jnp.exp(steepness * (self.maximum - reference(maximum))))
        weights = exponentials(products, scores, maximum, carries_plan=carries_plan)
        total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = self.mixed
        if mixed is not None and value is not None:
            mixed = mixed * decay + products.mix(weights, value)
        return Softmax(maximum, total, mixed)


class Rows(NamedTuple):
    """What turns the scores of rows into weights.

    Attributes:
        maximum: Largest score.
        log_total: Logarithm of the sum of the exponentials of the logits less the largest.
    """

    maximum: PerRow
    log_total: PerRow


def exponentials(products: Products, scores: PairTiles, maximum: PerRow, *, carries_plan: bool = False) -> PairTiles:
    """Exponentials of logits, relative to the logit of ``maximum``; 0 for masked keys."""
    # Mask again, because a scale of 0 makes all logits 0.
    steepness = products.of_rows(products.steepness, scores.shape[-2])
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
    """Softmax weights; 0 where a key is not seen.

    ``carries_plan`` is for one sweep of a pass, whose exponential the plan is put onto: XLA leaves those alone.
    """
    steepness = products.of_rows(products.steepness, query.shape[-2])
    below = steepness * (products.scores(query, key, bias) - reference(rows.maximum))
    # Scores that are computed twice may differ in the last place, which matters if they are large.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    return _exp(jnp.where(mask, below - rows.log_total, -jnp.inf), carries_plan)


def _exp(logits: PairTiles, carries_plan: bool) -> PairTiles:
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: PerRow) -> PerRow:
    """What to subtract from scores: a row that has seen no key has no maximum."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


#: A product of two float32 numbers of this size is off by less than 2e-5, and so is a weight.
LARGEST_RELIABLE_LOGIT = 256.0


class KnownRows(NamedTuple):
    """What is known of the rows before a sweep.

    Attributes:
        rows: As another sweep found them.
        is_unreliable: Whether they have to be found anew.
    """

    rows: Rows
    is_unreliable: Scalar

    @classmethod
    def of(cls, products: Products, operands: Operands, residuals: jax.Array | None) -> KnownRows:
        """Return the rows of another sweep, or zeros without one; constants for every derivative."""
        if residuals is None:
            per_row = (*operands.inputs.query.shape[:-1], 1)
            nothing = varying_like(jnp.zeros(per_row, products.dtype), operands)
            return cls(Rows(nothing, nothing), varying_like(jnp.array(True), operands))
        operands, residuals = lax.stop_gradient((operands, residuals))
        return cls(Rows(residuals[..., :1], residuals[..., 1:]), _may_be_large(products.constant(), operands))

    def rounds(self, count: int) -> Scalar:
        """Return the rounds of a loop: ``count`` if the rows are unreliable, otherwise 0."""
        return jnp.where(self.is_unreliable, count, 0).astype(jnp.int32)


def _may_be_large(products: Products, operands: Operands) -> Scalar:
    """Whether some logit of numbers that are finite may exceed LARGEST_RELIABLE_LOGIT.

    Rows are found anew for the whole batch or not at all, and round otherwise then. Numbers that are not finite make
    their rows' weights NaN either way, and must not change those of other batch entries.
    """

    def square(array: jax.Array) -> jax.Array:
        array = products.cast(array)
        array = jnp.where(jnp.isfinite(array), array, 0)
        return jnp.max(jnp.sum(array * array, axis=-1))

    keys = square(operands.inputs.key)
    if operands.inputs.additional_keys is not None:
        keys = jnp.maximum(keys, square(operands.inputs.additional_keys))
    # If the product overflows, it exceeds the bound.
    scale = jnp.abs(jnp.asarray(products.factors, products.dtype))
    scale = jnp.max(jnp.where(jnp.isfinite(scale), scale, 0))
    largest = square(operands.inputs.query) * keys
    if not products.adds:
        return ~(scale**2 * largest <= LARGEST_RELIABLE_LOGIT**2)
    biases = [each for each in (operands.inputs.relative_bias, operands.inputs.key_bias) if each is not None]
    added = sum(jnp.max(jnp.abs(jnp.where(jnp.isfinite(bias), bias, 0))) for bias in biases)
    return ~(scale * jnp.sqrt(largest) + added <= LARGEST_RELIABLE_LOGIT)
