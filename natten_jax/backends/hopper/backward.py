"""The backward pass of the ``hopper`` backend: how its kernels are called."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.backends.native_backend import (
    call_for_results,
    delta,
    entry_maps,
    key_bias_gradient_type,
    key_bias_operand,
    layouts_operand,
    logsumexp_cotangent_operand,
    saved_remainder,
    sinks_gradient,
    with_kernel_rank,
    with_key_bias_gradient,
)
from natten_jax.native import module as native
from natten_jax.native.module import ResultType
from natten_jax.plan.plan import Plan
from natten_jax.problem import Shape

TARGETS = ("natten_jax_sm90_backward", "natten_jax_sm90_backward_statistics")

#: Tensor maps of a batch entry: seven arrays, of eight classes of dilation groups.
_ENTRY_MAPS = 7 * 8


def gradients(
    plan: Plan,
    operands: Operands,
    saved: Saved,
    cotangents: Cotangents,
) -> Gradients:
    """Call the kernels."""
    problem, performance = plan.problem, plan.performance
    rank = functools.partial(with_kernel_rank, rank=problem.rank)
    out, logsumexp, out_cotangent = map(rank, (saved.out, saved.logsumexp, cotangents.out))
    layouts = layouts_operand(operands)
    if performance.backward_use_xla_reduction:
        statistics = _xla_statistics(logsumexp, rank(delta(saved.out, *cotangents)))
    else:
        of_logsumexp = logsumexp_cotangent_operand(problem, cotangents)
        statistics = _kernel_statistics(out, logsumexp, out_cotangent, of_logsumexp, layouts)
    # Sums of the query gradient, a counter of tiles, and those of who may add to the sums.
    scratch = operands.inputs.query.size + 1
    if performance.backward_deterministic:
        scratch += _query_tiles(operands.inputs.query, problem.dilation, plan.tiles[0])
    found, (_, of_keys, _) = call_for_results(
        TARGETS[0],
        plan,
        operands,
        (layouts, key_bias_operand(problem, operands), out_cotangent, statistics, saved_remainder(problem, saved)),
        [
            ResultType((scratch,), jnp.float32),
            key_bias_gradient_type(problem, operands),
            entry_maps(operands, _ENTRY_MAPS),
        ],
        is_deterministic=int(performance.backward_deterministic),
    )
    found = with_key_bias_gradient(found, operands.inputs, of_keys)
    sinks = operands.inputs.sinks
    if sinks is None:
        return found
    return found._replace(sinks=sinks_gradient(sinks, logsumexp, jnp.moveaxis(statistics[..., 1], 1, -1)))


def _query_tiles(query: jax.Array, dilation: Shape, q_tile: Shape) -> int:
    """Tiles of all dilation groups, heads and batch entries."""
    batch, *extents, heads, _ = query.shape
    tiles = [d * -(-extent // (d * tile)) for extent, d, tile in zip(extents, dilation, q_tile, strict=True)]
    return batch * heads * math.prod(tiles)


def _kernel_statistics(
    out: jax.Array, logsumexp: jax.Array, out_cotangent: jax.Array, logsumexp_cotangent: jax.Array, layouts: jax.Array
) -> jax.Array:
    """float32 ``[batch, heads, x, y, z, 2]``: logsumexp in base 2, ``sum(out * out_cotangent)`` less its cotangent.

    Where there are layouts, nothing is read of queries that see no key, as padding does not.
    """
    batch, *tokens, heads, _ = out.shape
    (statistics,) = native.call(
        TARGETS[1],
        [ResultType((batch, heads, *tokens, 2), jnp.float32)],
        out,
        out_cotangent,
        logsumexp,
        logsumexp_cotangent,
        layouts,
    )
    return statistics


def _xla_statistics(logsumexp: jax.Array, delta_of_queries: jax.Array) -> jax.Array:
    """The same, left to XLA. The logsumexp is rounded as in the kernels, whose remainders it has to go with."""
    per_query = logsumexp * np.float32(1 / math.log(2)), delta_of_queries
    return jnp.stack([jnp.moveaxis(array, -1, 1) for array in per_query], axis=-1)
