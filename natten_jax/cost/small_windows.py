"""The form of kernels for small windows: what it takes, and how long that takes.

Its warps own 16 tokens. Tiles choose it: 16 query tokens and 8 key/value tokens, and the other way round in the
backward pass, whose gradients are reproducible as they are.

How a launch divides a problem decides how long it takes, and both are worked out by one piece of native code
(``csrc/cuda/small/region.cpp``, ``region_time.cpp`` and ``ring_shape.cpp``), whose coefficients are of an H200, those
of windows that may have a ring of an H100: other devices differ in their multiprocessors, in shared memory, and in
whether they have an engine that copies boxes of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from natten_jax.cost.calibration import Calibration, calibration_for
from natten_jax.cost.tile_shapes import pairs_of
from natten_jax.cost.work import least_bytes
from natten_jax.native import module as native
from natten_jax.native.abi import KERNEL_RANK, axis_rows, with_kernel_tiles
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import ComputeCapability
from natten_jax.problem import Problem

_FORM = "small"
_LIMITS = native.limits(_FORM)

#: The least compute capability that has the engine.
_HAS_BOXES = (9, 0)

#: The one whose rings are loaded by it; elsewhere, warps copy what lies in them.
_RING_HAS_BOXES = (9, 0)

#: KiB of shared memory that a block may have, by compute capability (CUDA programming guide, technical specifications);
#: others have the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Tokens of the query and key/value tiles that choose the form; ``None`` where it does not take such heads."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if not _LIMITS or problem.element.bytes != 2 or wider > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def largest_biased_head_dim() -> int:
    """The widest heads of kernels with a relative bias."""
    return int(_LIMITS["largest_biased_head_dim"])


def additional_queries_at_once(problem: Problem) -> int:
    """How many queries a warp computes with at a time where gradients of additional tokens are summed."""
    wider = max(problem.head_dim, problem.head_dim_v)
    widths = zip(_LIMITS["head_dims"], _LIMITS["additional_queries_at_once"], strict=True)
    return next(queries for head_dim, queries in widths if wider <= head_dim)


def is_chosen(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether tiles are the form's."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


def is_for(calibration: Calibration, problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether tiles are the form's where a calibration's backend runs them."""
    return _FORM in calibration.limits and is_chosen(problem, pass_, pair)


class Launch(NamedTuple):
    """A kernel of a pass.

    Attributes:
        kernel: ``"forward"``, ``"query gradient"``, ``"key/value gradient"``, or ``"whole gradient"``, which is both;
            all but the last also ``"... with a ring"``.
        line: The token dimension in which a warp computes groups of columns in pairs; negative in a missing one.
        regions: Those of a batch entry and head: what its blocks own, or with a ring strips of the layout.
        columns: That a region loads, at most.
        tiles: Tiles of rows in a region.
        pairs: Pairs of a row and a column that a launch with a ring multiplies for a batch entry and head; zero for
            others.
    """

    kernel: str
    line: int
    regions: int
    columns: int
    tiles: int
    pairs: int


class Estimate(NamedTuple):
    """What a pass launches, and how long that takes.

    Attributes:
        launches: All but those for gradients of additional tokens.
        work: Seconds of all launches if memory were no limit.
        seconds: How long the pass takes.
    """

    launches: tuple[Launch, ...]
    work: float
    seconds: float


def seconds(
    family: str, problem: Problem, pass_: Pass, pair: TilePair, compute_capability: ComputeCapability | None
) -> float | None:
    """How long a pass takes with tiles of the form's size; ``None`` as :func:`estimate`."""
    found = estimate(family, problem, pass_, pair, compute_capability)
    return None if found is None else found.seconds


@functools.lru_cache(maxsize=4096)
def estimate(
    family: str, problem: Problem, pass_: Pass, pair: TilePair, compute_capability: ComputeCapability | None
) -> Estimate | None:
    """What a pass launches with tiles of the form's size, and how long that takes.

    Args:
        family: The backend family whose calibration says how fast memory is.
        problem: What is computed.
        pass_: The pass.
        pair: The tiles.
        compute_capability: The compute capability of the device; one that is not known has as little as any.

    Returns:
        The estimate; ``None`` where the form does not take the tiles: the keys that a warp's queries see do not fit
        into shared memory.
    """
    calibration = calibration_for(family)
    if calibration is None or not is_chosen(problem, pass_, pair):
        return None
    has_ring, ring_has_boxes = not problem.own_layouts, compute_capability == _RING_HAS_BOXES
    found = native.estimate_of_small_windows(
        axis_rows(problem),
        _sizes(problem),
        *with_kernel_tiles(problem, pair),
        is_backward=pass_ == "backward",
        shared_memory=_shared_bytes(compute_capability),
        multiprocessors=calibration.multiprocessors,
        has_boxes=compute_capability is not None and compute_capability >= _HAS_BOXES,
        has_ring=has_ring,
        ring_has_boxes=ring_has_boxes,
        has_relative_bias=problem.relative_bias,
        has_key_bias=problem.key_bias,
    )
    if found is None:
        return None
    launches, total = list(found["launches"]), found["seconds"]
    ring = None
    if has_ring and pass_ == "backward":
        ring = _gradient_ring(problem, calibration.multiprocessors, compute_capability)
    for i, launch in enumerate(launches):
        if ring is not None and launch["kernel"] == "key/value gradient" and ring["seconds"] < launch["seconds"]:
            total += ring["seconds"] - launch["seconds"]
            launches[i] = ring
    moving = calibration.byte * least_bytes(problem, pass_)
    return Estimate(tuple(_launch(problem, each) for each in launches), total, max(total, moving))


def _sizes(problem: Problem) -> tuple[int, ...]:
    heads = problem.heads, problem.heads_kv
    return (problem.batch, *heads, problem.head_dim, problem.head_dim_v, problem.additional_kv)


def _shared_bytes(compute_capability: ComputeCapability | None) -> int:
    kib = _LEAST_SHARED_KIB if compute_capability is None else _SHARED_KIB.get(compute_capability, _LEAST_SHARED_KIB)
    return 1024 * kib


@functools.lru_cache(maxsize=256)
def _gradient_ring(
    problem: Problem, multiprocessors: int, compute_capability: ComputeCapability | None
) -> Mapping[str, Any] | None:
    """The launch for key and value gradients whose tiles are its own: the same for every pair of tiles of a pass."""
    return native.gradient_ring_of_small_windows(
        axis_rows(problem),
        _sizes(problem),
        shared_memory=_shared_bytes(compute_capability),
        multiprocessors=multiprocessors,
        ring_has_boxes=compute_capability == _RING_HAS_BOXES,
        has_relative_bias=problem.relative_bias,
        has_key_bias=problem.key_bias,
    )


def _launch(problem: Problem, found: Mapping[str, Any]) -> Launch:
    line = found["line_dimension"] - KERNEL_RANK + problem.rank
    return Launch(found["kernel"], line, found["regions"], found["columns"], found["tiles"], found["pairs"])


def ranked(
    family: str, problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> Iterator[tuple[TilePair, float]]:
    """Every pair of tiles of the form's size that it takes, with seconds, the fastest first.

    Where memory is the limit, those with the least work come first; among equals, the most compact rows.

    Args:
        family: As for :func:`estimate`.
        problem: What the tiles are for.
        pass_: The pass.
        compute_capability: The compute capability of the device.
    """
    tokens = tile_tokens(problem, pass_)
    pairs = [] if tokens is None else pairs_of(*tokens, problem.rank)
    estimates = ((pair, estimate(family, problem, pass_, pair, compute_capability)) for pair in pairs)
    taken = [(pair, found) for pair, found in estimates if found is not None]
    # 14 x 14 tokens of 512 heads: gradients took 52 microseconds with 8 x 2 keys, and 59 with 16 x 1.
    taken.sort(key=lambda each: (each[1].work, max(outer_and_inner(each[0], pass_)[0])))
    yield from ((pair, found.seconds) for pair, found in taken)
