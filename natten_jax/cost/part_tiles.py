"""Tiles that a device visits of a token dimension that is split: in parts, the same pairs of tokens take more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from natten_jax.passes import Pass
from natten_jax.problem import Axis
from natten_jax.windows import window_bounds

#: Tokens ``[first, last)`` of the global layout, some of which may lie outside of it.
Range = tuple[int, int]


class Visits(NamedTuple):
    """Outer tiles, and the inner tiles that they visit; along one dimension, or of several."""

    outer: int
    inner: int

    def __mul__(self, other: object) -> Visits:
        """Those of both dimensions."""
        assert isinstance(other, Visits)
        return Visits(self.outer * other.outer, self.inner * other.inner)


def visits(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Along a dimension; of a dilated one, those of all groups, as if these had one length.

    Args:
        axis: The dimension.
        pass_: Forwards, query tiles are the outer ones; backwards, key/value tiles are.
        tile: Extents of query and key/value tile.
        queries: Which ones are run.
        keys: Which ones are run.
    """
    d = axis.dilation
    length = -(-axis.kv_extent // d)
    (first, last), (first_key, last_key) = ((a // d, -(-b // d)) for a, b in (queries, keys))
    start, end = window_bounds(axis.window, np.arange(length), length)
    if pass_ == "forward":
        outer = np.arange(first, last, tile[0])
        begin = np.maximum(start[outer], first_key)
        stop = np.minimum(end[np.minimum(outer + tile[0], last) - 1], last_key)
    else:
        outer = np.arange(first_key, last_key, tile[1])
        # Windows move with their queries: those that see a key are neighbors.
        begin = np.maximum(np.searchsorted(end, np.maximum(outer, 0), side="right"), first)
        stop = np.minimum(np.searchsorted(start, np.minimum(outer + tile[1], last_key) - 1, side="right"), last)
    inner = np.maximum(-(-(stop - begin) // tile[0 if pass_ == "backward" else 1]), 0)
    return Visits(d * len(outer), d * int(inner.sum()))
