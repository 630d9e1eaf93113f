"""Arrays as the kernels have them: lines of tokens along the last dimension, of which copies take pieces.

``[batch, x, y, z, heads, width]`` is ``[batch * x * y, z / dilation, columns, block]`` without a copy: a column is a
block of at most 64 elements of a head of a dilation group. The copy engine brings a piece of a line, tokens that stand
``dilation`` apart, as rows of a matrix, and zeros for what lies behind its end. Only a last dimension that is no
multiple of ``dilation`` times :data:`PIECE` tokens is padded, which copies the array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from natten_jax.native.abi import KERNEL_RANK

#: Tokens of a line that the matrix units' layout of shared memory keeps together.
PIECE = 8
#: Most elements of a block.
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Lines:
    """How the tokens of one array lie.

    Attributes:
        batch: Batch entries.
        extents: Tokens along each of three dimensions.
        dilation: Dilation groups of each.
        heads: Heads.
        width: Elements of a head.
    """

    batch: int
    extents: tuple[int, ...]
    dilation: tuple[int, ...]
    heads: int
    width: int

    @classmethod
    def of(cls, array: jax.Array, dilation: Sequence[int]) -> Lines:
        """Those of ``[batch, *extents, heads, width]``."""
        batch, *extents, heads, width = array.shape
        missing = (1,) * (KERNEL_RANK - len(extents))
        return cls(batch, missing + tuple(extents), missing + tuple(dilation), heads, width)

    @property
    def block(self) -> int:
        """Elements of a block."""
        return min(self.width, BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks of a head."""
        return self.width // self.block

    @property
    def length(self) -> int:
        """Tokens of a line that belong to a dilation group, padded to whole pieces."""
        return -(-self.extents[-1] // (self.dilation[-1] * PIECE)) * PIECE

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that kernels get: lines, tokens, columns, elements."""
        x, y, _ = self.extents
        return self.batch * x * y, self.length, self.dilation[-1] * self.heads * self.blocks, self.block

    def laid_out(self, array: jax.Array) -> jax.Array:
        """``[batch, *extents, heads, width]`` as :attr:`shape`."""
        x, y, z = self.extents
        lines = array.reshape(self.batch * x * y, z, self.heads * self.width)
        padding = self.length * self.dilation[-1] - z
        return jnp.pad(lines, [(0, 0), (0, padding), (0, 0)]).reshape(self.shape)

    def restored(self, array: jax.Array, rank: int) -> jax.Array:
        """The inverse of :meth:`laid_out`, for an array of so many token dimensions."""
        lines = array.reshape(array.shape[0], -1, self.heads * self.width)[:, : self.extents[-1]]
        return lines.reshape(self.batch, *self.extents[KERNEL_RANK - rank :], self.heads, self.width)
