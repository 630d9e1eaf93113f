"""Tiles of token layouts in the ``flex`` backend, and loops over the pairs of tiles that contain visible keys.

A *sweep* is a loop over *outer tiles*, which are all query tiles or all key tiles. Each outer tile visits several
*inner tiles*, which cover its *hull*. The hull of a query tile is the range from the first to the last key that its
queries see. The hull of a key tile is the range from the first to the last query that sees one of its keys.

If the local coordinate of a token is divided by the dilation, the quotient is the token's *index*, and the remainder is
its *residue*. All tokens of a dilation group have the same residue, and their indices are consecutive.

Bounds of windows are computed from global coordinates, which are divided in the same way. ``origins`` are the global
coordinates of the first local tokens, and are known only at run time. A global coordinate is the sum of the origin and
the local coordinate. The global index and residue of a token can therefore differ from the local ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from natten_jax.arrays.operands import Operands
from natten_jax.performance import Pass
from natten_jax.plan.plan import Plan
from natten_jax.windows import Axis, group_length

_State = TypeVar("_State")
_Inputs = TypeVar("_Inputs")
_Outputs = TypeVar("_Outputs")


class AxisPosition(NamedTuple):
    """Positions of outer tiles along one dimension, and of the inner tokens that they visit.

    All fields are NumPy arrays or all are JAX arrays.

    Attributes:
        inner_start: ``[..., tiles, 1]``. Local index of the first inner token that the tile visits. If
            :attr:`AxisSweep.period` is not ``None``, the index is reduced modulo the period.
        inner_residue: ``[..., tiles, 1]``. Residue of the inner tokens.
        seen_start: ``[..., tiles, outer_tile]``. First index of each outer token's range of inner tokens, relative to
            ``inner_start``. The range consists of the keys that a query sees, or of the queries that see a key.
        seen_end: ``[..., tiles, outer_tile]``. Exclusive end of this range, relative to ``inner_start``.
        inner_distance: ``[..., tiles, 1]``. Global index of the first visited inner token minus the global index of the
            first outer token.
    """

    inner_start: Any
    inner_residue: Any
    seen_start: Any
    seen_end: Any
    inner_distance: Any


@dataclasses.dataclass(frozen=True)
class AxisSweep:
    """Static properties of a sweep along one token dimension.

    Attributes:
        axis: The dimension, with its global extents.
        outer_is_query: True if outer tiles are query tiles.
        extents: Number of local queries, and number of local keys.
        outer_tile: Tokens per outer tile.
        inner_tile: Tokens per inner tile.
        inner_steps: Number of inner tiles that an outer tile visits.
        assumes_whole: True if ``inner_steps`` is sufficient only for arrays that start at the first token of the
            layout.
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
        """Distance in tokens between neighboring tokens of a dilation group."""
        return self.axis.dilation

    @property
    def outer_length(self) -> int:
        """Number of local outer indices, which is the number of outer tokens in the longest dilation group."""
        return -(-self.extents[not self.outer_is_query] // self.dilation)

    @property
    def inner_length(self) -> int:
        """Number of local inner indices, including the padding that outer tiles visit."""
        if self.period is not None:
            return self.period
        length = -(-self.extents[self.outer_is_query] // self.dilation)
        return max(length, self.inner_tile * self.inner_steps)

    @property
    def period(self) -> int | None:
        """Number of inner indices of the dimension, if visits wrap around its ends; otherwise ``None``.

        Visits wrap around only if the local queries or the local keys are the whole dimension. Otherwise the local keys
        are a shard with halos. Beyond an end of the layout, a halo contains the keys from the opposite end.
        """
        is_around = self.axis.edges == "wrap" and self.axis.kv_extent in self.extents
        return self.axis.kv_extent // self.dilation if is_around else None

    @property
    def outer_tiles(self) -> int:
        return -(-self.outer_length // self.outer_tile)

    def position(
        self, tile: Any, residue: Any, origins: jax.Array | None, xp: ModuleType, layout: jax.Array | None = None
    ) -> AxisPosition:
        """Return the positions of outer tiles, given the number of each tile within its dilation group.

        The keys that a query sees have consecutive indices, and so do the queries that see a key. Masks are therefore
        computed from the bounds of these ranges.

        Args:
            tile: ``[tiles]``. Tile numbers.
            residue: ``[tiles]``. Residue of each tile's outer tokens.
            origins: ``[2]``. Global coordinates of the first local query and of the first local key; ``None`` if both
                are 0.
            xp: Array namespace, ``numpy`` or ``jax.numpy``.
            layout: ``[2]``. Extents of the query layout and the key layout, which replace the extents of ``axis``.
                Tokens beyond them are padding.
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
            # Outer tokens that are padding, or in halos beyond the layout's edges, get an empty range: they are not
            # tokens of the layout.
            end = xp.where((index >= 0) & (index < lengths[not self.outer_is_query]), end, start)
        elif not self.outer_is_query:
            # Keys after the last local one are padding, and get an empty range. In a dimension that wraps, they would
            # otherwise be treated as the first keys.
            local = group_length(self.extents[1], d, residue[:, None])
            end = xp.where(index - coordinate // d < local, end, start)
        if self.period is not None:
            first = start[:, :1]
            inner_start = (first - inner_shift) % self.period
            return AxisPosition(inner_start, inner_residue, start - first, end - first, first - index[:, :1])
        # A part of a range may be on another device or in an array's padding: clip the range to the local tokens.
        local = group_length(self.extents[self.outer_is_query], d, inner_residue)
        start, end = (xp.minimum(xp.maximum(bound - inner_shift, 0), local) for bound in (start, end))
        inner_start = xp.minimum(start[:, :1], self.inner_length - self.inner_tile * self.inner_steps)
        distance = inner_start + inner_shift - index[:, :1]
        return AxisPosition(inner_start, inner_residue, start - inner_start, end - inner_start, distance)

    def hull_mask(self, position: AxisPosition) -> jax.Array:
        """Return a mask ``[tiles, queries, keys]`` of each outer tile's whole hull: True if a query sees a key."""
        inner = jnp.arange(self.inner_tile * self.inner_steps, dtype=jnp.int32).reshape(1, 1, -1)
        start, end = position.seen_start[..., None], position.seen_end[..., None]
        is_seen: jax.Array = (inner >= start) & (inner < end)
        if self.period is not None and self.extents[self.outer_is_query] < self.axis.kv_extent:
            # Visited indices cover the whole period, but the array contains only the inner tokens of the local shard.
            local = group_length(self.extents[self.outer_is_query], self.dilation, position.inner_residue)
            is_seen &= (position.inner_start[..., None] + inner) % self.period < local[..., None]
        return is_seen if self.outer_is_query else is_seen.swapaxes(1, 2)


@functools.lru_cache(maxsize=1024)
def largest_hull(axis: Axis, tile: int, outer_is_query: bool, is_aligned: bool) -> int:
    """Return the number of tokens in the largest hull of all tiles of a dimension, in all dilation groups.

    The module's docstring defines the hull of a tile. The run time of this function depends on the extent of the tiles,
    but not on the number of tokens.

    Args:
        axis: The dimension.
        tile: Extent of the tiles.
        outer_is_query: True for query tiles, False for key tiles.
        is_aligned: True if tiles start only at multiples of their extent. False if they may start at any token.
    """
    largest = 1
    window = axis.window
    for group in {0, axis.dilation - 1}:  # the longest and the shortest group
        lengths = axis.lengths(group)
        length = lengths[0 if outer_is_query else 1]
        first = _decisive_tiles(length, window.kernel_size, window.stride, tile, tile if is_aligned else 1)
        last = first + tile - 1
        if axis.edges != "wrap" or outer_is_query or is_aligned:  # otherwise, halos of keys extend past the layout
            last = np.minimum(last, length - 1)
        start, _ = axis.bounds(first, lengths, of_query=outer_is_query)
        _, end = axis.bounds(last, lengths, of_query=outer_is_query)
        largest = max(largest, int((end - start).max(initial=0)))
    return largest


def largest_hull_bound(axis: Axis, tile: int, outer_is_query: bool) -> int:
    """Return an upper bound of :func:`largest_hull` for layouts of any extent, with tiles that start at any token.

    The layout is assumed to be at least as long as a window. The distance between the first keys of two windows is at
    most the distance between their queries, rounded up to a multiple of the stride. If an edge shifts windows, their
    first keys are closer together than elsewhere, and more queries see the same key. In a layout that is shorter than
    two windows, all queries may see the same key.
    """
    if outer_is_query:
        return axis.kernel_size + -(-(tile - 1) // axis.stride) * axis.stride
    bound = 2 * axis.kernel_size + tile + axis.stride
    # In plain attention all queries may see the same key, and there may be more queries than keys.
    return bound if axis.query_extent == axis.kv_extent else max(bound, axis.query_extent)


def _decisive_tiles(length: int, kernel_size: int, stride: int, tile: int, step: int) -> Any:
    """Return the index of the first token of each candidate tile. One of the candidates has the largest hull.

    If a tile moves along the dimension, each end of its hull moves in steps of ``stride``, and is clamped at the edges
    of the layout. Call a position of the tile a *clamp* if an end of the hull starts or stops being clamped there.
    Between two clamps, hull sizes have one of two forms. Either they repeat with the period ``lcm(stride, step)``, or
    one end of the hull is constant and sizes only grow or only shrink. It is therefore sufficient to search one period
    before and one period after each clamp. Within a period, consider the positions at which an end of the hull moves.
    The candidates are the last tile before and the first tile after each of these positions.
    """
    left = kernel_size // 2
    middles = 0, left, kernel_size, length - kernel_size, length - kernel_size + left, length - left, length
    clamps = [middle - offset for middle in middles for offset in (0, tile - 1)]
    reach = 2 * (step // math.gcd(stride, step)) + 4
    blocks = np.unique(np.concatenate([clamp // stride + np.arange(-reach, reach + 1) for clamp in clamps]))
    # An end of a hull moves if the first or last index of the tile, minus a shift, passes a multiple of the stride.
    right = kernel_size - 1 - left
    shifts = 0, right - (stride - stride // 2 - 1), -(left + stride - stride // 2), -kernel_size
    steps = [blocks * stride + shift - offset for shift in shifts for offset in (0, tile - 1)]
    edges = np.concatenate([np.array(clamps), *steps])
    before = (edges - 1) // step * step
    first = np.unique(np.concatenate([before, before + step]))
    return first[(first >= 0) & (first < length)]


#: An array in the layout of the call: queries, keys, values, or numbers per query or per key.
Tokens = Annotated[jax.Array, "batch *layout heads width"]
#: An array that is cut into outer tiles. The first dimension is the step of the sweep that processes the tiles.
Cut = Annotated[jax.Array, "steps tiles batch heads_kv rows width"]
#: An array of inner tokens. Each token dimension is split into index and residue, so that an inner tile is a slice of
#: the array, unless it wraps around.
Split = Annotated[jax.Array, "batch heads *coordinates width"]

RowTiles = Annotated[jax.Array, "tiles batch heads_kv rows width"]
TokenTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width"]
ValueTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width_v"]
#: A number per pair of tokens: scores, logits, weights, or gradients of these.
PairTiles = Annotated[jax.Array, "tiles batch heads_kv rows tokens"]
#: True for the tokens that a row (a query of one head) sees. The first dimension has extent 1 if the mask is equal for
#: all tiles. The fourth dimension has extent 1 if the mask is equal for all rows.
MaskTiles = Annotated[jax.Array, "_ 1 1 _ tokens"]
#: A number per row of a tile or of a whole array.
PerRow = Annotated[jax.Array, "... 1"]

Scalar = Annotated[jax.Array, ""]


#: Maximum number of elements of a table that is stored in the program as a constant. Larger tables are computed at run
#: time.
_MAX_CONSTANTS = 1 << 14


class TilePositions(NamedTuple):
    """Positions of the outer tiles in one step of a sweep, and masks of the inner tokens that they visit.

    Attributes:
        corners: Index and residue, per dimension, of the first inner token that each tile visits.
        masks: A mask per dimension, which covers all visited inner tokens (:meth:`AxisSweep.hull_mask`). The masks are
            computed once per step. Otherwise, XLA would fuse their computation and repeat it for every logit.
        distances: :attr:`AxisPosition.inner_distance` of each tile, per dimension.
    """

    corners: Annotated[jax.Array, "tiles corner"]
    masks: tuple[Annotated[jax.Array, "tiles _ _"], ...]
    distances: Annotated[jax.Array, "tiles rank"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The static description of a loop over all outer tiles. Its methods cut, load and mask tiles.

    Attributes:
        axes: The token dimensions.
        tiles_per_step: Number of outer tiles that one step of the ``lax.scan`` processes together.
        heads_kv: Key/value heads.
        repeats: Query heads per key/value head.
    """

    axes: tuple[AxisSweep, ...]
    tiles_per_step: int
    heads_kv: int
    repeats: int

    @property
    def steps(self) -> int:
        """Number of steps of the ``lax.scan`` over all outer tiles."""
        return -(-math.prod(a.outer_tiles * a.dilation for a in self.axes) // self.tiles_per_step)

    @property
    def inner_steps(self) -> int:
        """Number of inner tiles that an outer tile visits."""
        return math.prod(a.inner_steps for a in self.axes)

    @property
    def outer_is_query(self) -> bool:
        return self.axes[0].outer_is_query

    @property
    def pair_extents(self) -> list[tuple[int, int]]:
        """Number of queries and number of keys in a pair of outer and inner tile, per dimension."""
        return [(a.outer_tile, a.inner_tile) if a.outer_is_query else (a.inner_tile, a.outer_tile) for a in self.axes]

    @property
    def pair_tokens(self) -> tuple[int, int]:
        """Total number of queries and total number of keys in a pair of outer and inner tile."""
        pair = self.outer_tokens, self.inner_tokens
        return pair if self.outer_is_query else pair[::-1]

    @property
    def outer_tokens(self) -> int:
        return math.prod(a.outer_tile for a in self.axes)

    @property
    def inner_tokens(self) -> int:
        return math.prod(a.inner_tile for a in self.axes)

    def positions(
        self, origins: Annotated[jax.Array, "2 rank"] | None, layout: Annotated[jax.Array, "2 rank"] | None = None
    ) -> Annotated[jax.Array, "steps tiles _"]:
        """Return the int32 positions of all outer tiles, packed into one row per tile. :meth:`at` unpacks them.

        Args:
            origins: Global coordinates of the first local query and of the first local key; ``None`` if the arrays are
                whole.
            layout: Extents of the query layout and the key layout, which replace the problem's extents. Requires
                ``origins``.
        """
        count = self.steps * self.tiles_per_step
        width = sum(3 + 2 * axis.outer_tile for axis in self.axes)
        is_constant = origins is None and count * width <= _MAX_CONSTANTS
        xp: ModuleType = np if is_constant else jnp
        tile = xp.arange(count, dtype=xp.int32)
        positions: list[AxisPosition] = []
        for i, axis in reversed(list(enumerate(self.axes))):
            tile, residue = tile // axis.dilation, tile % axis.dilation
            # The last step may have surplus tiles. They are past the end of the first dimension, and contain only
            # padding.
            tile, number = (tile // axis.outer_tiles, tile % axis.outer_tiles) if i else (tile, tile)
            own_origins, own_layout = (None if each is None else each[:, i] for each in (origins, layout))
            positions.insert(0, axis.position(number, residue, own_origins, xp, own_layout))
        corners = [each for position in positions for each in (position.inner_start, position.inner_residue)]
        seen = [each for position in positions for each in (position.seen_start, position.seen_end)]
        distances = [position.inner_distance for position in positions]
        packed = xp.concatenate([*corners, *seen, *distances], axis=-1, dtype=xp.int32)
        packed = packed.reshape(self.steps, self.tiles_per_step, width)
        return jnp.asarray(packed) if is_constant else materialize(packed)

    def at(self, packed: Annotated[jax.Array, "tiles _"]) -> TilePositions:
        """Unpack the positions of the outer tiles of one step, which :meth:`positions` packed."""
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
        """Return, per pair of tiles and dimension, the distance in indices from the first query to the first key."""
        distances = positions.distances
        if self.inner_steps > 1:
            distances = distances + self._first_inner(inner_step)[:, ::2]
        return distances if self.outer_is_query else -distances

    def mask(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles 1 1 rows tokens"]:
        """Return the mask of the keys that each row sees. Batch entries and key/value heads share the mask."""
        rank = len(self.axes)
        parts = []
        for i, part in enumerate(self._visited_masks(positions, inner_step)):
            shape = [1] * (2 * rank)
            shape[i], shape[rank + i] = part.shape[1:]
            parts.append(part.reshape(part.shape[0], *shape))
        visible = functools.reduce(operator.and_, parts)
        queries, keys = self.pair_tokens
        visible = visible.reshape(visible.shape[0], 1, 1, 1, queries, keys)
        visible = jnp.broadcast_to(visible, (visible.shape[0], 1, 1, self.repeats, queries, keys))
        return visible.reshape(visible.shape[0], 1, 1, self.repeats * queries, keys)

    def is_seen(self, positions: TilePositions, inner_step: Scalar) -> Scalar:
        """Return True if an inner step is needed: in at least one pair of tiles, a query sees a key."""
        parts = [jnp.any(part, axis=(1, 2)) for part in self._visited_masks(positions, inner_step)]
        return jnp.any(functools.reduce(operator.and_, parts))

    def _visited_masks(self, positions: TilePositions, inner_step: Scalar) -> list[jax.Array]:
        """Return the masks of one inner step's inner tiles: an array ``[tiles, queries, keys]`` per dimension."""
        parts = list(positions.masks)
        if self.inner_steps == 1:
            return parts
        firsts, along = self._first_inner(inner_step), 2 if self.outer_is_query else 1
        for i, axis in enumerate(self.axes):
            if axis.inner_steps > 1:
                parts[i] = lax.dynamic_slice_in_dim(
                    parts[i], firsts[0, 2 * i], axis.inner_tile, along, allow_negative_indices=False
                )
        return parts

    def cut_outer(self, array: Tokens) -> Cut:
        """Cut an array into outer tiles, grouped by the step that processes them."""
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
        rows = heads // self.heads_kv * self.outer_tokens
        return array.reshape(self.steps, self.tiles_per_step, batch, self.heads_kv, rows, width)

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
        """Pad and reshape an array of inner tokens, so that :meth:`load` can read tiles at any position."""
        return self._split(array, [a.inner_length for a in self.axes])

    def load(self, array: Split, positions: TilePositions, inner_step: Scalar) -> RowTiles:
        """Load the inner tiles of an inner step from a result of :meth:`split_inner`.

        The rows of all query heads that share a key/value head are in one dimension.
        """
        batch, heads, *_, width = array.shape
        view, starts, extents, dimensions = self._inner_tiles(array, positions, inner_step)
        numbers, sizes = lax.GatherDimensionNumbers(*dimensions), (batch, heads, *extents, width)
        loaded = lax.gather(view, starts, numbers, slice_sizes=sizes, mode="promise_in_bounds")
        return loaded.reshape(-1, batch, self.heads_kv, heads // self.heads_kv * self.inner_tokens, width)

    def store(
        self,
        scatter: Callable[..., jax.Array],
        array: Split,
        positions: TilePositions,
        inner_step: Scalar,
        update: RowTiles,
    ) -> Split:
        """Scatter tiles into an array, to the positions from which :meth:`load` reads them; return the new array.

        The array has the format of :meth:`split_inner`, and the tiles have the format of :meth:`load`. ``scatter`` is
        ``lax.scatter_add`` or ``lax.scatter_max``, and combines the tiles with the elements of the array.
        """
        batch, heads, *_, width = array.shape
        view, starts, extents, dimensions = self._inner_tiles(array, positions, inner_step)
        tokens = [self.inner_tokens] if self._may_wrap else extents[::2]
        update = update.reshape(-1, batch, heads, *tokens, width)
        numbers = lax.ScatterDimensionNumbers(*dimensions)
        return scatter(view, starts, update, numbers, mode="promise_in_bounds").reshape(array.shape)

    @property
    def _may_wrap(self) -> bool:
        """True if inner tiles may wrap around the end of a dimension. Such a tile is not a slice of the array."""
        return any(axis.period is not None for axis in self.axes)

    def _inner_tiles(self, array: Split, positions: TilePositions, inner_step: Scalar) -> tuple[Any, ...]:
        """Return the arguments with which ``lax.gather`` and ``lax.scatter`` address the inner tiles of an inner step.

        An inner tile is addressed as one slice. If inner tiles may wrap around, each token is a separate slice.

        Returns:
            Four values: the array, the starts of the slices, the extents of the slices in the dimensions between heads
            and width, and the first three arguments of ``lax.GatherDimensionNumbers``. If inner tiles may wrap around,
            the returned array has a single token dimension.
        """
        rank = len(self.axes)
        corners = positions.corners if self.inner_steps == 1 else positions.corners + self._first_inner(inner_step)
        if not self._may_wrap:
            extents = [n for axis in self.axes for n in (axis.inner_tile, 1)]
            result_dims, dropped = tuple(range(1, rank + 4)), tuple(range(3, 2 * rank + 2, 2))
            return array, corners, extents, (result_dims, dropped, tuple(range(2, 2 * rank + 2)))
        tokens = jnp.zeros((len(corners), 1), jnp.int32)
        for i, axis in enumerate(self.axes):
            index = corners[:, 2 * i, None] + jnp.arange(axis.inner_tile, dtype=jnp.int32)[None]
            index = index if axis.period is None else index % axis.period
            axis_tokens = index * axis.dilation + corners[:, 2 * i + 1, None]
            tokens = tokens[:, :, None] * (axis.inner_length * axis.dilation) + axis_tokens[:, None, :]
            tokens = tokens.reshape(len(corners), -1)
        flat_array = array.reshape(*array.shape[:2], -1, array.shape[-1])
        return flat_array, tokens[..., None], [1], ((1, 2, 4), (2,), (2,))

    def _first_inner(self, inner_step: Scalar) -> Annotated[jax.Array, "1 corner"]:
        """Return the offset of an inner step's tiles from the first inner token that the outer tiles visit.

        The offset consists of an index and a residue per dimension; the residue is 0.
        """
        steps = [axis.inner_steps for axis in self.axes]
        # Look the offset up in a table instead of computing it from `inner_step`. XLA would compile a signed integer
        # division to ten operations, and repeat them for each use.
        is_constant = self.inner_steps <= _MAX_CONSTANTS
        xp: ModuleType = np if is_constant else jnp
        numbers = np.arange(self.inner_steps) if is_constant else inner_step[None]
        firsts = [
            step * axis.inner_tile for step, axis in zip(xp.unravel_index(numbers, steps), self.axes, strict=True)
        ]
        table = xp.stack([each for first in firsts for each in (first, xp.zeros_like(first))], axis=-1)
        if not is_constant:
            return table
        return lax.dynamic_slice_in_dim(jnp.asarray(table, jnp.int32), inner_step, 1, allow_negative_indices=False)

    def _split(self, array: Tokens, lengths: Sequence[int]) -> Split:
        """Split each token dimension into index and residue, and pad the index dimensions with zeros to ``lengths``."""
        layout = array.shape[1:-2]
        padding = [(0, n * a.dilation - x) for n, a, x in zip(lengths, self.axes, layout, strict=True)]
        array = jnp.pad(jnp.moveaxis(array, -2, 1), [(0, 0), (0, 0), *padding, (0, 0)])
        shape = [n for length, a in zip(lengths, self.axes, strict=True) for n in (length, a.dilation)]
        return array.reshape(*array.shape[:2], *shape, array.shape[-1])


#: Maximum number of logits that one step of a sweep computes. For accelerators, the number is large enough to occupy
#: the device. For CPUs, it is small enough that the logits fit into the caches.
_LOGITS_PER_STEP = {"accelerator": 2**22, "cpu": 2**20}


def make_sweep(plan: Plan, operands: Operands, pass_: Pass, *, outer_is_query: bool) -> Sweep:
    """Return a sweep over all query tiles, or over all key/value tiles.

    Args:
        plan: Plan of the call.
        operands: Operands of the call. They determine the local extents.
        pass_: The pass. The sweep's tiles are at most as large as the plan's tiles for this pass.
        outer_is_query: True if outer tiles are query tiles.
    """
    problem, pair = plan.problem, plan.performance.tiles(pass_)
    assert pair is not None, "plans of pure JAX backends have the tiles of both passes"
    local = zip(operands.inputs.query.shape[1:-2], operands.inputs.key.shape[1:-2], strict=True)
    axes = []
    for axis, extents, tile in zip(problem.axes, local, zip(*pair, strict=True), strict=True):
        outer_tile, inner_tile = tile if outer_is_query else tile[::-1]
        outer_length, inner_length = (-(-x // axis.dilation) for x in (extents if outer_is_query else extents[::-1]))
        outer_tile = min(outer_tile, outer_length)
        if problem.own_extents:
            hulls = [largest_hull_bound(axis, outer_tile, outer_is_query)] * 2
        else:
            hulls = [largest_hull(axis, outer_tile, outer_is_query, is_aligned) for is_aligned in (False, True)]
        if axis.edges != "wrap":
            hulls = [min(inner_length, hull) for hull in hulls]
        # Arrays with the extents of the whole layout are assumed to start at its first token. Outer tiles then start
        # only at multiples of their extent, and the largest hull may be smaller than with tiles that start anywhere.
        is_whole = extents == (axis.query_extent, axis.kv_extent) and hulls[True] < hulls[False]
        hull = hulls[is_whole]
        steps = -(-hull // inner_tile)
        # Inner tiles of equal size that just cover the hull waste less work than tiles of the maximum size.
        axes.append(AxisSweep(axis, outer_is_query, extents, outer_tile, -(-hull // steps), steps, is_whole))
    logits = problem.batch * problem.heads * math.prod(a.outer_tile * a.inner_tile for a in axes)
    tiles = math.prod(a.outer_tiles * a.dilation for a in axes)
    max_tiles = _LOGITS_PER_STEP["cpu" if plan.platform == "cpu" else "accelerator"] // logits
    steps = -(-tiles // max(1, min(tiles, max_tiles)))
    return Sweep(tuple(axes), -(-tiles // steps), problem.heads_kv, problem.heads // problem.heads_kv)


def materialize(arrays: _State) -> _State:
    """Make XLA compute arrays once instead of fusing their computation into each use."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


# If a loop has one iteration, the functions below run its body without the loop. XLA compiles this in half the time.


def repeated(
    rounds: int | jax.Array,
    visit: Callable[[jax.Array, _State], _State],
    state: _State,
    is_needed: Callable[[jax.Array], jax.Array] | None = None,
    *,
    recomputes: bool = False,
) -> _State:
    """Update ``state`` in a loop: in each round, ``visit`` maps the round's number and the state to the next state.

    Rounds for which ``is_needed`` returns False are skipped. If ``recomputes`` is set, derivatives recompute each round
    instead of storing its residuals.
    """
    visit = jax.checkpoint(visit) if recomputes else visit

    def visit_if_needed(number: jax.Array, state: _State) -> _State:
        if is_needed is None:
            return visit(number, state)
        return lax.cond(is_needed(number), functools.partial(visit, number), lambda same: same, state)

    if isinstance(rounds, int) and rounds == 1:
        return visit_if_needed(jnp.zeros((), jnp.int32), state)
    return lax.fori_loop(0, rounds, visit_if_needed, state)


def swept(
    step: Callable[[_State, _Inputs], tuple[_State, _Outputs]], carry: _State, inputs: _Inputs
) -> tuple[_State, _Outputs]:
    """Run ``lax.scan`` over the first dimension of ``inputs``; derivatives recompute each step."""
    step = jax.checkpoint(step)
    if len(jax.tree.leaves(inputs)[0]) > 1:
        return lax.scan(step, carry, inputs)
    carry, outputs = step(carry, jax.tree.map(lambda array: lax.squeeze(array, (0,)), inputs))
    return carry, jax.tree.map(lambda array: lax.expand_dims(array, (0,)), outputs)
