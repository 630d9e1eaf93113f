"""The ``flex`` backend: blockwise attention in plain JAX, for every device that XLA compiles for.

The forward pass (:mod:`natten_jax.backends.flex.sweeps`) is an online softmax over the hull of each query tile's
windows. Its derivative is given as a rule for *tangents* (:mod:`natten_jax.backends.flex.sweeps`), and as the
transpose of that rule, the usual backward pass of attention (:mod:`natten_jax.backends.flex.sweeps`). Both start
from output, logsumexp and what the softmax found of each row, so that nothing is kept per key/value tile, and are plain
JAX: derivatives of any order go through.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.boxes import without_padding
from natten_jax.arrays.operands import Cotangents, Differentiable, Gradients, Operands, Output, Saved
from natten_jax.backends.base import Capabilities, PureJaxBackend
from natten_jax.backends.flex.operands import TILE_PAIRS
from natten_jax.backends.flex.softmax import Products, Rows, rows_of
from natten_jax.backends.flex.sweeps import gradients_of, softmax_of, tangents_of
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import EDGES

_Arrays = TypeVar("_Arrays", bound=tuple[Any, ...])

_LARGEST_TILE = 1024  # tokens


class FlexBackend(PureJaxBackend):
    """Blockwise attention in plain JAX; see :class:`natten_jax.backends.base.Backend`."""

    family = "flex"
    capabilities = Capabilities(
        dtypes=("float32", "float16", "bfloat16", "float64"),
        largest_tiles=lambda *_: (_LARGEST_TILE, _LARGEST_TILE),
        converts_float8_to="bfloat16",
        edges=EDGES,
        takes_extents=True,
        heeds=("backward_deterministic",),  # in every run
        biases=("relative_bias", "key_bias"),
        is_plain_jax=True,
        is_slow_fallback=True,
        residual_width=len(Rows._fields),
    )

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return list(TILE_PAIRS[problem.rank])

    def attend(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        out, logsumexp, _ = self.forward_differentiable(plan, operands)
        return Output(out.astype(plan.problem.output_dtype), logsumexp)

    def forward_differentiable(self, plan: Plan, operands: Operands) -> Differentiable:
        """Compute output and logsumexp, and what the softmax found of each row."""
        problem = plan.problem
        operands = operands._replace(inputs=_without_padding(plan, operands, operands.inputs))
        softmax = softmax_of(plan, operands)
        assert softmax.mixed is not None
        steepness = Products(plan, operands.inputs.scale).steepness_of_tokens(problem.rank)
        total, lse = softmax.total, steepness * softmax.maximum + jnp.log(softmax.total)
        if operands.is_placed or problem.biases:
            # The keys that a row sees may all be another device's, or hidden, and padding sees none.
            is_empty = softmax.total == 0
            total, lse = jnp.where(is_empty, 1, total), jnp.where(is_empty, -jnp.inf, lse)
        return Differentiable(softmax.mixed / total, lse[..., 0], jnp.concatenate(rows_of(softmax), axis=-1))

    def tangents(self, plan: Plan, operands: Operands, result: Differentiable, tangents: Gradients) -> Output:
        """Compute tangents of output and logsumexp."""
        assert result.residuals is not None
        rows = Rows(result.residuals[..., :1], result.residuals[..., 1:])
        output = Output(result.out, result.logsumexp)
        tangents = _without_padding(plan, operands, tangents)
        operands = operands._replace(inputs=_without_padding(plan, operands, operands.inputs))
        return tangents_of(plan, operands, output, rows, tangents)

    def gradients(
        self, plan: Plan, operands: Operands, result: Differentiable, cotangents: Cotangents, wanted: Any
    ) -> Gradients:
        """Compute cotangents of the operands from those of output and logsumexp."""
        assert result.residuals is not None
        rows = Rows(result.residuals[..., :1], result.residuals[..., 1:])
        cotangents = _without_padding(plan, operands, cotangents)
        operands = operands._replace(inputs=_without_padding(plan, operands, operands.inputs))
        return gradients_of(plan, operands, Output(result.out, result.logsumexp), rows, cotangents, wanted)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients, from whatever computed the output."""
        # Rows have to be the softmax of this backend's scores; the kernels that computed the output have their own.
        wanted = jax.tree.map(lambda _: True, operands.inputs)
        cotangents = _without_padding(plan, operands, cotangents)
        operands = operands._replace(inputs=_without_padding(plan, operands, operands.inputs))
        return gradients_of(plan, operands, Output(saved.out, saved.logsumexp), None, cotangents, wanted)


def _without_padding(plan: Plan, operands: Operands, arrays: _Arrays) -> _Arrays:
    """The arrays, zero in their padding: a product of no weight and NaN is NaN."""
    if not plan.problem.own_extents:
        return arrays
    assert operands.layouts is not None
    return without_padding(operands.layouts, arrays)
