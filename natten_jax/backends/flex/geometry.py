"""Tiles of token layouts in the ``flex`` backend, and the pairs of tiles that see each other.

A *sweep* loops over outer tiles. Each outer tile visits a range of inner tiles: a query tile visits the keys that it
sees; a key tile visits the queries that see it.

A coordinate is split into ``(index, residue)``: quotient and remainder of the local coordinate and the dilation. All
tokens of a dilation group have the same residue, so that the group is a dense dimension. Windows are evaluated in
global indices. The global coordinates of the first local tokens (``origins``) are known only at run time, and shift
index and residue.
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
    """Positions of outer tiles in one dimension, and of the inner tokens that they visit; NumPy or JAX arrays.

    Attributes:
        inner_start: ``[..., tiles, 1]``. Local index of the first visited inner token, modulo
            :attr:`AxisSweep.period` if that is not ``None``.
        inner_residue: ``[..., tiles, 1]``. Local coordinates of the inner tokens modulo the dilation.
        seen_start: ``[..., tiles, outer_tile]``. First inner token that sees, or is seen by, an outer token; relative
            to ``inner_start``.
        seen_end: ``[..., tiles, outer_tile]``. Exclusive end of the range that ``seen_start`` begins, relative to
            ``inner_start``.
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
    """Static facts of one token dimension in a sweep.

    Attributes:
        axis: The dimension, with its global extents.
        outer_is_query: True if outer tiles are query tiles.
        extents: Local query and key/value tokens.
        outer_tile: Tokens per outer tile.
        inner_tile: Tokens per inner tile.
        inner_steps: Number of inner tiles that an outer tile visits.
        assumes_whole: True if ``inner_steps`` is valid only for arrays that start at the layout's first token.
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
        """Number of local outer indices: outer tokens of the longest dilation group."""
        return -(-self.extents[not self.outer_is_query] // self.dilation)

    @property
    def inner_length(self) -> int:
        """Number of local inner indices, including padding up to the last visited index."""
        if self.period is not None:
            return self.period
        length = -(-self.extents[self.outer_is_query] // self.dilation)
        return max(length, self.inner_tile * self.inner_steps)

    @property
    def period(self) -> int | None:
        """Number of indices after which inner tokens repeat; ``None`` if visits do not wrap around.

        Visits wrap around only if the local queries or keys are the whole dimension. Otherwise the keys of a shard
        include halos, which may extend beyond the first and last token of the layout.
        """
        is_around = self.axis.edges == "wrap" and self.axis.kv_extent in self.extents
        return self.axis.kv_extent // self.dilation if is_around else None

    @property
    def outer_tiles(self) -> int:
        return -(-self.outer_length // self.outer_tile)

    def position(
        self, tile: Any, residue: Any, origins: jax.Array | None, xp: ModuleType, layout: jax.Array | None = None
    ) -> AxisPosition:
        """Return the positions of outer tiles, given their numbers within a dilation group.

        A query sees a contiguous range of keys, and a contiguous range of queries sees a key. A mask therefore needs
        only the bounds of these ranges.

        Args:
            tile: ``[tiles]``. Tile numbers.
            residue: ``[tiles]``. Local coordinates modulo the dilation.
            origins: ``[2]``. Global coordinates of the first local query and key/value; ``None`` if both are 0.
            xp: Array namespace, ``numpy`` or ``jax.numpy``.
            layout: ``[2]``. Numbers of queries and keys, instead of the axis's extents; further tokens are padding.
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
            # Padding, and halos beyond the layout's edges, are not part of the layout: these tokens see no token.
            end = xp.where((index >= 0) & (index < lengths[not self.outer_is_query]), end, start)
        elif not self.outer_is_query:
            # In a dimension that wraps, padding would otherwise wrap around and count as the first keys again.
            local = group_length(self.extents[1], d, residue[:, None])
            end = xp.where(index - coordinate // d < local, end, start)
        if self.period is not None:
            first = start[:, :1]
            inner_start = (first - inner_shift) % self.period
            return AxisPosition(inner_start, inner_residue, start - first, end - first, first - index[:, :1])
        # Part of a window may be on another device, or in an array's padding: clip the window to the local tokens.
        local = group_length(self.extents[self.outer_is_query], d, inner_residue)
        start, end = (xp.minimum(xp.maximum(bound - inner_shift, 0), local) for bound in (start, end))
        inner_start = xp.minimum(start[:, :1], self.inner_length - self.inner_tile * self.inner_steps)
        distance = inner_start + inner_shift - index[:, :1]
        return AxisPosition(inner_start, inner_residue, start - inner_start, end - inner_start, distance)

    def hull_mask(self, position: AxisPosition) -> jax.Array:
        """Return the mask of all visited inner tokens, ``[tiles, queries, keys]``; True if a query sees a key."""
        inner = jnp.arange(self.inner_tile * self.inner_steps, dtype=jnp.int32).reshape(1, 1, -1)
        start, end = position.seen_start[..., None], position.seen_end[..., None]
        is_seen: jax.Array = (inner >= start) & (inner < end)
        if self.period is not None and self.extents[self.outer_is_query] < self.axis.kv_extent:
            # The period covers all shards of the dimension, but only the tokens of the local shard exist.
            local = group_length(self.extents[self.outer_is_query], self.dilation, position.inner_residue)
            is_seen &= (position.inner_start[..., None] + inner) % self.period < local[..., None]
        return is_seen if self.outer_is_query else is_seen.swapaxes(1, 2)


@functools.lru_cache(maxsize=1024)
def largest_hull(axis: Axis, tile: int, outer_is_query: bool, is_aligned: bool) -> int:
    """Return the size of the largest hull over all tiles and dilation groups of a dimension.

    The hull of a query tile is the range from the first to the last key that it sees; the hull of a key tile is the
    range from the first to the last query that sees it. The cost of this function depends on the tile, not on the
    number of tokens.

    Args:
        axis: The dimension.
        tile: Extent of the tiles.
        outer_is_query: True for query tiles, False for key tiles.
        is_aligned: True if tiles start only at multiples of their extent.
    """
    largest = 1
    window = axis.window
    for group in {0, axis.dilation - 1}:  # the longest and the shortest group
        lengths = axis.lengths(group)
        length = lengths[0 if outer_is_query else 1]
        first = _decisive_tiles(length, window.kernel_size, window.stride, tile, tile if is_aligned else 1)
        last = first + tile - 1
        if axis.edges != "wrap" or outer_is_query or is_aligned:  # halos of keys extend beyond the layout's ends
            last = np.minimum(last, length - 1)
        start, _ = axis.bounds(first, lengths, of_query=outer_is_query)
        _, end = axis.bounds(last, lengths, of_query=outer_is_query)
        largest = max(largest, int((end - start).max(initial=0)))
    return largest


def largest_hull_of_any_layout(axis: Axis, tile: int, outer_is_query: bool) -> int:
    """Return an upper bound of :func:`largest_hull` for tiles at any position in a layout of any extent.

    Windows are assumed to fit into the layout. The distance between the starts of two windows is at most the distance
    between their queries, rounded up to a multiple of the stride. Windows that an edge shifts start closer together, so
    that more queries see a key: in a layout that is shorter than two windows, all queries may see a key.
    """
    if outer_is_query:
        return axis.kernel_size + -(-(tile - 1) // axis.stride) * axis.stride
    bound = 2 * axis.kernel_size + tile + axis.stride
    # In plain attention all queries may see the same key, and there may be more queries than keys.
    return bound if axis.query_extent == axis.kv_extent else max(bound, axis.query_extent)


def _decisive_tiles(length: int, kernel_size: int, stride: int, tile: int, step: int) -> Any:
    """Return the first tokens of candidate tiles, which include a tile with the largest hull.

    As a function of the tile's position, both ends of a hull move in steps of ``stride``, and are clamped at the
    layout's edges. Between positions at which clamping starts or stops, hull sizes either repeat with the period
    ``lcm(stride, step)``, or one end of the hull is constant and sizes only grow or only shrink. It is therefore enough
    to search one period before and after each such position. Within a period, the candidates are the last tile before
    and the first tile after each position at which an end of the hull moves.
    """
    left = kernel_size // 2
    middles = 0, left, kernel_size, length - kernel_size, length - kernel_size + left, length - left, length
    clamps = [place - offset for place in middles for offset in (0, tile - 1)]
    reach = 2 * (step // math.gcd(stride, step)) + 4
    blocks = np.unique(np.concatenate([clamp // stride + np.arange(-reach, reach + 1) for clamp in clamps]))
    # An end of a hull moves when the first or last token of the tile, plus a shift, passes a multiple of the stride.
    right = kernel_size - 1 - left
    shifts = 0, right - (stride - stride // 2 - 1), -(left + stride - stride // 2), -kernel_size
    steps = [blocks * stride + shift - offset for shift in shifts for offset in (0, tile - 1)]
    edges = np.concatenate([np.array(clamps), *steps])
    before = (edges - 1) // step * step
    first = np.unique(np.concatenate([before, before + step]))
    return first[(first >= 0) & (first < length)]


#: Layout of a call's arrays: queries, keys, values, and values per query or key.
Tokens = Annotated[jax.Array, "batch *layout heads width"]
#: Outer tiles, grouped by the step of a sweep that processes them.
Cut = Annotated[jax.Array, "steps tiles batch heads_kv rows width"]
#: Inner tokens, with each dimension split into index and residue, so that a tile at any position is a slice.
Split = Annotated[jax.Array, "batch heads *coordinates width"]

RowTiles = Annotated[jax.Array, "tiles batch heads_kv rows width"]
TokenTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width"]
ValueTiles = Annotated[jax.Array, "tiles batch heads_kv tokens width_v"]
#: A number per pair of tokens: scores, logits, weights and their gradients.
PairTiles = Annotated[jax.Array, "tiles batch heads_kv rows tokens"]
#: True for the tokens that a row sees. The extent of tiles or rows is 1 if the mask is equal for all of them.
MaskTiles = Annotated[jax.Array, "_ 1 1 _ tokens"]
#: A number per row of a tile or of a whole array.
PerRow = Annotated[jax.Array, "... 1"]

Scalar = Annotated[jax.Array, ""]


#: Maximum elements of a sweep's table that is a constant of the program; larger tables are computed at run time.
_MOST_CONSTANTS = 1 << 14


class TilePositions(NamedTuple):
    """Positions of the outer tiles of one step, and masks of the inner tokens that they visit.

    Attributes:
        corners: Per dimension, index and residue of the first inner token that each tile visits.
        masks: Per dimension, mask of all visited inner tokens (:meth:`AxisSweep.hull_mask`). It is computed once per
            step, because XLA would repeat the computation for every logit of a fusion.
        distances: Per dimension, :attr:`AxisPosition.inner_distance`.
    """

    corners: Annotated[jax.Array, "tiles corner"]
    masks: tuple[Annotated[jax.Array, "tiles _ _"], ...]
    distances: Annotated[jax.Array, "tiles rank"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A loop over all outer tiles, with its static facts and with methods that cut, load and mask tiles.

    Attributes:
        axes: The token dimensions.
        tiles_per_step: Number of outer tiles that one step of the scan processes together.
        heads_kv: Key/value heads.
        repeats: Query heads per key/value head.
    """

    axes: tuple[AxisSweep, ...]
    tiles_per_step: int
    heads_kv: int
    repeats: int

    @property
    def steps(self) -> int:
        """Number of steps of the scan over outer tiles."""
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
        """Number of queries and of keys in a pair of tiles, per dimension."""
        return [(a.outer_tile, a.inner_tile) if a.outer_is_query else (a.inner_tile, a.outer_tile) for a in self.axes]

    @property
    def pair_tokens(self) -> tuple[int, int]:
        """Total number of queries and of keys in a pair of tiles."""
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
        """Return the packed int32 positions of the outer tiles of all steps; :meth:`at` unpacks a step.

        Args:
            origins: Coordinates of the first local query and key in the layout; ``None`` for the whole layout.
            layout: Numbers of queries and keys, instead of the problem's extents; only with origins.
        """
        count = self.steps * self.tiles_per_step
        width = sum(3 + 2 * axis.outer_tile for axis in self.axes)
        is_constant = origins is None and count * width <= _MOST_CONSTANTS
        xp: ModuleType = np if is_constant else jnp
        tile = xp.arange(count, dtype=xp.int32)
        found: list[AxisPosition] = []
        for i, axis in reversed(list(enumerate(self.axes))):
            tile, residue = tile // axis.dilation, tile % axis.dilation
            # Surplus tiles of the last step are past the end of the first dimension, and contain only padding.
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
        """Unpack the positions of a step's outer tiles from the step's row of :meth:`positions`."""
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
        """Return the distance in indices from the first query to the first key, per pair of tiles and dimension."""
        distances = positions.distances
        if self.inner_steps > 1:
            distances = distances + self._first_inner(inner_step)[:, ::2]
        return distances if self.outer_is_query else -distances

    def mask(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles 1 1 rows tokens"]:
        """Return the mask of the keys that each row sees; it is equal for all batch entries and key/value heads."""
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
        """Return True if any query sees any key in the tiles of a step and an inner step."""
        parts = [jnp.any(part, axis=(1, 2)) for part in self._visited_masks(positions, inner_step)]
        return jnp.any(functools.reduce(operator.and_, parts))

    def _visited_masks(self, positions: TilePositions, inner_step: Scalar) -> list[jax.Array]:
        """Return the masks of an inner step's tiles, ``[tiles, queries, keys]`` per dimension."""
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
        """Reshape an array so that :meth:`load` can cut tiles at any position."""
        return self._split(array, [a.inner_length for a in self.axes])

    def load(self, array: Split, positions: TilePositions, inner_step: Scalar) -> RowTiles:
        """Load inner tiles from the result of :meth:`split_inner`; rows of queries are grouped by key/value head."""
        batch, heads, *_, width = array.shape
        view, starts, extents, dimensions = self._inner_tiles(array, positions, inner_step)
        numbers, sizes = lax.GatherDimensionNumbers(*dimensions), (batch, heads, *extents, width)
        loaded = lax.gather(view, starts, numbers, slice_sizes=sizes, mode="promise_in_bounds")
        return loaded.reshape(-1, batch, self.heads_kv, heads // self.heads_kv * self.inner_tokens, width)

    def put(
        self,
        scatter: Callable[..., jax.Array],
        array: Split,
        positions: TilePositions,
        inner_step: Scalar,
        update: RowTiles,
    ) -> Split:
        """Scatter tiles, in the format of :meth:`load`, into an array by ``lax.scatter_add`` or ``lax.scatter_max``."""
        batch, heads, *_, width = array.shape
        view, starts, extents, dimensions = self._inner_tiles(array, positions, inner_step)
        tokens = [self.inner_tokens] if self._goes_around else extents[::2]
        update = update.reshape(-1, batch, heads, *tokens, width)
        numbers = lax.ScatterDimensionNumbers(*dimensions)
        return scatter(view, starts, update, numbers, mode="promise_in_bounds").reshape(array.shape)

    @property
    def _goes_around(self) -> bool:
        """True if inner tiles may wrap around the end of a dimension, so that a tile is not a slice of the array."""
        return any(axis.period is not None for axis in self.axes)

    def _inner_tiles(self, array: Split, positions: TilePositions, inner_step: Scalar) -> tuple[Any, ...]:
        """Return arguments with which ``lax.gather`` and ``lax.scatter`` address inner tiles: as slices, or per token.

        Returns:
            The array, possibly reshaped; the starts of slices; the extents of slices in the dimensions between heads
            and width; and the three lists of dimensions for ``lax.GatherDimensionNumbers``.
        """
        rank = len(self.axes)
        corners = positions.corners if self.inner_steps == 1 else positions.corners + self._first_inner(inner_step)
        if not self._goes_around:
            extents = [n for axis in self.axes for n in (axis.inner_tile, 1)]
            result_dims, dropped = tuple(range(1, rank + 4)), tuple(range(3, 2 * rank + 2, 2))
            return array, corners, extents, (result_dims, dropped, tuple(range(2, 2 * rank + 2)))
        places = jnp.zeros((len(corners), 1), jnp.int32)
        for i, axis in enumerate(self.axes):
            index = corners[:, 2 * i, None] + jnp.arange(axis.inner_tile, dtype=jnp.int32)[None]
            index = index if axis.period is None else index % axis.period
            place = index * axis.dilation + corners[:, 2 * i + 1, None]
            places = places[:, :, None] * (axis.inner_length * axis.dilation) + place[:, None, :]
            places = places.reshape(len(corners), -1)
        tokens = array.reshape(*array.shape[:2], -1, array.shape[-1])
        return tokens, places[..., None], [1], ((1, 2, 4), (2,), (2,))

    def _first_inner(self, inner_step: Scalar) -> Annotated[jax.Array, "1 corner"]:
        """Return the offset of the inner tiles of an inner step, relative to the first visited token.

        Per dimension, the offset is an index and a residue, which is 0.
        """
        steps = [axis.inner_steps for axis in self.axes]
        # Use a table: XLA compiles a signed integer division to ten operations, and repeats them for each use.
        is_constant = self.inner_steps <= _MOST_CONSTANTS
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
        """Split each token dimension into index and residue, padded with zeros to the given numbers of indices."""
        layout = array.shape[1:-2]
        padding = [(0, n * a.dilation - x) for n, a, x in zip(lengths, self.axes, layout, strict=True)]
        array = jnp.pad(jnp.moveaxis(array, -2, 1), [(0, 0), (0, 0), *padding, (0, 0)])
        shape = [n for length, a in zip(lengths, self.axes, strict=True) for n in (length, a.dilation)]
        return array.reshape(*array.shape[:2], *shape, array.shape[-1])


#: Maximum logits per step of a sweep: enough to occupy an accelerator, or few enough to fit into a CPU's caches.
_LOGITS_PER_STEP = {"accelerator": 2**22, "cpu": 2**20}


def make_sweep(plan: Plan, operands: Operands, pass_: Pass, *, outer_is_query: bool) -> Sweep:
    """Plan a sweep over all query tiles, or over all key/value tiles.

    Args:
        plan: Plan of the call.
        operands: Operands of the call, with local token extents.
        pass_: The pass whose tiles are used as upper limits.
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
            hulls = [largest_hull_of_any_layout(axis, outer_tile, outer_is_query)] * 2
        else:
            hulls = [largest_hull(axis, outer_tile, outer_is_query, is_aligned) for is_aligned in (False, True)]
        if axis.edges != "wrap":
            hulls = [min(inner_length, hull) for hull in hulls]
        # An array with the extents of the whole layout starts at the layout's first token, so its tiles are aligned.
        is_whole = extents == (axis.query_extent, axis.kv_extent) and hulls[True] < hulls[False]
        hull = hulls[is_whole]
        steps = -(-hull // inner_tile)
        # Equal tiles that just cover the hull waste less work than tiles of the maximum size.
        axes.append(AxisSweep(axis, outer_is_query, extents, outer_tile, -(-hull // steps), steps, is_whole))
    logits = problem.batch * problem.heads * math.prod(a.outer_tile * a.inner_tile for a in axes)
    tiles = math.prod(a.outer_tiles * a.dilation for a in axes)
    most = _LOGITS_PER_STEP["cpu" if plan.platform == "cpu" else "accelerator"] // logits
    steps = -(-tiles // max(1, min(tiles, most)))
    return Sweep(tuple(axes), -(-tiles // steps), problem.heads_kv, problem.heads // problem.heads_kv)


def materialize(arrays: _State) -> _State:
    """Make XLA compute arrays once instead of fusing their computation into each use."""
    return lax.optimization_barrier(arrays)  # type: ignore[no-untyped-call]


# The functions below replace a loop of one iteration by its body, which XLA compiles in half the time.


def repeated(
    rounds: int | jax.Array,
    visit: Callable[[jax.Array, _State], _State],
    state: _State,
    is_needed: Callable[[jax.Array], jax.Array] | None = None,
    *,
    recomputes: bool = False,
) -> _State:
    """Call ``visit`` with the number of each round, in order; with ``is_needed``, only if that returns True.

    With ``recomputes``, derivatives recompute each round instead of storing residuals.
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
    """Run ``lax.scan`` over the first dimension of all ``inputs``; derivatives recompute each step."""
    step = jax.checkpoint(step)
    if len(jax.tree.leaves(inputs)[0]) > 1:
        return lax.scan(step, carry, inputs)
    carry, outputs = step(carry, jax.tree.map(lambda array: lax.squeeze(array, (0,)), inputs))
    return carry, jax.tree.map(lambda array: lax.expand_dims(array, (0,)), outputs)
