"""The performance arguments of ``attention`` where neighborhood attention calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from natten_jax import backends
from natten_jax.performance import ATTENTION_NAMES, performance_of
from natten_jax.static_arguments import hashable, shown


def checked_attention_kwargs(attention_kwargs: Mapping[str, Any] | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """A checked and hashable copy of ``attention_kwargs``: only what does not change the result may be overridden.

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
    for name in attention_kwargs:
        if name != "backend" and name not in ATTENTION_NAMES:
            allowed = ", ".join(sorted([*ATTENTION_NAMES, "backend"]))
            raise TypeError(f"attention_kwargs has {shown(name)}; it may hold {allowed}")
    arguments = {**others, **attention_kwargs}
    backend = arguments.pop("backend", None)
    try:
        if backend is not None:
            backends.find(backend, "fmha")
        performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})
    except (TypeError, ValueError) as error:
        raise type(error)(f"attention_kwargs: {error}") from None
    return {name: hashable(value) for name, value in attention_kwargs.items()}
