"""What a call adds to its logits, as kernels take it: relative biases and biases of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arguments.static import choice_tuple
from natten_jax.arrays.added_logits import in_accumulator
from natten_jax.arrays.operands import Inputs
from natten_jax.arrays.roles import Role
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.ops.arrays import ArrayLike, as_logit_term
from natten_jax.ops.boxes import FinerGrid
from natten_jax.problem import Axis, Problem
from natten_jax.sharding.explicit import spread
from natten_jax.windows import EDGES, Edges


class Biases(NamedTuple):
    """The arguments of the operators.

    Attributes:
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``, or ``None``.
        key_bias: ``[batch, *layout]`` or ``[batch, heads, *layout]``, or ``None``.
    """

    relative_bias: ArrayLike | None = None
    key_bias: ArrayLike | None = None


def with_biases(
    problem: Problem,
    inputs: Inputs,
    biases: Biases,
    edges: Edges = "shift",
    grid: FinerGrid | None = None,
    kernel_size: Sequence[int] | None = None,
) -> tuple[Problem, Inputs]:
    """The problem and the arrays of a call that adds these to its logits.

    Args:
        problem: What is computed.
        inputs: The other arrays.
        biases: The arguments.
        edges: What becomes of windows at the ends, as the caller says.
        grid: That of the queries, where it is finer than the keys' and queries have become heads.
        kernel_size: The caller's windows, if the problem's are clamped. The relative bias has entries for these.

    Raises:
        ValueError: A shape or an element type is wrong.
        TypeError: One is not an array.
    """
    relative_bias, key_bias = biases
    if relative_bias is not None and grid is not None:
        raise ValueError(
            "relative_bias and upsample were both given: queries between the tokens of keys have offsets that no entry "
            "is of"
        )
    if relative_bias is not None:
        inputs = inputs._replace(relative_bias=_of_offsets(problem, relative_bias, kernel_size))
        problem = dataclasses.replace(problem, axes=axes_of_offsets(problem.axes, edges))
    if key_bias is not None:
        inputs = _with_key_bias(problem, inputs, key_bias, grid)
    if relative_bias is None and key_bias is None:
        return problem, inputs
    has = dataclasses.replace(problem, relative_bias=relative_bias is not None, key_bias=key_bias is not None)
    return has, inputs


def axes_of_offsets(axes: Sequence[Axis], edges: Edges) -> tuple[Axis, ...]:
    """The dimensions, of which those wrap whose windows see all keys, too: offsets go around there."""
    return tuple(
        dataclasses.replace(axis, edges="wrap") if edge == "wrap" and axis.kernel_size > 1 else axis
        for axis, edge in zip(axes, choice_tuple("edges", edges, EDGES, len(axes)), strict=True)
    )


def _of_offsets(problem: Problem, relative_bias: ArrayLike, kernel_size: Sequence[int] | None) -> jax.Array:
    return checked_table(problem, relative_bias, kernel_size).reshape(problem.heads, -1)[None]


def checked_table(problem: Problem, relative_bias: ArrayLike, kernel_size: Sequence[int] | None = None) -> jax.Array:
    """Return a relative bias in the accumulator's element type, cropped to the offsets within the problem's windows.

    Args:
        problem: The problem.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``.
        kernel_size: The caller's windows; ``None`` is the problem's. Clamped windows need the middle of the table only.

    Returns:
        ``[heads, 2 * problem.kernel_size - 1, ...]``.

    Raises:
        ValueError: The shape or the element type is wrong.
        TypeError: It is not an array.
    """
    table = as_logit_term("relative_bias", relative_bias)
    sizes = problem.kernel_size if kernel_size is None else tuple(kernel_size)
    expected = (problem.heads, *(2 * size - 1 for size in sizes))
    if table.shape != expected:
        raise ValueError(
            f"relative_bias has shape {table.shape}, but [heads, 2 * kernel_size - 1, ...] of {problem.heads} query "
            f"heads and kernel_size {sizes} asks for {expected}"
        )
    table = in_accumulator(table, ELEMENT_TYPES[problem.dtype].accumulator)
    if sizes == problem.kernel_size:
        return table
    starts = [0, *(size - clamped for size, clamped in zip(sizes, problem.kernel_size, strict=True))]
    return jax.lax.slice(table, starts, [n - start for n, start in zip(table.shape, starts, strict=True)])


def _with_key_bias(problem: Problem, inputs: Inputs, key_bias: ArrayLike, grid: FinerGrid | None) -> Inputs:
    bias = as_logit_term("key_bias", key_bias)
    batch, *layout, _, _ = inputs.key.shape
    of_all, by_head = (batch, *layout), (batch, problem.heads // (1 if grid is None else grid.queries), *layout)
    if bias.shape not in (of_all, by_head):
        raise ValueError(
            f"key_bias has shape {bias.shape}, but [batch, *layout] or [batch, heads, *layout] of the keys asks for "
            f"{of_all} or {by_head}"
        )
    bias = in_accumulator(bias, ELEMENT_TYPES[problem.dtype].accumulator)
    if bias.ndim == len(of_all):
        return inputs._replace(shared_key_bias=bias)
    bias = jnp.moveaxis(bias if grid is None else grid.scales(bias), 1, -1)
    return inputs._replace(key_bias=spread(bias, (*of_all, problem.heads, 1), inputs, Role.PER_KEY))
