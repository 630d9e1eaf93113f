"""``python -m tests.fuzz.interpreted_blackwell``: run random problems on the Blackwell kernels in JAX's interpreter.

The interpreter detects races between copies, products and threads. It initializes memory with NaN. Outputs, logsumexp
and all gradients are compared with the oracle. The kernels are called directly. Some calls compute only a part of a
layout, have per-head scales, or have thread blocks that process several work items. Interpreting is slow, so problems
are small and have few work items.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from natten_jax.arrays.operands import Operands
from natten_jax.backends.pallas import _blackwell_call
from natten_jax.backends.pallas._blackwell_call import call_of
from natten_jax.backends.pallas.blackwell import are_supported, tile_sizes
from natten_jax.cost_model.tiles import tile_pairs_of_sizes
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan.plan import Plan
from tests.support.families import family_named
from tests.support.interpreted_blackwell import interpreting

from .interpreted_session import Kernels
from .problem import Fuzzed

#: Maximum number of tokens of a problem, and maximum number of work items of each pass.
TOKENS, ITEMS = 320, {"forward": 8, "backward": 12}
#: Numbers of thread blocks that share the work items. With 148 blocks, a block has at most one item. With 1, 2 or 3
#: blocks, a block may have several items.
BLOCKS = (148, 1, 2, 3)
FAMILY = family_named("blackwell")


def _draw_heads(rng: np.random.Generator) -> tuple[int, int, Sequence[int]]:
    heads_kv, width = int(rng.integers(1, 3)), int(rng.choice(FAMILY.capabilities.head_widths))
    return heads_kv * int(rng.integers(1, 3)), heads_kv, (width, width)


def _draw_tiles(problem: Fuzzed, rng: np.random.Generator) -> dict[str, Any]:
    tiles: dict[str, Any] = {"run_persistent_kernel": bool(rng.random() < 0.5)}
    for pass_ in PASSES:
        pairs = [pair for sizes in tile_sizes(pass_) for pair in tile_pairs_of_sizes(*sizes, problem.case.rank)]
        pairs = [pair for pair in pairs if are_supported(pair, pass_)]
        tiles |= dict(zip(tile_names(pass_), pairs[int(rng.integers(len(pairs)))], strict=True))
    return tiles


def _size(plan: Plan, operands: Operands) -> float:
    call = call_of(plan, operands)
    items = call.items() if plan.pass_ == "forward" else max(call.items(), call.items(owns_keys=True))
    return items / ITEMS[plan.pass_]


@contextlib.contextmanager
def _interpreting(problem: Fuzzed) -> Iterator[None]:
    """Interpret kernels with race detection. The problem's seed selects the number of thread blocks."""
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blackwell_call, "MULTIPROCESSORS", BLOCKS[problem.seed % len(BLOCKS)])
        yield


KERNELS = Kernels(FAMILY, TOKENS, _draw_heads, _draw_tiles, _size, _interpreting)

if __name__ == "__main__":
    sys.exit(KERNELS.main("tests.fuzz.interpreted_blackwell", __doc__))
