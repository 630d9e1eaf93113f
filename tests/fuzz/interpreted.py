"""``python -m tests.fuzz.interpreted``: run random problems on the TPU kernels in Pallas's interpreter.

The interpreter detects races between copies and computations. It initializes memory with NaN. Outputs, logsumexp and
all gradients are compared with the oracle. The kernels are called directly, with tiles of any shape. Some calls compute
only a part of a layout. Interpreting is slow, so problems are small, and the kernels' grids have few programs.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from natten_jax.arrays.operands import Operands
from natten_jax.backends.pallas import _tpu_call
from natten_jax.backends.pallas._tpu_call import call_of
from natten_jax.backends.pallas._tpu_grid import query_grid
from natten_jax.backends.pallas.tpu import alignment
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan.plan import Plan
from tests.support import interpreted_tpu
from tests.support.families import Family

from .interpreted_session import Kernels
from .problem import Fuzzed

#: Maximum number of tokens of a problem, and maximum number of programs in the grid of a pass.
TOKENS, PROGRAMS = 160, 24
WIDTHS = (8, 16, 24, 40, 64, 72, 128, 136)
#: Maximum numbers of keys per chunk of a box. Small numbers divide the boxes of small problems into several chunks.
#: ``None`` is the kernels' default.
CHUNKS = (16, 48, None)


def _draw_heads(rng: np.random.Generator) -> tuple[int, int, Sequence[int]]:
    widths: Any = rng.choice(WIDTHS, 2).tolist()
    heads_kv = int(rng.integers(1, 3))
    heads = heads_kv * int(rng.integers(1, 3))
    if rng.random() < 0.4:  # heads so narrow that kernels pack several into one
        widths, heads_kv = rng.choice([8, 16, 24, 32], 2).tolist(), int(rng.integers(2, 5))
        widths, heads_kv = ([32, 32], 8) if rng.random() < 0.25 else (widths, heads_kv)
        heads = heads_kv
    return heads, heads_kv, widths if rng.random() < 0.5 else widths[:1] * 2


def _draw_tiles(problem: Fuzzed, rng: np.random.Generator) -> dict[str, Any]:
    """Draw tiles for both passes, of any shape that the kernels support."""
    described = problem.description()
    tiles: dict[str, Any] = {}
    for pass_ in PASSES:
        for name in tile_names(pass_):
            layout = described.query_layout if "q_" in name else described.kv_layout
            step = alignment(described)
            last = step * int(rng.integers(1, -(-layout[-1] // step) + 1))
            tiles[name] = (*(int(rng.integers(max(1, n // 3), n + 1)) for n in layout[:-1]), last)
    return tiles


def _size(plan: Plan, operands: Operands) -> float:
    return math.prod(query_grid(call_of(plan, operands, alignment(plan.problem)))) / PROGRAMS


@contextlib.contextmanager
def _interpreting(problem: Fuzzed) -> Iterator[None]:
    """Interpret kernels with race detection. The problem's seed selects the number of keys per chunk of a box."""
    keys = CHUNKS[problem.seed % len(CHUNKS)]
    with pytest.MonkeyPatch.context() as patch, interpreted_tpu.finding_races():
        if keys is not None:
            patch.setattr(_tpu_call, "FEW_ROWS_CHUNK", keys)
            patch.setattr(_tpu_call, "MANY_ROWS_CHUNK", keys)
        yield


KERNELS = Kernels(
    Family.for_backend(interpreted_tpu.InterpretedTpuBackend()), TOKENS, _draw_heads, _draw_tiles, _size, _interpreting
)

if __name__ == "__main__":
    interpreted_tpu.register()
    sys.exit(KERNELS.main("tests.fuzz.interpreted", __doc__))
