"""Exact counts of the tiles and of the query-key pairs that a kernel walks through.

Kernels cut the tokens of one side into *owned* tiles (queries in the forward pass, keys and values in the backward
pass) and stream tiles of the other side past each of them. The mask is separable, so each count is a product over the
dimensions of a sum over the owned tiles of one dimension. With ``[begin, end)`` of the windows of an owned tile's first
and last token, in one dimension:

    hull  = [begin(first), end(last))      some token of the tile sees it: what has to be streamed
    inner = [begin(last), end(first))      every token of the tile sees it: needs no mask
    anchored tiles of t tokens start with the hull:    ceil(|hull| / t) tiles
    aligned tiles lie on a grid from token 0:          ceil(hull.end / t) - floor(hull.begin / t) tiles

A streamed tile inside ``inner`` in every dimension is *whole*. Dilation groups are counted one by one. Where every
streamed tile is whole, the mask is *fully block-sparse*: nothing is masked token by token.

A kernel may split the rows of an owned tile among *row groups* (the warpgroups of the Hopper forward kernel), each of
which judges on its own: it skips a streamed tile that none of its rows sees, and masks one that is not whole for the
smallest box of the owned tile that holds its rows. What a row group does with a streamed tile is a *part* of it.

A tile that some row group masks is no product over the dimensions, but the tiles that a set of row groups sees, and
another one sees whole, are; with the indicators of row group g, no row group masks the tile where

    product over g of (1 - seen_g + whole_g) = 1

whose expansion has one such product per choice of 1, seen or whole for every row group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from natten_jax.axis_tiles import Axis, AxisCounts, Judgement, Placement, Rows, axes_of, axis_counts, judged_tiles
from natten_jax.calibration import Kernel, ordered
from natten_jax.flops import visible_pairs
from natten_jax.passes import Pass, TilePair
from natten_jax.problem import Problem, Shape

_PLACEMENTS = ("anchored", "aligned")


class TimedTiles(NamedTuple):
    """Tiles of one batch element and one head as the time model takes them.

    Attributes:
        owned: Owned tiles.
        streamed: Streamed tiles.
        seen: Their parts that are computed, in tiles.
        masked: Streamed tiles that some row group masks.
    """

    owned: float
    streamed: float
    seen: float
    masked: float


@dataclasses.dataclass(frozen=True)
class TileCounts:
    """Tiles and query-key pairs of one batch element and one head.

    Attributes:
        owned: Tiles that own their tokens: query tiles in the forward, key/value tiles in the backward pass.
        streamed: Tiles that are streamed past them, all together.
        whole: Those of them that need no mask.
        most_streamed: Tiles streamed past the owned tile that has the most of them.
        row_groups: Groups of an owned tile's rows that skip and mask streamed tiles on their own.
        seen_parts: Parts of streamed tiles that are not skipped, of ``row_groups * streamed``.
        whole_parts: Those of them that need no mask.
        masked: Streamed tiles that some row group masks.
        visible_pairs: Query-key pairs that the mask leaves: the work.
        hull_pairs: Pairs of tokens in the tiles: work and what is masked.
        streamed_pairs: Pairs in the tiles, padding included.
        executed_pairs: Pairs that are computed: those of parts that are not skipped.
    """

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    row_groups: int
    seen_parts: int
    whole_parts: int
    masked: int
    visible_pairs: int
    hull_pairs: int
    streamed_pairs: int
    executed_pairs: int

    @property
    def tiles(self) -> TimedTiles:
        """What the time model sees of them."""
        return TimedTiles(self.owned, self.streamed, self.seen_parts / self.row_groups, self.masked)

    @property
    def streamed_per_owned(self) -> float:
        """Streamed tiles per owned tile, on average."""
        return self.streamed / self.owned

    @property
    def whole_share(self) -> float:
        """Share of what is computed of the streamed tiles that needs no mask."""
        return self.whole_parts / self.seen_parts if self.seen_parts else 1.0

    @property
    def is_fully_block_sparse(self) -> bool:
        """Whether no tile needs a mask."""
        return self.whole == self.streamed

    @property
    def computed_share(self) -> float:
        """Share of the streamed tiles that is computed and not skipped."""
        return self.executed_pairs / self.streamed_pairs

    @property
    def masked_share(self) -> float:
        """Share of the streamed pairs that the mask hides."""
        return (self.hull_pairs - self.visible_pairs) / self.streamed_pairs

    @property
    def padding_share(self) -> float:
        """Share of the streamed pairs that lies outside of the tokens or of the hull."""
        return (self.streamed_pairs - self.hull_pairs) / self.streamed_pairs

    @property
    def wasted_share(self) -> float:
        """Share of the executed pairs that is masked or padding."""
        return 1 - self.visible_pairs / self.executed_pairs


def count_tiles(
    problem: Problem,
    pair: TilePair,
    pass_: Pass = "forward",
    *,
    placement: Placement = "anchored",
    kernel: Kernel | None = None,
) -> TileCounts:
    """Count the tiles of a pass exactly, for one batch element and one head.

    Args:
        problem: The problem.
        pair: Query and key/value tile shape, with one extent per token dimension.
        pass_: The pass.
        placement: ``"anchored"``: streamed tiles start at the first token that the owned tile needs.
            ``"aligned"``: they lie on a grid that starts at token 0 (of each dilation group).
        kernel: The kernel that executes them; without one, tiles are executed as large as they are.

    Raises:
        ValueError: A tile does not have one positive extent per dimension, ``placement`` is unknown, or a dimension is
            too long to be counted.
    """
    check_tiles(problem, pair, placement)
    owned_tile, streamed_tile = ordered(pair, pass_)
    axes = list(zip(axes_of(problem), owned_tile, streamed_tile, strict=True))
    counts = [axis_counts(axis, owned, streamed, placement, pass_) for axis, owned, streamed in axes]
    owned, streamed, whole, most, hull = (math.prod(values) for values in zip(*counts, strict=True))
    tokens = math.prod(owned_tile), math.prod(streamed_tile)
    row_groups, parts = 1, Parts(streamed, whole, streamed - whole)
    fills = kernel is None or tokens[1] == kernel.streamed_tokens
    if kernel is not None:
        row_groups, parts = kernel.row_groups, part_counts(axes, placement, pass_, kernel)
        whole = whole if fills else 0
        tokens = kernel.owned_tokens, kernel.streamed_tokens
    if problem.additional_kv:
        additional = additional_counts(problem, owned, streamed_tile, tokens, pass_)
        additional_whole = additional.whole if fills or pass_ == "forward" else 0
        owned += additional.owned
        streamed += additional.streamed
        whole += additional_whole
        parts = parts.plus(row_groups, additional.streamed, additional_whole)
        most = most + additional.most_streamed if pass_ == "forward" else max(most, additional.most_streamed)
        hull += additional.hull_pairs
    pairs = tokens[0] * tokens[1]
    return TileCounts(
        owned=owned,
        streamed=streamed,
        whole=whole,
        most_streamed=most,
        row_groups=row_groups,
        seen_parts=parts.seen,
        whole_parts=parts.whole,
        masked=parts.masked,
        visible_pairs=visible_pairs(problem),
        hull_pairs=hull,
        streamed_pairs=streamed * pairs,
        executed_pairs=parts.seen * pairs // row_groups,
    )


class Parts(NamedTuple):
    """What row groups make of streamed tiles: their parts that are seen and whole, tiles that some row group masks."""

    seen: int
    whole: int
    masked: int

    def plus(self, row_groups: int, streamed: int, whole: int) -> Parts:
        """With more tiles, which every row group sees, and of which ``whole`` need no mask."""
        return Parts(self.seen + row_groups * streamed, self.whole + row_groups * whole, self.masked + streamed - whole)


def check_tiles(problem: Problem, pair: TilePair, placement: Placement) -> None:
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}, got {placement!r}")
    for name, tile in zip(("query", "key/value"), pair, strict=True):
        if len(tile) != problem.rank or min(tile) < 1:
            raise ValueError(
                f"the {name} tile must have {problem.rank} positive extent(s), one per token dimension, got {tile}"
            )


@functools.lru_cache(maxsize=1 << 10)
def row_boxes(owned_tile: Shape, rows: int, row_groups: int) -> tuple[tuple[Rows, ...], ...]:
    """Of each group of ``rows``, the smallest box of the owned tile that holds them; a group without has the last."""
    tokens = math.prod(owned_tile)
    boxes = []
    for group in range(row_groups):
        first, last = min(rows * group, tokens - 1), min(rows * (group + 1), tokens) - 1
        box: list[Rows] = []
        is_line = True  # first and last row agree in the dimensions before
        for extent, inner in zip(owned_tile, _inner_sizes(owned_tile), strict=True):
            box.append((first // inner % extent, last // inner % extent) if is_line else (0, extent - 1))
            is_line = is_line and box[-1][0] == box[-1][1]
        boxes.append(tuple(box))
    return tuple(boxes)


def _inner_sizes(tile: Shape) -> list[int]:
    return [math.prod(tile[dim + 1 :]) for dim in range(len(tile))]


def part_counts(axes: Sequence[tuple[Axis, int, int]], placement: Placement, pass_: Pass, kernel: Kernel) -> Parts:
    """What a kernel's row groups make of the tiles; of every dimension its axis, owned and streamed extent are given.

    A streamed tile that does not fill the kernel's is masked where it ends.
    """
    row_groups = kernel.row_groups
    boxes = row_boxes(tuple(owned for _, owned, _ in axes), kernel.owned_tokens // row_groups, row_groups)
    of_axes = (
        judged_tiles(*each, placement, pass_, rows) for each, rows in zip(axes, zip(*boxes, strict=True), strict=True)
    )
    judged = functools.reduce(np.multiply, of_axes)
    fills = math.prod(streamed for *_, streamed in axes) == kernel.streamed_tokens
    seen, whole, unmasked = _weights(row_groups, fills)
    return Parts(int(seen @ judged), int(whole @ judged), int(judged[0] - unmasked @ judged))


@functools.cache
def _weights(row_groups: int, fills: bool) -> tuple[Any, Any, Any]:
    """Of the entries of :func:`judged_tiles`: in seen parts, in whole parts, in tiles that no row group masks."""
    judgements = np.array(list(itertools.product(Judgement, repeat=row_groups)))
    is_single = np.count_nonzero(judgements != Judgement.ANYTHING, axis=1) == 1
    seen, whole = (is_single & np.any(judgements == each, axis=1) for each in (Judgement.SEEN, Judgement.WHOLE))
    unmasked = np.prod(np.choose(judgements, (1, -1, int(fills))), axis=1)
    return seen.astype(np.int64), (whole & fills).astype(np.int64), unmasked


def additional_counts(
    problem: Problem, owned: int, streamed_tile: Shape, tokens: tuple[int, int], pass_: Pass
) -> AxisCounts:
    """What additional tokens come to beside ``owned`` tiles, executed by tiles of ``tokens``."""
    queries = math.prod(problem.query_layout)
    hull_pairs = queries * problem.additional_kv
    if pass_ == "forward":
        tiles, whole = -(-problem.additional_kv // tokens[1]), problem.additional_kv // tokens[1]
        return AxisCounts(0, owned * tiles, owned * whole, tiles, hull_pairs)
    # Every tile of them reads the query layout from its first token on, whatever the dilation.
    tiles, full = -(-problem.additional_kv // tokens[0]), problem.additional_kv // tokens[0]
    extents = list(zip(problem.query_layout, streamed_tile, strict=True))
    streamed = math.prod(-(-extent // tile) for extent, tile in extents)
    whole = math.prod(extent // tile for extent, tile in extents)
    return AxisCounts(tiles, tiles * streamed, full * whole, streamed, hull_pairs)
