"""Token layouts as the ``flex`` backend cuts them into tiles, and which tiles see which.

A dimension is viewed as (index, residue) of the local coordinate modulo the dilation, so that a dilation group is an
ordinary dense dimension. Windows are evaluated in global indices; where the local arrays start in the global layout
(``origins``) is only known at run time, and shifts both views.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis, group_length


class AxisPosition(NamedTuple):
    """Where outer tiles lie in one dimension; arrays of NumPy or JAX.

    Attributes:
        inner_start: Local index at which the visited inner tokens start, ``[..., tiles, 1]``; of a dimension that is
            gone around, modulo its :attr:`AxisSweep.period`.
        inner_residue: Local coordinates of the inner tokens modulo the dilation, likewise.
        seen_start: First inner token that is related to an outer token, counted from ``inner_start``,
            ``[..., tiles, outer_tile]``.
        seen_end: One past the last, likewise.
        inner_distance: How many neighbors the first inner token that is visited lies behind the first outer one,
            ``[..., tiles, 1]``.
    """

    inner_start: Any
    inner_residue: Any
    seen_start: Any
    seen_end: Any
    inner_distance: Any


@dataclasses.dataclass(frozen=True)
class AxisSweep:
    """The static facts of one token dimension in a pass.

    Attributes:
        axis: The dimension, with its global extents.
        outer_is_query: Whether outer tiles are query tiles.
        extents: Local query and key/value tokens.
        outer_tile: Outer tokens of a tile.
        inner_tile: Inner tokens of a tile.
        inner_steps: Inner tiles that an outer tile visits.
        assumes_whole: Whether ``inner_steps`` holds only for arrays that start at the layout's first token.
    """

    axis: Axis
    outer_is_query: bool
    extents: tuple[int, int]
    outer_tile: int
    inner_tile: int
    inner_steps: int
    assumes_whole: bool

    @property
    def dilation(self) -> int:
        """Distance between neighbors."""
        return self.axis.dilation

    @property
    def outer_length(self) -> int:
        """Local outer indices: tokens of the longest dilation group."""
        return -(-self.extents[not self.outer_is_query] // self.dilation)

    @property
    def inner_length(self) -> int:
        """Local inner indices, padded so that whatever is visited lies inside."""
        if self.period is not None:
            return self.period
        length = -(-self.extents[self.outer_is_query] // self.dilation)
        return max(length, self.inner_tile * self.inner_steps)

    @property
    def period(self) -> int | None:
        """After how many indices inner tokens come again; ``None`` where nothing is visited behind an end.

        Parts of a dimension that wraps have each other's tokens next to theirs, in front of the first and behind the
        last one of the layout, too: they go around where one side is whole.
        """
        is_around = self.axis.edges == "wrap" and self.axis.kv_extent in self.extents
        return self.axis.kv_extent // self.dilation if is_around else None

    @property
    def outer_tiles(self) -> int:
        """Outer tiles in one dilation group."""
        return -(-self.outer_length // self.outer_tile)

    def position(
        self,
        tile: Any,
        residue: Any,
        origins: jax.Array | None,
        xp: ModuleType,
        layout: jax.Array | None = None,
    ) -> AxisPosition:
        """Where outer tiles lie, given their numbers inside their residue classes.

        The keys that a query sees are a range, and so are the queries that see a key: the bounds of these ranges are
        all that a mask needs.

        Args:
            tile: Tile numbers, ``[tiles]``.
            residue: Local coordinates modulo the dilation, ``[tiles]``.
            origins: Global coordinates of the first local query and key/value, ``[2]``; ``None`` where both are 0.
            xp: Array namespace, ``numpy`` or ``jax.numpy``.
            layout: How many queries and keys there are in place of the axis's, ``[2]``: others are padding.
        """
        d = self.dilation
        axis = self.axis if layout is None else self.axis.within(layout[0], layout[1], xp=xp)
        query_origin, key_origin = (0, 0) if origins is None else (origins[0], origins[1])
        outer_origin, inner_origin = (query_origin, key_origin) if self.outer_is_query else (key_origin, query_origin)
        tile, coordinate = tile[:, None], (residue + outer_origin)[:, None]
        inner_residue = (coordinate - inner_origin) % d
        inner_shift = (inner_residue + inner_origin) // d
        group = coordinate % d
        lengths = axis.lengths(group)
        index = tile * self.outer_tile + xp.arange(self.outer_tile, dtype=xp.int32)[None] + coordinate // d
        start, end = axis.bounds(index, lengths, of_query=self.outer_is_query, xp=xp)
        if layout is not None or (not self.outer_is_query and axis.edges != "wrap"):
            # Halos reach beyond the layout at its edges, where no key is; and so does padding.
            end = xp.where((index >= 0) & (index < lengths[not self.outer_is_query]), end, start)
        elif not self.outer_is_query:
            # An array's padding would be the first keys again.
            local = group_length(self.extents[1], d, residue[:, None])
            end = xp.where(index - coordinate // d < local, end, start)
        if self.period is not None:
            first = start[:, :1]
            inner_start = (first - inner_shift) % self.period
            return AxisPosition(inner_start, inner_residue, start - first, end - first, first - index[:, :1])
        # What a window names may lie on another device; as an array's padding, it is not there.
        local = group_length(self.extents[self.outer_is_query], d, inner_residue)
        start, end = (xp.minimum(xp.maximum(bound - inner_shift, 0), local) for bound in (start, end))
        inner_start = xp.minimum(start[:, :1], self.inner_length - self.inner_tile * self.inner_steps)
        distance = inner_start + inner_shift - index[:, :1]
        return AxisPosition(inner_start, inner_residue, start - inner_start, end - inner_start, distance)

    def hull_mask(self, position: AxisPosition) -> jax.Array:
        """Which inner tokens that are visited are related to which outer ones, ``[tiles, queries, keys]``."""
        inner = jnp.arange(self.inner_tile * self.inner_steps, dtype=jnp.int32).reshape(1, 1, -1)
        start, end = position.seen_start[..., None], position.seen_end[..., None]
        is_seen: jax.Array = (inner >= start) & (inner < end)
        if self.period is not None and self.extents[self.outer_is_query] < self.axis.kv_extent:
            # The tokens of one part, and where those of the others would be.
            local = group_length(self.extents[self.outer_is_query], self.dilation, position.inner_residue)
            is_seen &= (position.inner_start[..., None] + inner) % self.period < local[..., None]
        return is_seen if self.outer_is_query else is_seen.swapaxes(1, 2)


@functools.lru_cache(maxsize=1024)
def largest_hull(
    axis: Axis,
    tile: int,
    outer_is_query: bool,
    is_aligned: bool,
) -> int:
    """Indices from the first to the last that any tile of a dimension sees, over all tiles and groups.

    Its cost depends on the tile alone, not on how many tokens there are.

    Args:
        axis: The dimension.
        tile: Extent of the tiles.
        outer_is_query: Whether the tiles hold queries, which see keys, or keys, which are seen by queries.
        is_aligned: Whether tiles start at multiples of their extent only.
    """
    largest = 1
    window = axis.window
    for group in {0, axis.dilation - 1}:  # the longest groups and the shortest
        lengths = axis.lengths(group)
        length = lengths[0 if outer_is_query else 1]
        first = _decisive_tiles(length, window.kernel_size, window.stride, tile, tile if is_aligned else 1)
        last = first + tile - 1
        if axis.edges != "wrap" or outer_is_query or is_aligned:  # halos of keys go on behind the layout's ends
            last = np.minimum(last, length - 1)
        start, _ = axis.bounds(first, lengths, of_query=outer_is_query)
        _, end = axis.bounds(last, lengths, of_query=outer_is_query)
        largest = max(largest, int((end - start).max(initial=0)))
    return largest


def largest_hull_of_any_layout(axis: Axis, tile: int, outer_is_query: bool) -> int:
    """A bound on the same for tiles anywhere in a layout of any extent, whose windows are those that fit.

    In steps of the stride, windows begin at most as far apart as their queries. What an edge shifts makes them begin
    closer together, and keys be seen by more queries: those of a layout of less than two windows by all of it.
    """
    if outer_is_query:
        return axis.kernel_size + -(-(tile - 1) // axis.stride) * axis.stride
    bound = 2 * axis.kernel_size + tile + axis.stride
    # In attention a key is seen by every query, and there may be more of them than keys.
    return bound if axis.query_extent == axis.kv_extent else max(bound, axis.query_extent)


def _decisive_tiles(length: int, kernel_size: int, stride: int, tile: int, step: int) -> Any:
    """First tokens of tiles, among them one of the tiles with the largest hull.

    Both ends of a hull are steps of ``stride``, clamped at the layout's edges. So between the places where a clamp
    sets in, hulls either repeat with the period ``lcm(stride, step)``, or one of their ends stands still: then they
    only grow, or only shrink. It takes one period at either side of these places, and of each step of an end the last
    tile before it and the first after it.
    """
    left = kernel_size // 2
    middles = 0, left, kernel_size, length - kernel_size, length - kernel_size + left, length - left, length
    clamps = [place - offset for place in middles for offset in (0, tile - 1)]
    reach = 2 * (step // math.gcd(stride, step)) + 4
    blocks = np.unique(np.concatenate([clamp // stride + np.arange(-reach, reach + 1) for clamp in clamps]))
    # Ends step where a token, seen through the window, passes a multiple of the stride.
    right = kernel_size - 1 - left
    shifts = 0, right - (stride - stride // 2 - 1), -(left + stride - stride // 2), -kernel_size
    steps = [blocks * stride + shift - offset for shift in shifts for offset in (0, tile - 1)]
    edges = np.concatenate([np.array(clamps), *steps])
    before = (edges - 1) // step * step
    first = np.unique(np.concatenate([before, before + step]))
    return first[(first >= 0) & (first < length)]


#: As users have it: queries, keys, values, and what there is for each of them.
Tokens = Annotated[jax.Array, "batch *layout heads width"]
#: Outer tiles, by the step of a sweep that takes them.
Cut = Annotated[jax.Array, "steps tiles batch heads_kv rows width"]
#: Inner tokens by index and residue of each dimension, so that tiles are cut out anywhere.
Split = Annotated[jax.Array, "batch heads *coordinates width"]

RowTiles = Annotated[jax.Array, "tiles batch heads_kv rows width"]
TokenTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width"]
ValueTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width_v"]
#: A number for each pair: scores, logits, weights and their gradients.
PairTiles = Annotated[jax.Array, "tiles batch heads_kv rows tokens"]
#: Which tokens a row sees; tiles and rows that are alike have one extent of 1.
MaskTiles = Annotated[jax.Array, "_ 1 1 _ tokens"]
#: A number for each row, of tiles or of anything else.
PerRow = Annotated[jax.Array, "... 1"]

#: A number for each head.
PerHead = Annotated[jax.Array, "batch heads"]
Scalar = Annotated[jax.Array, ""]


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


# Loops are none where there is one round: XLA compiles that in half the time.
_State = TypeVar("_State")
_Carry = TypeVar("_Carry")
_Inputs = TypeVar("_Inputs")
_Outputs = TypeVar("_Outputs")


def repeated(
    rounds: int,
    visit: Callable[[jax.Array, _State], _State],
    state: _State,
    is_needed: Callable[[jax.Array], jax.Array] | None = None,
) -> _State:
    """``visit`` with the numbers of so many rounds, one after the other: of those that are needed, or of all."""

    def visit_if_needed(number: jax.Array, state: _State) -> _State:
        if is_needed is None:
            return visit(number, state)
        needed = is_needed(number)
        visited: _State = lax.cond(needed, functools.partial(visit, number), lambda same: same, state)
        return visited

    if rounds == 1:
        return visit_if_needed(jnp.zeros((), jnp.int32), state)
    result: _State = lax.fori_loop(0, rounds, visit_if_needed, state)
    return result


def swept(
    step: Callable[[_Carry, _Inputs], tuple[_Carry, _Outputs]], carry: _Carry, inputs: _Inputs
) -> tuple[_Carry, _Outputs]:
    """``lax.scan`` over the first dimension of all ``inputs``, of which derivatives of a step are computed anew."""
    step = jax.checkpoint(step)
    if len(jax.tree.leaves(inputs)[0]) > 1:
        result: tuple[_Carry, _Outputs] = lax.scan(step, carry, inputs)
        return result
    only: _Inputs = jax.tree.map(lambda array: lax.squeeze(array, (0,)), inputs)
    carry, outputs = step(carry, only)
    stacked: _Outputs = jax.tree.map(lambda array: lax.expand_dims(array, (0,)), outputs)
    return carry, stacked
