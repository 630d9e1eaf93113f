"""Tiles of a token layout as arrays: how the ``flex`` backend cuts, loads and masks them.

A pass over a problem has an *outer* side, whose tiles are enumerated (several of them per step of a scan),
and an *inner* side, of which each outer tile visits only the hull of what its tokens see. Outer is the
queries in the forward pass; the derivative with respect to keys and values is enumerated by their tiles.

Dimensions are independent of each other: :mod:`natten_jax.backends.flex.axes` has what concerns one of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from natten_jax.backends.flex.axes import AxisPosition, AxisSweep
from natten_jax.backends.flex.hulls import largest_hull, largest_hull_of_any_layout
from natten_jax.backends.flex.shapes import Cut, RowTiles, Scalar, Split, Tokens
from natten_jax.problem import Problem, Shape

#: Where the tiles of a sweep lie is a constant of the program up to so many numbers, and computed beyond.
_MOST_CONSTANTS = 1 << 14


class TilePositions(NamedTuple):
    """Where the outer tiles of one step lie, and what they see.

    Attributes:
        corners: Index and residue, in each dimension, of the first inner token that each tile visits.
        masks: By dimension, which of all inner tokens that are visited the outer ones see, or are seen by. Worked out
            here, it is not again for every logit that XLA fuses a mask with.
        distances: How many neighbors the first inner token lies behind the first outer one, in each dimension.
    """

    corners: Annotated[jax.Array, "tiles corner"]
    masks: tuple[Annotated[jax.Array, "tiles _ _"], ...]
    distances: Annotated[jax.Array, "tiles rank"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A pass over all outer tiles: what is static about cutting, loading and masking them.

    Attributes:
        axes: The token dimensions.
        tiles_per_step: Outer tiles that one step of the scan processes at once.
    """

    axes: tuple[AxisSweep, ...]
    tiles_per_step: int

    @property
    def steps(self) -> int:
        """Steps of the scan over outer tiles."""
        return -(-math.prod(a.outer_tiles * a.dilation for a in self.axes) // self.tiles_per_step)

    @property
    def inner_steps(self) -> int:
        """Inner tiles that an outer tile visits."""
        return math.prod(a.inner_steps for a in self.axes)

    @property
    def outer_is_query(self) -> bool:
        """Whether outer tiles are query tiles."""
        return self.axes[0].outer_is_query

    @property
    def pair_extents(self) -> list[tuple[int, int]]:
        """By dimension, the queries and the keys of a pair of tiles."""
        return [(a.outer_tile, a.inner_tile) if a.outer_is_query else (a.inner_tile, a.outer_tile) for a in self.axes]

    @property
    def pair_tokens(self) -> tuple[int, int]:
        """All queries and all keys of a pair of tiles."""
        pair = self.outer_tokens, self.inner_tokens
        return pair if self.outer_is_query else pair[::-1]

    @property
    def outer_tokens(self) -> int:
        """Tokens in an outer tile."""
        return math.prod(a.outer_tile for a in self.axes)

    @property
    def inner_tokens(self) -> int:
        """Tokens in an inner tile."""
        return math.prod(a.inner_tile for a in self.axes)

    def positions(
        self,
        origins: Annotated[jax.Array, "2 rank"] | None,
        layout: Annotated[jax.Array, "2 rank"] | None = None,
    ) -> Annotated[jax.Array, "steps tiles _"]:
        """Where the outer tiles of all steps lie, int32; :meth:`at` reads what a step gets.

        Args:
            origins: Where local queries and keys begin in the layout; ``None`` for the whole layout.
            layout: How many queries and keys there are in place of the problem's; with origins.
        """
        count = self.steps * self.tiles_per_step
        width = sum(3 + 2 * axis.outer_tile for axis in self.axes)
        is_constant = origins is None and count * width <= _MOST_CONSTANTS
        xp: ModuleType = np if is_constant else jnp
        tile = xp.arange(count, dtype=xp.int32)
        found: list[AxisPosition] = []
        for i, axis in reversed(list(enumerate(self.axes))):
            tile, residue = tile // axis.dilation, tile % axis.dilation
            # Surplus tiles of the last step end up beyond the first dimension, where no token is.
            tile, number = (tile // axis.outer_tiles, tile % axis.outer_tiles) if i else (tile, tile)
            own_origins, own_layout = (None if each is None else each[:, i] for each in (origins, layout))
            found.insert(0, axis.position(number, residue, own_origins, xp, own_layout))
        corners = [each for position in found for each in (position.inner_start, position.inner_residue)]
        seen = [each for position in found for each in (position.seen_start, position.seen_end)]
        distances = [position.inner_distance for position in found]
        packed = xp.concatenate([*corners, *seen, *distances], axis=-1, dtype=xp.int32)
        packed = packed.reshape(self.steps, self.tiles_per_step, width)
        return jnp.asarray(packed) if is_constant else materialize(packed)

    def at(self, packed: Annotated[jax.Array, "tiles _"]) -> TilePositions:
        """Where the outer tiles of a step lie, from its part of :meth:`positions`."""
        rank = len(self.axes)
        masks, begin = [], 2 * rank
        distances = packed[:, -rank:]
        for i, axis in enumerate(self.axes):
            middle, end = begin + axis.outer_tile, begin + 2 * axis.outer_tile
            corner = packed[:, 2 * i : 2 * i + 1], packed[:, 2 * i + 1 : 2 * i + 2]
            seen = packed[:, begin:middle], packed[:, middle:end]
            masks.append(axis.hull_mask(AxisPosition(*corner, *seen, distances[:, i : i + 1])))
            begin = end
        return TilePositions(packed[:, : 2 * rank], tuple(masks), distances)

    def key_distances(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles rank"]:
        """How many neighbors the first keys of visited tiles lie behind their first queries."""
        distances = positions.distances
        if self.inner_steps > 1:
            distances = distances + self._first_inner(inner_step)[:, ::2]
        return distances if self.outer_is_query else -distances

    def mask(
        self, positions: TilePositions, inner_step: Scalar, repeats: int
    ) -> Annotated[jax.Array, "tiles 1 1 rows tokens"]:
        """Which keys each row sees: the same for all batch entries and KV heads."""
        rank = len(self.axes)
        visible: jax.Array | None = None
        firsts = self._first_inner(inner_step) if self.inner_steps > 1 else None
        for i, (axis, part) in enumerate(zip(self.axes, positions.masks, strict=True)):
            if firsts is not None and axis.inner_steps > 1:
                along = 2 if axis.outer_is_query else 1
                part = lax.dynamic_slice_in_dim(
                    part, firsts[0, 2 * i], axis.inner_tile, along, allow_negative_indices=False
                )
            shape = [1] * (2 * rank)
            shape[i], shape[rank + i] = part.shape[1:]
            part = part.reshape(part.shape[0], *shape)
            visible = part if visible is None else visible & part
        assert visible is not None
        queries, keys = self.pair_tokens
        visible = visible.reshape(visible.shape[0], 1, 1, 1, queries, keys)
        visible = jnp.broadcast_to(visible, (visible.shape[0], 1, 1, repeats, queries, keys))
        return visible.reshape(visible.shape[0], 1, 1, repeats * queries, keys)

    def is_seen(self, positions: TilePositions, inner_step: Scalar) -> Scalar:
        """Whether some outer token of a step is related to some inner one of an inner step."""
        firsts = self._first_inner(inner_step) if self.inner_steps > 1 else None
        seen: jax.Array | None = None
        for i, (axis, part) in enumerate(zip(self.axes, positions.masks, strict=True)):
            if firsts is not None and axis.inner_steps > 1:
                along = 2 if axis.outer_is_query else 1
                part = lax.dynamic_slice_in_dim(part, firsts[0, 2 * i], axis.inner_tile, along)
            of_tiles = jnp.any(part, axis=(1, 2))
            seen = of_tiles if seen is None else seen & of_tiles
        assert seen is not None
        return jnp.any(seen)

    def cut_outer(self, array: Tokens, heads_kv: int) -> Cut:
        """Cut an array into the outer tiles of each step."""
        array = self._split(array, [a.outer_tiles * a.outer_tile for a in self.axes])
        batch, heads, *_, width = array.shape
        rank = len(self.axes)
        shape = [n for a in self.axes for n in (a.outer_tiles, a.outer_tile, a.dilation)]
        tile_axes = [n for i in range(rank) for n in (2 + 3 * i, 4 + 3 * i)]
        token_axes = [3 + 3 * i for i in range(rank)]
        array = array.reshape(batch, heads, *shape, width)
        array = array.transpose(*tile_axes, 0, 1, *token_axes, 2 + 3 * rank)
        array = array.reshape(-1, batch, heads, self.outer_tokens, width)
        surplus = self.steps * self.tiles_per_step - array.shape[0]
        array = jnp.pad(array, [(0, surplus)] + [(0, 0)] * 4)
        repeats = heads // heads_kv
        return array.reshape(self.steps, self.tiles_per_step, batch, heads_kv, repeats * self.outer_tokens, width)

    def join_outer(self, array: Cut, heads: int) -> Tokens:
        """Undo :meth:`cut_outer`."""
        batch, width = array.shape[2], array.shape[-1]
        tiles = [n for a in self.axes for n in (a.outer_tiles, a.dilation)]
        array = array.reshape(-1, *array.shape[2:])[: math.prod(tiles)]
        array = array.reshape(*tiles, batch, heads, *(a.outer_tile for a in self.axes), width)
        rank = len(self.axes)
        order = [n for i in range(rank) for n in (2 * i, 2 * rank + 2 + i, 2 * i + 1)]
        array = array.transpose(2 * rank, *order, 2 * rank + 1, 3 * rank + 2)
        coordinates = [a.outer_tiles * a.outer_tile * a.dilation for a in self.axes]
        array = array.reshape(batch, *coordinates, heads, width)
        return array[(slice(None), *(slice(a.extents[not a.outer_is_query]) for a in self.axes))]

    def split_inner(self, array: Tokens) -> Split:
        """View an array so that :meth:`load` can cut tiles anywhere."""
        return self._split(array, [a.inner_length for a in self.axes])

    def empty_inner(self, batch: int, heads: int, width: int, dtype: jax.typing.DTypeLike) -> Split:
        """Zeros in the form of :meth:`split_inner`."""
        shape = [n for a in self.axes for n in (a.inner_length, a.dilation)]
        return jnp.zeros((batch, heads, *shape, width), dtype)

    def join_inner(self, array: Split) -> Tokens:
        """Undo :meth:`split_inner`."""
        batch, heads, *_, width = array.shape
        array = array.reshape(batch, heads, *(a.inner_length * a.dilation for a in self.axes), width)
        array = array[(slice(None), slice(None), *(slice(a.extents[a.outer_is_query]) for a in self.axes))]
        return jnp.moveaxis(array, 1, -2)

    def load(self, array: Split, positions: TilePositions, inner_step: Scalar, heads_kv: int) -> RowTiles:
        """Load inner tiles from :meth:`split_inner`'s form; of keys and values, each head has rows of its own."""
        rank = len(self.axes)
        batch, heads, *_, width = array.shape
        if self._goes_around:
            tokens = array.reshape(batch, heads, -1, width)
            dimensions = lax.GatherDimensionNumbers(
                offset_dims=(1, 2, 4), collapsed_slice_dims=(2,), start_index_map=(2,)
            )
            loaded = lax.gather(
                tokens,
                self._inner_places(positions, inner_step)[..., None],
                dimensions,
                slice_sizes=(batch, heads, 1, width),
                mode="promise_in_bounds",
            )
            return loaded.reshape(-1, batch, heads_kv, heads // heads_kv * self.inner_tokens, width)
        tile = [n for a in self.axes for n in (a.inner_tile, 1)]
        loaded = lax.gather(
            array,
            self._inner_corners(positions, inner_step),
            lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rank + 4)),
                collapsed_slice_dims=tuple(range(3, 2 * rank + 2, 2)),
                start_index_map=tuple(range(2, 2 * rank + 2)),
            ),
            slice_sizes=(batch, heads, *tile, width),
            mode="promise_in_bounds",
        )
        return loaded.reshape(-1, batch, heads_kv, heads // heads_kv * self.inner_tokens, width)

    def add(self, array: Split, positions: TilePositions, inner_step: Scalar, update: RowTiles) -> Split:
        """Add tiles, as :meth:`load` returns them, where they belong; the transpose of :meth:`load`."""
        return self._scatter(lax.scatter_add, array, positions, inner_step, update)

    def raise_to(self, array: Split, positions: TilePositions, inner_step: Scalar, update: RowTiles) -> Split:
        """Raise what is smaller to tiles, as :meth:`load` returns them."""
        return self._scatter(lax.scatter_max, array, positions, inner_step, update)

    def _scatter(
        self,
        combine: Callable[..., jax.Array],
        array: Split,
        positions: TilePositions,
        inner_step: Scalar,
        update: RowTiles,
    ) -> Split:
        rank = len(self.axes)
        batch, heads, *_, width = array.shape
        if self._goes_around:
            combined = combine(
                array.reshape(batch, heads, -1, width),
                self._inner_places(positions, inner_step)[..., None],
                update.reshape(-1, batch, heads, self.inner_tokens, width),
                lax.ScatterDimensionNumbers(
                    update_window_dims=(1, 2, 4), inserted_window_dims=(2,), scatter_dims_to_operand_dims=(2,)
                ),
                mode="promise_in_bounds",
            )
            return combined.reshape(array.shape)
        return combine(
            array,
            self._inner_corners(positions, inner_step),
            update.reshape(-1, batch, heads, *(a.inner_tile for a in self.axes), width),
            lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(1, rank + 4)),
                inserted_window_dims=tuple(range(3, 2 * rank + 2, 2)),
                scatter_dims_to_operand_dims=tuple(range(2, 2 * rank + 2)),
            ),
            mode="promise_in_bounds",
        )

    @property
    def _goes_around(self) -> bool:
        """Whether tiles reach over the end of a dimension to its beginning, so that they are no slices of arrays."""
        return any(axis.period is not None for axis in self.axes)

    def _inner_places(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles tokens"]:
        """Where the tokens of inner tiles stand among all of :meth:`split_inner`'s form."""
        corners = self._inner_corners(positions, inner_step)
        places = jnp.zeros((len(corners), 1), jnp.int32)
        for i, axis in enumerate(self.axes):
            index = corners[:, 2 * i, None] + jnp.arange(axis.inner_tile, dtype=jnp.int32)[None]
            index = index if axis.period is None else index % axis.period
            place = index * axis.dilation + corners[:, 2 * i + 1, None]
            places = places[:, :, None] * (axis.inner_length * axis.dilation) + place[:, None, :]
            places = places.reshape(len(corners), -1)
        return places

    def _inner_corners(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles corner"]:
        return positions.corners if self.inner_steps == 1 else positions.corners + self._first_inner(inner_step)

    def _first_inner(self, inner_step: Scalar) -> Annotated[jax.Array, "1 corner"]:
        """The first token of the inner tiles that a step visits, counted from the first that any step does.

        Index and residue, which is 0, in each dimension.
        """
        steps = [axis.inner_steps for axis in self.axes]
        count = math.prod(steps)
        # Looked up: XLA compiles a division of what may be negative as ten operations, once for each use.
        is_constant = count <= _MOST_CONSTANTS
        numbers = np.arange(count) if is_constant else inner_step[None]
        found = (np if is_constant else jnp).unravel_index(numbers, steps)
        firsts = [step * axis.inner_tile for step, axis in zip(found, self.axes, strict=True)]
        if not is_constant:
            return jnp.stack([each for first in firsts for each in (first, jnp.zeros_like(first))], axis=-1)
        table = np.stack([each for first in firsts for each in (first, np.zeros_like(first))], axis=-1)
        return lax.dynamic_slice_in_dim(jnp.asarray(table, jnp.int32), inner_step, 1, allow_negative_indices=False)

    def _split(self, array: Tokens, lengths: Sequence[int]) -> Split:
        """Each coordinate as index and residue; padded with zeros."""
        layout = array.shape[1:-2]
        padding = [(0, n * a.dilation - x) for n, a, x in zip(lengths, self.axes, layout, strict=True)]
        array = jnp.pad(jnp.moveaxis(array, -2, 1), [(0, 0), (0, 0), *padding, (0, 0)])
        shape = [n for length, a in zip(lengths, self.axes, strict=True) for n in (length, a.dilation)]
        return array.reshape(*array.shape[:2], *shape, array.shape[-1])


def make_sweep(
    problem: Problem,
    query_extents: Shape,
    key_extents: Shape,
    query_tile: Shape,
    key_tile: Shape,
    rows: int,
    logits_per_step: int,
    *,
    outer_is_query: bool,
) -> Sweep:
    """Plan a pass.

    Args:
        problem: The problem, with its global extents.
        query_extents: Local query tokens.
        key_extents: Local key/value tokens.
        query_tile: Query tokens of a tile at most.
        key_tile: Key/value tokens of a tile at most.
        rows: Rows that share a token's place in the tiles: batch size times query heads.
        logits_per_step: Logits that one step may compute, if that is enough for one outer tile.
        outer_is_query: Whether outer tiles are query tiles.
    """
    axes = []
    for i, axis in enumerate(problem.axes):
        extents = query_extents[i], key_extents[i]
        outer_tile, inner_tile = (query_tile[i], key_tile[i]) if outer_is_query else (key_tile[i], query_tile[i])
        outer_length, inner_length = (-(-x // axis.dilation) for x in (extents if outer_is_query else extents[::-1]))
        outer_tile = min(outer_tile, outer_length)
        if problem.own_extents:
            hulls = [largest_hull_of_any_layout(axis, outer_tile, outer_is_query)] * 2
        else:
            hulls = [largest_hull(axis, outer_tile, outer_is_query, is_aligned) for is_aligned in (False, True)]
        if axis.edges != "wrap":
            hulls = [min(inner_length, hull) for hull in hulls]
        steps = [-(-hull // inner_tile) for hull in hulls]
        # An array as long as the whole layout starts where the layout does, and so do its tiles.
        is_whole = extents == (axis.query_extent, axis.kv_extent) and hulls[True] < hulls[False]
        # Equal tiles that just cover the hull waste less than the largest ones.
        inner_tile = -(-hulls[is_whole] // steps[is_whole])
        axes.append(
            AxisSweep(
                axis=axis,
                outer_is_query=outer_is_query,
                extents=extents,
                outer_tile=outer_tile,
                inner_tile=inner_tile,
                inner_steps=steps[is_whole],
                assumes_whole=is_whole,
            )
        )
    logits = rows * math.prod(a.outer_tile * a.inner_tile for a in axes)
    tiles = math.prod(a.outer_tiles * a.dilation for a in axes)
    steps_needed = -(-tiles // max(1, min(tiles, logits_per_step // logits)))
    return Sweep(axes=tuple(axes), tiles_per_step=-(-tiles // steps_needed))


def materialize(array: jax.Array) -> jax.Array:
    """``array``, which XLA shall compute once instead of fusing it into whatever uses it."""
    materialized: jax.Array = lax.optimization_barrier(array)  # type: ignore[no-untyped-call]
    return materialized
