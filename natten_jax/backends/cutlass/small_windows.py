"""Calls of the ``cutlass`` kernels for small windows; :mod:`natten_jax.cost_model.small_windows` ranks their tiles."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.backends.native_backend import (
    attributes,
    call_for_results,
    entry_maps,
    kernel_operands,
    key_bias_gradient_type,
    key_bias_operand,
    layouts_operand,
    logsumexp_cotangent_operand,
    saved_remainder,
    with_kernel_rank,
    with_key_bias_gradient,
)
from natten_jax.native import module as native
from natten_jax.native.abi import axis_rows, with_kernel_tiles
from natten_jax.native.module import ResultType
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape

FORWARD = "natten_jax_sm80_small_forward"
BACKWARD = "natten_jax_sm80_small_backward"

#: Tensor maps of a batch entry for a kernel: of two arrays, and of what is known of queries.
_ENTRY_MAPS = 3

#: The performance arguments of the backend that the form has no use for, and what it does.
UNUSED = {
    "backward_kv_splits": "does not split keys and values with the tiles for small windows",
    "backward_use_xla_reduction": "computes row sums on the way with the tiles for small windows",
    "memory_usage_preference": "takes next to no scratch memory with the tiles for small windows",
}


def call_forward(plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
    """Call the kernel."""
    rows, columns = with_kernel_tiles(plan.problem, plan.tiles)
    arrays = (
        *kernel_operands(plan.problem, operands),
        layouts_operand(operands),
        _or_nothing(operands.inputs.relative_bias),
        key_bias_operand(plan.problem, operands),
        _or_nothing(operands.inputs.sinks),
    )
    scratch = _table_products(plan.problem, operands, rows, columns), entry_maps(operands, _ENTRY_MAPS)
    return native.call(FORWARD, [*types, *scratch], *arrays, **attributes(plan))


#: What numbers of an array in memory are a multiple of, so that kernels load several at a time.
_STEP = 4

#: Parts of the queries whose gradients of sinks are added up where kernels of their own do so, over all batch entries
#: that have sinks of their own.
_MOST_SINKS_PARTS = 256


def _or_nothing(array: jax.Array | None) -> jax.Array:
    """The array, as kernels take it; one of nothing where there is none."""
    return jnp.zeros((0,), jnp.float32) if array is None else array


def _sinks_parts(plan: Plan, operands: Operands) -> ResultType:
    """Scratch memory for the gradient of sinks: what tiles of queries, or else parts of all of them, add to it."""
    sinks = operands.inputs.sinks
    if sinks is None:
        return ResultType((0,), jnp.float32)
    problem = plan.problem
    _, tile = with_kernel_tiles(problem, plan.tiles)
    batch, *extents, heads, _ = with_kernel_rank(operands.inputs.query, problem.rank).shape
    dilations = (1,) * (len(extents) - problem.rank) + tuple(axis.dilation for axis in problem.axes)
    # Kernels share tiles out to regions of several, the last of which need not be full.
    tiles = math.prod(
        dilation * (2 * -(-extent // (dilation * rows)) - 1)
        for extent, dilation, rows in zip(extents, dilations, tile, strict=True)
    )
    own = sinks.shape[0]  # batch entries that have sinks of their own
    of_tiles = own * heads * _filled_up(batch // own * tiles)
    return ResultType((max(of_tiles, own * max(_MOST_SINKS_PARTS // own, 1) * _filled_up(heads)),), jnp.float32)


def _filled_up(number: int) -> int:
    return number + -number % _STEP


def _table_products(problem: Problem, operands: Operands, rows: Shape, columns: Shape) -> ResultType:
    """Scratch memory for a relative bias as kernels read it, one for all batch entries where these have neither tables
    nor scales of their own; nothing where there is none.

    Args:
        problem: What is computed.
        operands: Its arrays.
        rows: Extents of a tile, for which lines are filled up.
        columns: Extents of a group.
    """
    inputs = operands.inputs
    if inputs.relative_bias is None:
        return ResultType((0,), jnp.float32)
    entries = math.prod(problem.bias_shape[:-1]) * native.bias_line(axis_rows(problem), rows, columns)
    tables, heads, _ = inputs.relative_bias.shape
    if inputs.scale is not None:
        tables = inputs.query.shape[0]
    return ResultType((tables, heads, _filled_up(entries)), jnp.float32)


def _table_sums(plan: Plan, operands: Operands) -> list[ResultType]:
    """What the gradient of a relative bias takes: records of tiles, and their sums in parts."""
    tables = operands.inputs.relative_bias
    if tables is None:
        return [ResultType((0,), jnp.float32)] * 2
    problem = plan.problem
    *_, x, y, z, _, _ = with_kernel_rank(operands.inputs.query, problem.rank).shape
    group, tile = with_kernel_tiles(problem, plan.tiles)
    sums = native.bias_sums(axis_rows(problem), (x, y, z), tile, group)
    _, heads, entries = tables.shape
    batch = operands.inputs.query.shape[0]
    shapes: list[tuple[Any, ...]] = [
        (batch, heads, sums.tiles, sums.record),
        (sums.parts, batch, heads, _filled_up(entries)),
    ]
    return [ResultType(shape, jnp.float32) for shape in shapes]


def _additional_sums(problem: Problem, batch: int, queries: int) -> tuple[int, ...]:
    """The shape of what parts of the queries add to gradients of additional tokens."""
    parts = native.additional_parts(queries * problem.heads // problem.heads_kv, problem.additional_kv)
    return (parts, batch, problem.additional_kv, problem.heads_kv, problem.head_dim + problem.head_dim_v)


def gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Call the kernels: one for queries, which also works out what the other, for keys and values, reads of them."""
    problem = plan.problem
    out, logsumexp, out_cotangent = (
        with_kernel_rank(array, problem.rank) for array in (saved.out, saved.logsumexp, cotangents.out)
    )
    batch, *tokens, heads = logsumexp.shape
    scratch = (batch, math.prod(tokens), heads, 4), _additional_sums(problem, batch, math.prod(tokens))
    columns, rows = with_kernel_tiles(problem, plan.tiles)
    inputs = operands.inputs
    tables, sinks = _or_nothing(inputs.relative_bias), _or_nothing(inputs.sinks)
    found, (*_, of_table, of_keys, _, of_sinks, _) = call_for_results(
        BACKWARD,
        plan,
        operands,
        (
            layouts_operand(operands),
            tables,
            key_bias_operand(problem, operands),
            sinks,
            logsumexp,
            saved_remainder(problem, saved),
            out,
            out_cotangent,
            logsumexp_cotangent_operand(problem, cotangents),
        ),
        [
            *(ResultType(shape, jnp.float32) for shape in scratch),
            _table_products(problem, operands, rows, columns),
            *_table_sums(plan, operands),
            ResultType(tables.shape, jnp.float32),
            key_bias_gradient_type(problem, operands),
            _sinks_parts(plan, operands),
            ResultType(sinks.shape, jnp.float32),
            entry_maps(operands, 2 * _ENTRY_MAPS),
        ],
    )
    found = with_key_bias_gradient(found, inputs, of_keys)
    return found._replace(
        sinks=None if inputs.sinks is None else of_sinks,
        relative_bias=None if inputs.relative_bias is None else of_table,
    )
