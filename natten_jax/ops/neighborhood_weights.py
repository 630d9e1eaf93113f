"""Neighborhood attention in two steps: compute the attention weights as an array, then apply them to the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.arrays import Scale, number_or_array, per_head
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, flag
from natten_jax.arrays.biases import with_hidden_keys
from natten_jax.arrays.operands import Inputs, varying_like
from natten_jax.element_types import ELEMENT_TYPES, WIDE_DTYPES
from natten_jax.ops.canonicalize import ArrayLike, as_jax_array, checked_table, neighborhood_problem
from natten_jax.sharding.explicit import run_with_auto_axes
from natten_jax.windows import Axis, Edges, WindowArguments


@reject_unknown_kwargs()
def neighborhood_weights(
    query: ArrayLike,
    key: ArrayLike,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: Scale | None = None,
    *,
    edges: Edges = "shift",
    relative_bias: ArrayLike | None = None,
    return_logits: bool = False,
) -> jax.Array:
    """Return the attention weights of :func:`natten_jax.na1d`, ``na2d`` or ``na3d`` as an array.

    The array has one weight per query, head and key in the query's window. Use it to inspect the weights, or to change
    them (dropout, another normalization) before :func:`neighborhood_apply` applies them to values. The function is
    plain JAX and differentiable. It is slower than the fused operators, which do not store the weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax import na2d, neighborhood_apply, neighborhood_weights
        >>> query, key, value = jnp.ones((3, 1, 8, 12, 4, 16))
        >>> weights = neighborhood_weights(query, key, kernel_size=(3, 5))
        >>> weights.shape
        (1, 8, 12, 4, 15)
        >>> out = neighborhood_apply(weights, value, kernel_size=(3, 5))
        >>> bool(jnp.allclose(out, na2d(query, key, value, kernel_size=(3, 5))))
        True

    Args:
        query: ``[batch, *layout, heads, head_dim]`` with one, two or three token dimensions.
        key: ``[batch, *layout, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv``.
        kernel_size: Tokens in a window, per dimension. Each window argument is a single value for all dimensions, or a
            value per dimension.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.
        scale: Factor of the logits: a number, or an array with the shape ``[]`` or ``[heads]``. ``None`` is
            ``head_dim ** -0.5``.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``, in a floating point dtype. It is added to the scaled
            logits, as in the operators. A bias of ``0.5 * finfo(dtype).min`` or less masks the key out.
        return_logits: Return the scaled logits, including the bias, instead of the weights.

    Returns:
        ``[batch, *layout, heads, prod(kernel_size)]``. Weights have the query's dtype. Logits are float32 (float64 for
        float64 inputs). The last axis contains the keys of a window in row-major order. In causal dimensions, and with
        ``edges="cut"``, some windows have fewer than ``prod(kernel_size)`` keys. The remaining entries of such a window
        have a weight of 0 and a logit of ``-inf``.

    Raises:
        ValueError: A value, shape or dtype breaks a rule.
        TypeError: An argument is of the wrong type.
    """
    return_logits = flag("return_logits", return_logits)
    query, key = as_jax_array("query", query), as_jax_array("key", key)
    rank = _rank("query", query, "[batch, *layout, heads, head_dim]")
    number, factors = number_or_array(scale)
    inputs = Inputs(query, key, key)
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)
    problem = neighborhood_problem(rank, inputs, window, number if factors is None else 1.0)
    accumulator = problem.element.accumulator
    factor = jnp.asarray(problem.scale, accumulator)
    if factors is not None:
        factor = jnp.expand_dims(per_head(factors, 1, problem.heads, problem.dtype), range(1, rank + 1))
        factor = jnp.where(jnp.isfinite(factor), factor, jnp.nan)  # otherwise an infinite scale could mask keys out
    table = None if relative_bias is None else with_hidden_keys(checked_table(problem, relative_bias))

    def weights_of(query: jax.Array, key: jax.Array, factor: jax.Array, table: jax.Array | None) -> jax.Array:
        grouped = _grouped(query, problem.heads_kv).astype(accumulator)

        @jax.checkpoint  # otherwise JAX saves a copy of the keys per window entry for gradients
        def logits_of(entry: _WindowEntries) -> jax.Array:
            keys = entry.take(key).astype(accumulator)
            products = jnp.sum(grouped * keys[..., None, :], axis=-1).reshape(query.shape[:-1])
            logits = factor * products
            if table is not None:
                logits = logits + entry.bias(table)
            return jnp.where(entry.is_seen(), logits, -jnp.inf)

        logits = jnp.moveaxis(jax.lax.map(logits_of, _window_entries(problem.axes)), 0, -1)
        if return_logits:
            return logits
        if table is None:
            return jax.nn.softmax(logits, axis=-1).astype(query.dtype)
        # If all keys of a query are masked out, the query's weights and their derivatives are zero.
        has_no_keys = jnp.all(jnp.isneginf(logits), axis=-1, keepdims=True)
        weights = jax.nn.softmax(jnp.where(has_no_keys, 0, logits), axis=-1)
        return jnp.where(has_no_keys, 0, weights).astype(query.dtype)

    query, key = jnp.asarray(query), jnp.asarray(key)
    return run_with_auto_axes(weights_of, query, query, key, factor, table, inside_manual=False)


@reject_unknown_kwargs()
def neighborhood_apply(
    weights: ArrayLike,
    value: ArrayLike,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    *,
    edges: Edges = "shift",
) -> jax.Array:
    """Compute the weighted sum of the values in each query's window.

    :func:`neighborhood_weights` returns suitable weights. The function is plain JAX and differentiable.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax import neighborhood_apply
        >>> means = neighborhood_apply(jnp.full((2, 32, 4, 5), 1 / 5), jnp.ones((2, 32, 4, 16)), kernel_size=5)
        >>> means.shape
        (2, 32, 4, 16)

    Args:
        weights: ``[batch, *layout, heads, prod(kernel_size)]``, in a floating point dtype. They need not sum to 1. If a
            window has fewer than ``prod(kernel_size)`` keys, the remaining weights are ignored.
        value: ``[batch, *layout, heads_kv, head_dim_v]``; ``heads`` is a multiple of ``heads_kv``.
        kernel_size: Tokens in a window, per dimension. Each window argument is a single value for all dimensions, or a
            value per dimension.
        stride: Number of queries that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.

    Returns:
        ``[batch, *layout, heads, head_dim_v]`` in the dtype of the values.

    Raises:
        ValueError: A value, shape or dtype breaks a rule.
        TypeError: An argument is of the wrong type.
    """
    weights, value = as_jax_array("weights", weights), as_jax_array("value", value)
    rank = _rank("value", value, "[batch, *layout, heads_kv, head_dim_v]")
    batch, *layout, heads_kv, width = value.shape
    if value.dtype.name not in WIDE_DTYPES:
        raise ValueError(f"value has dtype {value.dtype.name}; supported are {', '.join(WIDE_DTYPES)}")
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges).checked(rank)
    axes = window.axes(layout, layout)
    shape = (batch, *layout, math.prod(axis.kernel_size for axis in axes))
    given = weights.shape
    if weights.ndim != value.ndim or (*given[:-2], given[-1]) != shape or not given[-2] or given[-2] % heads_kv:
        raise ValueError(
            f"weights has shape {given}, but [batch, *layout, heads, prod(kernel_size)] requires "
            f"{(*shape[:-1], 'heads', shape[-1])} with heads a multiple of the {heads_kv} of value"
        )
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(f"weights has dtype {weights.dtype.name}, but weights are floating point numbers")
    with jax.numpy_dtype_promotion("standard"):
        accumulator = jnp.promote_types(ELEMENT_TYPES[value.dtype.name].accumulator, weights.dtype)

    def mixed_values(weights: jax.Array, value: jax.Array) -> jax.Array:
        @jax.checkpoint
        def add_entry(mixed: jax.Array, place_and_weight: tuple[_WindowEntries, jax.Array]) -> tuple[jax.Array, None]:
            entry, weight = place_and_weight
            weight = jnp.where(entry.is_seen()[..., None, None], weight, 0).astype(accumulator)
            return mixed + weight * entry.take(value).astype(accumulator)[..., None, :], None

        by_place = jnp.moveaxis(_grouped(weights, heads_kv), -1, 0)[..., None]
        zeros = jnp.zeros((*by_place.shape[1:-1], width), accumulator)
        entries = _window_entries(axes)
        mixed, _ = jax.lax.scan(add_entry, varying_like(zeros, (weights, value)), (entries, by_place))
        return mixed.reshape(*given[:-1], width).astype(value.dtype)

    weights, value = jnp.asarray(weights), jnp.asarray(value)
    return run_with_auto_axes(mixed_values, weights, weights, value)


class _WindowEntries(NamedTuple):
    """The ``n``-th entry of every query's window, for one ``n``.

    An entry contains a key, or is empty because the window has fewer than ``prod(kernel_size)`` keys. Each attribute
    has one array per token dimension. Element ``i`` of the array belongs to the queries with the coordinate ``i`` in
    this dimension.

    Attributes:
        keys: int32 ``[extent]``. Coordinate of the key, or of the window's first key if the entry is empty.
        exist: bool ``[extent]``. True if the entry contains a key.
        offsets: int32 ``[extent]``. Index of the key's bias in a table of relative biases.
    """

    keys: tuple[jax.Array, ...]
    exist: tuple[jax.Array, ...]
    offsets: tuple[jax.Array, ...]

    def bias(self, table: jax.Array) -> jax.Array:
        """Gather the keys' biases ``[1, *layout, heads]`` from a table ``[heads, 2 * kernel_size - 1, ...]``."""
        return jnp.moveaxis(table[(slice(None), *jnp.ix_(*self.offsets))], 0, -1)[None]

    def take(self, array: jax.Array) -> jax.Array:
        """Gather the elements of an array ``[batch, *layout, ...]`` at the coordinates of the keys."""
        return array[(slice(None), *jnp.ix_(*self.keys))]

    def is_seen(self) -> jax.Array:
        """Return a mask ``[1, *layout, 1]``: True for each query whose entry contains a key."""
        seen = jnp.array(True)
        for exists in self.exist:
            seen = seen[..., None] & jnp.expand_dims(exists, range(seen.ndim))
        return seen[None, ..., None]


def _window_entries(axes: Sequence[Axis]) -> _WindowEntries:
    """Return all window entries, stacked along the first axis of each array in row-major order."""
    keys, exist, offsets = zip(*map(_keys_of_windows, axes), strict=True)
    numbers = np.indices([axis.kernel_size for axis in axes]).reshape(len(axes), -1)

    def place_arrays(arrays: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(array.T[number]) for array, number in zip(arrays, numbers, strict=True))

    return _WindowEntries(place_arrays(keys), place_arrays(exist), place_arrays(offsets))


def _keys_of_windows(axis: Axis) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the three fields of :class:`_WindowEntries` for one dimension, as arrays ``[extent, kernel_size]``."""
    index, group = np.divmod(np.arange(axis.query_extent), axis.dilation)
    lengths = axis.lengths(group)
    start, end = (bound[:, None] for bound in axis.bounds(index, lengths))
    keys = start + np.arange(axis.kernel_size)
    exist = keys < end
    keys = np.where(exist, keys, start)
    offsets = keys - index[:, None] + axis.kernel_size - 1
    if axis.edges == "wrap":
        keys = keys % lengths[1][:, None]
    return (keys * axis.dilation + group[:, None]).astype(np.int32), exist, offsets.astype(np.int32)


def _grouped(array: jax.Array, heads_kv: int) -> jax.Array:
    """Reshape ``[..., heads, width]`` to ``[..., heads_kv, heads // heads_kv, width]``."""
    *layout, heads, width = array.shape
    return array.reshape(*layout, heads_kv, heads // heads_kv, width)


def _rank(name: str, array: jax.Array, shape: str) -> int:
    """Check the shape of an array, and return its number of token dimensions."""
    if not 4 <= array.ndim <= 6 or 0 in array.shape[1:]:
        raise ValueError(
            f"{name} has shape {array.shape}, but {shape} has one, two or three token dimensions, and every extent "
            "but the batch is at least 1"
        )
    return array.ndim - 3
