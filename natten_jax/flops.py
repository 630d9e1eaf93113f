"""The work that a problem's mask leaves: visible query-key pairs, and the floating-point operations on them.

Exact counts for the mask, not for what a kernel executes: padding and masked tiles are overhead, not work.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from natten_jax import windows
from natten_jax.problem import Problem


def visible_pairs(problem: Problem) -> int:
    """Sum over the queries of the keys that each of them sees, for one batch element and one head.

    The mask is separable, so the sum over all queries is the product of the dimensions' own sums.
    """
    per_dimension = zip(
        problem.query_layout,
        problem.kv_layout,
        problem.kernel_size,
        problem.stride,
        problem.dilation,
        problem.is_causal,
        strict=True,
    )
    pairs = math.prod(_pairs_in_dimension(*dimension) for dimension in per_dimension)
    return pairs + math.prod(problem.query_layout) * problem.additional_kv


def flops(problem: Problem, which: Literal["forward", "backward"]) -> int:
    """Floating-point operations of the matrix products of one pass, over all batch elements and heads.

    Args:
        problem: The problem.
        which: ``"forward"`` has two products, over ``head_dim`` and ``head_dim_v``; ``"backward"`` counts as two
            and a half times as many, its five products at the same average width.
    """
    width = problem.head_dim + problem.head_dim_v
    operations = problem.batch * problem.heads * width * visible_pairs(problem)
    return 2 * operations if which == "forward" else 5 * operations


def _pairs_in_dimension(
    query_extent: int, kv_extent: int, kernel_size: int, stride: int, dilation: int, is_causal: bool
) -> int:
    pairs = 0
    for group in range(dilation):
        queries = np.arange(windows.group_length(query_extent, dilation, group))
        keys = windows.group_length(kv_extent, dilation, group)
        start, end = windows.window_bounds(queries, keys, kernel_size, stride, is_causal)
        pairs += int(np.sum(end - start))
    return pairs
