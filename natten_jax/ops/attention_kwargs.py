"""The arguments of ``attention`` where neighborhood attention calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from natten_jax import backends
from natten_jax.arguments.natten_names import OF_OPERATORS, check_neutral
from natten_jax.arguments.other_names import explanation
from natten_jax.arguments.scale import checked_scale
from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import flag, hashable, one_bool, shown
from natten_jax.performance import ATTENTION_NAMES, performance_of
from natten_jax.problem import Problem

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
