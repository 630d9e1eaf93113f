"""Softmax as the ``flex`` backend computes it: scores, running sums over keys, and the weights that follow from them.

A *score* is ``query key^T`` before it is scaled, negated where the scale is negative. Rows are described by scores, not
by logits: ``|scale| * (score - maximum)`` is exact near the maximum, however large the logits are, and stays the same
where a compiler contracts the product and the difference to one rounding. Where something is added to logits, scores
are these sums, and the factor from scores to logits, their *steepness*, is 1.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.backends.flex.shapes import MaskTiles, PairTiles, PerHead, PerRow, RowTiles, TokenTiles, ValueTiles
from natten_jax.plan.marks import carrying_plan
from natten_jax.plan.plan import Plan


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
        self._adds = bool(problem.biases)
        self._sign = None if scale is None else jnp.where(scale < 0, -1, 1).astype(self.dtype)
        # Half-precision values are exact in TF32 and bfloat16 passes; float32 is not, so it takes full
        # precision unless the user chose one.
        is_chosen = problem.element.bytes == 2 or plan.precision is not None
        self._precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """``array`` in the element type of the computation."""
        return array.astype(self.dtype)

    def steepness(self, rows: int) -> float | jax.Array:
        """Factors from scores to logits, never negative, for ``[tiles, batch, heads_kv, rows, ...]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else self._of_rows(steepness, rows)

    def steepness_of_tokens(self, rank: int) -> float | jax.Array:
        """The same for ``[batch, *layout, heads, width]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else self._of_tokens(steepness, rank)

    def steepness_of_heads(self, ndim: int) -> float | jax.Array:
        """The same for arrays of so many dimensions, ``[batch, heads, ...]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else steepness.reshape(*steepness.shape, *(1,) * (ndim - 2))

    def scale_of_tokens(self, rank: int) -> float | jax.Array:
        """The factors of logits for ``[batch, *layout, heads, width]``."""
        return self.scale if self._scales is None else self._of_tokens(self._scales, rank)

    def scaled(self, rows: RowTiles) -> RowTiles:
        """Rows times the scales of heads, where these have their own."""
        return rows if self._scales is None else self._of_rows(self._scales, rows.shape[-2]) * rows

    def constant(self) -> Products:
        """The same, without derivatives with respect to the scales."""
        result = copy.copy(self)
        result._scales = lax.stop_gradient(self._scales)
        return result

    def with_constant_maximum(self, rows: Rows) -> Rows:
        """Rows of tiles whose maximum times the scale is a constant for derivatives, as it is without scales of heads.

        What is added to the logarithm of the total is zero, and has the derivative of that product.
        """
        if self._scales is None or self._adds:
            return rows
        steepness = self.steepness(rows.maximum.shape[-2])
        change = (steepness - lax.stop_gradient(steepness)) * reference(rows.maximum)
        return Rows(rows.maximum, rows.log_total - change)

    def scores(self, query: RowTiles, key: TokenTiles, bias: PairTiles | None = None) -> PairTiles:
        """``query key^T``, in the order of the logits; these, with what is added, where something may be."""
        if self._adds:
            logits = self.logits(query, key)
            return logits if bias is None else logits + bias
        if self._sign is not None:
            return self.inner(self.cast(query) * self._of_rows(self._sign, query.shape[-2]), key)
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: RowTiles, tokens: TokenTiles) -> PairTiles:
        """``rows tokens^T``: a number for each row and token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def logits(self, query: RowTiles, key: TokenTiles) -> PairTiles:
        """``scale * query key^T``."""
        if self._adds:
            return self.scaled(self.scale * self.inner(query, key))
        return self.steepness(query.shape[-2]) * self.scores(query, key)

    def logit_tangents(self, scale_tangent: PerHead, query: RowTiles, key: TokenTiles) -> PairTiles:
        """``scale_tangent * query key^T``, where heads have scales of their own."""
        return self._of_rows(scale_tangent, query.shape[-2]) * self.inner(query, key)

    def mix(self, weights: PairTiles, value: TokenTiles) -> RowTiles:
        """``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: PairTiles, rows: RowTiles) -> TokenTiles:
        """``weights^T rows``: a sum over rows for each token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

    @property
    def _steepness(self) -> float | jax.Array:
        """Absolute scales of heads that have their own: products with the sign, since ``abs`` has a kink at zero."""
        if self._adds:
            return 1.0
        return abs(self.scale) if self._scales is None or self._sign is None else self._scales * self._sign

    def _of_rows(self, factors: jax.Array, rows: int) -> jax.Array:
        """``[batch, heads]`` as ``[1, batch, heads_kv, rows, 1]``: rows are tokens, head by head."""
        heads_kv, repeats = self._heads
        per_head = factors.reshape(-1, heads_kv, repeats, 1)
        per_row = jnp.broadcast_to(per_head, (*per_head.shape[:-1], rows // repeats))
        return per_row.reshape(1, -1, heads_kv, rows, 1)

    @staticmethod
    def _of_tokens(factors: jax.Array, rank: int) -> jax.Array:
        batch, heads = factors.shape
        return factors.reshape(batch, *(1,) * rank, heads, 1)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts,
            self.cast(a),
            self.cast(b),
            precision=self._precision,
            preferred_element_type=self.dtype,
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
        scores = masked(products.scores(query, key, bias), mask)
        maximum = jnp.maximum(self.maximum, highest(scores))
        decay = jnp.where(
            self.maximum == -jnp.inf,
            0,
            jnp.exp(products.steepness(scores.shape[-2]) * (self.maximum - reference(maximum))),
        )
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


def masked(scores: PairTiles, mask: Annotated[jax.Array, "_ _ _ _ tokens"]) -> PairTiles:
    """The scores, ``-inf`` where a key is not seen."""
    return jnp.where(mask, scores, -jnp.inf)


def highest(scores: PairTiles) -> PerRow:
    """The largest of each row's masked scores."""
    return scores.max(axis=-1, keepdims=True)


def exponentials(products: Products, scores: PairTiles, maximum: PerRow, *, carries_plan: bool = False) -> PairTiles:
    """Exponentials of the logits of masked scores less those of ``maximum``; 0 where a key is not seen."""
    # A mask again: where the scale is 0, so is every other logit.
    logits = masked(products.steepness(scores.shape[-2]) * (scores - reference(maximum)), scores != -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


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
    below = products.steepness(query.shape[-2]) * (products.scores(query, key, bias) - reference(rows.maximum))
    # Scores that are computed twice may differ in the last place, which counts where they are large.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    logits = jnp.where(mask, below - rows.log_total, -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: PerRow) -> PerRow:
    """What to subtract from scores: a row that has seen no key has no maximum."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)
