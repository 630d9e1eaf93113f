"""Inner tiles by what the row groups of a kernel do with them, each on its own.

A kernel may split the rows of an outer tile among *row groups* (the warpgroups of the Hopper forward kernel), each of
which judges on its own: it skips an inner tile that none of its rows sees, and masks one that is not full for the
smallest box of the outer tile that holds its rows. What a row group does with an inner tile is a *part* of it.

A tile that some row group masks is no product over the dimensions, but the tiles that a set of row groups sees, and
another one finds full, are; with the indicators of row group g, no row group masks the tile where

    product over g of (1 - seen_g + full_g) = 1

whose expansion has one such product per choice of 1, seen or full for every row group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from natten_jax.cost.axis_tiles import Judgement, Placement, Rows, judged_tiles
from natten_jax.cost.calibration import Kernel
from natten_jax.performance import Pass
from natten_jax.problem import Shape
from natten_jax.windows import Axis


class RowGroupCounts(NamedTuple):
    """What row groups make of inner tiles: a number, or an array with an entry for every shape of inner tiles.

    Attributes:
        inner: Inner tiles, all together.
        seen: Their parts that are not skipped.
        full: Parts that are seen and need no mask.
        partial: Inner tiles that some row group masks.
    """

    inner: Any
    seen: Any
    full: Any
    partial: Any

    def plus(self, row_groups: int, inner: Any, full: Any) -> RowGroupCounts:
        """With more inner tiles, which every row group sees, and of which ``full`` need no mask."""
        return RowGroupCounts(
            self.inner + inner,
            self.seen + row_groups * inner,
            self.full + row_groups * full,
            self.partial + inner - full,
        )


def part_counts(
    axes: Sequence[Axis],
    outer_tile: Shape,
    inner_tiles: tuple[Shape, ...],
    placement: Placement,
    pass_: Pass,
    kernel: Kernel,
) -> RowGroupCounts:
    """What a kernel's row groups make of inner tiles of several shapes, all of as many tokens.

    An inner tile that does not fill the kernel's is masked where it ends.

    Returns:
        Arrays with an entry for every shape, of int64 where float64 holds them exactly, too, and else of Python's
        integers.
    """
    row_groups = kernel.row_groups
    boxes = _row_boxes(outer_tile, kernel.outer_tokens // row_groups, row_groups)
    of_axes = []
    for axis, outer, extents, rows in zip(
        axes, outer_tile, _extents(inner_tiles), zip(*boxes, strict=True), strict=True
    ):
        table = judged_tiles(axis, outer, extents.values, placement, pass_, rows)
        of_axes.append(table[extents.numbers])
    judged = functools.reduce(np.multiply, of_axes)
    seen, full, unmasked = _weights(row_groups, math.prod(inner_tiles[0]) == kernel.inner_tokens)
    inner = judged[:, 0]
    return RowGroupCounts(inner, judged @ seen, judged @ full, inner - judged @ unmasked)


class _Extents(NamedTuple):
    """Distinct extents of the inner tiles in one dimension, and which of them each tile has."""

    values: tuple[int, ...]
    numbers: Any


@functools.lru_cache(maxsize=1 << 10)
def _extents(inner_tiles: tuple[Shape, ...]) -> tuple[_Extents, ...]:
    of_dimensions = []
    for extents in zip(*inner_tiles, strict=True):
        values = tuple(sorted(set(extents)))
        of_dimensions.append(_Extents(values, np.array([values.index(each) for each in extents])))
    return tuple(of_dimensions)


@functools.lru_cache(maxsize=1 << 10)
def _row_boxes(outer_tile: Shape, rows: int, row_groups: int) -> tuple[tuple[Rows, ...], ...]:
    """For every group of ``rows``, the smallest box of the outer tile that holds them; past its end, the last row's."""
    tokens = math.prod(outer_tile)
    boxes = []
    for group in range(row_groups):
        first, last = min(rows * group, tokens - 1), min(rows * (group + 1), tokens) - 1
        box: list[Rows] = []
        is_line = True  # first and last row agree in the dimensions before
        for dim, extent in enumerate(outer_tile):
            step = math.prod(outer_tile[dim + 1 :])  # rows to the next token of the dimension
            box.append((first // step % extent, last // step % extent) if is_line else (0, extent - 1))
            is_line = is_line and box[-1][0] == box[-1][1]
        boxes.append(tuple(box))
    return tuple(boxes)


@functools.cache
def _weights(row_groups: int, fills: bool) -> tuple[Any, Any, Any]:
    """Weights of the entries of :func:`judged_tiles` in sums: seen parts, full parts, tiles that no row group masks."""
    judgements = np.array(list(itertools.product(Judgement, repeat=row_groups)))
    is_single = np.count_nonzero(judgements != Judgement.ANYTHING, axis=1) == 1
    seen, full = (is_single & np.any(judgements == each, axis=1) for each in (Judgement.SEEN, Judgement.FULL))
    unmasked = np.prod(np.choose(judgements, (1, -1, int(fills))), axis=1)
    return seen.astype(np.int64), (full & fills).astype(np.int64), unmasked
