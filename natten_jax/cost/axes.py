"""The token dimensions of a problem, one by one, and the dilation groups of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from natten_jax import windows
from natten_jax.problem import Axis


def dilation_groups(axis: Axis) -> Iterator[tuple[int, int, int]]:
    """How many dilation groups have how many queries and keys."""
    # The first groups have a token more than the others.
    extents = axis.query_extent, axis.kv_extent
    bounds = sorted({0, axis.dilation, *(extent % axis.dilation for extent in extents)})
    for first, end in itertools.pairwise(bounds):
        queries, keys = (windows.group_length(extent, axis.dilation, first) for extent in extents)
        yield end - first, queries, keys
