"""Asks whether heads come first where arrays that are refused would then be taken.

In ``[batch, heads, tokens, head_dim]`` heads stand where the operators take tokens. Where such arrays describe a
problem as they are, nothing tells them from others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from natten_jax.problem import Problem

_Shapes = Sequence[jax.ShapeDtypeStruct | None]


def described(describe: Callable[..., Problem], arrays: _Shapes) -> Problem:
    """The problem that arrays describe.

    Args:
        describe: Makes it of the arrays.
        arrays: Query, key, value and, or ``None``, additional tokens.

    Raises:
        ValueError: As ``describe``, and the message asks that question where it helps.
    """
    try:
        return describe(*arrays)
    except ValueError as error:
        if not _are_heads_first(describe, arrays):
            raise
        raise ValueError(
            f"{error}. Do heads come first in these arrays? They come after the tokens: jnp.moveaxis(array, 1, -2)"
        ) from None


def _are_heads_first(describe: Callable[..., Problem], arrays: _Shapes) -> bool:
    """Whether the arrays would do with the second dimension behind the tokens, and had fewer heads than tokens then."""
    if any(each is not None and each.ndim < 4 for each in arrays):
        return False
    moved = [
        None
        if each is None
        else jax.ShapeDtypeStruct((each.shape[0], *each.shape[2:-1], each.shape[1], each.shape[-1]), each.dtype)
        for each in arrays
    ]
    try:
        problem = describe(*moved)
    except (TypeError, ValueError):
        return False
    return problem.heads <= max(*problem.query_layout, *problem.kv_layout)
