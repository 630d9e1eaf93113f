"""Runs a sub-call: the arrays of the whole call cut, flattened or joined as it takes them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Inputs, Operands, Output
from natten_jax.arrays.roles import Role, roles_of_fields
from natten_jax.execution import custom_vjp
from natten_jax.ops.boxes import Placement
from natten_jax.ops.sub_calls import KeySet, SubCall
from natten_jax.plan.request import Request
from natten_jax.sharding.halos import device_line, exchange


@functools.partial(jax.jit, static_argnums=0)
def attend(request: Request, operands: Operands) -> Output:
    """The operator of a request, as a function of its own in a program: equal calls are traced once."""
    return custom_vjp.attend(request, operands)


def run_sub_call(call: SubCall, inputs: Inputs, place: Placement) -> Output:
    """Its output and logsumexp, in the shapes that the whole call has.

    Args:
        call: What to run.
        inputs: The inputs of the whole call: keys and values of the layout, and additional ones.
        place: Where they lie.
    """
    token_axes = call.request.token_axes
    if call.kind is KeySet.WINDOWS:
        if not call.request.problem.additional_kv:
            inputs = inputs._replace(additional_keys=None, additional_values=None)
        return attend(call.request, Operands(inputs, *place))
    lines = device_line.lines_of(token_axes)
    if call.kind is KeySet.WHOLE_LAYOUT:
        inputs = exchange.with_all_keys(inputs, lines)
    if call.kind is KeySet.ADDITIONAL and place.layouts is not None:
        inputs = inputs._replace(query=place.without_padding(inputs.query))
    query, flat = inputs.query, _with_one_token_dimension(inputs)
    is_additional = call.kind is KeySet.ADDITIONAL
    tokens = _of_additional_keys(flat, inputs) if is_additional else _with_additional_keys(flat, inputs)
    # Where tokens are split, the layout of the queries is a part of the problem's.
    origins = exchange.flat_origins(query.shape[1:-2], lines) if token_axes else None
    request = dataclasses.replace(call.request, token_axes=())
    operands = Operands(tokens, origins)
    if call.kind is KeySet.WHOLE_LAYOUT and any(request.problem.is_causal) and not place.is_whole:
        operands = operands._replace(**place._asdict())
    output = attend(request, operands)
    return Output(*(array.reshape(*query.shape[:-2], *array.shape[2:]) for array in output))


#: The inputs with a number or a vector for each key.
_OF_KEYS = [name for name, role in zip(Inputs._fields, roles_of_fields(Inputs), strict=True) if role.tokens == "keys"]


def _of_additional_keys(flat: Inputs, inputs: Inputs) -> Inputs:
    """Flattened queries with the additional tokens for keys; nothing that speaks of the layout's keys is left."""
    of_keys: dict[str, Any] = {
        **dict.fromkeys(_OF_KEYS),
        "key": inputs.additional_keys,
        "value": inputs.additional_values,
    }
    return flat._replace(**of_keys)


def _with_additional_keys(flat: Inputs, inputs: Inputs) -> Inputs:
    """Flattened tokens with the additional ones behind the layout's keys; other numbers of these are 0."""
    if inputs.additional_keys is None:
        return flat
    additional = {"key": inputs.additional_keys, "value": inputs.additional_values}
    count = inputs.additional_keys.shape[1]
    joined: dict[str, jax.Array] = {}
    for name in _OF_KEYS:
        array, more = getattr(flat, name), additional.get(name)
        if more is not None:
            joined[name] = jnp.concatenate([array, more], axis=1)
        elif array is not None:
            joined[name] = jnp.pad(array, [(0, count if axis == 1 else 0) for axis in range(array.ndim)])
    return flat._replace(**joined)


def _with_one_token_dimension(inputs: Inputs) -> Inputs:
    """The arrays of attention of the flattened tokens, which have no offsets; additional tokens are yet to be added."""
    pairs = zip(inputs, roles_of_fields(Inputs), strict=True)
    flat = [each if each is None or not role.has_layout else _flat(each, role) for each, role in pairs]
    return Inputs._make(flat)._replace(additional_keys=None, additional_values=None, relative_bias=None)


def _flat(array: jax.Array, role: Role) -> jax.Array:
    axis = array.ndim + role.heads_axis
    return array.reshape(array.shape[0], math.prod(array.shape[1:axis]), *array.shape[axis:])
