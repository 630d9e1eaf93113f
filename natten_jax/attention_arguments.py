"""The performance arguments of ``attention`` where neighborhood attention calls it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from natten_jax import backends
from natten_jax.problem import TileConfig, tile_config
from natten_jax.static_arguments import LARGEST_INT, hashable, shown

_NAMES = {field.name.replace("_tile_shape", "_tile_size"): field.name for field in dataclasses.fields(TileConfig)}


def flattened(tiles: TileConfig) -> dict[str, Any]:
    """The performance arguments of ``attention`` that correspond to those of neighborhood attention."""
    arguments = {name: getattr(tiles, field) for name, field in _NAMES.items()}
    return {
        name: min(math.prod(value), LARGEST_INT) if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }


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
        if name != "backend" and name not in _NAMES:
            allowed = ", ".join(sorted([*_NAMES, "backend"]))
            raise TypeError(f"attention_kwargs has {shown(name)}; it may hold {allowed}")
    arguments = {**others, **attention_kwargs}
    backend = arguments.pop("backend", None)
    try:
        if backend is not None:
            backends.find(backend, "fmha")
        tile_config(1, **{_NAMES[name]: value for name, value in arguments.items()}, tile_suffix="size")
    except (TypeError, ValueError) as error:
        raise type(error)(f"attention_kwargs: {error}") from None
    return {name: hashable(value) for name, value in attention_kwargs.items()}
