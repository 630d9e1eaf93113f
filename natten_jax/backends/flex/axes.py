"""One token dimension of a pass, as the ``flex`` backend cuts it: where its tiles lie, and what they see.

A dimension is viewed as (index, residue) of the local coordinate modulo the dilation, so that a dilation group is an
ordinary dense dimension. Windows are evaluated in global indices; where the local arrays start in the global layout
(``origins``) is only known at run time, and shifts both views.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
