"""The form of the ``cutlass`` kernels for small windows: warps that own 16 tokens, and what they take.

Tiles choose it: 16 query tokens and 8 key/value tokens, and the other way round in the backward pass, whose gradients
are reproducible as they are.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from natten_jax import native
from natten_jax.backends.base import Gradients, Operands, Output, Saved
from natten_jax.backends.native_backend import (
    attributes,
    axis_rows,
    gradients_of,
    kernel_operands,
    saved_remainder,
    with_kernel_rank,
    with_kernel_tiles,
)
from natten_jax.native import ResultType
from natten_jax.passes import Pass, TilePair
from natten_jax.plan import Plan
from natten_jax.problem import ELEMENT_BYTES, Problem

FORWARD = "natten_jax_sm80_small_forward"
BACKWARD = "natten_jax_sm80_small_backward"
_LIMITS = native.limits("small")

#: Part of a warp's time in which it waits, where there are as many as registers allow: of few warps each takes less.
_LATENCY = 0.35


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Tokens of the query and key/value tiles that choose the form; ``None`` where it does not take such heads."""
    if not _LIMITS or ELEMENT_BYTES[problem.dtype] != 2 or _wider(problem) > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def is_chosen(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether tiles are the form's."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


@functools.lru_cache(maxsize=4096)
def occupancy(problem: Problem, pass_: Pass, pair: TilePair, shared_memory: int) -> float:
    """What part of the warps that there are registers for run with these tiles of the form's size.

    Args:
        problem: What is computed.
        pass_: The pass.
        pair: The tiles.
        shared_memory: Bytes that a block may have.

    Returns:
        0 where the form does not take the tiles: the keys that a warp's queries see do not fit into shared memory, or
        the backward pass has additional tokens.
    """
    sizes = problem.heads, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.additional_kv
    return native.occupancy_of_small_windows(
        axis_rows(problem),
        (problem.batch, *sizes),
        *with_kernel_tiles(problem, pair),
        is_backward=pass_ == "backward",
        shared_memory=shared_memory,
    )


def slowdown(occupied: float) -> float:
    """How much longer the form takes than the cost model says, which knows it with all warps that have registers."""
    return 1 + _LATENCY * (1 / occupied - 1)


def call_forward(plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
    """Call the kernel."""
    return native.call(FORWARD, types, *kernel_operands(plan.problem, operands), **attributes(plan))


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
    """Call the kernels: one for queries, which also works out what the other, for keys and values, reads of them."""
    problem = plan.problem
    out, logsumexp, out_cotangent, logsumexp_cotangent = (
        with_kernel_rank(array, problem.rank) for array in (saved.out, saved.logsumexp, *cotangents)
    )
    arrays = kernel_operands(problem, operands)
    batch, *tokens, heads = logsumexp.shape
    *results, _ = native.call(
        BACKWARD,
        [
            *(ResultType(array.shape, array.dtype) for array in arrays[:5]),
            ResultType((batch, math.prod(tokens), heads, 4), jnp.float32),
        ],
        *arrays,
        logsumexp,
        saved_remainder(problem, saved),
        out,
        out_cotangent,
        logsumexp_cotangent,
        **attributes(plan),
    )
    return gradients_of(problem, operands, results)


def _wider(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)
