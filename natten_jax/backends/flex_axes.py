"""One token dimension of a pass, as the ``flex`` backend cuts it: where its tiles lie, and what they see.

A dimension is viewed as (index, residue) of the local coordinate modulo the dilation, so that a dilation group is an
ordinary dense dimension. Windows are evaluated in global indices; where the local arrays start in the global layout
(``origins``) is only known at run time, and shifts both views.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.problem import Axis
from natten_jax.windows import group_length, inverse_window_bounds, window_bounds


class AxisPosition(NamedTuple):
    """Where the outer tiles of one step lie in one dimension; every array starts with a tile dimension.

    Attributes:
        outer: Local indices of the outer tokens, ``[tiles, outer_tile]``.
        outer_shift: Global index of the outer side's local index 0 in the tile's dilation group.
        outer_residue: The tile's local coordinates modulo the dilation.
        inner_start: Local index at which the visited inner tokens start.
        inner_shift: As ``outer_shift``.
        inner_residue: As ``outer_residue``.
        keys_in_group: Global number of keys in the tile's dilation group.
    """

    outer: jax.Array
    outer_shift: jax.Array
    outer_residue: jax.Array
    inner_start: jax.Array
    inner_shift: jax.Array
    inner_residue: jax.Array
    keys_in_group: jax.Array


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
        length = -(-self.extents[self.outer_is_query] // self.dilation)
        return max(length, self.inner_tile * self.inner_steps)

    @property
    def outer_tiles(self) -> int:
        """Outer tiles in one dilation group."""
        return -(-self.outer_length // self.outer_tile)

    def position(self, tile: jax.Array, residue: jax.Array, origins: jax.Array) -> AxisPosition:
        """Where outer tiles lie, given their numbers inside their residue classes.

        Args:
            tile: Tile numbers, ``[tiles]``.
            residue: Local coordinates modulo the dilation, ``[tiles]``.
            origins: Global coordinates of the first local query and key/value, ``[2]``.
        """
        d = self.dilation
        outer_origin, inner_origin = (origins[0], origins[1]) if self.outer_is_query else (origins[1], origins[0])
        coordinate = residue + outer_origin
        group = coordinate % d
        outer_shift = coordinate // d
        inner_residue = (coordinate - inner_origin) % d
        inner_shift = (inner_residue + inner_origin) // d
        queries = group_length(self.axis.query_extent, d, group)
        keys = group_length(self.axis.kv_extent, d, group)
        outer = (tile * self.outer_tile)[:, None] + jnp.arange(self.outer_tile, dtype=tile.dtype)[None]
        first = outer[:, 0] + outer_shift
        window = self.axis.window
        if self.outer_is_query:
            start = window_bounds(window, first, keys, xp=jnp)[0]
        else:
            first = jnp.clip(first, 0, keys - 1)
            start = inverse_window_bounds(window, first, queries, keys, xp=jnp)[0]
        inner_start = jnp.clip(start - inner_shift, 0, self.inner_length - self.inner_tile * self.inner_steps)
        return AxisPosition(outer, outer_shift, residue, inner_start, inner_shift, inner_residue, keys)

    def mask(self, position: AxisPosition, step: jax.Array) -> jax.Array:
        """Which keys of a tile the queries of a tile see in this dimension, ``[tiles, queries, keys]``."""
        inner = self.inner_indices(position, step)
        outer_side = (position.outer, position.outer_shift, position.outer_residue)
        inner_side = (inner, position.inner_shift, position.inner_residue)
        query_side, key_side = (outer_side, inner_side) if self.outer_is_query else (inner_side, outer_side)
        query = query_side[0] + query_side[1][:, None]
        start, end = window_bounds(self.axis.window, query, position.keys_in_group[:, None], xp=jnp)
        local_key, shift, residue = key_side
        # A key that a window names may lie on another device; as an array's padding, it is not there.
        local_keys = (self.extents[1] - residue + self.dilation - 1) // self.dilation
        key = local_key + shift[:, None]
        is_local = local_key < local_keys[:, None]
        is_seen: jax.Array = (key[:, None] >= start[..., None]) & (key[:, None] < end[..., None])
        return is_seen & is_local[:, None]

    def inner_indices(self, position: AxisPosition, step: jax.Array) -> jax.Array:
        """Local indices of the inner tokens that are visited in a step, ``[tiles, inner_tile]``."""
        offsets = step * self.inner_tile + jnp.arange(self.inner_tile, dtype=position.outer.dtype)
        return position.inner_start[:, None] + offsets[None]
