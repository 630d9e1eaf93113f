"""Problems with enough keys and batch entries for the small-window kernels with a ring.

A CTA of these kernels moves along a strip of the layout, and loads keys into a ring of buffers in shared memory.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from natten_jax.backends.base import Backend
from natten_jax.cost_model import small_windows
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem
from tests.support.problems import Case

#: A window has at least LEAST_KEYS keys. Most problems have at most MAX_TOKENS tokens, and a few problems have up to
#: TOKENS_OF_FEW tokens. Both limits are low because the oracle computes all query/key pairs. Problems with at least
#: TOKENS_OF_ONE_HEAD tokens have a single key/value head.
LEAST_KEYS, MAX_TOKENS, TOKENS_OF_FEW, TOKENS_OF_ONE_HEAD = 100, 800, 1700, 500
#: For each rank, _WINDOWS is the range of a window's extent per dimension, and _LAYOUTS limits a layout's extent per
#: dimension. A layout is at least as large as its window.
_WINDOWS = {1: (100, 300), 2: (7, 17), 3: (3, 9)}
_LAYOUTS = {1: 700, 2: 50, 3: 18}
#: _ROWS is the range of the number of queries, summed over all copies, batch entries and heads. A launch uses a ring
#: kernel only if the estimated time is shorter than without a ring. With the fewest queries, this is the case for few
#: launches. With the most queries, it is the case for most launches.
_ROWS, _MAX_COPIES = (6e3, 1.2e5), 400


def with_many_keys(rng: np.random.Generator, case: Case) -> tuple[Case, int]:
    """Give the problem a large window and heads that ring kernels support. Also draw the number of copies of its batch.

    A few problems have features that ring kernels do not support. They test the fallback to other kernels.
    """
    rank = int(rng.choice([1, 2, 3], p=[0.06, 0.54, 0.4]))
    least, most = _WINDOWS[rank]
    tokens = TOKENS_OF_FEW if rng.random() < 0.1 else MAX_TOKENS
    while True:
        kernel_size = tuple(int(n) for n in rng.integers(least, most + 1, rank))
        layout = tuple(int(rng.integers(k, max(_LAYOUTS[rank], k + 1))) for k in kernel_size)
        if math.prod(kernel_size) >= LEAST_KEYS and math.prod(layout) <= tokens:
            break
    is_causal = tuple(bool(rng.random() < 0.15) for _ in layout)
    dilations = [
        2 if rng.random() < 0.03 and 2 * k <= extent else 1 for k, extent in zip(kernel_size, layout, strict=True)
    ]
    heads_kv, batch = (int(n) for n in rng.integers(1, 3, 2)) if math.prod(layout) < TOKENS_OF_ONE_HEAD else (1, 1)
    case = dataclasses.replace(
        case,
        layout=layout,
        kernel_size=kernel_size,
        stride=tuple(int(rng.integers(1, (k if rng.random() < 0.2 else 3) + 1)) for k in kernel_size)
        if rng.random() < 0.4
        else (1,) * rank,
        dilation=tuple(dilations),
        is_causal=is_causal,
        edges=tuple("cut" if rng.random() < 0.2 and not causal else "shift" for causal in is_causal),
        batch=batch,
        head_dim=int(rng.choice([32, 64], p=[0.35, 0.65])),
        head_dim_v=None,
        additional=case.additional if rng.random() < 0.1 else 0,
    ).with_heads(heads_kv * int(rng.choice([1, 2, 3], p=[0.75, 0.15, 0.1])), heads_kv)
    rows = math.exp(rng.uniform(*np.log(_ROWS)))
    return case, int(np.clip(rows / (batch * case.heads * math.prod(layout)), 2, _MAX_COPIES))


def kernels_with_rings(
    backend: Backend, problem: Problem, device: Device, pass_: Pass, pair: TilePair
) -> tuple[str, ...]:
    """Return the names of the ring kernels that a pass launches with given tiles."""
    found = small_windows.estimate(backend.family, problem, pass_, pair, device.compute_capability)
    return () if found is None else tuple(each.kernel for each in found.launches if "with a ring" in each.kernel)


def ring_pairs(
    backend: Backend, problem: Problem, device: Device, pass_: Pass
) -> dict[tuple[str, ...], list[TilePair]]:
    """Return the tiles with which a pass launches ring kernels, grouped by the names of these kernels."""
    found: dict[tuple[str, ...], list[TilePair]] = {}
    for pair, _ in small_windows.ranked(backend.family, problem, pass_, device.compute_capability):
        kernels = kernels_with_rings(backend, problem, device, pass_, pair)
        if kernels and backend.offers(problem, device, pass_, pair):
            found.setdefault(kernels, []).append(pair)
    return found
