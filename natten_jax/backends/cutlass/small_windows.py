"""Calls of the ``cutlass`` kernels' form for small windows, which :mod:`natten_jax.cost.small_windows` is about."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Gradients, Operands, Output, Saved
from natten_jax.backends.native_backend import (
    attributes,
    call_for_gradients,
    kernel_operands,
    saved_remainder,
    with_kernel_rank,
)
from natten_jax.native import module as native
from natten_jax.native.module import ResultType
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem

FORWARD = "natten_jax_sm80_small_forward"
BACKWARD = "natten_jax_sm80_small_backward"

#: The performance arguments of the backend that the form has no use for, and what it does.
UNUSED = {
    "backward_kv_splits": "does not split keys and values with the tiles for small windows",
    "backward_use_xla_reduction": "computes row sums on the way with the tiles for small windows",
    "memory_usage_preference": "takes next to no scratch memory with the tiles for small windows",
}


def call_forward(plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
    """Call the kernel."""
    return native.call(FORWARD, types, *kernel_operands(plan.problem, operands), **attributes(plan))


def _additional_sums(problem: Problem, batch: int, queries: int) -> tuple[int, ...]:
    """The shape of what parts of the queries add to gradients of additional tokens."""
    parts = native.additional_parts(queries * problem.heads // problem.heads_kv, problem.additional_kv)
    return (parts, batch, problem.additional_kv, problem.heads_kv, problem.head_dim + problem.head_dim_v)


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
    """Call the kernels: one for queries, which also works out what the other, for keys and values, reads of them."""
    problem = plan.problem
    out, logsumexp, out_cotangent, logsumexp_cotangent = (
        with_kernel_rank(array, problem.rank) for array in (saved.out, saved.logsumexp, *cotangents)
    )
    batch, *tokens, heads = logsumexp.shape
    scratch = (batch, math.prod(tokens), heads, 4), _additional_sums(problem, batch, math.prod(tokens))
    return call_for_gradients(
        BACKWARD,
        plan,
        operands,
        (logsumexp, saved_remainder(problem, saved), out, out_cotangent, logsumexp_cotangent),
        [ResultType(shape, jnp.float32) for shape in scratch],
    )
