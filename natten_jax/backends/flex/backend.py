"""The ``flex`` backend: blockwise attention in plain JAX, for every device that XLA compiles for.

The forward pass is an online softmax over the hull of each query tile's windows. Its derivative is a rule for
gradients, the usual backward pass of attention, and its transpose (:mod:`natten_jax.backends.flex.sweeps`).
The rule starts from output, logsumexp and what the softmax found of each row, so that nothing is kept per key/value
tile, and is plain JAX: derivatives of any order go through.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Differentiable, Gradients, Operands, Output, Saved
from natten_jax.backends.base import Capabilities, PureJaxBackend
from natten_jax.backends.flex.softmax import Products, Rows
from natten_jax.backends.flex.sweeps import gradients_of, softmax_of, tangents_of
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import EDGES

_LARGEST_TILE = 1024  # tokens

#: Pairs of query and key/value tiles by rank, the recommended one first.
_TILE_PAIRS: dict[int, list[TilePair]] = {
    1: [((64,), (64,)), ((128,), (128,)), ((64,), (128,)), ((128,), (64,)), ((256,), (256,))],
    2: [((8, 8), (8, 8)), ((4, 16), (4, 16)), ((4, 16), (8, 8)), ((16, 16), (16, 16))],
    3: [((4, 4, 4), (4, 4, 4)), ((2, 4, 8), (2, 4, 8)), ((2, 4, 8), (4, 4, 4)), ((4, 8, 8), (4, 8, 8))],
}


class FlexBackend(PureJaxBackend):
    """Blockwise attention in plain JAX; see :class:`natten_jax.backends.base.Backend`."""

    family = "flex"
    capabilities = Capabilities(
        dtypes=("float32", "float16", "bfloat16", "float64"),
        largest_tiles=lambda *_: (_LARGEST_TILE, _LARGEST_TILE),
        converts_float8_to="bfloat16",
        edges=EDGES,
        heeds=("backward_deterministic",),  # in every run
        takes=("own_extents", "relative_bias", "key_bias", "additional_kv"),
        is_plain_jax=True,
        is_slow_fallback=True,
        residual_width=len(Rows._fields),
    )

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return list(_TILE_PAIRS[problem.rank])

    def attend(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        out, logsumexp, _ = self.forward_differentiable(plan, operands)
        return Output(out.astype(plan.problem.output_dtype), logsumexp)

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        """Compute output and logsumexp, and what the softmax found of each row."""
        softmax, products = softmax_of(plan, operands), Products(plan, operands.inputs.scale)
        assert softmax.mixed is not None
        steepness = products.of_tokens(products.steepness, plan.problem.rank)
        total, lse = softmax.total, steepness * softmax.maximum + jnp.log(softmax.total)
        if operands.is_placed or plan.problem.biases:
            # The keys that a row sees may all be another device's, or hidden, and padding sees none.
            is_empty = softmax.total == 0
            total, lse = jnp.where(is_empty, 1, total), jnp.where(is_empty, -jnp.inf, lse)
        return Differentiable(softmax.mixed / total, lse[..., 0], jnp.concatenate(softmax.rows, axis=-1))

    def tangents(self, plan: Plan, operands: Operands, result: Differentiable, tangents: Gradients) -> Output:
        """Compute tangents of output and logsumexp."""
        return tangents_of(plan, operands, result, tangents)

    def gradients(
        self, plan: Plan, operands: Operands, result: Differentiable, cotangents: Cotangents, wanted: Any
    ) -> Gradients:
        """Compute cotangents of the operands from the cotangents of output and logsumexp."""
        return gradients_of(plan, operands, result, cotangents, wanted, is_transposed=False)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients, from whatever computed the output."""
        # Rows have to be the softmax of this backend's scores; the kernels that computed the output have their own.
        wanted = jax.tree.map(lambda _: True, operands.inputs)
        return self.gradients(plan, operands, Differentiable(saved.out, saved.logsumexp), cotangents, wanted)
