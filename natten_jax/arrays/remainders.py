"""Logsumexps in base 2 and their rounding errors, in the format of the kernels.

The native kernels define the format in csrc/include/natten_jax/logsumexp.h.

The logsumexp that a pass returns is rounded. The *remainder* of a row is its exact logsumexp minus the rounded one,
both in base 2. The remainder is the sum of two parts. The *distance* is the row's reference, such as its largest logit,
minus the rounded logsumexp. The second part is the logarithm of the sum of the row's weights relative to the reference.
For logits above 2^40 the distance is so large that the float32 sum of both parts would lose the digits of the
logarithm. The last 12 bits of such a remainder store the logarithm instead.
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
    """Convert a logsumexp to base 2, and round it before any later subtraction.

    The barrier keeps XLA from fusing the product and a later subtraction into a multiply-add, which would not round the
    product. On CPUs, XLA drops the barrier before LLVM runs. There, ``jnp.maximum`` prevents the fusion instead.
    ``jnp.maximum`` also keeps finite numbers from overflowing to ``-inf``.
    """
    lowest = jnp.where(jnp.isneginf(logsumexp), -jnp.inf, float(jnp.finfo(logsumexp.dtype).min))
    product = jax.lax.optimization_barrier(logsumexp * np.asarray(LOG2_E, logsumexp.dtype))
    return jnp.maximum(product, lowest.astype(product.dtype))


def pack_remainder(distance: jax.Array, log2_sum: jax.Array) -> jax.Array:
    """Pack the two parts of each remainder into one number.

    Args:
        distance: float32 or float64. The row's reference minus the rounded logsumexp, both in base 2. Weights are
            relative to the reference.
        log2_sum: Base-2 logarithm of the sum of the row's weights.
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
    """Return the distance and the logarithm that a remainder consists of.

    If the remainder is not packed, their sum is returned as the distance, and the logarithm is 0.
    """
    if remainder.dtype != jnp.float32:
        return remainder, jnp.zeros_like(remainder)
    bits = jax.lax.bitcast_convert_type(remainder, jnp.uint32)
    distance = jax.lax.bitcast_convert_type(bits & np.uint32(~_BITS & 0xFFFFFFFF), jnp.float32)
    log2_sum = (bits & np.uint32(_BITS)).astype(jnp.float32) * _UNIT
    is_packed = jnp.abs(remainder) >= _PACKED
    return jnp.where(is_packed, distance, remainder), jnp.where(is_packed, log2_sum, 0)


def base2_parts(logsumexp: jax.Array, remainder: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return each row's reference and the logarithm of its sum of weights, both in base 2.

    With logits in base 2, the softmax weights are ``exp2((logit - reference) - logarithm)``.

    If the remainder is not packed, the rounded logsumexp is returned as the reference and the remainder as the
    logarithm. A remainder of ``None`` counts as 0.
    """
    rounded = base2(logsumexp)
    if remainder is None:
        return rounded, jnp.zeros_like(logsumexp)
    distance, log2_sum = unpack_remainder(remainder)
    is_packed = jnp.abs(remainder) >= _PACKED
    return jnp.where(is_packed, rounded + distance, rounded), jnp.where(is_packed, log2_sum, remainder)
