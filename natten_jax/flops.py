"""The work that a problem's mask leaves: visible query-key pairs, and the floating-point operations on them.

Exact counts for the mask, not for what a kernel executes: padding and masked tiles are overhead, not work.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from natten_jax import windows
from natten_jax.axis_sums import check_extent, totals, window_changes
from natten_jax.axis_tiles import Axis, axes_of, dilation_groups
from natten_jax.problem import Problem


def visible_pairs(problem: Problem) -> int:
    """Sum over the queries of the keys that each of them sees, for one batch element and one head.

    The mask is separable, so the sum over all queries is the product of the dimensions' own sums.

    Raises:
        ValueError: A dimension is too long to be counted.
    """
    pairs = math.prod(map(_pairs_in_dimension, axes_of(problem)))
    return pairs + math.prod(problem.query_layout) * problem.additional_kv


def flops(problem: Problem, pass_: Literal["forward", "backward"]) -> int:
    """Floating-point operations of the matrix products of one pass, over all batch elements and heads.

    Args:
        problem: The problem.
        pass_: ``"forward"`` has two products, over ``head_dim`` and ``head_dim_v``; ``"backward"`` counts as two
            and a half times as many, its five products at the same average width.
    """
    width = problem.head_dim + problem.head_dim_v
    operations = problem.batch * problem.heads * width * visible_pairs(problem)
    return 2 * operations if pass_ == "forward" else 5 * operations


def _pairs_in_dimension(axis: Axis) -> int:
    pairs = 0
    window = axis.kernel_size, axis.stride, axis.is_causal
    for groups, queries, keys in dilation_groups(axis):
        check_extent(max(queries, keys))

        def lengths(index: Any, keys: int = keys) -> Any:
            start, end = windows.window_bounds(index, keys, *window)
            return (end - start)[np.newaxis]

        changes = window_changes(queries, keys, *window)
        pairs += groups * totals(queries, axis.stride, changes, lengths).sums[0]
    return pairs
