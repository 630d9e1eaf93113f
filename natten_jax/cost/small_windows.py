"""The form of the ``cutlass`` kernels for small windows: what it takes, and how long that takes.

Its warps own 16 tokens. Tiles choose it: 16 query tokens and 8 key/value tokens, and the other way round in the
backward pass, whose gradients are reproducible as they are.

How a launch divides a problem decides how long it takes, and both are worked out by one piece of native code
(``csrc/cuda/small/region.cpp`` and ``region_time.cpp``), whose coefficients are of an H200: other devices differ in
their multiprocessors, in shared memory, and in whether they have an engine that copies boxes of tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from natten_jax import native
from natten_jax.cost.calibration import calibration_for
from natten_jax.cost.ranking import pairs_of
from natten_jax.devices import ComputeCapability
from natten_jax.kernel_rank import axis_rows, with_kernel_tiles
from natten_jax.passes import Pass, TilePair, outer_and_inner
from natten_jax.problem import ELEMENT_BYTES, Problem

#: The backend family whose form it is.
FAMILY = "cutlass"

_LIMITS = native.limits("small")

#: The least compute capability that has the engine.
_HAS_BOXES = (9, 0)

#: KiB of shared memory that a block may have, by compute capability (CUDA programming guide, technical specifications);
#: others have the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99


def tile_tokens(problem: Problem, pass_: Pass) -> tuple[int, int] | None:
    """Tokens of the query and key/value tiles that choose the form; ``None`` where it does not take such heads."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if not _LIMITS or ELEMENT_BYTES[problem.dtype] != 2 or wider > max(_LIMITS["head_dims"]):
        return None
    tokens = _LIMITS["row_tokens"], _LIMITS["column_tokens"]
    return tokens if pass_ == "forward" else tokens[::-1]


def is_chosen(problem: Problem, pass_: Pass, pair: TilePair) -> bool:
    """Whether tiles are the form's."""
    return tuple(map(math.prod, pair)) == tile_tokens(problem, pass_)


@functools.lru_cache(maxsize=4096)
def seconds(
    problem: Problem, pass_: Pass, pair: TilePair, compute_capability: ComputeCapability | None
) -> float | None:
    """How long a pass takes with tiles of the form's size.

    Args:
        problem: What is computed.
        pass_: The pass.
        pair: The tiles.
        compute_capability: Of the device; one that is not known has as little as any.

    Returns:
        Seconds; ``None`` where the form does not take the tiles: the keys that a warp's queries see do not fit into
        shared memory.
    """
    calibration = calibration_for(FAMILY)
    if calibration is None or not is_chosen(problem, pass_, pair):
        return None
    kib = _LEAST_SHARED_KIB if compute_capability is None else _SHARED_KIB.get(compute_capability, _LEAST_SHARED_KIB)
    sizes = problem.heads, problem.heads_kv, problem.head_dim, problem.head_dim_v, problem.additional_kv
    found = native.seconds_of_small_windows(
        axis_rows(problem),
        (problem.batch, *sizes),
        *with_kernel_tiles(problem, pair),
        is_backward=pass_ == "backward",
        shared_memory=1024 * kib,
        multiprocessors=calibration.multiprocessors,
        has_boxes=compute_capability is not None and compute_capability >= _HAS_BOXES,
    )
    return found or None


def ranked(
    problem: Problem, pass_: Pass, compute_capability: ComputeCapability | None
) -> Iterator[tuple[TilePair, float]]:
    """Every pair of tiles of the form's size that it takes, with seconds; among equals, the most compact rows first.

    Args:
        problem: What the tiles are for.
        pass_: The pass.
        compute_capability: Of the device.
    """
    tokens = tile_tokens(problem, pass_)
    pairs = [] if tokens is None else pairs_of(*tokens, problem.rank)
    # 14 x 14 tokens of 512 heads: gradients took 52 microseconds with 8 x 2 keys, and 59 with 16 x 1.
    for pair in sorted(pairs, key=lambda pair: max(outer_and_inner(pair, pass_)[0])):
        taken = seconds(problem, pass_, pair, compute_capability)
        if taken is not None:
            yield pair, taken
