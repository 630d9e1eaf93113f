"""What kernels in Pallas find of a query's logits, as the backward pass reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.remainders import LOG2_E, base2, pack_remainder


def finite_scale(scale: float, factors: jax.Array | None) -> jax.Array:
    """Return the scale in float32, or the scales of heads, with NaN instead of infinity.

    A product with infinity may be ``-inf``, which would hide keys.
    """
    if factors is None:
        return jnp.float32(scale)
    return jnp.where(jnp.isfinite(factors), factors, jnp.nan).astype(jnp.float32)


def logsumexp_and_remainder(maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp, and what float32 leaves out of it in base 2 (:class:`natten_jax.arrays.operands.Saved`).

    Args:
        maximum: float32, what weights are relative to, in base 2.
        total: Their sum, in the same shape; 0 of a query that sees no key, whose logsumexp is ``-inf``.
    """
    sees_nothing = total == 0
    total = jnp.where(sees_nothing, 1, total)
    logsumexp = maximum / LOG2_E + jnp.log(total)
    remainder = jnp.where(sees_nothing, 0, pack_remainder(maximum - base2(logsumexp), jnp.log2(total)))
    return jnp.where(sees_nothing, -jnp.inf, logsumexp), remainder
