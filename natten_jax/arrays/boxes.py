"""Boxes of queries that are read from arrays or written to them in place, and masks of the padding of batch entries."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from natten_jax.arrays.operands import Role, roles_of


def words_of(array: jax.Array) -> jax.Array:
    """Bitcast pairs of adjacent 16-bit elements to 32-bit words.

    Arrays with elements of another size, or with an odd last dimension, are returned unchanged.
    """
    *outer, width = array.shape
    if array.dtype.itemsize != 2 or width % 2:
        return array
    return jax.lax.bitcast_convert_type(array.reshape(*outer, width // 2, 2), jnp.uint32)


def elements_of(words: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Invert :func:`words_of`."""
    if words.dtype == dtype:
        return words
    *outer, width = words.shape
    return jax.lax.bitcast_convert_type(words, dtype).reshape(*outer, 2 * width)


_Array = TypeVar("_Array")


def unfused(arrays: _Array) -> _Array:
    """Return the arrays behind a barrier, so that XLA does not fuse slices of these arrays with a custom call.

    On GPUs, XLA fuses a custom call with contiguous slices of its operands and results. In JAX 0.11.2 the fusion has
    two faults. Compilation fails with "DUS target must be a fusion parameter" if the target of a dynamic-update-slice
    is a result of the custom call. The fusion also prevents the results of the call from aliasing the call's operands.
    """
    return jax.lax.optimization_barrier(arrays)  # type: ignore[no-any-return]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("first",), meta_fields=("extents",))
@dataclasses.dataclass(frozen=True)
class QueryBox:
    """A box of adjacent queries in the token layout of an array.

    Attributes:
        first: int32 ``[rank]``. Coordinates of the box's first query. These may differ between devices.
        extents: Number of queries in the box, per token dimension.
    """

    first: jax.Array
    extents: tuple[int, ...]

    @property
    def starts(self) -> list[jax.Array]:
        """Coordinate of the first query, per token dimension."""
        return [self.first[i] for i in range(len(self.extents))]

    def cut(self, array: jax.Array) -> jax.Array:
        """Return the box's slice of an array ``[batch, *query_layout, ...]``."""
        shape = self._shape(array)
        return array if array.shape == shape else jax.lax.dynamic_slice(array, self._start(array), shape)

    def copied(self, array: jax.Array) -> jax.Array:
        """Return a copy of the box's slice, moved as 32-bit words; to compute with the slice, use :meth:`cut`."""
        return elements_of(self.cut(words_of(array)), array.dtype)

    def update(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Return the array with the queries of this box replaced.

        The method updates a slice, which XLA does in place. ``array.at[...]`` would be a scatter. If all indices are
        static, the scatter has an empty constant as its index operand. In a ``jax.shard_map`` over explicit axes,
        XLA of JAX 0.11 aborts the process on such a constant.
        """
        if array.shape == part.shape:
            return part
        return jax.lax.dynamic_update_slice(unfused(array), part, self._start(array))

    def _shape(self, array: jax.Array) -> tuple[int, ...]:
        return array.shape[0], *self.extents, *array.shape[1 + len(self.extents) :]

    def _start(self, array: jax.Array) -> list[jax.Array | np.int32]:
        # All indices must have the same type. A Python number would become an int64 in JAX's 64-bit mode.
        zero = np.int32(0)
        return [zero, *self.starts, *[zero] * (array.ndim - 1 - len(self.extents))]


_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])


def is_real(layouts: jax.Array, shape: Sequence[int], *, for_queries: bool) -> jax.Array:
    """Return a mask ``[batch, *shape]``: True for tokens inside the layout of their batch entry, False for padding.

    Args:
        layouts: ``layouts`` of :class:`natten_jax.arrays.operands.Operands`.
        shape: Token extents of the array to mask.
        for_queries: True if the array's tokens are queries, False if they are keys and values.
    """
    rank, dimensions = len(shape), layouts.shape[-1]
    mask = jnp.ones((layouts.shape[0], *(1,) * rank), bool)
    for i, extent in enumerate(shape):
        row = layouts[:, :, dimensions - rank + i, None]
        token = jnp.arange(extent, dtype=jnp.int32)[None]
        is_inside = row[:, 0] + token < row[:, 1] if for_queries else token < row[:, 2]
        mask = mask & is_inside.reshape(-1, *(extent if j == i else 1 for j in range(rank)))
    return mask


def without_padding(layouts: jax.Array | None, arrays: _Arrays) -> _Arrays:
    """Set the padding of arrays to zero.

    Args:
        layouts: ``layouts`` of :class:`natten_jax.arrays.operands.Operands`; ``None`` if the arrays have no padding.
        arrays: A named tuple of arrays whose fields are annotated with a :class:`natten_jax.arrays.operands.Role`.
    """
    if layouts is None:
        return arrays

    def cleared(array: jax.Array, role: Role) -> jax.Array:
        if not role.has_layout:
            return array
        shape = array.shape[1 : array.ndim + role.heads_axis]
        mask = is_real(layouts, shape, for_queries=role.tokens == "queries")
        return jnp.where(mask.reshape(*mask.shape, *(1,) * -role.heads_axis), array, 0)

    leaves, structure = jax.tree.flatten(arrays)
    result: _Arrays = jax.tree.unflatten(structure, map(cleared, leaves, roles_of(arrays)))
    return result
