"""A box of a device's queries: those that see a halo."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from natten_jax.arrays.bitcast import elements_of, words_of
from natten_jax.arrays.in_place import apart


@functools.partial(jax.tree_util.register_dataclass, data_fields=("first",), meta_fields=("extents",))
@dataclasses.dataclass(frozen=True)
class QueryBox:
    """Some of the queries along each token dimension.

    Attributes:
        first: int32 ``[rank]``: where they begin, which may depend on the device.
        extents: How many there are.
    """

    first: jax.Array
    extents: tuple[int, ...]

    @property
    def starts(self) -> list[jax.Array]:
        """Where they begin, by token dimension."""
        return [self.first[i] for i in range(len(self.extents))]

    def cut(self, array: jax.Array) -> jax.Array:
        """These queries of an array ``[batch, *query_layout, ...]``."""
        shape = self._shape(array)
        return array if array.shape == shape else jax.lax.dynamic_slice(array, self._start(array), shape)

    def copied(self, array: jax.Array) -> jax.Array:
        """The same, where nothing is computed with them on the way: in words."""
        return elements_of(self.cut(words_of(array)), array.dtype)

    def put(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """The array, with these queries replaced.

        By slices, which XLA updates in place: ``array.at[...]`` is a scatter whose indices are an empty constant where
        they are all static, and XLA of JAX 0.11 ends the process on such a constant in a ``jax.shard_map`` over
        explicit axes.
        """
        if array.shape == part.shape:
            return part
        return jax.lax.dynamic_update_slice(apart(array), part, self._start(array))

    def _shape(self, array: jax.Array) -> tuple[int, ...]:
        return array.shape[0], *self.extents, *array.shape[1 + len(self.extents) :]

    def _start(self, array: jax.Array) -> list[jax.Array | np.int32]:
        # In 64-bit mode a Python number would be an int64, and indices must have one type.
        zero = np.int32(0)
        return [zero, *self.starts, *[zero] * (array.ndim - 1 - len(self.extents))]
