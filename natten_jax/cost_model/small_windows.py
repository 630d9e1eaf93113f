"""Predicted times of the kernels for small windows, which are a part of the ``cutlass`` backends.

The sizes of a pair of tiles select these kernels: 16 query tokens and 8 key/value tokens in the forward pass, the
reverse in the backward pass. Their gradients are always reproducible.

Native code (``csrc/cuda/small/region.cpp``, ``region_time.cpp`` and ``ring_shape.cpp``) decides how a launch divides a
problem, and predicts the time of the launch. Its coefficients were measured on an H200, or on an H100 for windows whose
kernels may use a ring buffer. Devices differ in the number of multiprocessors, in shared memory, and in support for
TMA.

A warp owns a tile of 16 rows. It loops over pairs of groups of 8 columns, which are adjacent in one dimension, called
the line. The first group begins at the start of the rows' hull (:mod:`natten_jax.cost_model.tiles`). A forward pass is
a single launch. A backward pass is either a single launch that computes all gradients, or a launch with queries as rows
and a launch with keys as rows, both of which compute logits and their gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.tiles import least_bytes, shortened, tile_pairs_of_sizes
from natten_jax.native import module as native
from natten_jax.native.module import axis_rows, with_kernel_tiles
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import ComputeCapability
from natten_jax.problem import Problem

_FORM = "small"
_LIMITS = native.limits(_FORM)

#: First compute capability with TMA, and the only compute capability whose kernels load ring buffers by TMA; on other
#: GPUs, warps load them.
_HAS_TMA = _RING_HAS_TMA = (9, 0)

#: KiB of shared memory per block, by compute capability (CUDA programming guide, technical specifications). Other
#: compute capabilities have ``_LEAST_SHARED_KIB``.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Return the tokens of the query and key/value tiles of these kernels; ``None`` if they reject the heads."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if not _LIMITS or problem.element.bytes != 2 or wider > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def largest_biased_head_dim() -> int:
    """Return the largest head dimension of kernels with a relative bias."""
    return int(_LIMITS["largest_biased_head_dim"])


def is_chosen(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Return True if a pair of tiles selects the kernels for small windows."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


def is_for(calibration: Calibration, problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Return True if a pair of tiles selects the kernels for small windows in a calibration's backend."""
    return _FORM in calibration.limits and is_chosen(problem, pass_, pair)


class Launch(NamedTuple):
    """A kernel of a pass.

    Attributes:
        kernel: ``"forward"``, ``"query gradient"``, ``"key/value gradient"``, or ``"whole gradient"`` for both
            gradients. All except the last also exist as ``"... with a ring"``.
        pairs: Row-column pairs that a launch with a ring multiplies, per batch entry and head; zero for other launches.
    """

    kernel: str
    pairs: int


class Estimate(NamedTuple):
    """Launches of a pass, and predicted times.

    Attributes:
        launches: All launches except those for gradients of additional tokens.
        work: Seconds of all launches, without the limit of memory bandwidth.
        seconds: Seconds of the pass.
    """

    launches: tuple[Launch, ...]
    work: float
    seconds: float


@functools.lru_cache(maxsize=4096)
def estimate(
    family: str, problem: Problem, pass_: Pass, pair: TilePair, compute_capability: ComputeCapability | None
) -> Estimate | None:
    """Predict the launches and the time of a pass with the kernels for small windows.

    Args:
        family: The backend family whose calibration provides the memory bandwidth.
        problem: The problem.
        pass_: The pass.
        pair: The tiles.
        compute_capability: The compute capability of the device. If it is unknown, the smallest shared memory is
            assumed.

    Returns:
        The estimate. ``None`` if the tiles have other sizes, or if the keys that a warp's queries see do not fit into
        shared memory.
    """
    calibration = calibration_for(family)
    if calibration is None or not is_chosen(problem, pass_, pair):
        return None
    native_estimate, ring = _native_estimate(problem, pass_, compute_capability, calibration.multiprocessors)
    found = native_estimate(*with_kernel_tiles(problem, pair))
    if found is None:
        return None
    launches, work = list(found["launches"]), found["seconds"]
    for i, launch in enumerate(launches):
        if ring is not None and launch["kernel"] == "key/value gradient" and ring["seconds"] < launch["seconds"]:
            work += ring["seconds"] - launch["seconds"]
            launches[i] = ring
    kept = tuple([Launch(each["kernel"], each["pairs"]) for each in launches])
    return Estimate(kept, work, max(work, calibration.byte * least_bytes(problem, pass_)))


@functools.lru_cache(maxsize=256)
def _native_estimate(
    problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None, multiprocessors: int
) -> tuple[Callable[..., Any], Mapping[str, Any] | None]:
    """Return the native estimate as a function of the kernel's tiles, and the ring launch for key/value gradients.

    The ring launch chooses its tiles itself; ``None`` if the problem does not support rings.
    """
    sizes = problem.batch, problem.heads, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.additional_kv
    axes, has_ring = axis_rows(problem), not problem.own_layouts
    options: dict[str, Any] = {
        "shared_memory": 1024 * _SHARED_KIB.get(compute_capability or (0, 0), _LEAST_SHARED_KIB),
        "multiprocessors": multiprocessors,
        "ring_has_boxes": compute_capability == _RING_HAS_TMA,
        "has_relative_bias": problem.relative_bias,
        "has_key_bias": problem.key_bias,
    }
    ring = None
    if has_ring and pass_ == "backward":
        ring = native.gradient_ring_of_small_windows(axes, sizes, **options)
    options |= {
        "is_backward": pass_ == "backward",
        "has_boxes": compute_capability is not None and compute_capability >= _HAS_TMA,
        "has_ring": has_ring,
    }
    return functools.partial(native.estimate_of_small_windows, axes, sizes, **options), ring


def seconds(calibration: Calibration, problem: Problem, pass_: Pass, pair: TilePair) -> float | None:
    """Return the seconds of :func:`estimate` on a calibration's device; ``None`` if there is no estimate."""
    found = estimate(calibration.family, problem, pass_, pair, calibration.compute_capability)
    return None if found is None else found.seconds


def ranked(
    family: str, problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> Iterator[tuple[TilePair, float]]:
    """Yield every supported pair of tiles of these kernels with its seconds, the fastest first.

    Pairs are sorted by their work, because memory-bound pairs have equal seconds. Among pairs with equal work, pairs
    with the most compact rows come first. Dimensions of any length are ranked: see
    :func:`natten_jax.cost_model.tiles.shortened`.

    Args:
        family: The backend family, as in :func:`estimate`.
        problem: The problem that the tiles are for.
        pass_: The pass.
        compute_capability: The compute capability of the device.
    """
    tokens, problem = tile_tokens(problem, pass_), shortened(problem)
    pairs = [] if tokens is None else tile_pairs_of_sizes(*tokens, problem.rank)
    estimates = ((pair, estimate(family, problem, pass_, pair, compute_capability)) for pair in pairs)
    taken = [(pair, found) for pair, found in estimates if found is not None]
    # With 14 x 14 tokens and 512 heads, gradients took 52 microseconds with tiles of 8 x 2 keys, and 59 with 16 x 1.
    rows = 0 if pass_ == "forward" else 1
    taken.sort(key=lambda each: (each[1].work, max(each[0][rows])))
    yield from ((pair, found.seconds) for pair, found in taken)
