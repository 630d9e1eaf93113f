"""How the arrays of one call are laid out for the ``flex`` backend's sweeps."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from natten_jax.backends.base import Operands, Pass, TilePair, requested_pair
from natten_jax.backends.flex_blocks import Sweep, make_sweep
from natten_jax.problem import Problem, TileConfig
from natten_jax.symbolic_batch import planned_batch

_Tree = TypeVar("_Tree")

#: Pairs of query and key/value tiles by rank, the recommended one first.
TILE_PAIRS: dict[int, list[TilePair]] = {
    1: [((64,), (64,)), ((128,), (128,)), ((64,), (128,)), ((128,), (64,)), ((256,), (256,))],
    2: [((8, 8), (8, 8)), ((4, 16), (4, 16)), ((4, 16), (8, 8)), ((16, 16), (16, 16))],
    3: [
        ((4, 4, 4), (4, 4, 4)),
        ((2, 4, 8), (2, 4, 8)),
        ((2, 4, 8), (4, 4, 4)),
        ((4, 8, 8), (4, 8, 8)),
    ],
}


def sweep_of(problem: Problem, tiles: TileConfig, operands: Operands, pass_: Pass, *, home_is_query: bool) -> Sweep:
    pair = requested_pair(tiles, pass_) or TILE_PAIRS[problem.rank][0]
    return make_sweep(
        problem,
        operands.query.shape[1:-2],
        operands.key.shape[1:-2],
        *pair,
        rows=planned_batch(operands.query.shape[0]) * problem.heads,
        home_is_query=home_is_query,
    )


def varying_like(carry: _Tree, operands: Operands) -> _Tree:
    """``carry``, varying over the manual mesh axes of ``operands`` too, as ``jax.shard_map`` asks of a scan's carry.

    Adding a zero computed from the operands does it; XLA folds that away.
    """
    never = jnp.asarray(False)
    for leaf in jax.tree.leaves(operands):
        element = leaf[(0,) * leaf.ndim]
        never = never | ((element == element) & False)
    varying: _Tree = jax.tree.map(lambda array: array + never.astype(array.dtype), carry)
    return varying


def origins_of(problem: Problem, operands: Operands) -> jax.Array:
    if operands.origins is None:
        return jnp.zeros((2, problem.rank), jnp.int32)
    return operands.origins[:, 3 - problem.rank :].astype(jnp.int32)


def or_nan_for_parts(sweep: Sweep, origins: jax.Array, results: _Tree) -> _Tree:
    """``results``, or NaN where a pass that was planned for whole arrays is given a part: not a wrong result."""
    axes = [i for i, axis in enumerate(sweep.axes) if axis.assumes_whole]
    if not axes:
        return results
    is_whole = jnp.all(origins[:, jnp.array(axes)] == 0)
    guarded: _Tree = jax.tree.map(lambda array: array * jnp.where(is_whole, 1, jnp.nan).astype(array.dtype), results)
    return guarded


def tile_additional(
    problem: Problem, keys: jax.Array | None, values: jax.Array | None, sweep: Sweep
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Additional keys and values as ``[tiles, batch, heads_kv, tokens, width]``, and which of them exist."""
    if keys is None or values is None:
        return None
    count = keys.shape[1]
    tiles = -(-count // max(sweep.away_tokens, 64))
    tokens = -(-count // tiles)

    def tile(array: jax.Array) -> jax.Array:
        array = jnp.pad(jnp.moveaxis(array, 1, 2), [(0, 0), (0, 0), (0, tiles * tokens - count), (0, 0)])
        array = array.reshape(*array.shape[:2], tiles, tokens, array.shape[-1])
        return jnp.moveaxis(array, 2, 0)

    exists = jnp.arange(tiles * tokens) < count
    return tile(keys), tile(values), exists.reshape(tiles, 1, 1, 1, 1, tokens)


def for_tiles(array: jax.Array, query: jax.Array) -> jax.Array:
    """``array`` once more for each of the query tiles of a step."""
    return jnp.broadcast_to(array, (query.shape[0], *array.shape))
