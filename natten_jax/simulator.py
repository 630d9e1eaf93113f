"""What a tile configuration makes of a problem, and how long that takes: counted and predicted without a device.

Kernels cut the tokens of one side into *owned* tiles (queries in the forward pass, keys and values in the backward
pass) and stream tiles of the other side past each of them. Counts are exact. The mask is separable, so each is a
product over the dimensions of a sum over the owned tiles of one dimension. With ``[begin, end)`` of the windows of an
owned tile's first and last token, in one dimension:

    hull  = [begin(first), end(last))      some token of the tile sees it: what has to be streamed
    inner = [begin(last), end(first))      every token of the tile sees it: needs no mask
    anchored tiles of t tokens start with the hull:    ceil(|hull| / t) tiles
    aligned tiles lie on a grid from token 0:          ceil(hull.end / t) - floor(hull.begin / t) tiles

A streamed tile inside ``inner`` in every dimension is *whole*. Dilation groups are counted one by one. Where every
streamed tile is whole, the mask is *fully block-sparse*: nothing is masked token by token.

The predicted time of a pass, in seconds, with coefficients fitted to measurements on one kind of device
(``natten_jax/calibration``):

    tile  = owned_tile + streamed_tile * (streamed tiles) / (owned tiles) + masking * (masked tiles) / (owned tiles)
    work  = ceil(batch * heads * (owned tiles) / multiprocessors) * tile
    busy  = launch + max(work, byte * (bytes of inputs and results))
    time  = busy * (1 + slowdown * busy / (busy + onset))

The last line is the clock, which falls while a kernel keeps the device at its power limit.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from natten_jax import windows
from natten_jax.calibration import Calibration, Kernel, Pass, TilePair, calibration_for, ordered
from natten_jax.flops import flops, visible_pairs
from natten_jax.problem import Problem, Shape, check_windows_fit, int_tuple, window_parameters

__all__ = [
    "Calibration",
    "Kernel",
    "Recommendation",
    "Simulation",
    "TileCounts",
    "calibration_for",
    "count_tiles",
    "least_block_sparse_stride",
    "predict",
    "problem_of",
    "rank",
    "recommend_stride",
    "simulate",
]

Placement = Literal["anchored", "aligned"]

_PLACEMENTS = ("anchored", "aligned")
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a pass of a problem comes to with a pair of tiles.

    Attributes:
        problem: The problem.
        which: The pass.
        pair: Query and key/value tile.
        placement: Where streamed tiles start.
        counts: Tiles and pairs per batch element and head.
        seconds: Predicted device time; ``None`` where nothing was calibrated.
    """

    problem: Problem
    which: Pass
    pair: TilePair
    placement: Placement
    counts: TileCounts
    seconds: float | None

    @property
    def flops(self) -> int:
        """Floating-point operations that the mask leaves."""
        return flops(self.problem, self.which)

    @property
    def executed_flops(self) -> int:
        """Floating-point operations that are computed, on masked pairs and padding, too."""
        return self.flops * self.counts.executed_pairs // self.counts.visible_pairs

    @property
    def flop_bound(self) -> float:
        """Speedup over self attention if time were the operations that the mask leaves."""
        return all_pairs(self.problem) / self.counts.visible_pairs

    @property
    def tile_bound(self) -> float:
        """Speedup over self attention if time were the operations that the tiles execute."""
        return all_pairs(self.problem) / self.counts.executed_pairs

    @property
    def least_bytes(self) -> int:
        """Bytes that inputs and results take: each is moved from or to memory at least once."""
        return least_bytes(self.problem, self.which)

    @property
    def tile_bytes(self) -> int:
        """Bytes of all owned and streamed tiles: what is loaded, mostly from the device's cache."""
        problem = self.problem
        owned, streamed = (math.prod(tile) for tile in ordered(self.pair, self.which))
        tokens = self.counts.owned * owned + self.counts.streamed * streamed
        width = problem.head_dim + problem.head_dim_v
        return problem.batch * problem.heads * tokens * width * _BYTES[problem.dtype]


def problem_of(
    layout: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    additional_kv: int = 0,
) -> Problem:
    """Describe a problem without arrays; arguments as in :func:`natten_jax.na1d` and its like.

    Args:
        layout: Tokens per dimension.
        kernel_size: Window extent, per dimension or one for all, and so on for the next three.
        stride: Queries that share a window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Whether later keys are hidden.
        batch: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads; ``None`` is ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value heads; ``None`` is ``head_dim``.
        dtype: Name of the element type.
        additional_kv: Tokens that every query sees.

    Raises:
        ValueError: A value breaks a rule of the operators.
        TypeError: An argument is of the wrong type.
    """
    tokens = int_tuple("layout", tuple(layout), len(layout))
    parameters = window_parameters(len(tokens), kernel_size, stride, dilation, is_causal)
    check_windows_fit(tokens, *parameters[:3])
    window, strides, dilations, causal = parameters
    heads_kv = heads if heads_kv is None else heads_kv
    if dtype not in _BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_BYTES)}, got {dtype!r}")
    if heads % heads_kv:
        raise ValueError(f"heads {heads} must be a multiple of heads_kv {heads_kv}")
    return Problem(
        operator="fna",
        batch=batch,
        query_layout=tokens,
        kv_layout=tokens,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        kernel_size=window,
        stride=strides,
        dilation=dilations,
        is_causal=causal,
        scale=head_dim**-0.5,
        additional_kv=additional_kv,
    )


def all_pairs(problem: Problem) -> int:
    """Query-key pairs without any mask, for one batch element and one head."""
    return math.prod(problem.query_layout) * (math.prod(problem.kv_layout) + problem.additional_kv)


def least_bytes(problem: Problem, which: Pass) -> int:
    """Bytes of the inputs and results of a pass."""
    queries, keys = math.prod(problem.query_layout), math.prod(problem.kv_layout) + problem.additional_kv
    width = problem.head_dim + problem.head_dim_v
    elements = queries * problem.heads * width + keys * problem.heads_kv * width
    once = problem.batch * elements * _BYTES[problem.dtype]
    logsumexp = problem.batch * problem.heads * queries * _BYTES[problem.accumulator_dtype]
    # The backward pass reads the output beside its gradient, and writes a gradient for every other array.
    return (once if which == "forward" else 2 * once) + logsumexp


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
    _check(problem, pair, placement)
    owned_tile, streamed_tile = ordered(pair, which)
    counts = [
        _axis_counts(axis, owned, streamed, placement, which)
        for axis, owned, streamed in zip(_axes(problem), owned_tile, streamed_tile, strict=True)
    ]
    owned, streamed, whole, most, hull = (math.prod(values) for values in zip(*counts, strict=True))
    tokens = math.prod(owned_tile), math.prod(streamed_tile)
    if kernel is not None:
        # A streamed tile that does not fill the kernel's is masked where it ends.
        whole = whole if tokens[1] == kernel.streamed_tokens else 0
        tokens = kernel.owned_tokens, kernel.streamed_tokens
    if problem.additional_kv:
        fills = kernel is None or math.prod(streamed_tile) == kernel.streamed_tokens
        additional = _additional_counts(problem, owned, streamed_tile, tokens, which)
        owned += additional.owned
        streamed += additional.streamed
        whole += additional.whole if fills or which == "forward" else 0
        most = most + additional.most_streamed if which == "forward" else max(most, additional.most_streamed)
        hull += additional.hull_pairs
    return TileCounts(owned, streamed, whole, most, visible_pairs(problem), hull, streamed * tokens[0] * tokens[1])


def simulate(
    problem: Problem,
    pair: TilePair,
    which: Pass = "forward",
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Simulation:
    """Count a pass and, with a calibration, predict its time.

    Args:
        problem: The problem.
        pair: Query and key/value tile shape.
        which: The pass.
        calibration: The time model, of :func:`calibration_for`; without one no time is predicted.
        placement: Where streamed tiles start; see :func:`count_tiles`.

    Raises:
        ValueError: A tile or the placement is not valid.
    """
    kernel = None if calibration is None else calibration.kernel(problem, pair, which)
    counts = count_tiles(problem, pair, which, placement=placement, kernel=kernel)
    seconds = None
    if calibration is not None and kernel is not None:
        seconds = float(predict(problem, counts.tiles, which, kernel, calibration))
    return Simulation(problem, which, pair, placement, counts, seconds)


def rank(
    problem: Problem, pairs: Iterable[TilePair], which: Pass, calibration: Calibration | None
) -> list[tuple[TilePair, float]]:
    """Pairs that anchored kernels take, with predicted seconds, fastest first; without a model, none."""
    groups: dict[Kernel, list[TilePair]] = collections.defaultdict(list)
    for pair in pairs:
        kernel = None if calibration is None else calibration.kernel(problem, pair, which)
        if kernel is not None:
            groups[kernel].append(pair)
    timed: list[tuple[TilePair, float]] = []
    axes = _axes(problem)
    for kernel, of_kernel in groups.items():
        assert calibration is not None
        counts = np.ones((len(of_kernel), 3))
        for dim, axis in enumerate(axes):
            extents = [tuple(tile[dim] for tile in ordered(pair, which)) for pair in of_kernel]
            counts *= [_axis_counts(axis, *each, "anchored", which)[:3] for each in extents]
        fills = [math.prod(ordered(pair, which)[1]) == kernel.streamed_tokens for pair in of_kernel]
        counts[:, 2] *= fills
        if problem.additional_kv:
            tokens = kernel.owned_tokens, kernel.streamed_tokens
            for row, pair, is_filled in zip(counts, of_kernel, fills, strict=True):
                extra = _additional_counts(problem, int(row[0]), ordered(pair, which)[1], tokens, which)
                row += extra.owned, extra.streamed, extra.whole if is_filled or which == "forward" else 0
        seconds = predict(problem, counts, which, kernel, calibration)
        timed += zip(of_kernel, map(float, seconds), strict=True)
    # Among equals, tiles that are long in the leading dimensions: on an H200 (16, 8) took 5% less time than (8, 16).
    return sorted(timed, key=lambda item: (item[1], *([-extent for extent in tile] for tile in item[0])))


def predict(problem: Problem, counts: Any, which: Pass, kernel: Kernel, calibration: Calibration) -> Any:
    """Predicted seconds of a pass.

    Args:
        problem: The problem.
        counts: Owned, streamed and whole tiles per batch element and head, in the last axis of an array.
        which: The pass.
        kernel: The kernel that executes them.
        calibration: The time model.

    Returns:
        Seconds, without the last axis.
    """
    owned, streamed, whole = np.moveaxis(np.asarray(counts, np.float64), -1, 0)
    # In the backward pass a key/value tile is worked on once for all query heads that share it.
    heads, repeats = (problem.heads, 1) if which == "forward" else (problem.heads_kv, problem.heads // problem.heads_kv)
    streaming = kernel.streamed_tile * streamed + kernel.masking * (streamed - whole)
    rounds = np.ceil(problem.batch * heads * owned / calibration.multiprocessors)
    tile = kernel.owned_tile + repeats * streaming / owned
    moving = calibration.byte * least_bytes(problem, which)
    return calibration.clocked(calibration.launch + np.maximum(rounds * tile, moving))


class Recommendation(NamedTuple):
    """A stride with which no tile needs a mask.

    Attributes:
        stride: The stride.
        simulation: The problem with that stride, and the pair of tiles that it was found for.
    """

    stride: Shape
    simulation: Simulation


def least_block_sparse_stride(problem: Problem, pair: TilePair, *, placement: Placement = "anchored") -> Shape | None:
    """The smallest stride, per dimension, with which the forward mask is fully block-sparse for a pair of tiles.

    ``None`` where no stride is: a window that is no multiple of the key/value tile, or a causal dimension, has tiles
    that need a mask in every case.
    """
    _check(problem, pair, placement)
    strides = []
    for axis, q_tile, kv_tile in zip(_axes(problem), *pair, strict=True):
        for stride in range(1, axis.kernel_size + 1):
            counts = _axis_counts(axis._replace(stride=stride), q_tile, kv_tile, placement, "forward")
            if counts.streamed == counts.whole:
                strides.append(stride)
                break
        else:
            return None
    return tuple(strides)


def recommend_stride(
    problem: Problem,
    pairs: Sequence[TilePair],
    *,
    calibration: Calibration | None = None,
    placement: Placement = "anchored",
) -> Recommendation | None:
    """The smallest stride that makes the mask fully block-sparse for one of the pairs, at nearly the best speed.

    Among the pairs that have such a stride, those within 2% of the fewest executed operations (or of the shortest
    predicted time) count; the one with the smallest stride is taken.

    Returns:
        The recommendation, or ``None`` where no pair has such a stride.
    """
    found = []
    for pair in pairs:
        stride = least_block_sparse_stride(problem, pair, placement=placement)
        if stride is None:
            continue
        strided = dataclasses.replace(problem, stride=stride)
        simulation = simulate(strided, pair, calibration=calibration, placement=placement)
        if simulation.counts.is_fully_block_sparse:
            found.append(Recommendation(stride, simulation))

    def cost(each: Recommendation) -> float:
        seconds = each.simulation.seconds
        return each.simulation.counts.executed_pairs if seconds is None else seconds

    bound = 1.02 * min(map(cost, found), default=0.0)
    nearly_best = [each for each in found if cost(each) <= bound]
    return min(nearly_best, key=lambda each: (math.prod(each.stride), cost(each)), default=None)


class _Axis(NamedTuple):
    """One token dimension of a problem."""

    queries: int
    keys: int
    kernel_size: int
    stride: int
    dilation: int
    is_causal: bool


class _AxisCounts(NamedTuple):
    """In one dimension, over all dilation groups: as in TileCounts."""

    owned: int
    streamed: int
    whole: int
    most_streamed: int
    hull_pairs: int


def _axes(problem: Problem) -> list[_Axis]:
    return [
        _Axis(*values)
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


def _check(problem: Problem, pair: TilePair, placement: str) -> None:
    if placement not in _PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}, got {placement!r}")
    for name, tile in zip(("query", "key/value"), pair, strict=True):
        if len(tile) != problem.rank or min(tile) < 1:
            raise ValueError(
                f"the {name} tile must have {problem.rank} positive extent(s), one per token dimension, got {tile}"
            )


def _additional_counts(
    problem: Problem, owned: int, streamed_tile: Shape, tokens: tuple[int, int], which: Pass
) -> _AxisCounts:
    """What additional tokens come to beside ``owned`` tiles, executed by tiles of ``tokens``."""
    queries = math.prod(problem.query_layout)
    hull_pairs = queries * problem.additional_kv
    if which == "forward":
        tiles, whole = -(-problem.additional_kv // tokens[1]), problem.additional_kv // tokens[1]
        return _AxisCounts(0, owned * tiles, owned * whole, tiles, hull_pairs)
    # Every tile of them reads the query layout from its first token on, whatever the dilation.
    tiles, full = -(-problem.additional_kv // tokens[0]), problem.additional_kv // tokens[0]
    extents = list(zip(problem.query_layout, streamed_tile, strict=True))
    streamed = math.prod(-(-extent // tile) for extent, tile in extents)
    whole = math.prod(extent // tile for extent, tile in extents)
    return _AxisCounts(tiles, tiles * streamed, full * whole, streamed, hull_pairs)


@functools.lru_cache(maxsize=1 << 16)
def _axis_counts(axis: _Axis, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass) -> _AxisCounts:
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
    return _AxisCounts(owned, streamed, whole, max(of_group.most_streamed for _, of_group in of_groups), hull)


def _group_counts(
    axis: _Axis, queries: int, keys: int, owned_tile: int, streamed_tile: int, placement: Placement, which: Pass
) -> _AxisCounts:
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
    return _AxisCounts(len(first), int(np.sum(tiles)), int(np.sum(whole)), int(np.max(tiles)), int(hull_pairs))
