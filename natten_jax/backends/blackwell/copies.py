"""Tiles of tokens between the arrays and shared memory, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import Pieces, Scalar, line_of
from natten_jax.backends.blackwell.layout import PIECE, Lines


class Place(NamedTuple):
    """Where a tile lies: batch entry, dilation group, first token inside the group, and column."""

    batch: Scalar
    group: Sequence[Scalar]
    first: Sequence[Scalar]
    column: Scalar


def copy_in(lines: Lines, pieces: Pieces, place: Place, source: Any, tile: Any, barrier: Any) -> None:
    """Copy a tile of tokens into shared memory, ``[blocks, tokens, block]``.

    Args:
        lines: How the tokens lie.
        pieces: The tile.
        place: Where it lies.
        source: Reference to the array.
        tile: Reference to shared memory.
        barrier: Who waits for it.
    """

    def copy(piece: Scalar, none: None) -> None:
        line, rows = line_of(lines, place.batch, _outer_tokens(lines, pieces, place, piece)), _rows(pieces, piece)
        for block in range(lines.blocks):
            plgpu.copy_gmem_to_smem(
                source.at[line, _tokens(pieces, place), place.column + block], tile.at[block, rows], barrier
            )

    jax.lax.fori_loop(0, pieces.count, copy, None)


def copy_out(lines: Lines, pieces: Pieces, place: Place, blocks: dict[int, Any], target: Any) -> None:
    """Begin to copy a tile out of shared memory, where there are tokens.

    Args:
        lines: How the tokens lie.
        pieces: The tile.
        place: Where it lies.
        blocks: References to shared memory, ``[tokens, block]``, by number of the block.
        target: Reference to the array.
    """

    def copy(piece: Scalar, none: None) -> None:
        x, y = _outer_tokens(lines, pieces, place, piece)
        rows = _rows(pieces, piece)

        @pl.when((x < lines.extents[0]) & (y < lines.extents[1]) & (place.first[-1] < lines.length))
        def _() -> None:
            line = line_of(lines, place.batch, (x, y))
            for block, tile in blocks.items():
                plgpu.copy_smem_to_gmem(tile.at[rows], target.at[line, _tokens(pieces, place), place.column + block])

    jax.lax.fori_loop(0, pieces.count, copy, None)


def _outer_tokens(lines: Lines, pieces: Pieces, place: Place, piece: Scalar) -> list[Scalar]:
    """The tokens of a piece's line along all dimensions but the last."""
    at = pieces.place(piece)
    return [g + (f + a) * d for g, f, a, d in zip(place.group, place.first, at, lines.dilation, strict=False)]


def _rows(pieces: Pieces, piece: Scalar) -> Any:
    """The rows of a piece in the tile."""
    return pl.ds(piece * pieces.tokens, pieces.tokens)


def _tokens(pieces: Pieces, place: Place) -> Any:
    """The tokens of a piece in its line: a multiple of :data:`PIECE`, which the product shows to the compiler."""
    return pl.ds(jax.lax.div(place.first[-1], np.int32(PIECE)) * PIECE, pieces.tokens)
