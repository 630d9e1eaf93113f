"""Exact counts of the work of a pass: visible query-key pairs, operations, bytes, and visited tiles.

In the forward pass, a thread block owns an *outer* tile of queries and loops over *inner* tiles of keys and values. In
the backward pass, the outer tile has keys and values, and the inner tiles have queries. The mask is separable, so each
count is a product with one factor per dimension, and each factor is a sum over the outer tiles along this dimension.

Consider one dimension and one outer tile. Let ``[begin(t), end(t))`` be the tokens that token ``t`` of the tile sees
(in the backward pass: the queries that see key ``t``). Let ``first`` and ``last`` be the first and the last token of
the tile. Then:

    hull = [begin(first), end(last))       seen by at least one token of the tile: inner tiles must cover it
    core = [begin(last), end(first))       seen by every token of the tile: needs no mask
    anchored tiles of t tokens start at hull.begin:    ceil(|hull| / t) tiles
    aligned tiles lie on a grid from token 0:          ceil(hull.end / t) - floor(hull.begin / t) tiles

An inner tile that is inside ``core`` in every dimension is *full*. Any other inner tile is *partial* and needs a mask.
If every inner tile is full, the mask is *fully block-sparse*. Each dilation group has separate tiles.

A kernel may divide the rows of an outer tile among *row groups* (the warpgroups of the Hopper forward kernel). A row
group skips an inner tile if no row of the group sees the tile. The group masks every other inner tile, unless the inner
tile is full for the bounding box of the group's rows. A *part* is the work of one row group on one inner tile.

The number of inner tiles that at least one row group masks is not a product over the dimensions. But this number is a
sum of such products. For an inner tile, let seen_g be 1 if row group g sees the tile, and full_g be 1 if the tile is
full for g. Otherwise they are 0. No row group masks the tile if

    product over g of (1 - seen_g + full_g) = 1

In each term of the expanded product, every row group contributes 1, -seen_g or full_g. The term is nonzero for the
inner tiles that one set of row groups sees and that are full for another set. The number of these tiles is a product
over the dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from natten_jax.arguments.names import check_types, checked_pair
from natten_jax.cost_model.calibration import Kernel
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

Placement = Literal["anchored", "aligned"]

#: Maximum number of tiles along a dimension. Dimensions with more tiles are rejected.
MAX_TILES = 1 << 20
#: Maximum number of tokens of a dilation group when tiles are ranked. Longer groups are shortened to this number.
_RANKED_TOKENS = 1 << 17
#: Tokens per tile that the limit ``MAX_TILES`` assumes if visible pairs are counted without tiles.
_COMMON_TILE = 128
#: Maximum number of tiles or tokens in a NumPy array.
_CHUNK = 1 << 14
#: If integers are smaller than this number, products of three of them, and sums of a few such products, are exact in
#: float64.
_SMALL_ENTRY = 1 << 17

#: Requirements on an inner tile for one row group: no requirement; the row group sees the tile; the tile is full for
#: the row group.
_ANY, _SEEN, _FULL = range(3)

#: First and last coordinate of a row group's rows inside an outer tile, in one dimension.
Rows = tuple[int, int]


def check_countable(tokens: int, tile: int) -> None:
    """Reject a dimension that has too many tiles to count.

    Raises:
        ValueError: There are more than ``2**20`` tiles.
    """
    tiles = -(-tokens // tile)
    if tiles > MAX_TILES:
        raise ValueError(f"{tokens} tokens have {tiles} tiles of {tile}, which are too many to simulate: at most 2**20")


def has_longer_groups(problem: Problem, tokens: int) -> bool:
    """Return True if some dilation group of a dimension has more than the given number of tokens."""
    return any(max(axis.query_extent, axis.kv_extent) > tokens * axis.dilation for axis in problem.axes)


def shortened(problem: Problem) -> Problem:
    """Return the problem with long dimensions shortened, so that ranking tiles takes only a fraction of a second.

    Dilation groups are shortened to at most ``2**17`` tokens. This hardly changes the order of the tiles.
    """
    if not has_longer_groups(problem, _RANKED_TOKENS):
        return problem
    axes = []
    for axis in problem.axes:
        max_inner = _RANKED_TOKENS * axis.dilation
        short = axis.within(min(axis.query_extent, max_inner), min(axis.kv_extent, max_inner))
        axes.append(dataclasses.replace(short, kernel_size=int(short.kernel_size), stride=int(short.stride)))
    return dataclasses.replace(problem, axes=tuple(axes))


def visible_pairs(problem: Problem) -> int:
    """Count the visible query-key pairs of one batch entry and head.

    Raises:
        ValueError: A dimension is too long to count.
    """
    pairs = math.prod(map(_visible_pairs_of_axis, problem.axes))
    return pairs + math.prod(problem.query_layout) * problem.additional_kv


@functools.lru_cache(maxsize=1024)
def _visible_pairs_of_axis(axis: Axis) -> int:
    pairs = 0
    for groups, queries, keys in axis.dilation_groups():
        if not axis.is_causal and axis.edges != "cut":  # every window has exactly kernel_size keys
            pairs += groups * queries * axis.kernel_size
            continue
        check_countable(queries, _COMMON_TILE)
        for index in _chunks(queries):
            start, end = axis.bounds(index, (queries, keys))
            pairs += groups * int((end - start).sum())
    return pairs


def _chunks(count: int) -> Iterator[Any]:
    """Yield the integers from 0 to ``count - 1`` in arrays of limited size."""
    for first in range(0, count, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, count))


def all_pairs(problem: Problem) -> int:
    """Return the number of all query-key pairs, visible or masked, of one batch entry and head."""
    return math.prod(problem.query_layout) * (math.prod(problem.kv_layout) + problem.additional_kv)


def flops(problem: Problem, pass_: Pass) -> int:
    """Return the floating-point operations of a pass: matrix products on visible pairs, in all entries and heads.

    Args:
        problem: The problem.
        pass_: The forward pass has two matrix products, one of width ``head_dim`` and one of width ``head_dim_v``. The
            backward pass has five, which are counted as 2.5 times the operations of the forward pass. This count is
            exact if ``head_dim`` equals ``head_dim_v``.
    """
    width = problem.head_dim + problem.head_dim_v
    operations = problem.batch * problem.heads * width * visible_pairs(problem)
    return 2 * operations if pass_ == "forward" else 5 * operations


def least_bytes(problem: Problem, pass_: Pass) -> int:
    """Return the bytes of the inputs and results of a pass."""
    queries, keys = math.prod(problem.query_layout), math.prod(problem.kv_layout) + problem.additional_kv
    elements = queries * problem.heads * problem.head_dim
    elements += keys * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
    out = queries * problem.heads * problem.head_dim_v * ELEMENT_TYPES[problem.output_dtype].bytes
    once = problem.batch * (elements * problem.element.bytes + out)
    logsumexp = problem.batch * problem.heads * queries * ELEMENT_TYPES[problem.element.accumulator].bytes
    # The backward pass reads all arrays and the gradient of the output, and writes a gradient for every input.
    return (once if pass_ == "forward" else 2 * once) + logsumexp


class ClassifiedTiles(NamedTuple):
    """Tile counts of one dimension, summed over its dilation groups.

    Attributes:
        outer: Number of outer tiles.
        classified: ``[len(inner_tiles), 3 ** len(rows)]``. Number of inner tiles that meet each combination of
            requirements. A combination has one requirement (``_ANY``, ``_SEEN`` or ``_FULL``) per row group.
            Combinations have the order of ``itertools.product``. The elements are int64 if products over dimensions are
            exact in float64, otherwise Python ints.
        most_inner: Maximum number of inner tiles that an outer tile visits.
        hull_pairs: Number of pairs of a token of an outer tile and a token of this tile's hull.
    """

    outer: int
    classified: Any
    most_inner: int
    hull_pairs: int


@functools.lru_cache(maxsize=1 << 14)
def classified_tiles(
    axis: Axis, outer_tile: int, inner_tiles: tuple[int, ...], placement: Placement, pass_: Pass, rows: tuple[Rows, ...]
) -> ClassifiedTiles:
    """Count the inner tiles along a dimension that meet each combination of requirements (:class:`ClassifiedTiles`).

    ``rows`` has one entry per row group: the coordinates of the group's rows inside an outer tile.

    Raises:
        ValueError: The dimension has too many tiles.
    """
    classified: Any = np.zeros((3 ** len(rows), len(inner_tiles)), object)
    outer = max_inner = hull_pairs = 0
    for groups, queries, keys in axis.dilation_groups():
        tokens, inner_tokens = (queries, keys) if pass_ == "forward" else (keys, queries)
        tile = min(outer_tile, tokens)
        check_countable(tokens, tile)
        check_countable(inner_tokens, min(inner_tiles))
        tiles = -(-tokens // tile)
        outer += groups * tiles
        extents = np.minimum(inner_tiles, inner_tokens + 1)[:, np.newaxis]
        offsets = np.array([0, tile - 1, *itertools.chain(*rows)])[:, np.newaxis]
        for numbers in _chunks(tiles):
            first = numbers * tile
            last = np.minimum(first + tile, tokens) - 1
            index = np.minimum(first + offsets, last)  # rows after the last token count as the last token
            begin, end = axis.bounds(index, (queries, keys), of_query=pass_ == "forward")
            counts = _count_classified(begin, np.minimum(end, inner_tokens), end, extents, placement)
            classified += groups * counts.sum(axis=-1).astype(object)
            max_inner = max(max_inner, int(counts[0].max()))
            hull = np.maximum(end[1] - begin[0], 0)
            hull_pairs += groups * int((hull * (last - first + 1)).sum())
    classified = classified.T if classified.max() >= _SMALL_ENTRY else classified.T.astype(np.int64)
    return ClassifiedTiles(outer, classified, max_inner, hull_pairs)


def _count_classified(begin: Any, core_end: Any, end: Any, extents: Any, placement: Placement) -> Any:
    """Count the inner tiles of each outer tile that meet each combination of requirements.

    Args:
        begin: ``[2 + 2 * row_groups, outer tiles]``. First token that each of the following rows sees: the first and
            the last row of the outer tile, then the first and the last row of each row group.
        core_end: Like ``end``, but at most the end of the dimension, even if the dimension wraps.
        end: End of the tokens that each of these rows sees, with the shape of ``begin``.
        extents: ``[inner_tiles, 1]``. Candidate extents of an inner tile.
        placement: Position of the inner tiles, as in :func:`count_tiles`.

    Returns:
        ``[3 ** row_groups, inner_tiles, outer tiles]``.
    """
    origin = begin[0] if placement == "anchored" else 0
    begins, ends = np.full((1, 1, 1), np.iinfo(np.int64).min), np.full((1, 1, 1), np.iinfo(np.int64).max)
    for low, high in zip(range(2, len(begin), 2), range(3, len(begin), 2), strict=True):
        # Range of the inner tiles that overlap the hull, and range of the inner tiles that the row group sees.
        seen_begin, seen_end = begin[[0, low], np.newaxis], end[[1, high], np.newaxis]
        holding_begin = (seen_begin - origin) // extents
        holding_end = np.where(seen_end > seen_begin, -((origin - seen_end) // extents), holding_begin)
        # Range of the inner tiles that are full for the row group: each of its rows sees all tokens of the tile.
        full_begin, full_end = -((origin - begin[high]) // extents), (core_end[low] - origin) // extents
        group_begins = np.concatenate([holding_begin, full_begin[np.newaxis]])
        group_ends = np.concatenate([holding_end, full_end[np.newaxis]])
        begins = np.maximum(begins[:, np.newaxis], group_begins).reshape(-1, *group_begins.shape[1:])
        ends = np.minimum(ends[:, np.newaxis], group_ends).reshape(-1, *group_ends.shape[1:])
    return np.maximum(ends - begins, 0)


class PartCounts(NamedTuple):
    """Tile counts for all row groups. Each attribute is a number, or an array with one entry per inner tile shape.

    The attributes have the same meaning as in :class:`TileCounts`.
    """

    outer: Any
    inner: Any
    full: Any
    seen_parts: Any
    full_parts: Any
    partial: Any
    most_inner: Any
    hull_pairs: Any


def part_counts(
    problem: Problem,
    outer_tile: Shape,
    inner_tiles: tuple[Shape, ...],
    placement: Placement,
    pass_: Pass,
    kernel: Kernel,
) -> PartCounts:
    """Count the tiles and parts that a kernel visits, skips and masks, for each of several inner tile shapes.

    All these shapes have the same number of tokens. If the kernel is compiled for an inner tile with more tokens, it
    masks the padding, so that no inner tile is full.
    """
    row_groups = kernel.row_groups
    boxes = _row_boxes(outer_tile, kernel.outer_tokens // row_groups, row_groups)
    extents_of_axes = _distinct_extents(inner_tiles)
    outer = most_inner = hull_pairs = 1
    classified: Any = np.ones((1, 1), np.int64)
    for axis, tile, (extents, numbers), rows in zip(problem.axes, outer_tile, extents_of_axes, boxes, strict=True):
        distinct = tuple(dict.fromkeys(rows))
        counts = classified_tiles(axis, tile, extents, placement, pass_, distinct)
        classified = classified * counts.classified[numbers][:, _strictest(tuple(map(distinct.index, rows)))]
        outer *= counts.outer
        most_inner *= counts.most_inner
        hull_pairs *= counts.hull_pairs
    weights = _weights(row_groups, math.prod(inner_tiles[0]) == kernel.inner_tokens)
    parts = PartCounts._make([outer, *(classified @ weights).T, most_inner, hull_pairs])
    if not problem.additional_kv:
        return parts
    extra = PartCounts(*np.array([_added_parts(problem, outer, each, kernel, pass_) for each in inner_tiles], object).T)
    total = PartCounts(*map(operator.add, parts, extra))
    if pass_ == "forward":  # the same outer tiles visit the additional tokens
        return total
    return total._replace(most_inner=np.maximum(parts.most_inner, extra.most_inner))


def _added_parts(problem: Problem, outer: int, inner_tile: Shape, kernel: Kernel, pass_: Pass) -> PartCounts:
    """Count the tiles of additional tokens.

    In the forward pass, each of the ``outer`` outer tiles visits additional tokens as inner tiles. In the backward
    pass, additional tokens are in separate outer tiles.
    """
    tokens = kernel.inner_tokens if pass_ == "forward" else kernel.outer_tokens
    full_tiles, rest = divmod(problem.additional_kv, tokens)
    tiles = full_tiles + bool(rest)
    if pass_ == "forward":
        added, most_inner, inner, full = 0, tiles, outer * tiles, outer * full_tiles
    else:
        # Every outer tile of additional tokens visits all queries. The inner tiles cover the layout from its first
        # token on, without regard to dilation.
        extents = list(zip(problem.query_layout, inner_tile, strict=True))
        added, most_inner = tiles, math.prod(-(-extent // tile) for extent, tile in extents)
        fills = math.prod(inner_tile) == kernel.inner_tokens
        inner, full = tiles * most_inner, full_tiles * math.prod(extent // tile for extent, tile in extents) * fills
    hull_pairs, row_groups = math.prod(problem.query_layout) * problem.additional_kv, kernel.row_groups
    return PartCounts(added, inner, full, row_groups * inner, row_groups * full, inner - full, most_inner, hull_pairs)


@functools.lru_cache(maxsize=1 << 10)
def _distinct_extents(inner_tiles: tuple[Shape, ...]) -> list[tuple[tuple[int, ...], Any]]:
    """Return, per dimension, the distinct extents of the tiles, and the index of each tile's extent in this list."""
    distinct = [np.unique(extents, return_inverse=True) for extents in zip(*inner_tiles, strict=True)]
    return [(tuple(values.tolist()), numbers) for values, numbers in distinct]


@functools.lru_cache(maxsize=1 << 10)
def _row_boxes(outer_tile: Shape, rows: int, row_groups: int) -> list[tuple[Rows, ...]]:
    """Return the bounding box of each row group's rows: per dimension, their first and last coordinates.

    Row indices after the end of the tile count as the last row of the tile.
    """
    end = math.prod(outer_tile) - 1
    rows_of_groups = [(min(rows * group, end), min(rows * (group + 1) - 1, end)) for group in range(row_groups)]
    boxes = []
    for dim, extent in enumerate(outer_tile):
        step = math.prod(outer_tile[dim + 1 :])  # distance in rows between neighbors in this dimension
        tokens = [(first // step, last // step) for first, last in rows_of_groups]
        is_line = [first // extent == last // extent for first, last in tokens]  # coordinates before `dim` are equal
        pairs = zip(tokens, is_line, strict=True)
        boxes.append(tuple([(a % extent, b % extent) if line else (0, extent - 1) for (a, b), line in pairs]))
    return boxes


def _requirements(row_groups: int) -> Any:
    """Return all combinations of requirements, one per row group: ``[3 ** row_groups, row_groups]``."""
    return np.array(list(itertools.product((_ANY, _SEEN, _FULL), repeat=row_groups)))


@functools.cache
def _strictest(numbers: tuple[int, ...]) -> Any:
    """Return, for each combination of requirements, the index of the equivalent combination for distinct row groups.

    Row groups with equal coordinates in a dimension are counted as one distinct row group. The strictest requirement on
    these row groups applies to the distinct row group, because it implies the other requirements.

    Args:
        numbers: For every row group, the index of its distinct row group.
    """
    required, distinct = _requirements(len(numbers)), range(max(numbers) + 1)
    strictest = [required[:, np.equal(numbers, number)].max(axis=1) for number in distinct]
    return np.ravel_multi_index(strictest, (3,) * len(strictest))


@functools.cache
def _weights(row_groups: int, fills: bool) -> Any:
    """Return the weight of each combination of requirements in each of five sums: ``[3 ** row_groups, 5]``.

    The sums are the fields ``inner`` to ``partial`` of :class:`PartCounts`. ``fills`` is True if inner tiles have the
    size for which the kernel is compiled.
    """
    required = _requirements(row_groups)
    is_single = np.count_nonzero(required != _ANY, axis=1) == 1
    seen, full = (is_single & np.any(required == each, axis=1) for each in (_SEEN, _FULL))
    inner, all_full = (np.all(required == each, axis=1).astype(np.int64) for each in (_ANY, _FULL))
    unmasked = np.prod(np.choose(required, (1, -1, int(fills))), axis=1)
    return np.stack([inner, all_full * fills, seen, full & fills, inner - unmasked], axis=1)


class TimedTiles(NamedTuple):
    """Tile counts of one batch entry and head, for the time model.

    Each attribute is a number, or an array with one entry per pair of tiles.

    Attributes:
        outer: Number of outer tiles.
        inner: Number of visited inner tiles, summed over the outer tiles.
        seen: Number of inner tiles that are not skipped. A part that is not skipped counts as ``1 / row_groups`` tiles.
        partial: Number of inner tiles that at least one row group masks.
    """

    outer: Any
    inner: Any
    seen: Any
    partial: Any


@dataclasses.dataclass(frozen=True)
class TileCounts:
    """Counts of tiles and query-key pairs of one batch entry and head.

    ``natten_jax.cost_model.tiles`` defines hulls, full tiles, row groups and parts.

    Attributes:
        outer: Number of outer tiles, which are query tiles in the forward pass and key/value tiles in the backward
            pass.
        inner: Number of visited inner tiles, summed over the outer tiles.
        full: Number of inner tiles that are full for all row groups.
        most_inner: Maximum number of inner tiles that an outer tile visits.
        row_groups: Number of row groups of an outer tile.
        seen_parts: Number of parts that are not skipped. The total number of parts is ``row_groups * inner``.
        full_parts: Number of parts that are not skipped and need no mask.
        partial: Number of inner tiles that at least one row group masks.
        visible_pairs: Number of query-key pairs that are not masked. These are the useful work.
        hull_pairs: Number of pairs of a token of an outer tile and a token of this tile's hull. Masked pairs are
            included.
        visited_pairs: Number of pairs in all visited tiles, including padding.
        executed_pairs: Number of pairs in all parts that are not skipped, including padding.
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
        """The counts that the time model needs."""
        return TimedTiles(self.outer, self.inner, self.seen_parts / self.row_groups, self.partial)

    @property
    def inner_per_outer(self) -> float:
        """Average number of inner tiles per outer tile."""
        return self.inner / self.outer

    @property
    def full_share(self) -> float:
        """Of the parts that are not skipped, the fraction that needs no mask."""
        return self.full_parts / self.seen_parts if self.seen_parts else 1.0

    @property
    def is_fully_block_sparse(self) -> bool:
        """True if no inner tile needs a mask."""
        return self.full == self.inner

    @property
    def computed_share(self) -> float:
        """Fraction of the visited pairs that are executed."""
        return self.executed_pairs / self.visited_pairs

    @property
    def masked_share(self) -> float:
        """Fraction of the visited pairs that are in a hull and masked."""
        return (self.hull_pairs - self.visible_pairs) / self.visited_pairs

    @property
    def padding_share(self) -> float:
        """Fraction of the visited pairs that are padding or outside of the hull."""
        return (self.visited_pairs - self.hull_pairs) / self.visited_pairs

    @property
    def wasted_share(self) -> float:
        """Fraction of the executed pairs that are masked or padding."""
        return 1 - self.visible_pairs / self.executed_pairs


@check_types
def count_tiles(
    problem: Problem,
    pair: TilePair,
    pass_: Pass = "forward",
    *,
    placement: Placement = "anchored",
    kernel: Kernel | None = None,
) -> TileCounts:
    """Count the tiles of a pass exactly, for one batch entry and head.

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
        placement: ``"anchored"`` if the inner tiles of an outer tile start at the first token that the outer tile sees.
            ``"aligned"`` if inner tiles are on a grid that starts at token 0 of each dilation group.
        kernel: The kernel that executes the tiles. If it is compiled for larger tiles than ``pair``, its tiles contain
            padding. If ``None``, a kernel that is compiled for exactly the sizes of ``pair`` is assumed.

    Raises:
        ValueError: A tile does not have one positive extent per dimension, ``placement`` is unknown, or a dimension has
            more than ``2**20`` tiles.
    """
    outer_tile, inner_tile = outer_and_inner(checked_pair(pair, problem.rank), pass_)
    kernel = kernel or Kernel(0, math.prod(outer_tile), math.prod(inner_tile), 0.0, 0.0, 0.0)
    parts = part_counts(problem, outer_tile, (inner_tile,), placement, pass_, kernel)
    counts = {name: int(np.ravel(each)[0]) for name, each in parts._asdict().items()}
    tile_pairs = kernel.outer_tokens * kernel.inner_tokens
    return TileCounts(
        **counts,
        row_groups=kernel.row_groups,
        visible_pairs=visible_pairs(problem),
        visited_pairs=counts["inner"] * tile_pairs,
        executed_pairs=counts["seen_parts"] * tile_pairs // kernel.row_groups,
    )


def tile_pairs_of_sizes(q_size: int, kv_size: int, rank: int) -> Iterator[TilePair]:
    """Return all pairs of a query tile shape and a key/value tile shape with the given numbers of tokens."""
    return itertools.product(_factorisations(q_size, rank), _factorisations(kv_size, rank))


@functools.cache
def _factorisations(size: int, rank: int) -> list[Shape]:
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    return [shape for shape in itertools.product(divisors, repeat=rank) if math.prod(shape) == size]
