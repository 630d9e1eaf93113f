"""The forward sweep of the ``flex`` backend: an online softmax over the keys that each query tile sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Operands
from natten_jax.backends.flex.loops import repeated, swept
from natten_jax.backends.flex.operands import AdditionalTiles, for_tiles
from natten_jax.backends.flex.query_sweep import QuerySweep
from natten_jax.backends.flex.softmax import Products, Softmax
from natten_jax.plan.plan import Plan


def softmax_of(plan: Plan, operands: Operands) -> Softmax:
    """The softmax of every row, whose arrays are ``[batch, *query_layout, heads, width]``."""
    problem = plan.problem
    products = Products(plan, operands.inputs.scale)
    over = QuerySweep.of(plan, operands, "forward")
    placed, sweep, additional = over.placed, over.placed.sweep, over.additional

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Softmax]:
        positions, query = sweep.at(inputs[0]), products.cast(inputs[1])
        softmax = Softmax.of_no_key(query.shape[:-1], problem.head_dim_v, products.dtype)
        softmax = varying_like(softmax, operands)

        def visit(inner_step: jax.Array, softmax: Softmax) -> Softmax:
            key, value, mask = over.inner_tiles(positions, inner_step)
            bias = over.biases.at(positions, inner_step)
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
