"""Padding of layouts that are smaller than their arrays: zeros in its place, as what it holds may be anything.

Sweeps give padding no weight, but a product of no weight and NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Operands
from natten_jax.arrays.roles import Role, roles_of
from natten_jax.backends.flex.operands import of_entry
from natten_jax.plan.plan import Plan

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])


def without_padding(plan: Plan, operands: Operands, arrays: _Arrays) -> _Arrays:
    """The arrays, zero where tokens lie outside of the layout; as they are where it is known to fill them.

    Args:
        plan: How the call runs.
        operands: Its arrays, of one entry of the batch.
        arrays: Those of queries, and those of keys and values.
    """
    problem = plan.problem
    if not problem.own_extents:
        return arrays
    assert operands.layouts is not None
    query_origin, query_extents, kv_extents = of_entry(operands.layouts, problem.rank)
    leaves, structure = jax.tree.flatten(arrays)

    def cleared(array: jax.Array, role: Role) -> jax.Array:
        if not role.has_layout:
            return array
        origin, extents = (0 * kv_extents, kv_extents) if role is Role.KEY_VALUE else (query_origin, query_extents)
        is_real = _is_inside(origin, extents, array.shape[1 : 1 + problem.rank])
        return jnp.where(is_real.reshape(*is_real.shape, *(1,) * (array.ndim - is_real.ndim)), array, 0)

    cleared_leaves = [cleared(*each) for each in zip(leaves, roles_of(arrays), strict=True)]
    result: _Arrays = jax.tree.unflatten(structure, cleared_leaves)
    return result


def _is_inside(origin: jax.Array, extents: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Which tokens of an array lie inside of the layout, ``[1, *layout]``."""
    rank = len(shape)
    is_inside = jnp.ones((1,) * (rank + 1), bool)
    for i, extent in enumerate(shape):
        along = origin[i] + jnp.arange(extent, dtype=jnp.int32) < extents[i]
        is_inside = is_inside & along.reshape(1, *(extent if j == i else 1 for j in range(rank)))
    return is_inside
