"""Asks whether heads come first where arrays that are refused would then be taken.

In ``[batch, heads, tokens, head_dim]`` heads stand where the operators take tokens. Where such arrays describe a
problem as they are, nothing tells them from others.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from natten_jax.arrays.operands import Inputs
from natten_jax.problem import Problem


def described(describe: Callable[[Inputs], Problem], inputs: Inputs) -> Problem:
    """The problem that arrays describe.

    Args:
        describe: Makes it of the arrays.
        inputs: Their shapes and element types.

    Raises:
        ValueError: As ``describe``, and the message asks that question where it helps.
    """
    try:
        return describe(inputs)
    except ValueError as error:
        if not _are_heads_first(describe, inputs):
            raise
        raise ValueError(
            f"{error}. Do heads come first in these arrays? They come after the tokens: jnp.moveaxis(array, 1, -2)"
        ) from None


def _are_heads_first(describe: Callable[[Inputs], Problem], inputs: Inputs) -> bool:
    """Whether the arrays would do with the second dimension behind the tokens, and had fewer heads than tokens then."""

    def moved(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        batch, heads, *tokens, width = array.shape
        return jax.ShapeDtypeStruct((batch, *tokens, heads, width), array.dtype)

    if any(each.ndim < 4 for each in jax.tree.leaves(inputs)):
        return False
    try:
        problem = describe(jax.tree.map(moved, inputs))
    except (TypeError, ValueError):
        return False
    return problem.heads <= max(*problem.query_layout, *problem.kv_layout)
