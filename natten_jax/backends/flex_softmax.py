"""Softmax as the ``flex`` backend computes it: scores, running sums over keys, and the weights that follow from them.

A *score* is ``query key^T`` before it is scaled, negated where the scale is negative. Rows are described by scores, not
by logits: ``|scale| * (score - maximum)`` is exact near the maximum, however large the logits are, and stays the same
where a compiler contracts the product and the difference to one rounding.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.plan_marks import carrying_plan
from natten_jax.problem import Problem

_PRECISION_OPTION = "jax_default_matmul_precision"  # JAX's stubs know it in some releases only


class Products:
    """The matrix products of a problem: operands and results in the accumulator's element type."""

    def __init__(self, problem: Problem):
        self.dtype = jnp.dtype(problem.accumulator_dtype)
        #: Factor from scores to logits, never negative.
        self.steepness = abs(problem.scale)
        self.scale = problem.scale
        # Half-precision values are exact in TF32 and bfloat16 passes; float32 is not, so it takes full
        # precision unless the user chose one.
        is_half = problem.dtype in ("float16", "bfloat16")
        is_chosen = is_half or getattr(jax.config, _PRECISION_OPTION) is not None
        self._precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """``array`` in the element type of the computation."""
        return array.astype(self.dtype)

    def scores(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """``query key^T``, in the order of the logits."""
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """``rows tokens^T``: a number for each row and token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def logits(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """``scale * query key^T``."""
        return self.steepness * self.scores(query, key)

    def mix(self, weights: jax.Array, value: jax.Array) -> jax.Array:
        """``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        """``weights^T rows``: a sum over rows for each token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

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
        maximum: Largest score, ``[..., rows, 1]``; ``-inf`` where no key was seen.
        total: Sum of the exponentials of the logits less the largest, ``[..., rows, 1]``.
        mixed: Values mixed with these exponentials, ``[..., rows, head_dim_v]``; ``None`` where nobody asks for them.
    """

    maximum: jax.Array
    total: jax.Array
    mixed: jax.Array | None

    @classmethod
    def of_no_key(cls, rows: tuple[int, ...], head_dim_v: int | None, dtype: jnp.dtype) -> Softmax:
        """Of rows that have seen no key yet."""
        mixed = None if head_dim_v is None else jnp.zeros((*rows, head_dim_v), dtype)
        return cls(jnp.full((*rows, 1), -jnp.inf, dtype), jnp.zeros((*rows, 1), dtype), mixed)

    def over(
        self,
        products: Products,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        mask: jax.Array,
        *,
        carries_plan: bool = False,
    ) -> Softmax:
        """Over more keys; ``carries_plan`` as in :func:`softmax_weights`."""
        scores = products.scores(query, key)
        maximum = jnp.maximum(self.maximum, highest(scores, mask))
        decay = jnp.where(
            self.maximum == -jnp.inf, 0, jnp.exp(products.steepness * (self.maximum - reference(maximum)))
        )
        weights = exponentials(products, scores, maximum, mask, carries_plan=carries_plan)
        total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = self.mixed
        if mixed is not None and value is not None:
            mixed = mixed * decay + products.mix(weights, value)
        return Softmax(maximum, total, mixed)


class Rows(NamedTuple):
    """What turns the scores of rows into weights.

    Attributes:
        maximum: Largest score, ``[..., 1]``.
        log_total: Logarithm of the sum of the exponentials of the logits less the largest, ``[..., 1]``.
    """

    maximum: jax.Array
    log_total: jax.Array


def highest(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """The largest score of each row, ``[..., rows, 1]``."""
    return jnp.where(mask, scores, -jnp.inf).max(axis=-1, keepdims=True)


def exponentials(
    products: Products, scores: jax.Array, maximum: jax.Array, mask: jax.Array, *, carries_plan: bool = False
) -> jax.Array:
    """Exponentials of the logits less those of ``maximum``; 0 where a key is not seen."""
    # Masked before the exponential: it could overflow, and infinity times zero is no derivative.
    logits = jnp.where(mask, products.steepness * (scores - reference(maximum)), -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def softmax_weights(
    products: Products, query: jax.Array, key: jax.Array, rows: Rows, mask: jax.Array, *, carries_plan: bool = False
) -> jax.Array:
    """Softmax weights ``[..., queries, keys]``; 0 where a key is not seen.

    ``carries_plan`` is for one sweep of a pass, whose exponential the plan is put onto: XLA leaves those alone.
    """
    below = products.steepness * (products.scores(query, key) - reference(rows.maximum))
    # Scores that are computed twice may differ in the last place, which counts where they are large.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    logits = jnp.where(mask, below - rows.log_total, -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: jax.Array) -> jax.Array:
    """What to subtract from scores: a row that has seen no key has no maximum."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)
