"""Attention in float64 NumPy with a dense mask over all pairs of tokens: the reference of every test.

Nothing here uses natten_jax. The mask is built token by token from the definition of a neighborhood, and the
gradients are the formulas of softmax attention, written out. :mod:`test_oracle` checks them against finite
differences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Operand = Any  # NumPy's array, which this module computes with, or JAX's, which operators are given


def window(
    position: int, length: int, kernel_size: int, stride: int, is_causal: bool, edges: str = "shift"
) -> list[int]:
    """Keys that the query at ``position`` of a line of ``length`` tokens sees, in order, found by walking."""
    begin = position
    while begin > 0 and (begin - 1) // stride == position // stride:
        begin -= 1
    if is_causal:
        # The last query of a full block decides where the window of the block begins; nobody sees the future.
        leader = min(begin + stride - 1, length - 1)
        return list(range(max(0, leader - kernel_size + 1), position + 1))
    leader = min(begin + stride // 2, length - 1)
    if edges != "shift":
        # Steps from the leader to the front and to the back: one that leaves the line is lost, or enters it again.
        places = [leader + step for step in range(-(kernel_size // 2), kernel_size - kernel_size // 2)]
        return [place % length for place in places if edges == "wrap" or 0 <= place < length]
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
    """Visibility ``[queries, keys]`` in one dimension."""
    mask = np.zeros((extent, extent), bool)
    for residue in range(dilation):
        line = np.arange(residue, extent, dilation)
        for position, query in enumerate(line):
            mask[query, line[window(position, len(line), kernel_size, stride, is_causal, edges)]] = True
    return mask


def neighborhood_mask(
    layout: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    is_causal: Sequence[bool],
    edges: Sequence[str] | None = None,
) -> Array:
    """Visibility ``[query tokens, key tokens]`` over flattened tokens, the last dimension fastest."""
    mask = np.ones((1, 1), bool)
    edges = edges or ("shift",) * len(layout)
    for dimension in zip(layout, kernel_size, stride, dilation, is_causal, edges, strict=True):
        mask = np.kron(mask, line_mask(*dimension)).astype(bool)
    return mask


def placed_mask(
    layout: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    is_causal: Sequence[bool],
    *,
    queries: Sequence[int],
    origin: Sequence[int],
    upsample: Sequence[int],
    extents: Sequence[int],
) -> Array:
    """Visibility of a box of so many queries that begins at an origin, in a layout of which ``extents`` are real.

    Windows that do not fit what is real are as large as fits. Along each dimension ``upsample`` queries are at a token.
    """
    mask = np.ones((1, 1), bool)
    dimensions = zip(layout, kernel_size, stride, dilation, is_causal, queries, origin, upsample, extents, strict=True)
    for extent, kernel, steps, distance, causal, count, first, finer, real in dimensions:
        size = max(1, min(kernel, real // distance))
        line = np.zeros((extent, extent), bool)
        line[:real, :real] = line_mask(real, size, min(steps, size), distance, causal)
        mask = np.kron(mask, line[[first + i // finer for i in range(count)]]).astype(bool)
    return mask


def attention_mask(queries: int, keys: int, is_causal: bool) -> Array:
    """Visibility of plain attention; causal masks are aligned at the first tokens."""
    mask = np.ones((queries, keys), bool)
    return np.tril(mask) if is_causal else mask


class Tensors(NamedTuple):
    """One array, or one number, for each differentiable operand."""

    query: Operand
    key: Operand
    value: Operand
    additional_keys: Operand | None = None
    additional_values: Operand | None = None
    scale: Operand | None = None  # of the logits, in place of the number: of every head, or one for each


class Forward(NamedTuple):
    """Output and logsumexp."""

    out: Array
    lse: Array


class Reference(NamedTuple):
    """Results of a problem, and how large each would be if nothing in its sums cancelled.

    A computation in floating point cannot be more accurate than rounding errors of the terms that it adds. Where
    a result is small because terms cancel, its magnitude here is what its error has to be compared with.
    """

    forward: Forward
    gradients: Tensors
    forward_magnitude: Forward
    gradient_magnitude: Tensors


class _Flat(NamedTuple):
    query: Array  # [batch, heads, queries, head_dim]
    key: Array  # [batch, heads, keys, head_dim], additional ones last
    value: Array
    mask: Array  # [queries, keys], or [batch, 1, queries, keys]


def forward(operands: Tensors, mask: Array, scale: float) -> Forward:
    """Output ``[batch, *layout, heads, head_dim_v]`` and logsumexp ``[batch, *layout, heads]``."""
    flat = _flatten(operands, mask)
    weights, lse = _softmax(flat, _factors(operands, scale))
    return Forward(_heads_last(weights @ flat.value, operands), _heads_last(lse[..., None], operands)[..., 0])


def reference(
    operands: Tensors,
    mask: Array,
    scale: float,
    out_cotangent: Array,
    lse_cotangent: Array,
    is_real: Array | None = None,
) -> Reference:
    """Forward and backward pass.

    ``mask`` may have one part for each entry of the batch, and ``is_real``, ``[batch, queries]``, says which queries
    are none of the padding, which sees no additional tokens, either.
    """
    flat, factors = _flatten(operands, mask, is_real), _factors(operands, scale)
    weights, lse = _softmax(flat, factors)
    out = weights @ flat.value
    d_out = _heads_first(out_cotangent)
    d_lse = _heads_first(lse_cotangent[..., None])

    d_value = weights.swapaxes(-1, -2) @ d_out
    d_weights = d_out @ flat.value.swapaxes(-1, -2)
    delta = (d_out * out).sum(-1, keepdims=True) - d_lse
    d_logits = weights * (d_weights - delta)
    d_query = factors * d_logits @ flat.key
    d_key = (factors * d_logits).swapaxes(-1, -2) @ flat.query
    products = flat.query @ flat.key.swapaxes(-1, -2)

    size = np.abs
    products_size = size(flat.query) @ size(flat.key).swapaxes(-1, -2)
    steep = size(factors) * products_size
    out_size = weights @ size(flat.value)
    d_weights_size = size(d_out) @ size(flat.value).swapaxes(-1, -2)
    delta_size = (size(d_out) * out_size).sum(-1, keepdims=True) + size(d_lse)
    d_logits_size = weights * (d_weights_size + delta_size)
    return Reference(
        Forward(_heads_last(out, operands), _heads_last(lse[..., None], operands)[..., 0]),
        _unflatten(Tensors(d_query, d_key, d_value, scale=d_logits * products), operands),
        Forward(
            _heads_last(out_size, operands),
            _heads_last(
                (weights * steep).sum(-1, keepdims=True) + size(np.where(np.isfinite(lse), lse, 0))[..., None], operands
            )[..., 0],
        ),
        _unflatten(
            Tensors(
                size(factors) * d_logits_size @ size(flat.key),
                (size(factors) * d_logits_size).swapaxes(-1, -2) @ size(flat.query),
                weights.swapaxes(-1, -2) @ size(d_out),
                scale=d_logits_size * products_size,
            ),
            operands,
        ),
    )


def _factors(operands: Tensors, scale: float) -> Array:
    """Factors of the logits, to be multiplied with ``[batch, heads, queries, keys]``."""
    factors = scale if operands.scale is None else np.asarray(operands.scale).astype(np.float64)
    return np.reshape(factors, (-1, 1, 1))


def _softmax(flat: _Flat, scale: Array) -> tuple[Array, Array]:
    logits = np.where(flat.mask, scale * (flat.query @ flat.key.swapaxes(-1, -2)), -np.inf)
    highest = logits.max(-1, keepdims=True)
    # A query of a part of a layout may see no key of another part: it has no weights, and a logsumexp of -inf.
    is_empty = highest == -np.inf
    exponentials = np.exp(logits - np.where(is_empty, 0, highest))
    total = exponentials.sum(-1, keepdims=True) + is_empty
    return exponentials / total, (highest + np.log(total))[..., 0]


def _heads_first(array: Array) -> Array:
    """``[batch, *layout, heads, width]`` as float64 ``[batch, heads, tokens, width]``."""
    flat = np.asarray(array).astype(np.float64).reshape(array.shape[0], -1, *array.shape[-2:])
    return flat.swapaxes(1, 2)


def _heads_last(array: Array, operands: Tensors) -> Array:
    """Undo :func:`_heads_first` for arrays of the query's tokens."""
    return array.swapaxes(1, 2).reshape(*operands.query.shape[:-1], array.shape[-1])


def _flatten(operands: Tensors, mask: Array, is_real: Array | None = None) -> _Flat:
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
    return _Flat(_heads_first(operands.query), key.repeat(repeats, axis=1), value.repeat(repeats, axis=1), mask)


def _unflatten(gradients: Tensors, operands: Tensors) -> Tensors:
    """Sum over the query heads that share a key/value head, and part tokens from additional ones.

    The gradient of the scale comes as one for each logit.
    """
    heads_kv = operands.key.shape[-2]

    def of_source(gradient: Array, source: Array, additional: Array | None) -> tuple[Array, Array | None]:
        batch, heads, tokens, width = gradient.shape
        summed = gradient.reshape(batch, heads_kv, heads // heads_kv, tokens, width).sum(2).swapaxes(1, 2)
        own = tokens if additional is None else tokens - additional.shape[1]
        return summed[:, :own].reshape(source.shape), None if additional is None else summed[:, own:]

    key, additional_keys = of_source(gradients.key, operands.key, operands.additional_keys)
    value, additional_values = of_source(gradients.value, operands.value, operands.additional_values)
    scale = None
    if operands.scale is not None and gradients.scale is not None:
        of_heads = gradients.scale.sum((0, 2, 3))
        scale = of_heads if np.ndim(operands.scale) else of_heads.sum()
    return Tensors(_heads_last(gradients.query, operands), key, value, additional_keys, additional_values, scale)
