"""The forward sweep of the ``flex`` backend: an online softmax over the keys that each query tile sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Operands
from natten_jax.backends.flex.bias import TileBias
from natten_jax.backends.flex.loops import repeated, swept
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, for_tiles
from natten_jax.backends.flex.softmax import Products, Softmax
from natten_jax.plan.plan import Plan


def softmax_of(plan: Plan, operands: Operands) -> Softmax:
    """The softmax of every row, whose arrays are ``[batch, *query_layout, heads, width]``."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    placed = PlacedSweep.of(plan, operands, "forward", outer_is_query=True)
    sweep = placed.sweep
    biases = TileBias.of(problem, operands.inputs, sweep)
    keys, values = sweep.split_inner(operands.inputs.key), sweep.split_inner(operands.inputs.value)
    additional = AdditionalTiles.of(operands.inputs.additional_keys, operands.inputs.additional_values, sweep)
    repeats = problem.heads // problem.heads_kv

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Softmax]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        softmax = Softmax.of_no_key(query.shape[:-1], problem.head_dim_v, products.dtype)
        softmax = varying_like(softmax, operands)

        def visit(inner_step: jax.Array, softmax: Softmax) -> Softmax:
            key = sweep.load(keys, positions, inner_step, problem.heads_kv)
            value = sweep.load(values, positions, inner_step, problem.heads_kv)
            mask = sweep.mask(positions, inner_step, repeats)
            bias = biases.at(positions, inner_step)
            return softmax.over(products, query, key, value, mask, bias, carries_plan=True)

        def visit_additional(softmax: Softmax, tile: AdditionalTiles) -> tuple[Softmax, None]:
            key, value = for_tiles(tile.keys, query), for_tiles(tile.values, query)
            return softmax.over(products, query, key, value, tile.exists), None

        if additional is not None:
            softmax, _ = swept(visit_additional, softmax, additional)
        return None, repeated(sweep.inner_steps, visit, softmax, placed.is_needed(positions))

    queries = sweep.cut_outer(operands.inputs.query, problem.heads_kv)
    _, cut = swept(step, None, (placed.positions, queries))
    # One array, which is put together once.
    joined = sweep.join_outer(jnp.concatenate(jax.tree.leaves(cut), axis=-1), problem.heads)
    return placed.or_nan_for_parts(Softmax(joined[..., :1], joined[..., 1:2], joined[..., 2:]))
