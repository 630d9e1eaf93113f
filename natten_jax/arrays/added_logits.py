"""Numbers that hide keys, in the operands that are added to logits.

A number of at most half the minimum of its element type hides its key, as ``-inf`` does: masks are often written with
``finfo.min``, and a sum with such a number may overflow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Inputs

#: Fields of :class:`Inputs` that are added to logits.
ADDED = ("relative_bias", "key_bias", "shared_key_bias", "sinks")


def in_accumulator(operand: Any, accumulator: Any) -> jax.Array:
    """Convert an operand to the accumulator's element type, in which it hides the same keys.

    An operand of this type is returned unchanged: the rule is applied later, by the kernel (``Backend.hides_keys``) or
    by :func:`with_hidden_keys`.
    """
    operand = jnp.asarray(operand)
    if operand.dtype == accumulator:
        return operand
    hiding = with_hidden_keys(operand)
    limits = jnp.finfo(accumulator)
    if float(jnp.finfo(operand.dtype).max) > float(limits.max):
        # Numbers that hide nothing must not overflow, nor hide their keys in the narrower type.
        lowest = np.nextafter(np.asarray(limits.min / 2, accumulator), np.asarray(0, accumulator))
        hiding = jnp.where(jnp.isinf(hiding), hiding, jnp.clip(hiding, float(lowest), float(limits.max)))
    return hiding.astype(accumulator)


def with_hidden_keys(operand: jax.Array) -> jax.Array:
    """Replace numbers that hide keys by ``-inf``; their gradient is 0."""
    return jnp.where(operand <= float(jnp.finfo(operand.dtype).min) / 2, -jnp.inf, operand)


def with_hidden_keys_of_inputs(inputs: Inputs) -> Inputs:
    """Apply :func:`with_hidden_keys` to every operand that is added to logits, for backends that do not."""
    given = {name: getattr(inputs, name) for name in ADDED}
    return inputs._replace(**{name: with_hidden_keys(array) for name, array in given.items() if array is not None})
