"""How much memory the kernels of a pass take beside operands and results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax import backends
from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Output, Saved
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem


def scratch_bytes(plan: Plan) -> int:
    """Bytes of the arrays that a pass's custom calls write, less those of the pass's results.

    Args:
        plan: The plan of a pass, whose backend has custom calls.
    """
    backend = backends.of(plan.backend)

    def run(operands: Operands, output: Output) -> Any:
        if plan.pass_ == "forward":
            return backend.forward(plan, operands)
        return backend.backward(plan, operands, Saved(*output, output.logsumexp), Cotangents(*output))

    arguments = _operands(plan.problem), _output(plan.problem)
    traced = jax.make_jaxpr(run)(*arguments)
    written = sum(_bytes(array) for array in _written(traced.jaxpr))
    return written - sum(_bytes(array) for array in jax.tree.leaves(jax.eval_shape(run, *arguments)))


def _operands(problem: Problem) -> Operands:
    def array(tokens: tuple[int, ...], heads: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((problem.batch, *tokens, heads, width), jnp.dtype(problem.dtype))

    widths = problem.head_dim, problem.head_dim_v
    query = array(problem.query_layout, problem.heads, problem.head_dim)
    key, value = (array(problem.kv_layout, problem.heads_kv, width) for width in widths)
    keys, values = (
        array((problem.additional_kv,), problem.heads_kv, width) if problem.additional_kv else None for width in widths
    )
    return Operands(Inputs(query, key, value, keys, values))  # type: ignore[arg-type]


def _output(problem: Problem) -> Output:
    shape = problem.batch, *problem.query_layout, problem.heads
    out = jax.ShapeDtypeStruct((*shape, problem.head_dim_v), jnp.dtype(problem.dtype))
    return Output(out, jax.ShapeDtypeStruct(shape, jnp.float32))  # type: ignore[arg-type]


def _written(jaxpr: Any) -> Iterator[Any]:
    """Result types of the custom calls of a traced function, those of functions inside it included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ffi_call":
            yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(inner, "eqns"):
                yield from _written(inner)
            elif hasattr(getattr(inner, "jaxpr", None), "eqns"):
                yield from _written(inner.jaxpr)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * int(array.dtype.itemsize)
