"""Padding: tokens of arrays that lie outside of a batch entry's layout, whatever they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.roles import Role, roles_of

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])


def is_real(layouts: jax.Array, shape: Sequence[int], *, of_queries: bool) -> jax.Array:
    """Which tokens lie inside of the layouts of their entries, ``[batch, *shape]``.

    Args:
        layouts: As :class:`natten_jax.arrays.operands.Operands` has them.
        shape: Token layout of an array.
        of_queries: Whether it is the queries', or else that of keys and values.
    """
    rank, dimensions = len(shape), layouts.shape[-1]
    found = jnp.ones((layouts.shape[0], *(1,) * rank), bool)
    for i, extent in enumerate(shape):
        of_dimension = layouts[:, :, dimensions - rank + i, None]
        token = jnp.arange(extent, dtype=jnp.int32)[None]
        is_inside = of_dimension[:, 0] + token < of_dimension[:, 1] if of_queries else token < of_dimension[:, 2]
        found = found & is_inside.reshape(-1, *(extent if j == i else 1 for j in range(rank)))
    return found


def without_padding(layouts: jax.Array | None, arrays: _Arrays) -> _Arrays:
    """The arrays, zero in their padding.

    Args:
        layouts: As :class:`natten_jax.arrays.operands.Operands` has them; ``None`` where nothing is padding.
        arrays: A tuple whose fields have roles.
    """
    if layouts is None:
        return arrays

    def cleared(array: jax.Array, role: Role) -> jax.Array:
        if not role.has_layout:
            return array
        shape = array.shape[1 : array.ndim + role.heads_axis]
        mask = is_real(layouts, shape, of_queries=role.tokens == "queries")
        return jnp.where(mask.reshape(*mask.shape, *(1,) * -role.heads_axis), array, 0)

    leaves, structure = jax.tree.flatten(arrays)
    result: _Arrays = jax.tree.unflatten(
        structure, [cleared(*each) for each in zip(leaves, roles_of(arrays), strict=True)]
    )
    return result
