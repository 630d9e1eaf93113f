"""8-bit arrays for backends that take none: converted to wider elements, and the output rounded to its own."""

from __future__ import annotations

import jax

from natten_jax.arrays.operands import Operands
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.problem import Problem


def converted(planned: Problem, operands: Operands) -> Operands:
    """The operands in the elements of the plan's problem, which have every number of 8 bits.

    Factors of keys and values are multiplied with these, in float32.
    """
    inputs = operands.inputs
    if not ELEMENT_TYPES[inputs.query.dtype.name].is_float8 or planned.element.is_float8:
        return operands

    def wide(array: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        array = array.astype(planned.dtype)
        return array if factors is None else array * factors

    more = inputs.additional_keys, inputs.additional_values
    additional_keys, additional_values = (None if each is None else wide(each) for each in more)
    wider = inputs._replace(
        query=wide(inputs.query),
        key=wide(inputs.key, inputs.key_scale),
        value=wide(inputs.value, inputs.value_scale),
        additional_keys=additional_keys,
        additional_values=additional_values,
        key_scale=None,
        value_scale=None,
        out_scale=None,
    )
    return operands._replace(inputs=wider)


def scaled(planned: Problem, operands: Operands, out: jax.Array) -> jax.Array:
    """The output times the call's factors of it, unless a kernel has multiplied them."""
    factors = operands.inputs.out_scale
    if factors is None or planned.element.is_float8:
        return out
    return out * factors.reshape(out.shape[0], *(1,) * (out.ndim - 3), -1, 1)


def rounded(out: jax.Array, dtype: str) -> jax.Array:
    """The output in the elements that the call asks for."""
    return out if out.dtype == dtype else out.astype(dtype)
