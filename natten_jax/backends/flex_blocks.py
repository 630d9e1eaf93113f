"""Tiles of a token layout as arrays: how the ``flex`` backend cuts, loads and masks them.

A pass over a problem has a *home* side, whose tiles are enumerated (several of them per step of a scan),
and an *away* side, of which each home tile visits only the hull of what its tokens see. Home is the
queries in the forward pass; the derivative with respect to keys and values is enumerated by their tiles.

Every dimension is viewed as (index, residue) of the local coordinate modulo the dilation, so that a
dilation group is an ordinary dense dimension. Windows are evaluated in global indices; where the local
arrays start in the global layout (``origins``) is only known at run time, and shifts both views.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.backends.flex_hulls import largest_hull
from natten_jax.devices import default_device
from natten_jax.problem import Problem, Shape
from natten_jax.windows import group_length, inverse_window_bounds, window_bounds

#: Logits that one step may compute: as many as fill an accelerator, or as stay in a CPU's caches.
LOGITS_PER_STEP = {"cpu": 2**20, "accelerator": 2**22}


class AxisPosition(NamedTuple):
    """Where the home tiles of one step lie in one dimension; every array starts with a tile dimension.

    Attributes:
        home: Local indices of the home tokens, ``[tiles, home_tile]``.
        home_shift: Global index of the home side's local index 0 in the tile's dilation group.
        home_residue: The tile's local coordinates modulo the dilation.
        away_start: Local index at which the visited away tokens start.
        away_shift: As ``home_shift``.
        away_residue: As ``home_residue``.
        keys_in_group: Global number of keys in the tile's dilation group.
    """

    home: jax.Array
    home_shift: jax.Array
    home_residue: jax.Array
    away_start: jax.Array
    away_shift: jax.Array
    away_residue: jax.Array
    keys_in_group: jax.Array


@dataclasses.dataclass(frozen=True)
class Axis:
    """The static facts of one token dimension in a pass.

    Attributes:
        home_is_query: Whether home tiles are query tiles.
        extents: Local query and key/value tokens.
        global_extents: Query and key/value tokens of the whole layout.
        kernel_size: Window extent.
        stride: Queries that share a window.
        dilation: Distance between neighbors.
        is_causal: Whether later keys are hidden.
        home_tile: Home tokens of a tile.
        away_tile: Away tokens of a tile.
        away_steps: Away tiles that a home tile visits.
        assumes_whole: Whether ``away_steps`` holds only for arrays that start at the layout's first token.
    """

    home_is_query: bool
    extents: tuple[int, int]
    global_extents: tuple[int, int]
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool
    home_tile: int
    away_tile: int
    away_steps: int
    assumes_whole: bool

    @property
    def home_length(self) -> int:
        """Local home indices: tokens of the longest dilation group."""
        return -(-self.extents[not self.home_is_query] // self.dilation)

    @property
    def away_length(self) -> int:
        """Local away indices, padded so that whatever is visited lies inside."""
        length = -(-self.extents[self.home_is_query] // self.dilation)
        return max(length, self.away_tile * self.away_steps)

    @property
    def home_tiles(self) -> int:
        """Home tiles in one dilation group."""
        return -(-self.home_length // self.home_tile)

    def position(self, tile: jax.Array, residue: jax.Array, origins: jax.Array) -> AxisPosition:
        """Where home tiles lie, given their numbers inside their residue classes.

        Args:
            tile: Tile numbers, ``[tiles]``.
            residue: Local coordinates modulo the dilation, ``[tiles]``.
            origins: Global coordinates of the first local query and key/value, ``[2]``.
        """
        d = self.dilation
        home_origin, away_origin = (origins[0], origins[1]) if self.home_is_query else (origins[1], origins[0])
        coordinate = residue + home_origin
        group = coordinate % d
        home_shift = coordinate // d
        away_residue = (coordinate - away_origin) % d
        away_shift = (away_residue + away_origin) // d
        queries = group_length(self.global_extents[0], d, group)
        keys = group_length(self.global_extents[1], d, group)
        home = (tile * self.home_tile)[:, None] + jnp.arange(self.home_tile, dtype=tile.dtype)[None]
        first = home[:, 0] + home_shift
        window = (self.kernel_size, self.stride, self.is_causal)
        if self.home_is_query:
            start = window_bounds(first, keys, *window, xp=jnp)[0]
        else:
            first = jnp.clip(first, 0, keys - 1)
            start = inverse_window_bounds(first, queries, keys, *window, xp=jnp)[0]
        away_start = jnp.clip(start - away_shift, 0, self.away_length - self.away_tile * self.away_steps)
        return AxisPosition(home, home_shift, residue, away_start, away_shift, away_residue, keys)

    def mask(self, position: AxisPosition, step: jax.Array) -> jax.Array:
        """Which keys of a tile the queries of a tile see in this dimension, ``[tiles, queries, keys]``."""
        away = self.away_indices(position, step)
        home_side = (position.home, position.home_shift, position.home_residue)
        away_side = (away, position.away_shift, position.away_residue)
        query_side, key_side = (home_side, away_side) if self.home_is_query else (away_side, home_side)
        start, end = window_bounds(
            query_side[0] + query_side[1][:, None],
            position.keys_in_group[:, None],
            self.kernel_size,
            self.stride,
            self.is_causal,
            xp=jnp,
        )
        local_key, shift, residue = key_side
        # A key that a window names may lie on another device; as an array's padding, it is not there.
        local_keys = (self.extents[1] - residue + self.dilation - 1) // self.dilation
        key = local_key + shift[:, None]
        is_local = local_key < local_keys[:, None]
        is_seen: jax.Array = (key[:, None] >= start[..., None]) & (key[:, None] < end[..., None])
        return is_seen & is_local[:, None]

    def away_indices(self, position: AxisPosition, step: jax.Array) -> jax.Array:
        """Local indices of the away tokens that are visited in a step, ``[tiles, away_tile]``."""
        offsets = step * self.away_tile + jnp.arange(self.away_tile, dtype=position.home.dtype)
        return position.away_start[:, None] + offsets[None]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A pass over all home tiles: what is static about cutting, loading and masking them.

    Attributes:
        axes: The token dimensions.
        tiles_per_step: Home tiles that one step of the scan processes at once.
    """

    axes: tuple[Axis, ...]
    tiles_per_step: int

    @property
    def steps(self) -> int:
        """Steps of the scan over home tiles."""
        return -(-math.prod(a.home_tiles * a.dilation for a in self.axes) // self.tiles_per_step)

    @property
    def away_steps(self) -> int:
        """Away tiles that a home tile visits."""
        return math.prod(a.away_steps for a in self.axes)

    @property
    def home_tokens(self) -> int:
        """Tokens in a home tile."""
        return math.prod(a.home_tile for a in self.axes)

    @property
    def away_tokens(self) -> int:
        """Tokens in an away tile."""
        return math.prod(a.away_tile for a in self.axes)

    def position(self, step: jax.Array, origins: jax.Array) -> tuple[AxisPosition, ...]:
        """Where the home tiles of a step lie, per dimension; ``origins`` are ``[2, rank]``."""
        tile = step * self.tiles_per_step + jnp.arange(self.tiles_per_step, dtype=jnp.int32)
        positions = []
        for i, axis in reversed(list(enumerate(self.axes))):
            residue, tile = tile % axis.dilation, tile // axis.dilation
            # Surplus tiles of the last step end up beyond the first dimension, where no token is.
            number, tile = (tile % axis.home_tiles, tile // axis.home_tiles) if i else (tile, tile)
            positions.append(axis.position(number, residue, origins[:, i]))
        return tuple(reversed(positions))

    def mask(self, positions: Sequence[AxisPosition], away_step: jax.Array, repeats: int) -> jax.Array:
        """Visibility ``[tiles, 1, 1, repeats * queries, keys]``: broadcast over batch and KV heads."""
        rank = len(self.axes)
        visible: jax.Array | None = None
        for i, (axis, position, step) in enumerate(zip(self.axes, positions, self._unravel(away_step), strict=True)):
            part = axis.mask(position, step)
            shape = [1] * (2 * rank)
            shape[i], shape[rank + i] = part.shape[1:]
            part = part.reshape(part.shape[0], *shape)
            visible = part if visible is None else visible & part
        assert visible is not None
        # Computed once for all heads, and not again for every logit that it is fused with.
        visible = materialize(visible)
        queries, keys = self.home_tokens, self.away_tokens
        if not self.axes[0].home_is_query:
            queries, keys = keys, queries
        visible = visible.reshape(visible.shape[0], 1, 1, 1, queries, keys)
        visible = jnp.broadcast_to(visible, (visible.shape[0], 1, 1, repeats, queries, keys))
        return visible.reshape(visible.shape[0], 1, 1, repeats * queries, keys)

    def cut_home(self, array: jax.Array, heads_kv: int) -> jax.Array:
        """Cut ``[batch, *layout, heads, width]`` into ``[steps, tiles, batch, heads_kv, repeats * tokens, width]``."""
        array = self._split(array, [a.home_tiles * a.home_tile for a in self.axes])
        batch, heads, *_, width = array.shape
        rank = len(self.axes)
        shape = [n for a in self.axes for n in (a.home_tiles, a.home_tile, a.dilation)]
        tile_axes = [n for i in range(rank) for n in (2 + 3 * i, 4 + 3 * i)]
        token_axes = [3 + 3 * i for i in range(rank)]
        array = array.reshape(batch, heads, *shape, width)
        array = array.transpose(*tile_axes, 0, 1, *token_axes, 2 + 3 * rank)
        array = array.reshape(-1, batch, heads, self.home_tokens, width)
        surplus = self.steps * self.tiles_per_step - array.shape[0]
        array = jnp.pad(array, [(0, surplus)] + [(0, 0)] * 4)
        repeats = heads // heads_kv
        return array.reshape(self.steps, self.tiles_per_step, batch, heads_kv, repeats * self.home_tokens, width)

    def join_home(self, array: jax.Array, heads: int) -> jax.Array:
        """Undo :meth:`cut_home`."""
        batch, width = array.shape[2], array.shape[-1]
        tiles = [n for a in self.axes for n in (a.home_tiles, a.dilation)]
        array = array.reshape(-1, *array.shape[2:])[: math.prod(tiles)]
        array = array.reshape(*tiles, batch, heads, *(a.home_tile for a in self.axes), width)
        rank = len(self.axes)
        order = [n for i in range(rank) for n in (2 * i, 2 * rank + 2 + i, 2 * i + 1)]
        array = array.transpose(2 * rank, *order, 2 * rank + 1, 3 * rank + 2)
        coordinates = [a.home_tiles * a.home_tile * a.dilation for a in self.axes]
        array = array.reshape(batch, *coordinates, heads, width)
        return array[(slice(None), *(slice(a.extents[not a.home_is_query]) for a in self.axes))]

    def split_away(self, array: jax.Array) -> jax.Array:
        """View ``[batch, *layout, heads, width]`` so that :meth:`load` can cut tiles anywhere."""
        return self._split(array, [a.away_length for a in self.axes])

    def empty_away(self, batch: int, heads: int, width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Zeros in the form of :meth:`split_away`."""
        shape = [n for a in self.axes for n in (a.away_length, a.dilation)]
        return jnp.zeros((batch, heads, *shape, width), dtype)

    def join_away(self, array: jax.Array) -> jax.Array:
        """Undo :meth:`split_away`."""
        batch, heads, *_, width = array.shape
        array = array.reshape(batch, heads, *(a.away_length * a.dilation for a in self.axes), width)
        array = array[(slice(None), slice(None), *(slice(a.extents[a.home_is_query]) for a in self.axes))]
        return jnp.moveaxis(array, 1, -2)

    def load(
        self, array: jax.Array, positions: Sequence[AxisPosition], away_step: jax.Array, heads_kv: int
    ) -> jax.Array:
        """Load away tiles from :meth:`split_away`'s form: ``[tiles, batch, heads_kv, repeats * tokens, width]``."""
        rank = len(self.axes)
        batch, heads, *_, width = array.shape
        tile = [n for a in self.axes for n in (a.away_tile, 1)]
        loaded = lax.gather(
            array,
            self._away_corners(positions, away_step),
            lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rank + 4)),
                collapsed_slice_dims=tuple(range(3, 2 * rank + 2, 2)),
                start_index_map=tuple(range(2, 2 * rank + 2)),
            ),
            slice_sizes=(batch, heads, *tile, width),
            mode="promise_in_bounds",
        )
        return loaded.reshape(-1, batch, heads_kv, heads // heads_kv * self.away_tokens, width)

    def add(
        self, array: jax.Array, positions: Sequence[AxisPosition], away_step: jax.Array, update: jax.Array
    ) -> jax.Array:
        """Add tiles, as :meth:`load` returns them, where they belong; the transpose of :meth:`load`."""
        return self._scatter(lax.scatter_add, array, positions, away_step, update)

    def raise_to(
        self, array: jax.Array, positions: Sequence[AxisPosition], away_step: jax.Array, update: jax.Array
    ) -> jax.Array:
        """Raise what is smaller to tiles, as :meth:`load` returns them."""
        return self._scatter(lax.scatter_max, array, positions, away_step, update)

    def _scatter(
        self,
        combine: Callable[..., jax.Array],
        array: jax.Array,
        positions: Sequence[AxisPosition],
        away_step: jax.Array,
        update: jax.Array,
    ) -> jax.Array:
        rank = len(self.axes)
        batch, heads, *_, width = array.shape
        return combine(
            array,
            self._away_corners(positions, away_step),
            update.reshape(-1, batch, heads, *(a.away_tile for a in self.axes), width),
            lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(1, rank + 4)),
                inserted_window_dims=tuple(range(3, 2 * rank + 2, 2)),
                scatter_dims_to_operand_dims=tuple(range(2, 2 * rank + 2)),
            ),
            mode="promise_in_bounds",
        )

    def _away_corners(self, positions: Sequence[AxisPosition], away_step: jax.Array) -> jax.Array:
        corners = []
        for axis, position, step in zip(self.axes, positions, self._unravel(away_step), strict=True):
            corners += [position.away_start + step * axis.away_tile, position.away_residue]
        return jnp.stack(corners, axis=-1)

    def _unravel(self, away_step: jax.Array) -> list[jax.Array]:
        steps = []
        for axis in reversed(self.axes):
            steps.append(away_step % axis.away_steps)
            away_step = away_step // axis.away_steps
        return steps[::-1]

    def _split(self, array: jax.Array, lengths: Sequence[int]) -> jax.Array:
        """``[batch, *layout, heads, width]`` as ``[batch, heads, *(index, residue), width]``, padded with zeros."""
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
    *,
    home_is_query: bool,
) -> Sweep:
    """Plan a pass.

    Args:
        problem: The problem, with its global extents.
        query_extents: Local query tokens.
        key_extents: Local key/value tokens.
        query_tile: Query tokens of a tile at most.
        key_tile: Key/value tokens of a tile at most.
        rows: Rows that share a token's place in the tiles: batch size times query heads.
        home_is_query: Whether home tiles are query tiles.
    """
    axes = []
    for i in range(problem.rank):
        d = problem.dilation[i]
        extents = query_extents[i], key_extents[i]
        global_extents = problem.query_layout[i], problem.kv_layout[i]
        home_tile, away_tile = (query_tile[i], key_tile[i]) if home_is_query else (key_tile[i], query_tile[i])
        home_length, away_length = (-(-x // d) for x in (extents if home_is_query else extents[::-1]))
        home_tile = min(home_tile, home_length)
        window = (problem.kernel_size[i], problem.stride[i], d, problem.is_causal[i])
        hulls = [
            min(away_length, largest_hull(*global_extents, *window, home_tile, home_is_query, is_aligned))
            for is_aligned in (False, True)
        ]
        steps = [-(-hull // away_tile) for hull in hulls]
        # An array as long as the whole layout starts where the layout does, and so do its tiles.
        is_whole = extents == global_extents and hulls[True] < hulls[False]
        # Equal tiles that just cover the hull waste less than whole ones.
        away_tile = -(-hulls[is_whole] // steps[is_whole])
        axes.append(
            Axis(
                home_is_query=home_is_query,
                extents=extents,
                global_extents=global_extents,
                kernel_size=window[0],
                stride=window[1],
                dilation=d,
                is_causal=window[3],
                home_tile=home_tile,
                away_tile=away_tile,
                away_steps=steps[is_whole],
                assumes_whole=is_whole,
            )
        )
    logits = rows * math.prod(a.home_tile * a.away_tile for a in axes)
    tiles = math.prod(a.home_tiles * a.dilation for a in axes)
    budget = LOGITS_PER_STEP["cpu" if default_device().platform == "cpu" else "accelerator"]
    steps_needed = -(-tiles // max(1, min(tiles, budget // logits)))
    return Sweep(axes=tuple(axes), tiles_per_step=-(-tiles // steps_needed))


def materialize(array: jax.Array) -> jax.Array:
    """``array``, which XLA shall compute once instead of fusing it into whatever uses it."""
    materialized: jax.Array = lax.optimization_barrier(array)  # type: ignore[no-untyped-call]
    return materialized
