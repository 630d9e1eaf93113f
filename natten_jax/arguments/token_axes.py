"""The argument ``token_axes``: the manual mesh axes that token dimensions are split over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from natten_jax.arguments.static import shown

#: One entry for each token dimension: a mesh axis, several, the first one slowest, or ``None``.
TokenAxes = Sequence[str | Sequence[str] | None]


def axis_names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one dimension, as users and partition specs write them: one, several or ``None``."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else (entry,)


def checked_token_axes(token_axes: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """The argument in canonical form: a tuple of names for each token dimension, or nothing at all.

    Raises:
        TypeError: It holds something else than names.
        ValueError: It has another length, or an axis is named twice or is none of ``jax.shard_map`` here.
    """
    if token_axes is None:
        return ()
    rule = f"token_axes must have {rank} value(s), one per token dimension: a mesh axis, a tuple of them or None"
    if isinstance(token_axes, str) or not isinstance(token_axes, Sequence):
        raise TypeError(f"{rule}; got {shown(token_axes)}")
    if len(token_axes) != rank:
        raise ValueError(f"{rule}; got {shown(token_axes)}")
    axes = tuple(map(axis_names, token_axes))
    names = [name for entry in axes for name in entry]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{rule}; got {shown(token_axes)}")
    if len(set(names)) < len(names):
        raise ValueError(f"token_axes names a mesh axis twice: {shown(token_axes)}")
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"token_axes names {name!r}, which is no manual mesh axis here: it is for calls inside jax.shard_map; "
                "elsewhere the sharding of the arrays says how tokens are split"
            ) from None
    return axes if names else ()
