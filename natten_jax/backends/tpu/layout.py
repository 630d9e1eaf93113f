"""Arrays as kernels have them: heads first or packed, three token dimensions, dilation groups apart, whole tiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from natten_jax.backends.tpu.packs import Heads
from natten_jax.native.abi import KERNEL_RANK


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the tokens of one array lie.

    Attributes:
        heads: How heads lie.
        extents: Tokens along each dimension, as the caller has them.
        groups: Dilation groups of each of three dimensions.
        lengths: Tokens of a group along each, padded.
        tile: Tokens of a tile along each.
        before: Tokens of a group along each that are padding before the first.
    """

    heads: Heads
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
        """``[batch, *extents, heads, width]`` as ``[batch * leading, groups, *lengths, width]``.

        Heads that lie side by side are one of their widths together.
        """
        batch, heads = array.shape[0], self.heads.leading
        width = array.shape[-2] * array.shape[-1] // heads
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

    def restored(self, array: jax.Array) -> jax.Array:
        """The inverse of :meth:`laid_out`."""
        heads, width = self.heads.leading, array.shape[-1]
        array = array.reshape(-1, heads, *self.groups, *self.lengths, width).transpose(0, 5, 2, 6, 3, 7, 4, 1, 8)
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        whole = [length * groups for length, groups in zip(self.lengths, self.groups, strict=True)]
        array = array.reshape(array.shape[0], *whole, heads, width)
        inside = (slice(start, start + n) for start, n in zip(self._starts, extents, strict=True))
        array = array[:, *inside]
        return array.reshape(array.shape[0], *self.extents, self.heads.count, -1)

    def in_tiles(self, rows: Sequence[jax.Array]) -> jax.Array:
        """Arrays ``[batch, *extents, heads]`` as one, ``[batch * leading, blocks, groups, *tiles, arrays, rows]``.

        Rows are the tokens of a tile, of each head of a pack.
        """
        count, pack, (x, y, z), (tx, ty, tz) = len(rows), self.heads.pack, self.grid, self.tile
        array = self.laid_out(jnp.stack(rows, axis=-1))
        array = array.reshape(*array.shape[:2], x, tx, y, ty, z, tz, self.heads.blocks, pack, count)
        array = array.transpose(0, 8, 1, 2, 4, 6, 10, 9, 3, 5, 7)
        return array.reshape(*array.shape[:6], count, pack * self.tile_tokens)

    def of_tiles(self, array: jax.Array) -> list[jax.Array]:
        """The inverse of :meth:`in_tiles`."""
        array = array.reshape(*array.shape[:7], self.heads.pack, *self.tile)
        array = array.transpose(0, 2, 3, 8, 4, 9, 5, 10, 1, 7, 6)
        restored = self.restored(array.reshape(*array.shape[:2], *self.lengths, -1))
        return [restored[..., i] for i in range(restored.shape[-1])]
