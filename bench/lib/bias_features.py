"""Emulate a relative bias by additional head dimensions (features), without kernel support for biases.

The keys of a window have distinct positions modulo the window's extent. The features of a key are a one-hot encoding of
its position modulo this extent. A query has one feature per position: its bias for the key at this position,
divided by the scale. The scaled dot product of the features of a query and of a key is the bias of this pair. The
number of features is the number of keys in a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.problem import Problem
from natten_jax.windows import Axis

Attend = Callable[..., jax.Array]


def by_features(attend: Attend, problem: Problem) -> Attend:
    """Wrap ``attend`` to take a relative bias as its last argument.

    Args:
        attend: Function of query, key, value and `scale`.
        problem: Problem that ``attend`` computes. Its queries and keys must have the same layout.
    """

    def attend_with_table(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array) -> jax.Array:
        scale = query.shape[-1] ** -0.5
        query_features = _query_features(problem, table / scale).astype(query.dtype)
        key_features = jnp.asarray(_key_features(problem), key.dtype)[..., None, :]
        wider = [
            jnp.concatenate([array, jnp.broadcast_to(features, (*array.shape[:-1], features.shape[-1]))], axis=-1)
            for array, features in ((query, query_features), (key, key_features))
        ]
        return attend(*wider, value, scale=scale)

    return attend_with_table


def _query_features(problem: Problem, table: jax.Array) -> jax.Array:
    """Return the features of queries, ``[*layout, heads, keys of a window]``."""
    rank = problem.rank
    for dimension, entries in enumerate(_entries(problem)):
        table = jnp.take(table, jnp.asarray(entries), axis=1 + 2 * dimension)
    tokens, places = range(1, 2 * rank, 2), range(2, 2 * rank + 1, 2)
    return table.transpose(*tokens, 0, *places).reshape(*problem.query_layout, table.shape[0], -1)


def _entries(problem: Problem) -> Iterator[np.ndarray]:
    """Yield the indices into the bias table for each dimension, ``[tokens, key positions]``."""
    for axis in problem.axes:
        index, group = _indices(axis)
        start, _ = axis.bounds(index, axis.lengths(group))
        first = np.asarray(start)[:, None]
        keys = first + (np.arange(axis.kernel_size) - first) % axis.kernel_size
        yield np.clip(keys - index[:, None] + axis.kernel_size - 1, 0, 2 * axis.kernel_size - 2)


def _key_features(problem: Problem) -> np.ndarray:
    """Return the features of keys, ``[*layout, keys of a window]``."""
    place = np.zeros((), int)
    for axis in problem.axes:
        place = place[..., None] * axis.kernel_size + _indices(axis)[0] % axis.kernel_size
    return np.eye(math.prod(problem.kernel_size))[place]


def _indices(axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's index within its dilation group, and the index of the dilation group."""
    tokens = np.arange(axis.kv_extent)
    return tokens // axis.dilation, tokens % axis.dilation
