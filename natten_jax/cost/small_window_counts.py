"""What the ``cutlass`` kernels' form for small windows executes and loads: exact counts of its tiles.

A warp owns a tile of 16 rows, and goes over groups of 8 columns in pairs, which follow each other in one dimension, its
line. Groups begin where the rows' hull does. A pass is one launch forwards; backwards it is one whose rows are queries
and one whose rows are keys, both of which compute logits and their gradients, or one that does the work of both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from natten_jax.cost import small_windows
from natten_jax.cost.axis_tiles import axis_counts
from natten_jax.cost.small_windows import Launch
from natten_jax.cost.tile_counts import TileCounts
from natten_jax.cost.work import visible_pairs
from natten_jax.native import module as native
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.problem import Problem

#: Groups of columns that are computed at a time.
_AT_ONCE = 2

#: Products of a pair of a row and a column that a launch computes, over ``head_dim`` and over ``head_dim_v``. The same
#: for gradients of additional keys and values as for those of others.
_PRODUCTS = {"forward": (1, 1), "query gradient": (2, 1), "key/value gradient": (2, 2)}


class Executed(NamedTuple):
    """What a pass comes to.

    Attributes:
        counts: The counts of the launch whose rows are queries in the forward, keys in the backward pass.
        flops: Floating-point operations of all launches, over all batch elements and heads.
        bytes: That all launches load of rows and columns: a region's columns once for all of its tiles.
    """

    counts: TileCounts
    flops: int
    bytes: int


class _Side(NamedTuple):
    """Tiles of a launch for one batch element and head, groups of columns being counted in full pairs."""

    outer: int
    inner: int
    full: int
    most_inner: int
    hull_pairs: int


def executed(problem: Problem, pass_: Pass, pair: TilePair, launches: tuple[Launch, ...]) -> Executed:
    """Count a pass.

    Args:
        problem: The problem.
        pass_: The pass.
        pair: Query and key/value tile, of the form's size.
        launches: The launches of :func:`natten_jax.cost.small_windows.estimate`.
    """
    tile_pairs = math.prod(map(math.prod, pair))
    every: list[tuple[str, _Side]] = []
    columns_and_rows = 0
    for launch in launches:
        if launch.pairs:
            kernel = launch.kernel.removesuffix(" with a ring")
            every.append((kernel, _ring_side(problem, pass_, pair, kernel, launch)))
            columns_and_rows += _loaded_tokens(problem, pass_, pair, launch)
            continue
        is_whole = launch.kernel == "whole gradient"
        for kernel in ("query gradient", "key/value gradient") if is_whole else (launch.kernel,):
            every.append((kernel, _side(problem, pass_, pair, kernel, launch.line)))
        columns_and_rows += _loaded_tokens(problem, pass_, pair, launch)
    if pass_ == "backward" and problem.additional_kv:
        additional = _additional(problem, pair)
        every.append(("key/value gradient", additional))
        columns_and_rows += additional.inner * math.prod(pair[0]) + problem.additional_kv
    items = problem.batch * problem.heads
    products = sum(
        side.inner * (of_keys * problem.head_dim + of_values * problem.head_dim_v)
        for kernel, side in every
        for of_keys, of_values in (_PRODUCTS[kernel],)
    )
    width = problem.head_dim + problem.head_dim_v
    return Executed(
        _counts(problem, [side for kernel, side in every if kernel != "query gradient"], tile_pairs),
        2 * items * products * tile_pairs,
        items * columns_and_rows * width * problem.element.bytes,
    )


def _side(problem: Problem, pass_: Pass, pair: TilePair, kernel: str, line: int) -> _Side:
    rows_are: Pass = "backward" if kernel == "key/value gradient" else "forward"
    rows, columns = outer_and_inner(pair, pass_)
    # A pair is a group that is twice as long; half of it is padding where the line is a missing dimension of one token.
    pairs = tuple(extent * (_AT_ONCE if d == line else 1) for d, extent in enumerate(columns))
    axes = problem.axes
    by_pairs = [axis_counts(*each, "anchored", rows_are) for each in zip(axes, rows, pairs, strict=True)]
    outer, inner, _, most, hull = (math.prod(values) for values in zip(*by_pairs, strict=True))
    by_groups = (axis_counts(*each, "anchored", rows_are) for each in zip(axes, rows, columns, strict=True))
    side = _Side(outer, _AT_ONCE * inner, math.prod(each.full for each in by_groups), _AT_ONCE * most, hull)
    if rows_are == "backward" or not problem.additional_kv:
        return side
    group = math.prod(columns)
    more, full = _AT_ONCE * -(-problem.additional_kv // (_AT_ONCE * group)), problem.additional_kv // group
    return _Side(
        outer,
        side.inner + outer * more,
        side.full + outer * full,
        side.most_inner + more,
        hull + math.prod(problem.query_layout) * problem.additional_kv,
    )


def _ring_side(problem: Problem, pass_: Pass, pair: TilePair, kernel: str, launch: Launch) -> _Side:
    """Tiles of a launch with a ring, whose warps multiply all blocks that some tile sees of a slab.

    Tiles of gradients have shapes of their own, and are counted in as many rows and columns as the pair has.
    """
    side = _side(problem, pass_, pair, kernel, launch.line)
    inner = launch.pairs // math.prod(map(math.prod, pair))
    outer = launch.regions * launch.tiles if kernel == "key/value gradient" else side.outer
    return side._replace(outer=outer, inner=inner, most_inner=max(side.most_inner, -(-inner // outer)))


def _additional(problem: Problem, pair: TilePair) -> _Side:
    """Gradients of additional tokens, whose tiles go over all queries that share a head of them, in parts."""
    group, rows = map(math.prod, pair)
    queries = math.prod(problem.query_layout)
    shared = problem.heads // problem.heads_kv
    columns, parts = queries * shared, native.additional_parts(queries * shared, problem.additional_kv)
    of_part = _AT_ONCE * group * -(-columns // (parts * _AT_ONCE * group))
    at_once = small_windows.additional_queries_at_once(problem)
    steps = columns // of_part * -(-of_part // at_once) + -(-(columns % of_part) // at_once)
    # Steps of one query head, rounded up.
    inner = -(-steps * (at_once // group) // shared)
    tiles, full_tiles = -(-problem.additional_kv // rows), problem.additional_kv // rows
    full = full_tiles * (queries // group)
    return _Side(tiles, tiles * inner, full, inner, queries * problem.additional_kv)


def _loaded_tokens(problem: Problem, pass_: Pass, pair: TilePair, launch: Launch) -> int:
    """Rows and columns that a launch loads for a batch element and head, of two arrays each."""
    if launch.kernel == "whole gradient":
        return 2 * launch.regions * launch.columns  # its rows are among the columns of the other side
    rows, _ = outer_and_inner(pair, pass_)
    additional = 0 if launch.kernel == "key/value gradient" else problem.additional_kv
    return launch.regions * (launch.columns + launch.tiles * math.prod(rows) + additional)


def _counts(problem: Problem, sides: list[_Side], tile_pairs: int) -> TileCounts:
    outer, inner, full, hull = (
        sum(getattr(side, name) for side in sides) for name in ("outer", "inner", "full", "hull_pairs")
    )
    return TileCounts(
        outer=outer,
        inner=inner,
        full=full,
        most_inner=max(side.most_inner for side in sides),
        row_groups=1,
        seen_parts=inner,
        full_parts=full,
        partial=inner - full,
        visible_pairs=visible_pairs(problem),
        hull_pairs=hull,
        visited_pairs=inner * tile_pairs,
        executed_pairs=inner * tile_pairs,
    )
