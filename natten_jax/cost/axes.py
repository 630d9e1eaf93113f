"""The token dimensions of a problem, one by one, and the dilation groups of each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from natten_jax import windows
from natten_jax.problem import Problem


@dataclasses.dataclass(frozen=True)
class Axis:
    """One token dimension of a problem.

    Attributes:
        query_extent: Query tokens.
        kv_extent: Key/value tokens.
        kernel_size: Window extent.
        stride: Queries that share a window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Whether later keys are hidden.
    """

    query_extent: int
    kv_extent: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool


def axes_of(problem: Problem) -> tuple[Axis, ...]:
    """The token dimensions of a problem."""
    return tuple(
        Axis(*values)
        for values in zip(
            problem.query_layout,
            problem.kv_layout,
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            problem.is_causal,
            strict=True,
        )
    )


def dilation_groups(axis: Axis) -> Iterator[tuple[int, int, int]]:
    """How many dilation groups have how many queries and keys."""
    # The first groups have a token more than the others.
    extents = axis.query_extent, axis.kv_extent
    bounds = sorted({0, axis.dilation, *(extent % axis.dilation for extent in extents)})
    for first, end in itertools.pairwise(bounds):
        queries, keys = (windows.group_length(extent, axis.dilation, first) for extent in extents)
        yield end - first, queries, keys
