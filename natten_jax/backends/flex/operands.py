"""How the arrays of one call are laid out for the ``flex`` backend's sweeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Operands
from natten_jax.backends.flex.blocks import Sweep, TilePositions, make_sweep
from natten_jax.backends.flex.shapes import MaskTiles, Scalar, TokenTiles, ValueTiles
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import Plan

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

#: Logits that a step of a sweep may compute: as many as fill an accelerator, or as stay in a CPU's caches.
_LOGITS_PER_STEP = {"accelerator": 2**22, "cpu": 2**20}


class PlacedSweep(NamedTuple):
    """A sweep of a call, and where its tiles lie.

    Attributes:
        plan: How the call runs.
        sweep: The sweep.
        positions: The positions of its tiles, as :meth:`Sweep.positions` returns them.
        origins: Where local queries and keys begin; ``None`` where they are those of the whole layout.
    """

    plan: Plan
    sweep: Sweep
    positions: Annotated[jax.Array, "steps tiles _"]
    origins: Annotated[jax.Array, "2 rank"] | None

    @classmethod
    def of(cls, plan: Plan, operands: Operands, pass_: Pass, *, outer_is_query: bool) -> PlacedSweep:
        """That of a pass over query tiles, or over key/value tiles."""
        origins, layout = operands.origins, None
        if origins is not None:
            origins = origins[:, 3 - plan.problem.rank :].astype(jnp.int32)
        if operands.layouts is not None:
            query_origin, *extents = of_entry(operands.layouts, plan.problem.rank)
            origins = jnp.stack([query_origin, jnp.zeros_like(query_origin)])
            layout = jnp.stack(extents) if plan.problem.own_extents else None
        sweep = _sweep_of(plan, operands, pass_, outer_is_query)
        return cls(plan, sweep, sweep.positions(origins, layout), origins)

    def is_needed(self, positions: TilePositions) -> Callable[[jax.Array], jax.Array] | None:
        """Asks of an inner step whether there is anything to compute; ``None`` where there always is, or almost.

        What windows reach of a layout is all there, unless the layout is padded.
        """
        return functools.partial(self.sweep.is_seen, positions) if self.plan.problem.own_extents else None

    def or_nan_for_parts(self, results: _Tree) -> _Tree:
        """``results``, or NaN where a pass that was planned for whole arrays is given a part: not a wrong result."""
        axes = [i for i, axis in enumerate(self.sweep.axes) if axis.assumes_whole]
        if self.origins is None or not axes:
            return results
        is_whole = jnp.all(self.origins[:, jnp.array(axes)] == 0)
        guarded: _Tree = jax.tree.map(
            lambda array: array * jnp.where(is_whole, 1, jnp.nan).astype(array.dtype), results
        )
        return guarded


class AdditionalTiles(NamedTuple):
    """Additional keys and values, cut into tiles.

    Attributes:
        keys: Keys; the last tile may end in zeros.
        values: Likewise.
        exists: Which tokens there are.
    """

    keys: Annotated[jax.Array, "*tiles batch heads_kv tokens width"]
    values: Annotated[jax.Array, "*tiles batch heads_kv tokens width_v"]
    exists: Annotated[jax.Array, "*tiles 1 1 1 1 tokens"]

    @classmethod
    def of(cls, keys: jax.Array | None, values: jax.Array | None, sweep: Sweep) -> AdditionalTiles | None:
        """Those of a call; ``None`` where it has none."""
        if keys is None or values is None:
            return None
        count = keys.shape[1]
        tiles = -(-count // max(sweep.inner_tokens, 64))
        tokens = -(-count // tiles)

        def tile(array: jax.Array) -> jax.Array:
            array = jnp.pad(jnp.moveaxis(array, 1, 2), [(0, 0), (0, 0), (0, tiles * tokens - count), (0, 0)])
            array = array.reshape(*array.shape[:2], tiles, tokens, array.shape[-1])
            return jnp.moveaxis(array, 2, 0)

        exists = jnp.arange(tiles * tokens, dtype=jnp.int32) < count
        return cls(tile(keys), tile(values), exists.reshape(tiles, 1, 1, 1, 1, tokens))

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return self.keys.shape[0]

    def tile(self, number: Scalar, query: jax.Array) -> tuple[TokenTiles, ValueTiles, MaskTiles]:
        """Keys and values of a tile, once for each of a step's query tiles, and which there are."""
        key, value, exists = (lax.dynamic_index_in_dim(array, number, keepdims=False) for array in self)
        return for_tiles(key, query), for_tiles(value, query), exists


def of_entry(layouts: jax.Array, rank: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query origin, query extents and key/value extents of the only entry of the batch, ``[rank]`` each."""
    assert layouts.shape[0] == 1, "one entry of the batch at a time"
    query_origin, query_extents, kv_extents = layouts[0, :, 3 - rank :].astype(jnp.int32)
    return query_origin, query_extents, kv_extents


def untiled(tiles: jax.Array, count: int) -> jax.Array:
    """Undo the tiling of keys or values by :class:`AdditionalTiles`: ``[batch, count, heads_kv, width]``."""
    array = jnp.moveaxis(tiles, 0, 2)
    array = array.reshape(*array.shape[:2], -1, array.shape[-1])
    return jnp.moveaxis(array[:, :, :count], 1, 2)


def for_tiles(array: jax.Array, query: jax.Array) -> jax.Array:
    """``array`` once more for each of the query tiles of a step."""
    return jnp.broadcast_to(array, (query.shape[0], *array.shape))


def _sweep_of(plan: Plan, operands: Operands, pass_: Pass, outer_is_query: bool) -> Sweep:
    problem, pair = plan.problem, plan.performance.tiles(pass_)
    assert pair is not None, "plans of pure JAX backends have the tiles of both passes"
    return make_sweep(
        problem,
        operands.inputs.query.shape[1:-2],
        operands.inputs.key.shape[1:-2],
        *pair,
        rows=problem.batch * problem.heads,
        logits_per_step=_LOGITS_PER_STEP["cpu" if plan.platform == "cpu" else "accelerator"],
        outer_is_query=outer_is_query,
    )
