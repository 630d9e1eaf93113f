"""The attention calls that one call consists of: on windows, on the whole layout, on additional keys."""

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
from natten_jax.arguments.names import OF_OPERATORS, check_neutral, explanation
from natten_jax.arguments.static import array_of, flag, hashable, one_bool, shown
from natten_jax.arrays.operands import Inputs, Operands, Output, Role, roles_of_fields
from natten_jax.execution import custom_vjp
from natten_jax.ops.canonicalize import Placement
from natten_jax.performance import ATTENTION_NAMES, Performance, performance_of
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, flattened, of_additional_tokens
from natten_jax.sharding.halos import exchange

#: What neighborhood attention itself says: it may be said again, but not otherwise.
_OF_THE_CALL = ("scale", "is_causal", "return_lse")


def checked_attention_kwargs(attention_kwargs: Mapping[str, Any] | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """A checked and hashable copy of what ``attention_kwargs`` overrides: only what does not change the result.

    Args:
        attention_kwargs: The argument of neighborhood attention.
        others: Arguments of ``attention`` that hold where ``attention_kwargs`` has none.

    Raises:
        ValueError: A value breaks a rule of ``attention``, whether or not this call is going to use it.
        TypeError: It is no mapping, has an unknown key, or a value is of the wrong type.
    """
    if attention_kwargs is None:
        return {}
    if not isinstance(attention_kwargs, Mapping):
        raise TypeError(f"attention_kwargs must be a mapping or None, got {shown(attention_kwargs)}")
    own = {}
    for name, value in attention_kwargs.items():
        if name in OF_OPERATORS:
            check_neutral(f"attention_kwargs takes {name}", OF_OPERATORS[name], value)
        elif name not in _OF_THE_CALL:
            own[name] = value
    _check_names(own)
    arguments = {**others, **own}
    backend = arguments.pop("backend", None)
    try:
        if backend is not None:
            backends.find(backend, "fmha")
        performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})
        _check_types(attention_kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"attention_kwargs: {error}") from None
    return {name: hashable(value) for name, value in own.items()}


def check_agreement(attention_kwargs: Mapping[str, Any], problem: Problem, scale: Any, return_lse: bool) -> None:
    """Check that ``attention_kwargs`` says nothing else than the call that it is given to.

    Args:
        attention_kwargs: The argument, checked.
        problem: What the call describes.
        scale: The scale that the call was given.
        return_lse: Whether the call returns the logsumexp.

    Raises:
        ValueError: It does.
    """
    own = attention_kwargs.get("scale")
    if own is not None and not _is_same(own, problem.scale if scale is None else scale):
        of_call = problem.scale if scale is None else shown(scale)
        raise ValueError(
            f"attention_kwargs: scale={shown(own)} contradicts the call's scale, {of_call}: all keys of a query "
            "have one scale, which the operator is given"
        )
    # Every query sees all additional tokens, so that their attention is never causal.
    is_causal = problem.is_attention and any(problem.is_causal)
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse)):
        if name in attention_kwargs and bool(attention_kwargs[name]) != value:
            raise ValueError(
                f"attention_kwargs: {name}={shown(attention_kwargs[name])} contradicts this call, whose attention has "
                f"{name}={value}: {name} is the operator's to say"
            )


def _is_same(own: Any, scale: Any) -> bool:
    """Whether two scales are known to be equal."""
    if own is scale:
        return True
    own, scale = array_of(own), array_of(scale)
    arrays = [None if isinstance(each, jax.core.Tracer) else np.asarray(each, np.float64) for each in (own, scale)]
    return arrays[0] is not None and arrays[1] is not None and np.array_equal(arrays[0], arrays[1])


def _check_names(arguments: Mapping[Any, Any]) -> None:
    known = (*ATTENTION_NAMES, "backend")
    for name in arguments:
        if name not in known:
            allowed = ", ".join(sorted([*known, *OF_OPERATORS, *_OF_THE_CALL]))
            meant = explanation(name, (*known, *_OF_THE_CALL))
            raise TypeError(f"attention_kwargs has {shown(name)}{meant} (it may hold {allowed})")


def _check_types(arguments: Mapping[str, Any]) -> None:
    if "is_causal" in arguments:
        one_bool("is_causal", arguments["is_causal"])
    if "return_lse" in arguments:
        flag("return_lse", arguments["return_lse"])
    scale = array_of(arguments.get("scale"))
    if not isinstance(scale, (jax.Array, np.ndarray)):
        checked_scale(scale)


class KeySet(enum.Enum):
    """What a sub-call attends to."""

    WINDOWS = "windows"  # the tokens, and the additional ones if the same kernel takes them
    WHOLE_LAYOUT = "whole layout"  # all tokens and all additional ones, flattened
    ADDITIONAL = "additional"  # the additional tokens alone, flattened


class SubCall(NamedTuple):
    """One attention call.

    Attributes:
        kind: What it attends to.
        request: What is asked of the backends.
    """

    kind: KeySet
    request: Request


def sub_calls_of(
    request: Request, attention_kwargs: Mapping[str, Any] | None = None, try_fuse_additional_kv: bool | None = None
) -> tuple[SubCall, ...]:
    """The attention calls of a call of ``na1d``, ``na2d`` or ``na3d``.

    Args:
        request: The call.
        attention_kwargs: As the operator takes them.
        try_fuse_additional_kv: Likewise.

    Raises:
        ValueError: ``attention_kwargs`` breaks a rule of ``attention``, or ``backend`` is unknown.
        TypeError: ``attention_kwargs`` holds a wrong type.
    """
    problem = request.problem
    counterpart = backends.counterpart(request.backend)
    if attention_kwargs is None and not problem.additional_kv and not problem.is_attention:
        return (SubCall(KeySet.WINDOWS, request),)
    # Whatever runs the whole layout is told the call's own performance arguments, too.
    inherited = request.performance.flattened() if problem.is_attention else {}
    own = checked_attention_kwargs(attention_kwargs, inherited)
    speaks_of_it = bool(own)
    backend = own.pop("backend", counterpart)
    performance = _attention_performance({**inherited, **own})
    if problem.is_attention:
        return (
            SubCall(
                KeySet.WHOLE_LAYOUT,
                dataclasses.replace(request, problem=flattened(problem), performance=performance, backend=backend),
            ),
        )
    if try_fuse_additional_kv is None:
        try_fuse_additional_kv = not speaks_of_it
    if not problem.additional_kv or (try_fuse_additional_kv and custom_vjp.fuses_additional_kv(request)):
        return (SubCall(KeySet.WINDOWS, request),)
    windows = dataclasses.replace(request, problem=dataclasses.replace(problem, additional_kv=0))
    additional = dataclasses.replace(
        request, problem=of_additional_tokens(problem), performance=performance, backend=backend
    )
    return SubCall(KeySet.WINDOWS, windows), SubCall(KeySet.ADDITIONAL, additional)


def _attention_performance(arguments: Mapping[str, Any]) -> Performance:
    return performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})


def operands_of(call: SubCall, inputs: Inputs, place: Placement) -> tuple[Request, Operands]:
    """What a sub-call runs: a request without token axes where tokens are flattened, and its operands.

    Args:
        call: The sub-call.
        inputs: The inputs of the whole call: keys and values of the layout, and additional ones.
        place: Where they lie.
    """
    token_axes = call.request.token_axes
    if call.kind is KeySet.WINDOWS:
        if not call.request.problem.additional_kv:
            inputs = inputs._replace(additional_keys=None, additional_values=None)
        return call.request, Operands(inputs, *place)
    lines = exchange.lines_of(token_axes)
    if call.kind is KeySet.WHOLE_LAYOUT:
        inputs = exchange.with_all_keys(inputs, lines)
    if call.kind is KeySet.ADDITIONAL and place.layouts is not None:
        inputs = inputs._replace(query=place.without_padding(inputs.query))
    flat = _with_one_token_dimension(inputs)
    is_additional = call.kind is KeySet.ADDITIONAL
    tokens = _of_additional_keys(flat, inputs) if is_additional else _with_additional_keys(flat, inputs)
    # Where tokens are split, the layout of the queries is a part of the problem's.
    origins = exchange.flat_origins(inputs.query.shape[1:-2], lines) if token_axes else None
    request = dataclasses.replace(call.request, token_axes=())
    operands = Operands(tokens, origins)
    if call.kind is KeySet.WHOLE_LAYOUT and any(request.problem.is_causal) and not place.is_whole:
        operands = operands._replace(**place._asdict())
    return request, operands


def in_layout_of(query: jax.Array, output: Output) -> Output:
    """Output and logsumexp of a sub-call, with the token dimensions of the query."""
    return Output(*[array.reshape(*query.shape[:-2], *array.shape[2:]) for array in output])


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
