"""Logsumexps in base 2 with their remainders, in the kernels' format (csrc/include/natten_jax/logsumexp.h).

The remainder is the difference between the logsumexp of a row and the rounded number that is returned. For logits above
2^40 this difference is so large that a float32 sum with the logarithm of the sum of weights loses the logarithm. For
such rows, the last 12 bits of the remainder store this logarithm.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

LOG2_E = math.log2(math.e)

_PACKED = 2.0**18
_BITS = 0xFFF
_UNIT = 2.0**-7


def base2(logsumexp: jax.Array) -> jax.Array:
    """Convert a logsumexp to base 2, rounded before anything is subtracted.

    The barrier keeps XLA from fusing the product into a difference. On CPUs XLA drops the barrier before LLVM runs;
    there the maximum prevents the fusion. It also stops finite numbers from overflowing to ``-inf``.
    """
    lowest = jnp.where(jnp.isneginf(logsumexp), -jnp.inf, float(jnp.finfo(logsumexp.dtype).min))
    product = jax.lax.optimization_barrier(logsumexp * np.asarray(LOG2_E, logsumexp.dtype))
    return jnp.maximum(product, lowest.astype(product.dtype))


def pack_remainder(distance: jax.Array, log2_sum: jax.Array) -> jax.Array:
    """Pack the two parts of a remainder into one number.

    Args:
        distance: float32 or float64. Reference of the row's weights minus the rounded logsumexp, both in base 2.
        log2_sum: Base-2 logarithm of the sum of these weights.
    """
    total = distance + log2_sum
    if distance.dtype != jnp.float32:
        return total
    reaches = (jnp.abs(distance) < _PACKED) & (jnp.abs(total) >= _PACKED)
    log2_sum = jnp.where(reaches, total - _PACKED, log2_sum)
    distance = jnp.where(reaches, jnp.float32(_PACKED), distance)
    units = jnp.clip(log2_sum / _UNIT + 0.5, 0, _BITS).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(distance, jnp.uint32) + jnp.where(distance < 0, np.uint32(_BITS), np.uint32(0))
    packed = jax.lax.bitcast_convert_type((bits & np.uint32(~_BITS & 0xFFFFFFFF)) | units, jnp.float32)
    return jnp.where(jnp.abs(distance) >= _PACKED, packed, total)


def unpack_remainder(remainder: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two parts of a remainder; the second is 0 if the first includes it."""
    if remainder.dtype != jnp.float32:
        return remainder, jnp.zeros_like(remainder)
    bits = jax.lax.bitcast_convert_type(remainder, jnp.uint32)
    distance = jax.lax.bitcast_convert_type(bits & np.uint32(~_BITS & 0xFFFFFFFF), jnp.float32)
    log2_sum = (bits & np.uint32(_BITS)).astype(jnp.float32) * _UNIT
    is_packed = jnp.abs(remainder) >= _PACKED
    return jnp.where(is_packed, distance, remainder), jnp.where(is_packed, log2_sum, 0)


def base2_parts(logsumexp: jax.Array, remainder: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return a reference and the logarithm of a sum, in base 2: weights are ``exp2((logit - reference) - logarithm)``.

    If the remainder is not packed, the reference is the rounded logsumexp and the logarithm is the remainder (0 for
    ``None``).
    """
    rounded = base2(logsumexp)
    if remainder is None:
        return rounded, jnp.zeros_like(logsumexp)
    distance, log2_sum = unpack_remainder(remainder)
    is_packed = jnp.abs(remainder) >= _PACKED
    return jnp.where(is_packed, rounded + distance, rounded), jnp.where(is_packed, log2_sum, remainder)
