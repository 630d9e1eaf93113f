"""Types of arrays on a mesh: what results have, and what JAX asks of arrays inside ``jax.shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

_Tree = TypeVar("_Tree")


def vary_alike(arrays: _Tree) -> _Tree:
    """Inside ``jax.shard_map``, make all arrays vary over the mesh axes that any of them varies over.

    Where this is done outside a derivative rule, JAX knows its transpose: gradients are summed over those axes.
    """
    return varying_like(arrays, arrays)


def varying_like(carry: _Tree, arrays: Any) -> _Tree:
    """``carry``, varying over the manual mesh axes of ``arrays`` too, as ``jax.shard_map`` asks of a scan's carry."""
    result: _Tree = jax.tree.map(functools.partial(_over, _varying(arrays)), carry)
    return result


def _varying(arrays: Any) -> frozenset[str]:
    """The manual mesh axes that any of the arrays varies over."""
    axes = (jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays))
    return frozenset().union(*axes)


def _over(axes: frozenset[str], array: jax.Array) -> jax.Array:
    """``array``, varying over these manual mesh axes, too."""
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(missing), to="varying") if missing else array


def type_like(array: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Abstract type of a result that lives where ``array``, or an array of this abstract type, does.

    It varies over the same mesh axes inside ``jax.shard_map`` and lies on the same mesh. Like operands, results are not
    sharded over explicit axes; the sharding that says so is as long as their shape.
    """
    like = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    sharding = like.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return like.update(shape=tuple(shape), dtype=np.dtype(dtype), sharding=sharding)
