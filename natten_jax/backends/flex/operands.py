"""How the arrays of one call are laid out for the ``flex`` backend's sweeps, and what is added to logits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends.flex.geometry import (
    MaskTiles,
    PairTiles,
    RowTiles,
    Scalar,
    Split,
    Sweep,
    TilePositions,
    TokenTiles,
    ValueTiles,
    make_sweep,
)
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape


@functools.partial(jax.tree_util.register_dataclass, data_fields=("tables", "keys"), meta_fields=("sweep", "heads_kv"))
@dataclasses.dataclass(frozen=True)
class TileBias:
    """The biases of a sweep, cut as its tiles are.

    Attributes:
        sweep: The sweep.
        heads_kv: Key/value heads.
        tables: Numbers of all offsets (``Problem.bias_shape``), one for all batch entries or one for each; or ``None``.
        keys: Biases of all keys as the sweep loads them, where its outer tiles are queries; ``None`` elsewhere.
    """

    sweep: Sweep
    heads_kv: int
    tables: Annotated[jax.Array, "tables heads *offsets"] | None
    keys: Split | None

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, sweep: Sweep) -> TileBias:
        """Those of a call, or their tangents."""
        tables, keys = inputs.relative_bias, inputs.key_bias
        if tables is not None:
            tables = tables.reshape(*tables.shape[:2], *problem.bias_shape)
        loaded = sweep.split_inner(keys) if keys is not None and sweep.outer_is_query else None
        return cls(sweep, problem.heads_kv, tables, loaded)

    def at(
        self, positions: TilePositions, inner_step: Scalar, of_outer_keys: RowTiles | None = None
    ) -> Annotated[jax.Array, "tiles batch heads_kv queries keys"] | None:
        """What is added to the logits of a step's tiles.

        Args:
            positions: The positions of the tiles.
            inner_step: Which inner tiles are visited.
            of_outer_keys: The biases of the outer tiles' keys, as :meth:`Sweep.cut_outer` cuts them.

        Returns:
            ``None`` where nothing is.
        """
        of_keys = of_outer_keys
        if self.keys is not None:
            of_keys = self.sweep.load(self.keys, positions, inner_step, self.heads_kv)
        found = None if self.tables is None else self._of_offsets(self.tables, positions, inner_step)
        if of_keys is None:
            return found
        queries, keys = self.sweep.pair_tokens
        *outer, rows, _ = of_keys.shape
        by_head = of_keys.reshape(*outer, rows // keys, 1, keys)
        by_row = jnp.broadcast_to(by_head, (*outer, rows // keys, queries, keys)).reshape(*outer, -1, keys)
        return by_row if found is None else found + by_row

    def table_gradients(
        self, changes: PairTiles, positions: TilePositions, inner_step: Scalar
    ) -> Annotated[jax.Array, "tables heads *offsets"]:
        """The gradients of the tables, from those of the logits of a step's tiles."""
        assert self.tables is not None
        if self.tables.shape[0] == 1:
            changes = jnp.sum(changes, axis=1, keepdims=True)
        extents = self.sweep.pair_extents
        rank = len(extents)
        tiles, batch = changes.shape[:2]
        heads = self.tables.shape[1]

        diagonals = jax.ShapeDtypeStruct((tiles, batch, heads, *(q + k for q, k in extents)), changes.dtype)
        (sums,) = jax.linear_transpose(self._rows, diagonals)(changes)
        starts = self._starts(positions, inner_step)
        for i, ((queries, keys), size) in enumerate(zip(extents, self.tables.shape[2:], strict=True)):
            entries = starts[:, i, None] + jnp.arange(queries + keys, dtype=jnp.int32)[None]
            goes_to = (entries[..., None] == jnp.arange(size, dtype=jnp.int32)[None, None]).astype(changes.dtype)
            # The last product adds tiles up.
            letters = "xyz"[:rank]
            own, new = letters[i], letters.replace(letters[i], "r")
            last = i == rank - 1
            sums = jnp.einsum(
                f"tbh{letters},t{own}r->{'' if last else 't'}bh{new}", sums, goes_to, precision=lax.Precision.HIGHEST
            )
        return sums

    def _of_offsets(
        self, tables: Annotated[jax.Array, "tables heads *offsets"], positions: TilePositions, inner_step: Scalar
    ) -> PairTiles:
        """What pairs of tokens have of the tables."""
        extents = self.sweep.pair_extents
        rank = len(extents)
        lengths = [queries + keys for queries, keys in extents]
        # What lies outside of the table belongs to pairs that no window has.
        padded = jnp.pad(tables, [(0, 0), (0, 0), *((length, length) for length in lengths)])
        bounds = jnp.asarray([[-length for length in lengths], tables.shape[2:]], jnp.int32)
        starts = jnp.clip(self._starts(positions, inner_step), bounds[:1], bounds[1:]) - bounds[:1]
        stretches = lax.gather(
            padded,
            starts,
            lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rank + 3)),
                collapsed_slice_dims=(),
                start_index_map=tuple(range(2, rank + 2)),
            ),
            slice_sizes=(*tables.shape[:2], *lengths),
            mode="promise_in_bounds",
        )
        return self._rows(stretches)

    def _starts(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles rank"]:
        """Which entries the first diagonals of tiles have: those of the last queries."""
        distances = self.sweep.key_distances(positions, inner_step)
        firsts = [
            axis.axis.kernel_size - q for axis, (q, _) in zip(self.sweep.axes, self.sweep.pair_extents, strict=True)
        ]
        return distances + jnp.asarray([firsts], jnp.int32)

    def _rows(self, diagonals: Annotated[jax.Array, "tiles batch heads *diagonals"]) -> PairTiles:
        """The pairs of tiles."""
        extents = self.sweep.pair_extents
        rank = len(extents)
        for i, (queries, keys) in enumerate(extents):
            diagonals = _unrolled(diagonals, 3 + 2 * i, queries, keys)
        order = [3 + 2 * i for i in range(rank)] + [4 + 2 * i for i in range(rank)]
        queries, keys = self.sweep.pair_tokens
        tiles, batch = diagonals.shape[:2]
        return diagonals.transpose(0, 1, 2, *order).reshape(tiles, batch, self.heads_kv, -1, keys)


def _unrolled(diagonals: jax.Array, axis: int, queries: int, keys: int) -> jax.Array:
    """``[..., queries + keys, ...]`` along a dimension as ``[..., queries, keys, ...]``: each row begins one earlier.

    Rows of one number more than there are between the beginnings of two, one behind the other, are as many copies.
    """
    before: Shape = diagonals.shape[:axis]
    after: Shape = diagonals.shape[axis + 1 :]
    length = queries + keys
    copies = jnp.broadcast_to(jnp.expand_dims(diagonals, axis), (*before, queries, length, *after))
    line = copies.reshape(*before, queries * length, *after)
    line = lax.slice_in_dim(line, queries - 1, queries - 1 + queries * (length - 1), axis=axis)
    rows = line.reshape(*before, queries, length - 1, *after)
    return lax.slice_in_dim(rows, 0, keys, axis=axis + 1)


def summed_by_key(changes: jax.Array, pair_tokens: Sequence[int]) -> jax.Array:
    """The gradients of the biases of a tile's keys, from those of its logits; as :meth:`Sweep.cut_outer` cuts these."""
    queries, keys = pair_tokens
    *outer, rows, _ = changes.shape
    by_head = changes.reshape(*outer, rows // queries, queries, keys).sum(axis=-2)
    return by_head.reshape(*outer, -1, 1)


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
