"""Kernels for small windows, a form of the ``cutlass`` kernels: predicted times, and counts of their tiles.

A pair of tiles selects the form by its sizes: 16 query tokens and 8 key/value tokens, and the reverse in the backward
pass, whose gradients are always reproducible.

One piece of native code (``csrc/cuda/small/region.cpp``, ``region_time.cpp`` and ``ring_shape.cpp``) decides how a
launch divides a problem, and predicts how long the launch takes. Its coefficients are those of an H200, and for windows
that may have a ring those of an H100. Devices differ in their multiprocessors, in shared memory, and in whether they
have TMA.

A warp owns a tile of 16 rows, and loops over groups of 8 columns in pairs, which follow each other in one dimension,
the line. The first group begins at the rows' hull. A forward pass is one launch. A backward pass is one launch whose
rows are queries and one whose rows are keys, both of which compute logits and their gradients, or one launch that does
the work of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.tiles import (
    AxisCounts,
    PartCounts,
    TileCounts,
    axis_counts,
    least_bytes,
    shortened,
    tile_counts,
    tile_pairs_of_sizes,
)
from natten_jax.native import module as native
from natten_jax.native.module import KERNEL_RANK, axis_rows, with_kernel_tiles
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import ComputeCapability
from natten_jax.problem import Problem

_FORM = "small"
_LIMITS = native.limits(_FORM)

#: The first compute capability with TMA, and the one whose rings are loaded by it; elsewhere, warps load rings.
_HAS_TMA = _RING_HAS_TMA = (9, 0)

#: KiB of shared memory that a block may have, by compute capability (CUDA programming guide, technical specifications);
#: others have the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99

#: Groups of columns that are computed at a time.
_AT_ONCE = 2

#: Products of a pair of a row and a column that a launch computes, over ``head_dim`` and over ``head_dim_v``, also for
#: gradients of additional keys and values.
_PRODUCTS = {"forward": (1, 1), "query gradient": (2, 1), "key/value gradient": (2, 2)}


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Tokens of the query and key/value tiles that select the form; ``None`` if it does not support such heads."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if not _LIMITS or problem.element.bytes != 2 or wider > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def tokens_for(calibration: Calibration, problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Tokens of tiles as for :func:`tile_tokens`; ``None`` also if a calibration's backend lacks the form."""
    return tile_tokens(problem, pass_) if _FORM in calibration.limits else None


def largest_biased_head_dim() -> int:
    """The widest heads of kernels with a relative bias."""
    return int(_LIMITS["largest_biased_head_dim"])


def is_chosen(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether a pair of tiles selects the form."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


def is_for(calibration: Calibration, problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether a pair of tiles selects the form in a calibration's backend."""
    return tuple(map(math.prod, pair)) == tokens_for(calibration, problem, pass_)


class Launch(NamedTuple):
    """A kernel of a pass.

    Attributes:
        kernel: ``"forward"``, ``"query gradient"``, ``"key/value gradient"``, or ``"whole gradient"``, which is both;
            all but the last also ``"... with a ring"``.
        line: The token dimension in which a warp computes groups of columns in pairs; negative in a missing one.
        regions: Regions of a batch entry and head: what its blocks own, or with a ring strips of the layout.
        columns: Most columns that a region loads.
        tiles: Tiles of rows in a region.
        pairs: Pairs of a row and a column that a launch with a ring multiplies for a batch entry and head; zero for
            other launches.
    """

    kernel: str
    line: int
    regions: int
    columns: int
    tiles: int
    pairs: int


class Estimate(NamedTuple):
    """Launches of a pass, and predicted times.

    Attributes:
        launches: All launches except those for gradients of additional tokens.
        work: Seconds of all launches if memory were no limit.
        seconds: Seconds of the pass.
    """

    launches: tuple[Launch, ...]
    work: float
    seconds: float


@functools.lru_cache(maxsize=4096)
def estimate(
    family: str, problem: Problem, pass_: Pass, pair: TilePair, compute_capability: ComputeCapability | None
) -> Estimate | None:
    """Predict the launches and the time of a pass with tiles of the form's size.

    Args:
        family: The backend family whose calibration has the speed of memory.
        problem: The problem.
        pass_: The pass.
        pair: The tiles.
        compute_capability: The compute capability of the device; an unknown one has the least shared memory.

    Returns:
        The estimate; ``None`` if the form does not support the tiles: the keys that a warp's queries see do not fit
        into shared memory.
    """
    common = _common_facts(family, problem, pass_, compute_capability)
    if common is None or tuple(map(math.prod, pair)) != common.tokens:
        return None
    tiles = with_kernel_tiles(problem, pair)
    found = native.estimate_of_small_windows(common.axes, common.sizes, *tiles, **common.options)
    if found is None:
        return None
    launches, total, ring = list(found["launches"]), found["seconds"], common.ring
    for i, launch in enumerate(launches):
        if ring is not None and launch["kernel"] == "key/value gradient" and ring["seconds"] < launch["seconds"]:
            total += ring["seconds"] - launch["seconds"]
            launches[i] = ring
    missing = KERNEL_RANK - problem.rank
    with_lines = ({**each, "line": each["line_dimension"] - missing} for each in launches)
    kept = [Launch(*(each[name] for name in Launch._fields)) for each in with_lines]
    return Estimate(tuple(kept), total, max(total, common.moving))


class _Common(NamedTuple):
    """Arguments of estimates that do not depend on the tiles.

    Attributes:
        tokens: Tokens of query and key/value tiles.
        axes: Axes as native code takes them.
        sizes: Batch size, heads and widths as native code takes them.
        options: Keyword arguments of the native estimate.
        ring: The launch for key and value gradients with tiles of its own; ``None`` if there is none.
        moving: Seconds that inputs and results take to be moved.
    """

    tokens: tuple[int, int]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    options: Mapping[str, Any]
    ring: Mapping[str, Any] | None
    moving: float


@functools.lru_cache(maxsize=256)
def _common_facts(
    family: str, problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> _Common | None:
    calibration, tokens = calibration_for(family), tile_tokens(problem, pass_)
    if calibration is None or tokens is None:
        return None
    heads, widths = (problem.heads, problem.heads_kv), (problem.head_dim, problem.head_dim_v)
    axes, sizes = axis_rows(problem), (problem.batch, *heads, *widths, problem.additional_kv)
    shared_kib = _SHARED_KIB.get(compute_capability or (0, 0), _LEAST_SHARED_KIB)
    options: dict[str, Any] = {
        "shared_memory": 1024 * shared_kib,
        "multiprocessors": calibration.multiprocessors,
        "ring_has_boxes": compute_capability == _RING_HAS_TMA,
        "has_relative_bias": problem.relative_bias,
        "has_key_bias": problem.key_bias,
    }
    has_ring, ring = not problem.own_layouts, None
    if has_ring and pass_ == "backward":
        ring = native.gradient_ring_of_small_windows(axes, sizes, **options)
    options |= {
        "is_backward": pass_ == "backward",
        "has_boxes": compute_capability is not None and compute_capability >= _HAS_TMA,
        "has_ring": has_ring,
    }
    return _Common(tokens, axes, sizes, options, ring, calibration.byte * least_bytes(problem, pass_))


def ranked(
    family: str, problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> Iterator[tuple[TilePair, float]]:
    """Every supported pair of tiles of the form's size, with seconds, the fastest first.

    If memory is the limit, pairs with the least work come first; among equals, the most compact rows. Dimensions of any
    length are ranked: see :func:`natten_jax.cost_model.tiles.shortened`.

    Args:
        family: As for :func:`estimate`.
        problem: The problem that the tiles are for.
        pass_: The pass.
        compute_capability: The compute capability of the device.
    """
    tokens, problem = tile_tokens(problem, pass_), shortened(problem)
    pairs = [] if tokens is None else tile_pairs_of_sizes(*tokens, problem.rank)
    estimates = ((pair, estimate(family, problem, pass_, pair, compute_capability)) for pair in pairs)
    taken = [(pair, found) for pair, found in estimates if found is not None]
    # 14 x 14 tokens of 512 heads: gradients took 52 microseconds with 8 x 2 keys, and 59 with 16 x 1.
    rows = 0 if pass_ == "forward" else 1
    taken.sort(key=lambda each: (each[1].work, max(each[0][rows])))
    yield from ((pair, found.seconds) for pair, found in taken)


class Executed(NamedTuple):
    """Work of a pass.

    Attributes:
        counts: The counts of the launch whose rows are queries in the forward, keys in the backward pass.
        flops: Floating-point operations of all launches, over all batch elements and heads.
        bytes: Rows and columns that all launches load: a region's columns once for all of its tiles.
    """

    counts: TileCounts
    flops: int
    bytes: int


def executed(problem: Problem, pass_: Pass, pair: TilePair, launches: tuple[Launch, ...]) -> Executed:
    """Count a pass.

    Args:
        problem: The problem.
        pass_: The pass.
        pair: Query and key/value tile, of the form's size.
        launches: The launches of :func:`estimate`.

    Raises:
        ValueError: A dimension has more than ``2**20`` tiles.
    """
    tile_pairs = math.prod(map(math.prod, pair))
    sides: list[tuple[str, AxisCounts]] = []
    loaded_tokens = 0
    for launch in launches:
        kernel = launch.kernel.removesuffix(" with a ring")
        for each in ("query gradient", "key/value gradient") if kernel == "whole gradient" else (kernel,):
            side = _side(problem, pass_, pair, each, launch.line)
            sides.append((each, _with_ring(side, pair, each, launch) if launch.pairs else side))
        loaded_tokens += _loaded_tokens(problem, pass_, pair, launch)
    if pass_ == "backward" and problem.additional_kv:
        additional = _additional_side(problem, pair)
        sides.append(("key/value gradient", additional))
        loaded_tokens += additional.inner * math.prod(pair[0]) + problem.additional_kv
    items = problem.batch * problem.heads
    products = sum(
        side.inner * (of_keys * problem.head_dim + of_values * problem.head_dim_v)
        for kernel, side in sides
        for of_keys, of_values in (_PRODUCTS[kernel],)
    )
    counted = [side for kernel, side in sides if kernel != "query gradient"]
    outer, inner, full, _, hull = (sum(values) for values in zip(*counted, strict=True))
    most = max(side.most_inner for side in counted)
    total = AxisCounts(outer, inner, full, most, hull)
    counts = tile_counts(problem, total, PartCounts(inner, inner, full, inner - full), 1, tile_pairs)
    width = problem.head_dim + problem.head_dim_v
    return Executed(counts, 2 * items * products * tile_pairs, items * loaded_tokens * width * problem.element.bytes)


def _side(problem: Problem, pass_: Pass, pair: TilePair, kernel: str, line: int) -> AxisCounts:
    rows_are: Pass = "backward" if kernel == "key/value gradient" else "forward"
    rows, columns = outer_and_inner(pair, pass_)
    # A pair is a group that is twice as long; half of it is padding if the line is a missing dimension of one token.
    pairs = tuple(extent * (_AT_ONCE if d == line else 1) for d, extent in enumerate(columns))
    axes = problem.axes
    by_pairs = [axis_counts(*each, "anchored", rows_are) for each in zip(axes, rows, pairs, strict=True)]
    outer, inner, _, most, hull = (math.prod(values) for values in zip(*by_pairs, strict=True))
    by_groups = (axis_counts(*each, "anchored", rows_are) for each in zip(axes, rows, columns, strict=True))
    side = AxisCounts(outer, _AT_ONCE * inner, math.prod(each.full for each in by_groups), _AT_ONCE * most, hull)
    if rows_are == "backward" or not problem.additional_kv:
        return side
    group = math.prod(columns)
    more, full = _AT_ONCE * -(-problem.additional_kv // (_AT_ONCE * group)), problem.additional_kv // group
    pairs_of_additional = math.prod(problem.query_layout) * problem.additional_kv
    return side.plus(AxisCounts(0, outer * more, outer * full, more, pairs_of_additional), pass_="forward")


def _with_ring(side: AxisCounts, pair: TilePair, kernel: str, launch: Launch) -> AxisCounts:
    """Tiles of a launch with a ring, whose warps multiply all blocks of a slab that some tile sees.

    Tiles of gradients have shapes of their own, and are counted in as many rows and columns as the pair has.
    """
    inner = launch.pairs // math.prod(map(math.prod, pair))
    outer = launch.regions * launch.tiles if kernel == "key/value gradient" else side.outer
    return side._replace(outer=outer, inner=inner, most_inner=max(side.most_inner, -(-inner // outer)))


def _additional_side(problem: Problem, pair: TilePair) -> AxisCounts:
    """Gradients of additional tokens, whose tiles loop over all queries that share a head of them, in parts."""
    group, rows = map(math.prod, pair)
    queries = math.prod(problem.query_layout)
    shared = problem.heads // problem.heads_kv
    columns, parts = queries * shared, native.additional_parts(queries * shared, problem.additional_kv)
    of_part = _AT_ONCE * group * -(-columns // (parts * _AT_ONCE * group))
    wider = max(problem.head_dim, problem.head_dim_v)
    widths = zip(_LIMITS["head_dims"], _LIMITS["additional_queries_at_once"], strict=True)
    at_once = next(count for head_dim, count in widths if wider <= head_dim)
    steps = columns // of_part * -(-of_part // at_once) + -(-(columns % of_part) // at_once)
    # Steps of one query head, rounded up.
    inner = -(-steps * (at_once // group) // shared)
    tiles, full_tiles = -(-problem.additional_kv // rows), problem.additional_kv // rows
    full = full_tiles * (queries // group)
    return AxisCounts(tiles, tiles * inner, full, inner, queries * problem.additional_kv)


def _loaded_tokens(problem: Problem, pass_: Pass, pair: TilePair, launch: Launch) -> int:
    """Rows and columns that a launch loads for a batch element and head, of two arrays each."""
    if launch.kernel == "whole gradient":
        return 2 * launch.regions * launch.columns  # its rows are among the columns of the other side
    rows, _ = outer_and_inner(pair, pass_)
    additional = 0 if launch.kernel == "key/value gradient" else problem.additional_kv
    return launch.regions * (launch.columns + launch.tiles * math.prod(rows) + additional)
