"""The ``tpu`` backend: Pallas kernels for TPUs.

Calls run it by name alone: the kernels have been interpreted and compiled, and never run on a TPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Output, Saved
from natten_jax.arrays.remainders import base2_parts
from natten_jax.backends.base import Backend, Platform
from natten_jax.backends.native_backend import delta
from natten_jax.backends.row_statistics import finite_scale, logsumexp_and_remainder
from natten_jax.backends.tpu.packs import pack_of
from natten_jax.backends.tpu.tiles import LARGEST_BOX, LARGEST_TILE, alignment, recommended
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import EDGES

#: Logsumexp in base 2 of queries that see nothing, or that are padding: their weights are zero.
_NOTHING_SEEN = 1e30


class TpuBackend(Backend):
    """Neighborhood attention on TPUs; see :class:`natten_jax.backends.base.Backend`."""

    family = "tpu"
    is_by_name_only = True  # until somebody has measured it
    platform = Platform("tpu")
    dtypes = ("bfloat16", "float32")
    edges = EDGES
    wraps_by_strips = True
    head_dim_step = 8
    largest_head_dim = 256
    biases = ("key_bias",)
    key_bias_by_columns = True
    carries_plan = False
    fuses_additional_kv = False
    heeds = ("backward_deterministic",)  # in every run

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return recommended(problem, pass_)

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of a tile: each has a row for every head of a pack."""
        tile = LARGEST_TILE // pack_of(problem.heads, problem.heads_kv, (problem.head_dim, problem.head_dim_v))
        return tile, LARGEST_BOX if pass_ == "forward" else tile

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Whether the kernels accept this pair: the last extents fill whole registers."""
        return super().offers(problem, device, pass_, pair) and all(tile[-1] % alignment(problem) == 0 for tile in pair)

    def forward(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        return Output(*self.forward_saving(plan, operands)[:2])

    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        """Compute them for a backward pass."""
        from natten_jax.backends.tpu.forward import forward
        from natten_jax.backends.tpu.kernels import call_of

        call = call_of(plan, operands, alignment(plan.problem))
        out, statistics = forward(call, *call.laid_out(operands), _scales(plan, operands))
        rows = logsumexp_and_remainder(*call.queries.of_tiles(statistics))
        return Saved(call.queries.restored(out), *rows)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients of the differentiable operands."""
        from natten_jax.backends.tpu.backward import key_gradients, query_gradient
        from natten_jax.backends.tpu.kernels import call_of

        call = call_of(plan, operands, alignment(plan.problem))
        arrays = *call.laid_out(operands), call.queries.laid_out(cotangents.out.astype(operands.inputs.query.dtype))
        reference, remainder = base2_parts(saved.logsumexp, saved.remainder)
        logsumexp = jnp.where(saved.logsumexp == -jnp.inf, _NOTHING_SEEN, reference)
        # Padding has logsumexp, cotangent and delta 0 here, so that it adds 0 to gradients.
        statistics = call.queries.in_tiles([logsumexp, remainder, delta(saved.out, *cotangents)])
        scales = _scales(plan, operands)
        of_query = query_gradient(call, *arrays, statistics, scales)
        of_query = call.queries.restored(of_query)
        of_key, of_value = key_gradients(call, *arrays, statistics, scales)
        heads = 1 if operands.inputs.scale is None else call.queries.heads.count
        scale = scales.reshape(-1, *(1,) * plan.problem.rank, heads, 1)
        of_scale = None
        if operands.inputs.scale is not None:
            products = of_query * operands.inputs.query.astype(jnp.float32)
            of_scale = jnp.sum(products, axis=(*range(1, 1 + plan.problem.rank), -1))
        return Gradients(
            (of_query * scale).astype(operands.inputs.query.dtype),
            call.keys.restored(of_key),
            call.keys.restored(of_value),
            scale=of_scale,
        )


def _scales(plan: Plan, operands: Operands) -> jax.Array:
    """Factors of the logits, float32 ``[batch * heads]``, or ``[1]`` where they are the same.

    Raises:
        ValueError: They differ, and how many there are is not known: kernels have all of them at hand.
    """
    scale = operands.inputs.scale
    if scale is None:
        return jnp.full((1,), plan.problem.scale, jnp.float32)
    batch, *_, heads, _ = operands.inputs.query.shape
    if not isinstance(batch, int):
        raise ValueError(f"scale is an array, and the batch size is {batch}: kernels for TPUs have to know how many")
    return jnp.broadcast_to(finite_scale(plan.problem.scale, scale), (batch, heads)).reshape(-1)
