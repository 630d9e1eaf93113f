"""Attention in float64 NumPy with a dense mask over all pairs of tokens: the reference for the tests.

This module does not use natten_jax. The mask is built token by token from the definition of a neighborhood, and the
gradients are written-out formulas of softmax attention. :mod:`test_oracle` checks them against finite differences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

#: If the magnitude of a bias is at least this number, the oracle rounds the biased logit to float32, as kernels do. Two
#: logits that are equal in the kernels are then also equal in the oracle.
TIED = 2.0**24

Array = np.ndarray
Operand = Any  # NumPy array in this module; operators get JAX arrays


def window(
    position: int, length: int, kernel_size: int, stride: int, is_causal: bool, edges: str = "shift"
) -> list[int]:
    """Return, in order, the keys that the query at ``position`` sees in a dilation group of ``length`` tokens."""
    return [place % length for place in window_places(position, length, kernel_size, stride, is_causal, edges)]


def window_places(
    position: int, length: int, kernel_size: int, stride: int, is_causal: bool, edges: str = "shift"
) -> list[int]:
    """Return the keys as unwrapped positions. With ``"wrap"``, they can be negative or exceed ``length - 1``."""
    begin = position
    while begin > 0 and (begin - 1) // stride == position // stride:
        begin -= 1
    if is_causal:
        # The leader (the last query of a full block of ``stride`` queries) determines the start of the block's window.
        # No query sees keys after itself.
        leader = min(begin + stride - 1, length - 1)
        return list(range(max(0, leader - kernel_size + 1), position + 1))
    leader = min(begin + stride // 2, length - 1)
    if edges != "shift":
        # Positions of the window around the leader. Positions beyond an end are dropped (cut) or wrapped around (wrap).
        places = [leader + step for step in range(-(kernel_size // 2), kernel_size - kernel_size // 2)]
        return [place for place in places if edges == "wrap" or 0 <= place < length]
    first = leader - kernel_size // 2
    while first < 0:
        first += 1
    while first + kernel_size > length:
        first -= 1
    return list(range(first, first + kernel_size))


@functools.lru_cache(maxsize=512)
def line_mask(
    extent: int, kernel_size: int, stride: int, dilation: int, is_causal: bool, edges: str = "shift"
) -> Array:
    """Return the visibility ``[queries, keys]`` in one dimension, True for keys that a query sees."""
    mask = np.zeros((extent, extent), bool)
    for query in range(extent):
        line = np.arange(query % dilation, extent, dilation)
        mask[query, line[window(query // dilation, len(line), kernel_size, stride, is_causal, edges)]] = True
    return mask


def neighborhood_mask(
    layout: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    is_causal: Sequence[bool],
    edges: Sequence[str] | None = None,
    *,
    queries: Sequence[int] | None = None,
    origin: Sequence[int] | None = None,
    upsample: Sequence[int] | None = None,
    extents: Sequence[int] | None = None,
) -> Array:
    """Return the visibility ``[query tokens, key tokens]`` of tokens flattened in C order.

    By default, the queries are all tokens of the layout. Otherwise they form a box that begins at token ``origin`` and
    has ``upsample`` queries per token in each dimension. ``extents`` are the valid extents of the layout. Larger
    windows are clamped to these extents.
    """
    mask, ones = np.ones((1, 1), bool), (1,) * len(layout)
    windows = zip(kernel_size, stride, dilation, is_causal, edges or ("shift",) * len(layout), strict=True)
    places = zip(queries or layout, origin or (0,) * len(layout), upsample or ones, extents or layout, strict=True)
    for extent, window, (count, first, finer, real) in zip(layout, windows, places, strict=True):
        kernel, steps, distance, causal, edge = window
        size = max(1, min(kernel, real // distance))
        line = np.zeros((extent, extent), bool)
        line[:real, :real] = line_mask(real, size, min(steps, size), distance, causal, edge)
        mask = np.kron(mask, line[[first + i // finer for i in range(count)]]).astype(bool)
    return mask


def attention_mask(queries: int, keys: int, is_causal: bool) -> Array:
    """Return the visibility of plain attention. If it is causal, query ``i`` sees keys 0 to ``i``."""
    mask = np.ones((queries, keys), bool)
    return np.tril(mask) if is_causal else mask


def line_offsets(
    extent: int, kernel_size: int, stride: int, dilation: int, is_causal: bool, edges: str = "shift"
) -> Array:
    """Return the offset ``[queries, keys]`` from each query to each key, in units of ``dilation`` tokens.

    Offsets are clipped to at most ``kernel_size - 1`` in either direction. Keys of other dilation groups have offset 0.
    """
    offsets = np.zeros((extent, extent), int)
    for query in range(extent):
        line, position = np.arange(query % dilation, extent, dilation), query // dilation
        offsets[query, line] = np.clip(np.arange(len(line)) - position, 1 - kernel_size, kernel_size - 1)
        if edges == "wrap":
            for place in window_places(position, len(line), kernel_size, stride, is_causal, edges):
                offsets[query, line[place % len(line)]] = place - position
    return offsets


def relative_entries(
    layout: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    is_causal: Sequence[bool],
    edges: Sequence[str] | None = None,
    *,
    table_size: Sequence[int] | None = None,
) -> Array:
    """Return indices ``[queries, keys]`` into a head's flattened relative bias, meaningful for visible keys.

    The table has ``2 * table_size - 1`` entries in each dimension. By default, ``table_size`` is ``kernel_size``.
    """
    entries = np.zeros((1, 1), int)
    edges = edges or ("shift",) * len(layout)
    sizes = kernel_size if table_size is None else table_size
    for size, *dimension in zip(sizes, layout, kernel_size, stride, dilation, is_causal, edges, strict=True):
        extent = dimension[0]
        own = line_offsets(*dimension) + size - 1
        queries, keys = entries.shape
        entries = entries[:, None, :, None] * (2 * size - 1) + own[None, :, None, :]
        entries = entries.reshape(queries * extent, keys * extent)
    return entries


class Tensors(NamedTuple):
    """An array or number for each differentiable operand."""

    query: Operand
    key: Operand
    value: Operand
    additional_keys: Operand | None = None
    additional_values: Operand | None = None
    scale: Operand | None = None  # replaces the argument ``scale``: [] or [heads]
    relative_bias: Operand | None = None  # [heads, 2 kernel_size - 1, ...]
    key_bias: Operand | None = None  # [batch, *layout] or [batch, heads, *layout]
    sinks: Operand | None = None  # [heads]


class Forward(NamedTuple):
    """Output and logsumexp."""

    out: Array
    lse: Array


class Reference(NamedTuple):
    """Results of a problem, and for each result the magnitude of the terms that add up to it.

    The rounding errors of a sum depend on the magnitude of its terms. If a result is small because its terms cancel,
    compare its error with this magnitude instead of the result.
    """

    forward: Forward
    gradients: Tensors
    forward_magnitude: Forward
    gradient_magnitude: Tensors


class _Flat(NamedTuple):
    query: Array  # [batch, heads, queries, head_dim]
    key: Array  # [batch, heads, keys, head_dim], additional keys last
    value: Array
    mask: Array  # [queries, keys], or [batch, 1, queries, keys]
    bias: Array  # broadcasts to [batch, heads, queries, keys]; -inf masks out a key
    is_double: bool  # True if operands are float64
    sinks: Array  # broadcasts to [batch, heads, queries, 1]; -inf without sinks


def forward(operands: Tensors, mask: Array, scale: float, entries: Array | None = None) -> Forward:
    """Return output ``[batch, *layout, heads, head_dim_v]`` and logsumexp ``[batch, *layout, heads]``.

    Args:
        operands: The arrays.
        mask: Visibility ``[query tokens, key tokens]``.
        scale: Scale of the logits. Ignored if the operands have a scale.
        entries: Indices from :func:`relative_entries`, needed for a relative bias.
    """
    flat = _flatten(operands, mask, entries)
    weights, lse = _softmax(flat, _factors(operands, scale))
    return Forward(_heads_last(weights @ flat.value, operands), _heads_last(lse[..., None], operands)[..., 0])


def spread(operands: Tensors, mask: Array, scale: float) -> Array:
    """Return, for each output element, the root of the sum of the squares of its terms.

    If the weights have independent relative errors of size ``e``, the output's error is about ``e`` times this value.
    """
    flat = _flatten(operands, mask, None)
    weights, _ = _softmax(flat, _factors(operands, scale))
    return _heads_last(np.sqrt(weights**2 @ flat.value**2), operands)


def reference(
    operands: Tensors,
    mask: Array,
    scale: float,
    out_cotangent: Array,
    lse_cotangent: Array,
    is_real: Array | None = None,
    entries: Array | None = None,
) -> Reference:
    """Compute forward and backward pass.

    Args:
        operands: The arrays.
        mask: Visibility ``[query tokens, key tokens]``, optionally with a leading batch axis.
        scale: Scale of the logits. Ignored if the operands have a scale.
        out_cotangent: Cotangent of the output.
        lse_cotangent: Cotangent of the logsumexp.
        is_real: ``[batch, queries]``. False for padding queries, which see no additional tokens. Default: no padding.
        entries: Indices from :func:`relative_entries`, needed for a relative bias. A leading batch axis is optional.
    """
    flat, factors = _flatten(operands, mask, entries, is_real), _factors(operands, scale)
    weights, lse = _softmax(flat, factors)
    out = weights @ flat.value
    d_out, d_lse = _heads_first(out_cotangent), _heads_first(lse_cotangent[..., None])
    delta = (d_out * out).sum(-1, keepdims=True) - d_lse
    sink_weights = np.exp(flat.sinks - np.where(np.isfinite(lse), lse, np.inf)[..., None])
    gradients = _backward(flat, factors, weights, d_out, delta, sink_weights)

    sizes = flat._replace(query=np.abs(flat.query), key=np.abs(flat.key), value=np.abs(flat.value))
    out_size, d_out_size = weights @ sizes.value, np.abs(d_out)
    lse_size = np.abs(factors) * (sizes.query * (weights @ sizes.key)).sum(-1, keepdims=True)
    if flat.bias.any():
        lse_size += (weights * np.abs(np.where(np.isfinite(flat.bias), flat.bias, 0))).sum(-1, keepdims=True)
    lse_size += np.abs(np.where(np.isfinite(lse), lse, 0))[..., None]
    delta_size = (d_out_size * out_size).sum(-1, keepdims=True) + np.abs(d_lse)
    gradient_sizes = _backward(sizes, np.abs(factors), weights, d_out_size, -delta_size, sink_weights)
    return Reference(
        Forward(_heads_last(out, operands), _heads_last(lse[..., None], operands)[..., 0]),
        _unflatten(gradients, operands, entries),
        Forward(_heads_last(out_size, operands), _heads_last(lse_size, operands)[..., 0]),
        _unflatten(gradient_sizes, operands, entries),
    )


class _FlatGradients(NamedTuple):
    query: Array
    key: Array
    value: Array
    scale: Array  # per query and feature, before summation
    logits: Array
    sinks: Array  # per query, before summation


def _backward(
    flat: _Flat, factors: Array, weights: Array, d_out: Array, delta: Array, sink_weights: Array
) -> _FlatGradients:
    """Return the gradients per query head.

    If ``flat``, ``factors`` and ``d_out`` are magnitudes and ``delta`` is a negative magnitude, no terms cancel. The
    results are then the magnitudes of the terms of the gradients.
    """
    # Arrays with one element per pair of tokens are by far the largest. The code reads and writes them as rarely as
    # possible.
    d_logits = d_out @ flat.value.swapaxes(-1, -2)
    d_logits -= delta
    d_logits *= weights
    logits_times_keys = d_logits @ flat.key
    d_logits_t, weights_t = (matrix.swapaxes(-1, -2) for matrix in (d_logits, weights))
    return _FlatGradients(
        factors * logits_times_keys,
        factors * (d_logits_t @ flat.query),
        weights_t @ d_out,
        flat.query * logits_times_keys,
        d_logits,
        -sink_weights * delta,
    )


def _factors(operands: Tensors, scale: float) -> Array:
    """Return the scale of the logits as an array that broadcasts to ``[batch, heads, queries, keys]``."""
    factors = scale if operands.scale is None else np.asarray(operands.scale).astype(np.float64)
    return np.reshape(factors, (-1, 1, 1))


def _softmax(flat: _Flat, scale: Array) -> tuple[Array, Array]:
    logits = flat.query @ flat.key.swapaxes(-1, -2)
    logits *= scale
    if flat.bias.any():
        logits += flat.bias
        if not flat.is_double:
            is_tied = np.isfinite(flat.bias) & (np.abs(flat.bias) >= TIED)
            if is_tied.any():
                logits = np.where(is_tied, logits.astype(np.float32), logits)
    np.copyto(logits, -np.inf, where=~flat.mask)
    highest = np.maximum(logits.max(-1, keepdims=True), flat.sinks)
    # Some queries see no key, for example if the arrays are a part of a layout. These queries have weights of 0 and a
    # logsumexp of -inf.
    is_empty = highest == -np.inf
    highest = np.where(is_empty, 0, highest)
    logits -= highest
    weights = np.exp(logits, out=logits)
    total = weights.sum(-1, keepdims=True) + np.exp(flat.sinks - highest) + is_empty
    weights /= total
    return weights, np.where(is_empty, -np.inf, highest + np.log(total))[..., 0]


def with_hidden(added: Operand) -> Array:
    """Convert a bias or sinks to float64. Values of at most half the minimum of the dtype become ``-inf``."""
    array = np.asarray(added)
    wide = array.astype(np.float64)
    return np.where(wide <= 0.5 * float(ml_dtypes.finfo(array.dtype).min), -np.inf, wide)


def _heads_first(array: Array) -> Array:
    """Convert ``[batch, *layout, heads, width]`` to float64 ``[batch, heads, tokens, width]``."""
    flat = np.asarray(array).astype(np.float64).reshape(array.shape[0], -1, *array.shape[-2:])
    return flat.swapaxes(1, 2)


def _heads_last(array: Array, operands: Tensors) -> Array:
    """Undo the reshape of :func:`_heads_first` for an array over the query tokens."""
    return array.swapaxes(1, 2).reshape(*operands.query.shape[:-1], array.shape[-1])


def _flatten(operands: Tensors, mask: Array, entries: Array | None, is_real: Array | None = None) -> _Flat:
    repeats = operands.query.shape[-2] // operands.key.shape[-2]
    key, value = _heads_first(operands.key), _heads_first(operands.value)
    if operands.additional_keys is not None and operands.additional_values is not None:
        key = np.concatenate([key, _heads_first(operands.additional_keys)], axis=2)
        value = np.concatenate([value, _heads_first(operands.additional_values)], axis=2)
        always = np.ones((*mask.shape[:-1], operands.additional_keys.shape[1]), bool)
        if is_real is not None:
            always &= is_real[:, :, None]
        mask = np.concatenate([mask, always], axis=-1)
    mask = mask[:, None] if mask.ndim == 3 else mask
    sinks = np.full((1, 1, 1, 1), -np.inf)
    if operands.sinks is not None:
        sinks = with_hidden(operands.sinks).reshape(1, -1, 1, 1)
    if is_real is not None:
        sinks = np.where(is_real[:, None, :, None], sinks, -np.inf)
    return _Flat(
        _heads_first(operands.query),
        key.repeat(repeats, axis=1),
        value.repeat(repeats, axis=1),
        mask,
        _bias(operands, entries, mask.shape[-1]),
        operands.query.dtype == np.float64,
        sinks,
    )


def _bias(operands: Tensors, entries: Array | None, keys: int) -> Array:
    """Return the biases that are added to the logits of ``keys`` keys. They are 0 for additional keys."""
    tokens = int(np.prod(operands.key.shape[1:-2]))
    found = np.zeros((1, 1, 1, tokens))
    if operands.relative_bias is not None:
        assert entries is not None
        tables = with_hidden(operands.relative_bias).reshape(operands.relative_bias.shape[0], -1)
        found = found + (tables[:, entries] if entries.ndim == 2 else tables[:, entries].swapaxes(0, 1))
    if operands.key_bias is not None:
        found = found + _by_head(operands)[:, :, None]
    return np.pad(found, [(0, 0), (0, 0), (0, 0), (0, keys - tokens)])


def _by_head(operands: Tensors) -> Array:
    """Return the key bias as ``[batch, heads or 1, tokens]``."""
    assert operands.key_bias is not None
    has_heads = operands.key_bias.ndim == operands.key.ndim - 1
    heads = operands.key_bias.shape[1] if has_heads else 1
    return with_hidden(operands.key_bias).reshape(operands.key.shape[0], heads, -1)


def _bias_gradients(gradients: _FlatGradients, operands: Tensors, entries: Array | None) -> dict[str, Array]:
    """Return the gradients of relative bias, key bias and sinks."""
    found: dict[str, Array] = {}
    if operands.relative_bias is not None:
        assert entries is not None
        shape = operands.relative_bias.shape
        token_logits = gradients.logits[..., : entries.shape[-1]]
        token_logits = token_logits.sum(0, keepdims=True) if entries.ndim == 2 else token_logits
        by_head = token_logits.swapaxes(0, 1).reshape(shape[0], -1)
        tables = [np.bincount(entries.ravel(), each, int(np.prod(shape[1:]))) for each in by_head]
        found["relative_bias"] = np.stack(tables).reshape(shape)
    if operands.key_bias is not None:
        by_key = gradients.logits.sum(2)[..., : int(np.prod(operands.key.shape[1:-2]))]
        has_heads = operands.key_bias.ndim == operands.key.ndim - 1
        found["key_bias"] = (by_key if has_heads else by_key.sum(1)).reshape(operands.key_bias.shape)
    if operands.sinks is not None:
        found["sinks"] = gradients.sinks.sum((0, 2, 3))
    return found


def _unflatten(gradients: _FlatGradients, operands: Tensors, entries: Array | None) -> Tensors:
    """Return the gradients in the shapes of the operands.

    Sum over the query heads that share a key/value head, and split off additional tokens.
    """
    heads_kv = operands.key.shape[-2]

    def split_additional(gradient: Array, source: Array, additional: Array | None) -> tuple[Array, Array | None]:
        batch, heads, tokens, width = gradient.shape
        summed = gradient.reshape(batch, heads_kv, heads // heads_kv, tokens, width).sum(2).swapaxes(1, 2)
        own = tokens if additional is None else tokens - additional.shape[1]
        return summed[:, :own].reshape(source.shape), None if additional is None else summed[:, own:]

    key, additional_keys = split_additional(gradients.key, operands.key, operands.additional_keys)
    value, additional_values = split_additional(gradients.value, operands.value, operands.additional_values)
    scale = None
    if operands.scale is not None:
        per_head = gradients.scale.sum((0, 2, 3))
        scale = per_head if np.ndim(operands.scale) else per_head.sum()
    query, biases = _heads_last(gradients.query, operands), _bias_gradients(gradients, operands, entries)
    return Tensors(query, key, value, additional_keys, additional_values, scale, **biases)
