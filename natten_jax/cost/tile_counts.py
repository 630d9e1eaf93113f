"""Exact counts of the tiles and of the query-key pairs that a kernel walks through.

A thread block owns an *outer* tile of one side's tokens (queries in the forward pass, keys and values in the backward
pass) and goes over *inner* tiles of the other side. The mask is separable, so each count is a product over the
dimensions of a sum over the outer tiles of one dimension. With ``[begin, end)`` of the windows of an outer tile's first
and last token, in one dimension:

    hull = [begin(first), end(last))       some token of the tile sees it: what inner tiles have to hold
    core = [begin(last), end(first))       every token of the tile sees it: needs no mask
    anchored tiles of t tokens start with the hull:    ceil(|hull| / t) tiles
    aligned tiles lie on a grid from token 0:          ceil(hull.end / t) - floor(hull.begin / t) tiles

An inner tile inside ``core`` in every dimension is *full*, another one *partial*. Dilation groups are counted one by
one. Where every inner tile is full, the mask is *fully block-sparse*: nothing is masked token by token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from natten_jax.cost.axis_tiles import AxisCounts, Placement, axis_counts
from natten_jax.cost.calibration import Kernel
from natten_jax.cost.row_groups import RowGroupCounts, part_counts
from natten_jax.cost.work import visible_pairs
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem, Shape

_PLACEMENTS = ("anchored", "aligned")


class TimedTiles(NamedTuple):
    """Tiles of one batch element and one head as the time model takes them.

    Each is a number, or an array with an entry for every pair of tiles.

    Attributes:
        outer: Outer tiles.
        inner: Inner tiles, all together.
        seen: Their parts that are computed, in tiles.
        partial: Inner tiles that some row group masks.
    """

    outer: Any
    inner: Any
    seen: Any
    partial: Any


@dataclasses.dataclass(frozen=True)
class TileCounts:
    """Tiles and query-key pairs of one batch element and one head.

    Attributes:
        outer: Outer tiles: query tiles in the forward, key/value tiles in the backward pass.
        inner: Inner tiles that are visited, all together.
        full: Those of them that need no mask.
        most_inner: Inner tiles of the outer tile that has the most of them.
        row_groups: Groups of an outer tile's rows that skip and mask inner tiles on their own.
        seen_parts: Parts of inner tiles that are not skipped, of ``row_groups * inner``.
        full_parts: Those of them that need no mask.
        partial: Inner tiles that some row group masks.
        visible_pairs: Query-key pairs that the mask leaves: the work.
        hull_pairs: Pairs of tokens in the tiles: work and what is masked.
        visited_pairs: Pairs in the tiles, padding included.
        executed_pairs: Pairs that are computed: those of parts that are not skipped.
    """

    outer: int
    inner: int
    full: int
    most_inner: int
    row_groups: int
    seen_parts: int
    full_parts: int
    partial: int
    visible_pairs: int
    hull_pairs: int
    visited_pairs: int
    executed_pairs: int

    @property
    def tiles(self) -> TimedTiles:
        """What the time model sees of them."""
        return TimedTiles(self.outer, self.inner, self.seen_parts / self.row_groups, self.partial)

    @property
    def inner_per_outer(self) -> float:
        """Inner tiles per outer tile, on average."""
        return self.inner / self.outer

    @property
    def full_share(self) -> float:
        """Share of what is computed of the inner tiles that needs no mask."""
        return self.full_parts / self.seen_parts if self.seen_parts else 1.0

    @property
    def is_fully_block_sparse(self) -> bool:
        """Whether no tile needs a mask."""
        return self.full == self.inner

    @property
    def computed_share(self) -> float:
        """Share of the inner tiles that is computed and not skipped."""
        return self.executed_pairs / self.visited_pairs

    @property
    def masked_share(self) -> float:
        """Share of the visited pairs that the mask hides."""
        return (self.hull_pairs - self.visible_pairs) / self.visited_pairs

    @property
    def padding_share(self) -> float:
        """Share of the visited pairs that lies outside of the tokens or of the hull."""
        return (self.visited_pairs - self.hull_pairs) / self.visited_pairs

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

    Example:
        >>> from natten_jax import simulator
        >>> problem = simulator.problem_of((256, 256), kernel_size=80, stride=16)
        >>> counts = simulator.count_tiles(problem, ((16, 8), (16, 8)))
        >>> counts.inner_per_outer, counts.is_fully_block_sparse
        (50.0, True)

    Args:
        problem: The problem.
        pair: Query and key/value tile shape, with one extent per token dimension.
        pass_: The pass.
        placement: ``"anchored"``: inner tiles start at the first token that the outer tile needs.
            ``"aligned"``: they lie on a grid that starts at token 0 (of each dilation group).
        kernel: The kernel that executes them; without one, tiles are executed as large as they are.

    Raises:
        ValueError: A tile does not have one positive extent per dimension, ``placement`` is unknown, or a dimension is
            too long to be counted.
    """
    check_tiles(problem, pair, placement)
    outer_tile, inner_tile = outer_and_inner(pair, pass_)
    axes = problem.axes
    counts = [axis_counts(*each, placement, pass_) for each in zip(axes, outer_tile, inner_tile, strict=True)]
    outer, inner, full, most, hull = (math.prod(values) for values in zip(*counts, strict=True))
    tokens = math.prod(outer_tile), math.prod(inner_tile)
    row_groups, parts = 1, RowGroupCounts(inner, inner, full, inner - full)
    fills = kernel is None or tokens[1] == kernel.inner_tokens
    if kernel is not None:
        counted = part_counts(axes, outer_tile, (inner_tile,), placement, pass_, kernel)
        row_groups, parts = kernel.row_groups, RowGroupCounts(*(int(each[0]) for each in counted))
        full = full if fills else 0
        tokens = kernel.outer_tokens, kernel.inner_tokens
    if problem.additional_kv:
        additional = additional_counts(problem, outer, inner_tile, tokens, pass_)
        additional_full = additional.full if fills or pass_ == "forward" else 0
        outer += additional.outer
        full += additional_full
        parts = parts.plus(row_groups, additional.inner, additional_full)
        most = most + additional.most_inner if pass_ == "forward" else max(most, additional.most_inner)
        hull += additional.hull_pairs
    pairs = tokens[0] * tokens[1]
    return TileCounts(
        outer=outer,
        inner=parts.inner,
        full=full,
        most_inner=most,
        row_groups=row_groups,
        seen_parts=parts.seen,
        full_parts=parts.full,
        partial=parts.partial,
        visible_pairs=visible_pairs(problem),
        hull_pairs=hull,
        visited_pairs=parts.inner * pairs,
        executed_pairs=parts.seen * pairs // row_groups,
    )


def check_tiles(problem: Problem, pair: TilePair, placement: Placement) -> None:
    """Refuse what has no counts.

    Raises:
        ValueError: A tile does not have one positive extent per dimension, or ``placement`` is unknown.
    """
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}, got {placement!r}")
    for name, tile in zip(("query", "key/value"), pair, strict=True):
        if len(tile) != problem.rank or min(tile) < 1:
            raise ValueError(
                f"the {name} tile must have {problem.rank} positive extent(s), one per token dimension, got {tile}"
            )


def additional_counts(
    problem: Problem, outer: int, inner_tile: Shape, tokens: tuple[int, int], pass_: Pass
) -> AxisCounts:
    """What additional tokens come to beside ``outer`` tiles, executed by outer and inner tiles of ``tokens``."""
    queries = math.prod(problem.query_layout)
    hull_pairs = queries * problem.additional_kv
    if pass_ == "forward":
        tiles, full = -(-problem.additional_kv // tokens[1]), problem.additional_kv // tokens[1]
        return AxisCounts(0, outer * tiles, outer * full, tiles, hull_pairs)
    # Every tile of them reads the query layout from its first token on, whatever the dilation.
    tiles, full = -(-problem.additional_kv // tokens[0]), problem.additional_kv // tokens[0]
    extents = list(zip(problem.query_layout, inner_tile, strict=True))
    inner = math.prod(-(-extent // tile) for extent, tile in extents)
    inner_full = math.prod(extent // tile for extent, tile in extents)
    return AxisCounts(tiles, tiles * inner, full * inner_full, inner, hull_pairs)
