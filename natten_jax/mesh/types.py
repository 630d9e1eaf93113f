"""Types of arrays on a mesh: what results have, and what JAX asks of arrays inside ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

OptionalArray = TypeVar("OptionalArray", jax.Array, jax.Array | None)
_Tree = TypeVar("_Tree")


def vary_alike(arrays: Sequence[OptionalArray]) -> list[OptionalArray]:
    """Inside ``jax.shard_map``, make all arrays vary over the mesh axes that any of them varies over.

    Where this is done outside a derivative rule, JAX knows its transpose: gradients are summed over those axes.
    """
    axes = [frozenset() if array is None else jax.typeof(array).manual_axis_type.varying for array in arrays]
    every: frozenset[str] = frozenset().union(*axes)
    return [
        array if array is None or own == every else jax.lax.pcast(array, tuple(every - own), to="varying")
        for array, own in zip(arrays, axes, strict=True)
    ]


def varying_like(carry: _Tree, arrays: Any) -> _Tree:
    """``carry``, varying over the manual mesh axes of ``arrays`` too, as ``jax.shard_map`` asks of a scan's carry."""
    axes = [jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(arrays)]
    every: frozenset[str] = frozenset().union(*axes)

    def varying(leaf: jax.Array) -> jax.Array:
        missing = every - jax.typeof(leaf).manual_axis_type.varying
        return jax.lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    result: _Tree = jax.tree.map(varying, carry)
    return result


def type_like(array: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Abstract type of a result that lives where ``array``, or an array of this abstract type, does.

    It varies over the same mesh axes inside ``jax.shard_map`` and lies on the same mesh. Like operands, results are not
    sharded over explicit axes; the sharding that says so is as long as their shape.
    """
    like = array if isinstance(array, jax.core.ShapedArray) else jax.typeof(array)
    sharding = like.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return like.update(shape=tuple(shape), dtype=np.dtype(dtype), sharding=sharding)
