"""Sweeps of the ``flex`` backend that find the softmax of every query row.

Weights are recomputed from what the forward pass says about the rows. That is accurate as long as the recomputed
scores are the forward pass's: a matrix product of another shape may be rounded otherwise, by a unit in the last place,
and a unit of a logit of 1e7 is a factor of e. So where logits may be large, each sweep of the backward pass first finds
the rows anew, by products of the shapes that it is going to use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.backends.base import Operands
from natten_jax.backends.flex_axes import AxisPosition
from natten_jax.backends.flex_operands import (
    for_tiles,
    or_nan_for_parts,
    origins_of,
    sweep_of,
    tile_additional,
)
from natten_jax.backends.flex_softmax import Products, Rows, Softmax, exponentials, highest
from natten_jax.mesh.types import varying_like
from natten_jax.passes import Pass
from natten_jax.plan import Plan
from natten_jax.problem import Problem

#: A product of two float32 numbers of this size is off by less than 2e-5, and so is a weight.
LARGEST_RELIABLE_LOGIT = 256.0


class RowsOfSweeps(NamedTuple):
    """Rows as the scores of either sweep of the backward pass want them.

    Attributes:
        by_query: For the sweep over query tiles.
        by_key: For the sweep over key/value tiles.
    """

    by_query: Rows
    by_key: Rows


def softmax_of_rows(plan: Plan, operands: Operands, pass_: Pass, *, mixes: bool) -> tuple[Softmax, Softmax]:
    """Sweep over query tiles.

    Returns:
        The softmax over the additional tokens, without mixed values, and that over all tokens, whose values are mixed
        if ``mixes``; arrays are ``[batch, *query_layout, heads, width]``.
    """
    problem = plan.problem
    products = Products(problem)
    sweep = sweep_of(plan, operands, pass_, outer_is_query=True)
    origins = origins_of(problem, operands)
    keys, values = sweep.split_inner(operands.key), sweep.split_inner(operands.value)
    extra = tile_additional(problem, operands.additional_keys, operands.additional_values, sweep)
    repeats = problem.heads // problem.heads_kv

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[Softmax, Softmax]]:
        index, query = inputs
        query = products.cast(query)
        positions = sweep.position(index, origins)
        head_dim_v = problem.head_dim_v if mixes else None
        state = varying_like(Softmax.of_no_key(query.shape[:-1], head_dim_v, products.dtype), operands)

        def visit(state: Softmax, inner_step: jax.Array) -> tuple[Softmax, None]:
            key = sweep.load(keys, positions, inner_step, problem.heads_kv)
            value = sweep.load(values, positions, inner_step, problem.heads_kv) if mixes else None
            mask = sweep.mask(positions, inner_step, repeats)
            return state.over(products, query, key, value, mask), None

        def visit_extra(state: Softmax, tile: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Softmax, None]:
            key, value, mask = tile
            value_tiles = for_tiles(value, query) if mixes else None
            return state.over(products, query, for_tiles(key, query), value_tiles, mask), None

        if extra is not None:
            state, _ = lax.scan(visit_extra, state, extra)
        every, _ = lax.scan(visit, state, jnp.arange(sweep.inner_steps, dtype=jnp.int32))
        return None, (state._replace(mixed=None), every)

    queries = sweep.cut_outer(operands.query, problem.heads_kv)
    _, states = lax.scan(step, None, (jnp.arange(sweep.steps, dtype=jnp.int32), queries))
    joined: tuple[Softmax, Softmax] = jax.tree.map(lambda array: sweep.join_outer(array, problem.heads), states)
    return or_nan_for_parts(sweep, origins, joined)


def rows_of(softmax: Softmax) -> Rows:
    """What the weights of a sweep need to know of its rows."""
    return Rows(softmax.maximum, jnp.where(softmax.total == 0, 0, jnp.log(softmax.total)))


def rows_of_sweeps(plan: Plan, operands: Operands, rows: Rows) -> RowsOfSweeps:
    """Rows for both sweeps of the backward pass, constants for every derivative.

    Args:
        plan: Of either pass.
        operands: The arrays.
        rows: As another sweep found them: right unless logits are large.
    """
    operands, rows = lax.stop_gradient((operands, rows))

    def compute() -> RowsOfSweeps:
        additional, every = softmax_of_rows(plan, operands, "backward", mixes=False)
        return RowsOfSweeps(rows_of(every), _rows_by_key(plan, operands, additional))

    return _replaced_if(_may_be_large(plan.problem, operands), compute, RowsOfSweeps(rows, rows))


def _rows_by_key(plan: Plan, operands: Operands, additional: Softmax) -> Rows:
    """Rows by the scores of the sweep over key/value tiles, and by given ones of additional tokens."""
    problem = plan.problem
    products = Products(problem)
    sweep = sweep_of(plan, operands, "backward", outer_is_query=False)
    origins = origins_of(problem, operands)
    queries = sweep.split_inner(operands.query)
    repeats = problem.heads // problem.heads_kv
    steps = jnp.arange(sweep.steps, dtype=jnp.int32), sweep.cut_outer(operands.key, problem.heads_kv)
    Positions = Sequence[AxisPosition]

    def swept(
        start: jax.Array, update: Callable[[jax.Array, Positions, jax.Array, jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        def step(carry: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            index, key = inputs
            positions = sweep.position(index, origins)

            def visit(carry: jax.Array, inner_step: jax.Array) -> tuple[jax.Array, None]:
                query = sweep.load(queries, positions, inner_step, problem.heads_kv)
                mask = sweep.mask(positions, inner_step, repeats)
                return update(carry, positions, inner_step, products.scores(query, key), mask), None

            carry, _ = lax.scan(visit, carry, jnp.arange(sweep.inner_steps, dtype=jnp.int32))
            return carry, None

        carry, _ = lax.scan(step, varying_like(start, operands), steps)
        return carry

    def raised(
        carry: jax.Array, positions: Positions, inner_step: jax.Array, scores: jax.Array, mask: jax.Array
    ) -> jax.Array:
        return sweep.raise_to(carry, positions, inner_step, highest(scores, mask))

    maxima = swept(sweep.split_inner(additional.maximum), raised)

    def added(
        carry: jax.Array, positions: Positions, inner_step: jax.Array, scores: jax.Array, mask: jax.Array
    ) -> jax.Array:
        maximum = sweep.load(maxima, positions, inner_step, problem.heads_kv)
        update = exponentials(products, scores, maximum, mask).sum(axis=-1, keepdims=True)
        return sweep.add(carry, positions, inner_step, update)

    maximum = sweep.join_inner(maxima)
    decay = jnp.exp(products.steepness * (additional.maximum - jnp.where(maximum == -jnp.inf, 0, maximum)))
    start = jnp.where(additional.maximum == -jnp.inf, 0, additional.total * decay)
    total = sweep.join_inner(swept(sweep.split_inner(start), added))
    return or_nan_for_parts(sweep, origins, rows_of(Softmax(maximum, total, None)))


def _may_be_large(problem: Problem, operands: Operands) -> jax.Array:
    """Whether some logit may exceed LARGEST_RELIABLE_LOGIT; also where some number is NaN."""
    products = Products(problem)

    def longest(array: jax.Array) -> jax.Array:
        array = products.cast(array)
        return jnp.sqrt(jnp.max(jnp.sum(array * array, axis=-1)))

    key = longest(operands.key)
    if operands.additional_keys is not None:
        key = jnp.maximum(key, longest(operands.additional_keys))
    return ~(products.steepness * longest(operands.query) * key <= LARGEST_RELIABLE_LOGIT)


def _replaced_if(needed: jax.Array, compute: Callable[[], RowsOfSweeps], given: RowsOfSweeps) -> RowsOfSweeps:
    """``compute()`` if ``needed``, else ``given``.

    A loop of one round or none: unlike ``lax.cond``, it is not run for nothing where ``jax.vmap`` maps ``needed``.
    """

    def round_(carry: tuple[jax.Array, RowsOfSweeps]) -> tuple[jax.Array, RowsOfSweeps]:
        return carry[0] & False, compute()

    return lax.while_loop(lambda carry: carry[0], round_, (needed, given))[1]
