"""The Blackwell kernels in JAX's interpreter for Mosaic GPU kernels, where this JAX has it.

Memory is full of NaN until it is written to, races between threads, copies and products raise, and a kernel must not
end before its copies and barriers are done with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Saved
from natten_jax.backends.pallas.blackwell import BlackwellBackend, missing_in_jax
from natten_jax.backends.select import plan_with
from natten_jax.execution.kernel_operands import with_head_dim, with_heads_of
from natten_jax.performance import Pass, Performance, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem
from tests.support import oracle

GPU = Device("cuda", (10, 0), is_present=False)

needs_interpreter = pytest.mark.skipif(
    missing_in_jax() is not None, reason=f"JAX {jax.__version__} has no interpreter that runs tcgen05 products"
)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Run kernels in the interpreter, in direct calls of the backend; its state is put back after an exception."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
    from jax.experimental.pallas import mosaic_gpu as plgpu

    parameters = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
    except BaseException:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        raise


def plan_of(problem: Problem, tiles: TilePair | None = None, pass_: Pass = "forward", **performance: Any) -> Plan:
    """The plan of a pass on a GPU that is not there."""
    asked = Performance(**performance)
    asked = asked if tiles is None else asked.with_tiles(pass_, tiles)
    return plan_with(BlackwellBackend(), Request(problem, asked), GPU, pass_)


def run(plan: Plan, problem: Problem, operands: Operands) -> Saved:
    """The forward pass of a problem whose heads may have to be filled up."""
    operands = operands._replace(inputs=with_heads_of(plan.problem, operands.inputs))
    saved = BlackwellBackend().forward(plan, operands, saves=True)
    return saved._replace(out=with_head_dim(saved.out, problem.head_dim_v))


def run_backward(plan: Plan, problem: Problem, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """The backward pass, likewise."""
    operands = operands._replace(inputs=with_heads_of(plan.problem, operands.inputs))
    saved = saved._replace(out=with_head_dim(saved.out, plan.problem.head_dim_v))
    cotangents = cotangents._replace(out=with_head_dim(cotangents.out, plan.problem.head_dim_v))
    return with_heads_of(problem, BlackwellBackend().backward(plan, operands, saved, cotangents))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random inputs of a problem, in float64 and rounded to its element type.

    Attributes:
        inputs: What kernels get.
        exact: The same numbers.
        cotangents: The cotangents of output and logsumexp.
    """

    inputs: Inputs
    exact: oracle.Tensors
    cotangents: Cotangents

    @classmethod
    def of(cls, problem: Problem, rng: np.random.Generator, factor: float = 1.0, additional: int = 0) -> Drawn:
        """Inputs of a problem, and maybe so many additional tokens."""

        def draw(layout: Sequence[int], heads: int, width: int, times: float = 1.0) -> jax.Array:
            numbers = times * rng.standard_normal((problem.batch, *layout, heads, width))
            return jnp.asarray(numbers, problem.dtype)

        arrays = [
            draw(problem.query_layout, problem.heads, problem.head_dim, factor),
            draw(problem.kv_layout, problem.heads_kv, problem.head_dim, factor),
            draw(problem.kv_layout, problem.heads_kv, problem.head_dim_v),
        ]
        if additional:
            arrays += [draw((additional,), problem.heads_kv, width) for width in (problem.head_dim, problem.head_dim_v)]
        of_out = draw(problem.query_layout, problem.heads, problem.head_dim_v)
        of_logsumexp = jnp.asarray(rng.standard_normal(of_out.shape[:-1]), jnp.float32)
        exact = oracle.Tensors(*(np.asarray(array, np.float64) for array in arrays))
        return cls(Inputs(*arrays[:3], *arrays[3:]), exact, Cotangents(of_out, of_logsumexp))


def mask_of(problem: Problem) -> np.ndarray:
    """Which keys each query sees."""
    axes = problem.axes
    if problem.operator == "fmha":
        return oracle.attention_mask(axes[0].query_extent, axes[0].kv_extent, axes[0].is_causal)
    edges = tuple(str(edge) for edge in problem.edges)
    return oracle.neighborhood_mask(
        problem.query_layout, problem.kernel_size, problem.stride, problem.dilation, problem.is_causal, edges
    )
