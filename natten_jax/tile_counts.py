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
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import numpy as np

from natten_jax import windows
from natten_jax.calibration import Kernel, Pass, TilePair, ordered
from natten_jax.flops import visible_pairs
from natten_jax.problem import Problem, Shape

Placement = Literal["anchored", "aligned"]

_PLACEMENTS = ("anchored", "aligned")


@dataclasses.dataclass(frozen=True)
class TileCounts:
    """Tiles and query-key pairs of one batch element and one head.

    Attributes:
        owned: Tiles that own their tokens: query tiles in the forward, key/value tiles in the backward pass.
        streamed: Tiles that are streamed past them, all together.
        whole: Those of them that need no mask.
        most_streamed: Tiles streamed past the owned tile that has the most of them.
        visible_pairs: Query-key pairs that the mask leaves: the work.
        hull_pairs: Pairs of tokens in the tiles: work and what is masked.
        executed_pairs: Pairs that are computed, padding included.
    """

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    visible_pairs: int
    hull_pairs: int
    executed_pairs: int

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Owned, streamed and whole tiles."""
        return self.owned, self.streamed, self.whole

    @property
    def streamed_per_owned(self) -> float:
        """Streamed tiles per owned tile, on average."""
        return self.streamed / self.owned

    @property
    def whole_share(self) -> float:
        """Share of the streamed tiles that needs no mask."""
        return self.whole / self.streamed if self.streamed else 1.0

    @property
    def is_fully_block_sparse(self) -> bool:
        """Whether no tile needs a mask."""
        return self.whole == self.streamed

    @property
    def masked_share(self) -> float:
        """Share of the executed pairs that the mask hides."""
        return (self.hull_pairs - self.visible_pairs) / self.executed_pairs

    @property
    def padding_share(self) -> float:
        """Share of the executed pairs that lies outside of the tokens or of the hull."""
        return (self.executed_pairs - self.hull_pairs) / self.executed_pairs


def count_tiles(
    problem: Problem,
    pair: TilePair,
    which: Pass = "forward",
    *,
    placement: Placement = "anchored",
    kernel: Kernel | None = None,
) -> TileCounts:
    """Count the tiles of a pass exactly, for one batch element and one head.

    Args:
        problem: The problem.
        pair: Query and key/value tile shape, with one extent per token dimension.
        which: The pass.
        placement: ``"anchored"``: streamed tiles start at the first token that the owned tile needs.
            ``"aligned"``: they lie on a grid that starts at token 0 (of each dilation group).
        kernel: The kernel that executes them; without one, tiles are executed as large as they are.

    Raises:
        ValueError: A tile does not have one positive extent per dimension, or ``placement`` is unknown.
    """
    check_tiles(problem, pair, placement)
    owned_tile, streamed_tile = ordered(pair, which)
    counts = [
        axis_counts(axis, owned, streamed, placement, which)
        for axis, owned, streamed in zip(axes_of(problem), owned_tile, streamed_tile, strict=True)
    ]
    owned, streamed, whole, most, hull = (math.prod(values) for values in zip(*counts, strict=True))
    tokens = math.prod(owned_tile), math.prod(streamed_tile)
    if kernel is not None:
        # A streamed tile that does not fill the kernel's is masked where it ends.
        whole = whole if tokens[1] == kernel.streamed_tokens else 0
        tokens = kernel.owned_tokens, kernel.streamed_tokens
    if problem.additional_kv:
        fills = kernel is None or math.prod(streamed_tile) == kernel.streamed_tokens
        additional = additional_counts(problem, owned, streamed_tile, tokens, which)
        owned += additional.owned
        streamed += additional.streamed
        whole += additional.whole if fills or which == "forward" else 0
        most = most + additional.most_streamed if which == "forward" else max(most, additional.most_streamed)
        hull += additional.hull_pairs
    return TileCounts(owned, streamed, whole, most, visible_pairs(problem), hull, streamed * tokens[0] * tokens[1])


class Axis(NamedTuple):
    """One token dimension of a problem."""

    queries: int
    keys: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool


class AxisCounts(NamedTuple):
    """In one dimension, over all dilation groups: as in TileCounts."""

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    hull_pairs: int


def axes_of(problem: Problem) -> list[Axis]:
    return [
        Axis(*values)
        for values in zip(
            problem.query_layout,
            problem.kv_layout,
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            problem.is_causal,
            strict=True,
        )
    ]


def check_tiles(problem: Problem, pair: TilePair, placement: str) -> None:
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}, got {placement!r}")
    for name, tile in zip(("query", "key/value"), pair, strict=True):
        if len(tile) != problem.rank or min(tile) < 1:
            raise ValueError(
                f"the {name} tile must have {problem.rank} positive extent(s), one per token dimension, got {tile}"
            )


def additional_counts(
    problem: Problem, owned: int, streamed_tile: Shape, tokens: tuple[int, int], which: Pass
) -> AxisCounts:
    """What additional tokens come to beside ``owned`` tiles, executed by tiles of ``tokens``."""
    queries = math.prod(problem.query_layout)
    hull_pairs = queries * problem.additional_kv
    if which == "forward":
        tiles, whole = -(-problem.additional_kv // tokens[1]), problem.additional_kv // tokens[1]
        return AxisCounts(0, owned * tiles, owned * whole, tiles, hull_pairs)
    # Every tile of them reads the query layout from its first token on, whatever the dilation.
    tiles, full = -(-problem.additional_kv // tokens[0]), problem.additional_kv // tokens[0]
    extents = list(zip(problem.query_layout, streamed_tile, strict=True))
    streamed = math.prod(-(-extent // tile) for extent, tile in extents)
    whole = math.prod(extent // tile for extent, tile in extents)
    return AxisCounts(tiles, tiles * streamed, full * whole, streamed, hull_pairs)


@functools.lru_cache(maxsize=1 << 16)
def axis_counts(axis: Axis, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass) -> AxisCounts:
    groups = collections.Counter(
        tuple(windows.group_length(extent, axis.dilation, group) for extent in (axis.queries, axis.keys))
        for group in range(axis.dilation)
    )
    of_groups = [
        (count, _group_counts(axis, queries, keys, owned_tile, streamed_tile, placement, which))
        for (queries, keys), count in groups.items()
    ]
    owned, streamed, whole, hull = (
        sum(count * getattr(of_group, name) for count, of_group in of_groups)
        for name in ("owned", "streamed", "whole", "hull_pairs")
    )
    return AxisCounts(owned, streamed, whole, max(of_group.most_streamed for _, of_group in of_groups), hull)


def _group_counts(
    axis: Axis, queries: int, keys: int, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass
) -> AxisCounts:
    window = axis.kernel_size, axis.stride, axis.is_causal
    tokens, others = (queries, keys) if which == "forward" else (keys, queries)
    first = np.arange(0, tokens, owned_tile)
    last = np.minimum(first + owned_tile, tokens) - 1
    if which == "forward":
        bounds = [windows.window_bounds(index, keys, *window) for index in (first, last)]
    else:
        bounds = [windows.inverse_window_bounds(index, queries, keys, *window) for index in (first, last)]
    (hull_begin, inner_end), (inner_begin, hull_end) = bounds
    length = np.maximum(hull_end - hull_begin, 0)
    if placement == "anchored":
        origin, tiles = hull_begin, -(-length // streamed_tile)
    else:
        origin = np.zeros_like(hull_begin)
        tiles = np.where(length > 0, -(-hull_end // streamed_tile) - hull_begin // streamed_tile, 0)
    whole_begin = -(-(inner_begin - origin) // streamed_tile)
    whole_end = (np.minimum(inner_end, others) - origin) // streamed_tile
    whole = np.maximum(whole_end - whole_begin, 0)
    hull_pairs = np.sum((last - first + 1) * length)
    return AxisCounts(len(first), int(np.sum(tiles)), int(np.sum(whole)), int(np.max(tiles)), int(hull_pairs))
