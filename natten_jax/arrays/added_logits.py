"""Numbers that hide keys, in the operands that are added to logits.

A number of at most half the minimum of its element type hides its key, as ``-inf`` does: masks are often written with
``finfo.min``, and a sum with such a number may overflow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Inputs

#: Fields of :class:`Inputs` that are added to logits.
ADDED = ("relative_bias", "key_bias", "shared_key_bias", "sinks")


def in_accumulator(operand: Any, accumulator: Any) -> jax.Array:
    """Convert an operand to the accumulator's element type, in which it hides the same keys.

    An operand that has this type already is returned as it is: kernels apply the rule when they load it.
    """
    operand = jnp.asarray(operand)
    return operand if operand.dtype == accumulator else with_hidden_keys(operand).astype(accumulator)


def with_hidden_keys(operand: jax.Array) -> jax.Array:
    """Replace numbers that hide keys by ``-inf``; their gradient is 0."""
    return jnp.where(operand <= float(jnp.finfo(operand.dtype).min) / 2, -jnp.inf, operand)


def with_hidden_keys_of_inputs(inputs: Inputs) -> Inputs:
    """Apply :func:`with_hidden_keys` to every operand that is added to logits, for backends that do not."""
    given = {name: getattr(inputs, name) for name in ADDED}
    return inputs._replace(**{name: with_hidden_keys(array) for name, array in given.items() if array is not None})
