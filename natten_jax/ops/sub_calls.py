"""Split an operator call into one or two attention calls, over windows, the whole layout, or additional keys."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax import backends
from natten_jax.arguments.arrays import checked_scale
from natten_jax.arguments.names import NEUTRAL_OPERATOR_ARGUMENTS, check_neutral, explanation
from natten_jax.arguments.static import array_of, flag, hashable, shown
from natten_jax.arrays.operands import Inputs, Operands, Output, Role, key_arrays, roles_of_fields
from natten_jax.execution import custom_vjp
from natten_jax.ops.canonicalize import TokenOffsets
from natten_jax.performance import ATTENTION_NAMES, attention_performance
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, flattened, of_additional_tokens
from natten_jax.sharding.halos import exchange

#: Arguments of ``attention`` whose values follow from the operator call. ``attention_kwargs`` can contain these
#: arguments only with the values of the call.
_CALL_ARGUMENTS = ("scale", "is_causal", "return_lse")


def checked_attention_kwargs(attention_kwargs: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Check ``attention_kwargs``, and return its performance arguments and ``backend`` with hashable values.

    Args:
        attention_kwargs: The operator's argument ``attention_kwargs``.
        defaults: Performance arguments of ``attention`` that ``attention_kwargs`` overrides.

    Raises:
        ValueError: ``attention`` does not allow a value. Values that this call does not use are also checked.
        TypeError: ``attention_kwargs`` is not a mapping, has an unknown key, or has a value of the wrong type.
    """
    if attention_kwargs is None:
        return {}
    if not isinstance(attention_kwargs, Mapping):
        raise TypeError(f"attention_kwargs must be a mapping or None, got {shown(attention_kwargs)}")
    used = {}
    known = (*ATTENTION_NAMES, "backend")
    for name, value in attention_kwargs.items():
        if name in NEUTRAL_OPERATOR_ARGUMENTS:
            check_neutral(f"attention_kwargs takes {name}", NEUTRAL_OPERATOR_ARGUMENTS[name], value)
        elif name in known:
            used[name] = value
        elif name not in _CALL_ARGUMENTS:
            allowed = ", ".join(sorted([*known, *NEUTRAL_OPERATOR_ARGUMENTS, *_CALL_ARGUMENTS]))
            meant = explanation(name, (*known, *_CALL_ARGUMENTS))
            raise TypeError(f"attention_kwargs has {shown(name)}{meant} (it may hold {allowed})")
    arguments = {**defaults, **used}
    backend = arguments.pop("backend", None)
    scale = array_of(attention_kwargs.get("scale"))
    try:
        if backend is not None:
            backends.find(backend, "fmha")
        attention_performance(arguments)
        flag("is_causal", attention_kwargs.get("is_causal", False))
        flag("return_lse", attention_kwargs.get("return_lse", False))
        if not isinstance(scale, (jax.Array, np.ndarray)):
            checked_scale(scale)
    except (TypeError, ValueError) as error:
        raise type(error)(f"attention_kwargs: {error}") from None
    return {name: hashable(value) for name, value in used.items()}


def check_agreement(attention_kwargs: Mapping[str, Any], problem: Problem, scale: Any, return_lse: bool) -> None:
    """Check that ``attention_kwargs`` does not contradict the arguments of the call.

    Args:
        attention_kwargs: The operator's argument, whose values :func:`checked_attention_kwargs` has checked.
        problem: The problem of the operator call.
        scale: The ``scale`` argument of the operator call.
        return_lse: True if the operator call returns the logsumexp.

    Raises:
        ValueError: ``scale``, ``is_causal`` or ``return_lse`` differs between ``attention_kwargs`` and the call.
    """
    passed = attention_kwargs.get("scale")
    if passed is not None and not _is_same(passed, problem.scale if scale is None else scale):
        call_scale = problem.scale if scale is None else shown(scale)
        raise ValueError(
            f"attention_kwargs: scale={shown(passed)} contradicts the call's scale, {call_scale}: all keys of a query "
            "share the operator's scale"
        )
    # Attention to additional tokens is never causal, because every query attends to all of them.
    is_causal = problem.is_attention and any(problem.is_causal)
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse)):
        if name in attention_kwargs and bool(attention_kwargs[name]) != value:
            raise ValueError(
                f"attention_kwargs: {name}={shown(attention_kwargs[name])} contradicts this call, whose attention has "
                f"{name}={value}: set {name} in the call only"
            )


def _is_same(other: Any, scale: Any) -> bool:
    """Return True if two scales are the same object, or if neither of them is traced and their values are equal."""
    if other is scale:
        return True
    scales = array_of(other), array_of(scale)
    if any(isinstance(each, jax.core.Tracer) for each in scales):
        return False
    first, second = [np.asarray(each, np.float64) for each in scales]
    return np.array_equal(first, second)


class KeySubset(enum.Enum):
    """The set of keys that a sub-call attends to."""

    WINDOWS = "windows"  # keys in the windows, and additional keys if they are fused
    WHOLE_LAYOUT = "whole layout"  # all keys and all additional keys, in one token dimension
    ADDITIONAL = "additional"  # only the additional keys, with queries in one token dimension


class SubCall(NamedTuple):
    """One of the attention calls that an operator call is split into.

    Attributes:
        kind: The keys that the call attends to.
        request: The request that is passed to the backends.
    """

    kind: KeySubset
    request: Request


def split_call(
    request: Request, attention_kwargs: Mapping[str, Any] | None = None, try_fuse_additional_kv: bool | None = None
) -> tuple[SubCall, ...]:
    """Split an operator call into attention calls.

    Args:
        request: The request of the operator call.
        attention_kwargs: The operator's argument ``attention_kwargs``.
        try_fuse_additional_kv: The operator's argument ``try_fuse_additional_kv``.

    Raises:
        ValueError: ``attention_kwargs`` breaks a rule of ``attention``, or ``backend`` is unknown.
        TypeError: A value in ``attention_kwargs`` is of the wrong type.
    """
    problem = request.problem
    if problem.operator == "fmha":
        if request.backend is not None:
            backends.find(request.backend, "fmha")
        return (SubCall(KeySubset.WINDOWS, request),)
    counterpart = backends.counterpart(request.backend)
    if attention_kwargs is None and not problem.additional_kv and not problem.is_attention:
        return (SubCall(KeySubset.WINDOWS, request),)
    # If the operator call becomes attention over the whole layout, ``attention`` inherits the performance arguments.
    inherited = request.performance.flattened() if problem.is_attention else {}
    given = checked_attention_kwargs(attention_kwargs, inherited)
    is_given = bool(given)
    backend = given.pop("backend", counterpart)
    attention = dataclasses.replace(request, performance=attention_performance({**inherited, **given}), backend=backend)
    if problem.is_attention:
        return (SubCall(KeySubset.WHOLE_LAYOUT, dataclasses.replace(attention, problem=flattened(problem))),)
    if try_fuse_additional_kv is None:
        try_fuse_additional_kv = not is_given
    if not problem.additional_kv or (try_fuse_additional_kv and custom_vjp.fuses_additional_kv(request)):
        return (SubCall(KeySubset.WINDOWS, request),)
    windows = dataclasses.replace(request, problem=dataclasses.replace(problem, additional_kv=0))
    additional = dataclasses.replace(attention, problem=of_additional_tokens(problem))
    return SubCall(KeySubset.WINDOWS, windows), SubCall(KeySubset.ADDITIONAL, additional)


def sub_call_operands(call: SubCall, inputs: Inputs, offsets: TokenOffsets) -> tuple[Request, Operands]:
    """Return the request and the operands of a sub-call.

    If the sub-call flattens the token dimensions, the returned request has no ``token_axes``.

    Args:
        call: The sub-call.
        inputs: The inputs of the operator call, including the additional keys and values.
        offsets: Offsets of the queries, and extents without padding.
    """
    token_axes = call.request.token_axes
    if call.kind is KeySubset.WINDOWS:
        if not call.request.problem.additional_kv:
            inputs = inputs._replace(additional_keys=None, additional_values=None)
        return call.request, Operands(inputs, *offsets)
    lines = exchange.lines_of(token_axes)
    if call.kind is KeySubset.WHOLE_LAYOUT:
        inputs = exchange.with_all_keys(inputs, lines)
    if call.kind is KeySubset.ADDITIONAL and offsets.layouts is not None:
        inputs = inputs._replace(query=offsets.without_padding(inputs.query))
    flat = _with_one_token_dimension(inputs)
    is_additional = call.kind is KeySubset.ADDITIONAL
    tokens = _only_additional_keys(flat, inputs) if is_additional else _with_additional_keys(flat, inputs)
    # With token axes, this device has only a shard of the queries, so the operands need the shard's origin.
    origins = exchange.flat_origins(inputs.query.shape[1:-2], lines) if token_axes else None
    request = dataclasses.replace(call.request, token_axes=())
    operands = Operands(tokens, origins)
    if call.kind is KeySubset.WHOLE_LAYOUT and any(request.problem.is_causal) and not offsets.is_whole:
        operands = operands._replace(**offsets._asdict())
    return request, operands


def in_layout_of(query: jax.Array, output: Output) -> Output:
    """Reshape the output and logsumexp of a sub-call to the token dimensions of the query."""
    return Output(*[array.reshape(*query.shape[:-2], *array.shape[2:]) for array in output])


def _only_additional_keys(flat: Inputs, inputs: Inputs) -> Inputs:
    """Replace the keys and values by the additional ones, and drop all other arrays that have a key dimension."""
    arrays: dict[str, Any] = dict.fromkeys(key_arrays(flat))
    arrays |= {"key": inputs.additional_keys, "value": inputs.additional_values}
    return flat._replace(**arrays)


def _with_additional_keys(flat: Inputs, inputs: Inputs) -> Inputs:
    """Append the additional keys and values. Pad other arrays that have a key dimension, such as biases, with zeros."""
    if inputs.additional_keys is None or inputs.additional_values is None:
        return flat
    additional = {"key": inputs.additional_keys, "value": inputs.additional_values}
    count = inputs.additional_keys.shape[1]
    joined: dict[str, jax.Array] = {}
    for name, array in key_arrays(flat).items():
        if name in additional:
            joined[name] = jnp.concatenate([array, additional[name]], axis=1)
        else:
            joined[name] = jnp.pad(array, [(0, count if axis == 1 else 0) for axis in range(array.ndim)])
    return flat._replace(**joined)


def _with_one_token_dimension(inputs: Inputs) -> Inputs:
    """Flatten the token dimensions of the arrays, and drop the relative bias and the additional tokens."""
    pairs = zip(inputs, roles_of_fields(Inputs), strict=True)
    flat = [each if each is None or not role.has_layout else _flat(each, role) for each, role in pairs]
    return Inputs._make(flat)._replace(additional_keys=None, additional_values=None, relative_bias=None)


def _flat(array: jax.Array, role: Role) -> jax.Array:
    axis = array.ndim + role.heads_axis
    return array.reshape(array.shape[0], math.prod(array.shape[1:axis]), *array.shape[axis:])
