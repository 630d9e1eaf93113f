"""Arrays as the kernels have them: heads first, three token dimensions, dilation groups apart, whole tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from natten_jax.native.abi import KERNEL_RANK


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tokens of one array lie.

    Attributes:
        extents: Tokens along each dimension, as the caller has them.
        groups: Dilation groups of each of three dimensions.
        lengths: Tokens of a group along each, padded.
        tile: Tokens of a tile along each.
        before: Tokens of a group along each that are padding before the first.
    """

    extents: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    tile: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles of a group along each dimension."""
        return tuple(length // tile for length, tile in zip(self.lengths, self.tile, strict=True))

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return math.prod(self.tile)

    @property
    def _starts(self) -> list[int]:
        """Padding before the first token of all groups, along each dimension."""
        return [before * groups for before, groups in zip(self.before, self.groups, strict=True)]

    def laid_out(self, array: jax.Array) -> jax.Array:
        """``[batch, *extents, heads, width]`` as ``[batch * heads, groups, *lengths, width]``."""
        batch, heads, width = array.shape[0], *array.shape[-2:]
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        split = [(length, groups) for length, groups in zip(self.lengths, self.groups, strict=True)]
        padding = [
            (start, length * groups - n - start)
            for (length, groups), n, start in zip(split, extents, self._starts, strict=True)
        ]
        array = jnp.pad(array.reshape(batch, *extents, heads, width), [(0, 0), *padding, (0, 0), (0, 0)])
        array = array.reshape(batch, *(n for pair in split for n in pair), heads, width)
        array = array.transpose(0, 7, 2, 4, 6, 1, 3, 5, 8)
        return array.reshape(batch * heads, math.prod(self.groups), *self.lengths, width)

    def restored(self, array: jax.Array, heads: int) -> jax.Array:
        """The inverse of :meth:`laid_out`."""
        width = array.shape[-1]
        array = array.reshape(-1, heads, *self.groups, *self.lengths, width).transpose(0, 5, 2, 6, 3, 7, 4, 1, 8)
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        whole = [length * groups for length, groups in zip(self.lengths, self.groups, strict=True)]
        array = array.reshape(array.shape[0], *whole, heads, width)
        inside = (slice(start, start + n) for start, n in zip(self._starts, extents, strict=True))
        array = array[:, *inside]
        return array.reshape(array.shape[0], *self.extents, heads, width)

    def in_tiles(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Arrays ``[batch, *extents, heads]`` as one, ``[batch * heads, groups, *tiles, arrays, tokens]``."""
        array = self.laid_out(jnp.stack(rows, axis=-1))
        (x, y, z), (tx, ty, tz) = self.grid, self.tile
        array = array.reshape(*array.shape[:2], x, tx, y, ty, z, tz, len(rows)).transpose(0, 1, 2, 4, 6, 8, 3, 5, 7)
        return array.reshape(*array.shape[:2], x, y, z, len(rows), tx * ty * tz)

    def of_tiles(self, array: jax.Array, heads: int) -> list[jax.Array]:
        """The inverse of :meth:`in_tiles`."""
        (x, y, z), (tx, ty, tz) = self.grid, self.tile
        count = array.shape[-2]
        array = array.reshape(*array.shape[:2], x, y, z, count, tx, ty, tz).transpose(0, 1, 2, 6, 3, 7, 4, 8, 5)
        restored = self.restored(array.reshape(*array.shape[:2], *self.lengths, count), heads)
        return [restored[..., i] for i in range(count)]
