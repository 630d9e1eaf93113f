"""What no kernel can do without: visible query-key pairs, floating-point operations on them, bytes of arrays.

Exact counts for the mask, not for what a kernel executes: padding and masked tiles are overhead, not work.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from natten_jax.cost.axis_sums import check_extent, totals, window_changes
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.performance import Pass
from natten_jax.problem import Problem
from natten_jax.windows import Axis


def visible_pairs(problem: Problem) -> int:
    """Sum over the queries of the keys that each of them sees, for one batch element and one head.

    The mask is separable, so the sum over all queries is the product of the dimensions' own sums.

    Raises:
        ValueError: A dimension is too long to be counted.
    """
    pairs = math.prod(map(visible_pairs_of_axis, problem.axes))
    return pairs + math.prod(problem.query_layout) * problem.additional_kv


@functools.lru_cache(maxsize=1024)
def visible_pairs_of_axis(axis: Axis) -> int:
    """Query-key pairs of one dimension that its windows leave.

    Raises:
        ValueError: The dimension is too long to be counted.
    """
    pairs = 0
    for groups, queries, keys in axis.dilation_groups():
        check_extent(max(queries, keys))

        def lengths(index: Any, of_group: tuple[int, int] = (queries, keys)) -> Any:
            start, end = axis.bounds(index, of_group)
            return (end - start)[np.newaxis]

        changes = window_changes(axis.window, queries, keys)
        pairs += groups * totals(queries, axis.stride, changes, lengths).sums[0]
    return pairs


def all_pairs(problem: Problem) -> int:
    """Query-key pairs without any mask, for one batch element and one head."""
    return math.prod(problem.query_layout) * (math.prod(problem.kv_layout) + problem.additional_kv)


def flops(problem: Problem, pass_: Pass) -> int:
    """Floating-point operations of the matrix products of one pass, over all batch elements and heads.

    Args:
        problem: The problem.
        pass_: ``"forward"`` has two products, over ``head_dim`` and ``head_dim_v``; ``"backward"`` counts as two
            and a half times as many, its five products at the same average width.
    """
    width = problem.head_dim + problem.head_dim_v
    operations = problem.batch * problem.heads * width * visible_pairs(problem)
    return 2 * operations if pass_ == "forward" else 5 * operations


def least_bytes(problem: Problem, pass_: Pass) -> int:
    """Bytes of the inputs and results of a pass."""
    queries, keys = math.prod(problem.query_layout), math.prod(problem.kv_layout) + problem.additional_kv
    elements = queries * problem.heads * problem.head_dim
    elements += keys * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
    out = queries * problem.heads * problem.head_dim_v * ELEMENT_TYPES[problem.output_dtype].bytes
    once = problem.batch * (elements * problem.element.bytes + out)
    logsumexp = problem.batch * problem.heads * queries * ELEMENT_TYPES[problem.element.accumulator].bytes
    # The backward pass reads the output beside its gradient, and writes a gradient for every other array.
    return (once if pass_ == "forward" else 2 * once) + logsumexp
