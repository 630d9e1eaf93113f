"""Predicted times of the kernels for small windows, which are some of the kernels of the ``cutlass`` backends.

The sizes of a pair of tiles select these kernels. In the forward pass, the query tile must have 16 tokens and the
key/value tile 8. In the backward pass, the query tile must have 8 tokens and the key/value tile 16. The gradients that
these kernels compute are always reproducible.

Native code (``csrc/cuda/small/region.cpp``, ``region_time.cpp`` and ``ring_shape.cpp``) selects how a launch divides a
problem among thread blocks, and predicts the time of the launch. Its coefficients are fitted to measurements: on an
H100 for windows whose kernels may use a ring buffer, and on an H200 for other windows. The native code takes three
properties of the device into account: the number of multiprocessors, the shared memory per block, and support for TMA.

Rows are queries, and columns are the keys that these queries see. In kernels for key and value gradients, rows are
keys, and columns are the queries that see them. A warp owns a tile of 16 rows and loops over groups of 8 columns, two
groups at a time. These two groups are neighbors along one dimension, which is called the line dimension. The first
group of the loop begins at the start of the rows' hull (``natten_jax.cost_model.tiles``).

A forward pass is a single launch. A backward pass is either a single launch that computes all gradients, or two
launches: one with queries as rows, and one with keys as rows. Each of these two launches computes the logits and their
gradients.
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

#: First compute capability with TMA. Kernels load ring buffers by TMA only on this compute capability. On other GPUs,
#: warps load them.
_HAS_TMA = _RING_HAS_TMA = (9, 0)

#: KiB of shared memory per block, by compute capability (source: CUDA programming guide, technical specifications). For
#: other compute capabilities, ``_LEAST_SHARED_KIB`` is assumed.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Return the number of tokens per query tile and per key/value tile of these kernels.

    ``None`` if the kernels do not support the head dimensions or the element type, or if the native module could not be
    loaded.
    """
    wider = max(problem.head_dim, problem.head_dim_v)
    if not _LIMITS or problem.element.bytes != 2 or wider > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def largest_biased_head_dim() -> int:
    """Return the largest head dimension for which these kernels support a relative bias."""
    return int(_LIMITS["largest_biased_head_dim"])


def are_selected(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Return True if a pair of tiles selects the kernels for small windows."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


def is_for(calibration: Calibration, problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Return True if a calibration's backend has the kernels for small windows, and a pair of tiles selects them."""
    return _FORM in calibration.limits and are_selected(problem, pass_, pair)


class Launch(NamedTuple):
    """One launch of a pass.

    Attributes:
        kernel: Name of the kernel. ``"forward"``, ``"query gradient"``, ``"key/value gradient"``, or ``"whole
            gradient"`` for all gradients. The name ends in ``" with a ring"`` if the kernel uses a ring buffer. There
            is no ring kernel for the whole gradient.
        pairs: Number of pairs of a row and a column that a launch with a ring multiplies, per batch entry and head. 0
            for other launches.
    """

    kernel: str
    pairs: int


class Estimate(NamedTuple):
    """The launches of a pass, and its predicted times.

    Attributes:
        launches: All launches, without launches that compute gradients of additional tokens.
        work: Sum of the predicted seconds of all launches.
        seconds: Predicted seconds of the pass: ``work``, or the time that memory traffic takes if this time is longer.
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
        family: The backend family whose calibration provides the memory bandwidth and the number of multiprocessors.
        problem: The problem.
        pass_: The pass.
        pair: The query tile and the key/value tile.
        compute_capability: The compute capability of the device. If it is ``None``, the smallest shared memory and no
            TMA are assumed.

    Returns:
        The estimate. ``None`` if the family is not calibrated, if the sizes of the tiles do not select these kernels,
        or if the columns that a warp's rows see do not fit into shared memory.
    """
    calibration = calibration_for(family)
    if calibration is None or not are_selected(problem, pass_, pair):
        return None
    native_estimate, ring = _native_estimate(problem, pass_, compute_capability, calibration.multiprocessors)
    prediction = native_estimate(*with_kernel_tiles(problem, pair))
    if prediction is None:
        return None
    launches, work = list(prediction["launches"]), prediction["seconds"]
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
    """Return a function that estimates a pass for given tiles, and the estimated ring launch for key/value gradients.

    The ring launch does not depend on the given tiles, because it chooses its own tiles. It is ``None`` in forward
    passes, and if the kernels do not support a ring for the problem.
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
    """Return ``Estimate.seconds`` for the device of a calibration; ``None`` if :func:`estimate` returns ``None``."""
    prediction = estimate(calibration.family, problem, pass_, pair, calibration.compute_capability)
    return None if prediction is None else prediction.seconds


def ranked(
    family: str, problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> Iterator[tuple[TilePair, float]]:
    """Yield every pair of tiles that these kernels support, with its predicted seconds, the fastest first.

    Pairs are sorted by ``Estimate.work``, because memory-bound pairs have equal ``Estimate.seconds``. Among pairs with
    equal work, the pair whose tile of rows has the smallest maximum extent comes first. If dimensions are very long,
    the predictions are for a problem with shorter dimensions (:func:`natten_jax.cost_model.tiles.shortened`).

    Args:
        family: The backend family, as in :func:`estimate`.
        problem: The problem.
        pass_: The pass.
        compute_capability: The compute capability of the device.
    """
    tokens, problem = tile_tokens(problem, pass_), shortened(problem)
    pairs = [] if tokens is None else tile_pairs_of_sizes(*tokens, problem.rank)
    estimates = ((pair, estimate(family, problem, pass_, pair, compute_capability)) for pair in pairs)
    supported = [(pair, prediction) for pair, prediction in estimates if prediction is not None]
    # With 14 x 14 tokens and 512 heads, the gradients took 52 microseconds with key tiles of 8 x 2, and 59 microseconds
    # with key tiles of 16 x 1.
    rows = 0 if pass_ == "forward" else 1
    supported.sort(key=lambda each: (each[1].work, max(each[0][rows])))
    yield from ((pair, prediction.seconds) for pair, prediction in supported)
