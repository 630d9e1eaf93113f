"""Window arithmetic of neighborhood attention: which keys a query sees, and which queries see a key.

The mask is separable, so everything here is about one dimension. Tokens whose coordinates are equal
modulo the dilation form a *dilation group*; within its group a token has an *index*, and windows are
contiguous ranges of indices. ``csrc/include/natten_jax/windows.h`` is the same arithmetic for native code.

The functions accept Python ints, NumPy arrays and (with ``xp=jax.numpy``) traced JAX arrays.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

Index = Any  # int, numpy.ndarray or jax.Array: the arithmetic below is the same for all three


class Window(NamedTuple):
    """The windows inside the dilation groups of one dimension.

    Attributes:
        kernel_size: Keys in a full window.
        stride: Queries that share one window; at most ``kernel_size``.
        is_causal: Whether keys after the query are hidden.
    """

    kernel_size: int
    stride: int = 1
    is_causal: bool = False


def group_length(extent: Index, dilation: int, group: Index) -> Index:
    """Number of tokens in dilation group ``group`` of a dimension of ``extent`` tokens.

    Example:
        >>> from natten_jax.windows import group_length
        >>> group_length(7, 2, 0), group_length(7, 2, 1)
        (4, 3)
    """
    return extent - group if dilation == 1 else (extent - group + dilation - 1) // dilation


def window_bounds(window: Window, index: Index, length: Index, *, xp: ModuleType = np) -> tuple[Index, Index]:
    """Half-open range ``[start, end)`` of key indices that the query at ``index`` sees.

    Example:
        >>> from natten_jax.windows import Window, window_bounds
        >>> start, end = window_bounds(Window(kernel_size=3), 0, 8)  # shifted at the edge
        >>> int(start), int(end)
        (0, 3)

    Args:
        window: The windows.
        index: Query index inside its dilation group. It may exceed ``length`` only where the window is
            the whole key sequence (``kernel_size == length``), as in attention between sequences of
            different lengths.
        length: Keys in the dilation group; at least ``kernel_size``.
        xp: Array namespace, ``numpy`` or ``jax.numpy``.
    """
    kernel_size, stride, is_causal = window
    group_start = _rounded_down(index, stride)
    if is_causal:
        leader = xp.minimum(group_start + stride - 1, length - 1)
        return xp.maximum(leader - kernel_size + 1, 0), xp.minimum(index + 1, length)
    leader = xp.minimum(group_start + stride // 2, length - 1)
    start = xp.minimum(xp.maximum(leader - kernel_size // 2, 0), length - kernel_size)
    return start, start + kernel_size


def inverse_window_bounds(
    window: Window, index: Index, query_length: Index, key_length: Index, *, xp: ModuleType = np
) -> tuple[Index, Index]:
    """Half-open range ``[first, last)`` of query indices that see the key at ``index``; exact and contiguous.

    Example:
        >>> from natten_jax.windows import Window, inverse_window_bounds
        >>> first, last = inverse_window_bounds(Window(kernel_size=3), 1, 8, 8)
        >>> int(first), int(last)
        (0, 3)

    Args:
        window: The windows.
        index: Key index inside its dilation group.
        query_length: Queries in the dilation group. It differs from ``key_length`` only where
            ``kernel_size == key_length``.
        key_length: Keys in the dilation group.
        xp: Array namespace, ``numpy`` or ``jax.numpy``.
    """
    kernel_size, stride, is_causal = window
    seen_to_the_end = index >= key_length - kernel_size
    if is_causal:
        first = index
        last = xp.where(seen_to_the_end, query_length, _rounded_down(index + kernel_size, stride))
    else:
        left = kernel_size // 2
        right = kernel_size - 1 - left
        # The stride group whose leader lies `right` before the key is the first to see it, and the
        # leader of group `n` is `n * stride + stride // 2`: rounding up to it is adding `offset`.
        offset = stride - stride // 2 - 1
        first = xp.where(index < kernel_size, 0, _rounded_down(index - right + offset, stride))
        last = xp.where(seen_to_the_end, query_length, _rounded_down(index + left + offset + 1, stride))
    last = xp.minimum(last, query_length)
    return xp.minimum(first, last), last


def _rounded_down(index: Index, step: int) -> Index:
    """The largest multiple of ``step`` that is not greater; without a division, where there is nothing to do."""
    return index if step == 1 else (index // step) * step
