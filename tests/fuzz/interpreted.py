"""``python -m tests.fuzz.interpreted``: random problems on the TPU kernels, in Pallas's interpreter.

Races between copies and computations are found, memory is full of NaN until it is written to, and outputs, logsumexp
and all gradients are compared with the oracle. Direct calls: any tiles, and parts of layouts. Interpreting is slow, so
that problems are small and have few programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.backends.pallas import _tpu_call
from natten_jax.backends.pallas._tpu_call import call_of
from natten_jax.backends.pallas._tpu_grid import query_grid
from natten_jax.backends.pallas.tpu import alignment
from natten_jax.performance import PASSES, Performance, tile_names
from tests.support import interpreted_tpu
from tests.support.cases import random_case
from tests.support.families import Family
from tests.support.plans import plans_of
from tests.support.problems import QUICK_COMPILATION

from .accuracy import excesses, expectation
from .execution import both_passes
from .interpreted_session import run_problems
from .problem import Fuzzed, _factor, _range

#: Most tokens of a problem, and programs of a grid.
TOKENS, PROGRAMS = 160, 24
FAMILY = Family.of(interpreted_tpu.InterpretedTpuBackend())
WIDTHS = (8, 16, 24, 40, 64, 72, 128, 136)
#: Most keys of a chunk: so few that boxes of small problems have several, or as many as in real ones.
CHUNKS = (16, 48, None)


def draw(seed: int, number: int) -> Fuzzed:
    """The problem with a number in the sequence that a seed stands for."""
    rng = np.random.default_rng([seed, number])
    while True:
        problem = _drawn(rng)
        if problem is not None:
            return problem


def _drawn(rng: np.random.Generator) -> Fuzzed | None:
    """A problem; ``None`` where none of its tiles has few enough programs."""
    case = random_case(int(rng.integers(2**31)), tokens=TOKENS)
    if rng.random() < 0.4:  # narrow heads that are packed
        widths = [int(width) for width in rng.choice([8, 16, 24, 32], 2)]
        heads = heads_kv = int(rng.integers(2, 5))
        if rng.random() < 0.25:
            widths, heads, heads_kv = [32, 32], 8, 8
    else:
        widths = [int(width) for width in rng.choice(WIDTHS, 2)]
        heads_kv = int(rng.integers(1, 3))
        heads = heads_kv * int(rng.integers(1, 3))
    case = dataclasses.replace(
        case.with_heads(heads, heads_kv),
        batch=1 if heads_kv > 1 and rng.random() < 0.7 else int(rng.integers(1, 3)),
        additional=0,
        fused=False,
        head_dim=widths[0],
        head_dim_v=widths[1] if rng.random() < 0.5 else None,
        scale=None if case.scale is None else math.copysign(widths[0] ** -0.5, case.scale),
    )
    if rng.random() < 0.2:
        queries, keys = (int(n) for n in rng.integers(1, TOKENS, 2))
        plain: dict[str, Any] = dict.fromkeys(("kernel_size", "stride", "dilation", "edges"))
        case = dataclasses.replace(
            case, layout=(keys,), queries=queries, is_causal=(bool(rng.random() < 0.5),), **plain
        )
    case = case.with_edges_of(FAMILY, is_direct=True)
    problem = Fuzzed(
        family=FAMILY.name,
        case=case,
        dtype=str(rng.choice(["float32", "bfloat16"])),
        seed=int(rng.integers(2**31)),
        query_factor=_factor(rng),
        value_factor=_factor(rng),
        is_direct=True,
    )
    if case.queries is None and rng.random() < 0.25:
        of_queries, of_keys = (tuple(_range(rng, extent) for extent in case.layout) for _ in range(2))
        problem = dataclasses.replace(problem, queries=of_queries, keys=of_keys)
    for _ in range(8):
        tiled = dataclasses.replace(problem, tiles=_tiles(problem, rng))
        if _programs(tiled) <= PROGRAMS:
            return tiled
    return None


def _tiles(problem: Fuzzed, rng: np.random.Generator) -> dict[str, Any]:
    """Tiles of both passes, of any shape that the kernels take."""
    described = problem.description()
    tiles: dict[str, Any] = {}
    for pass_ in PASSES:
        for name in tile_names(pass_):
            layout = described.query_layout if "q_" in name else described.kv_layout
            step = alignment(described)
            last = step * int(rng.integers(1, -(-layout[-1] // step) + 1))
            tiles[name] = (*(int(rng.integers(max(1, n // 3), n + 1)) for n in layout[:-1]), last)
    return tiles


def _programs(problem: Fuzzed) -> int:
    """How many the largest grid of a pass of queries has."""
    inputs = Inputs(*problem.inputs()[0][:3])
    _, plans = plans_of(problem.backend, problem.description(), Performance(**problem.tiles))
    found: list[int] = []

    def count(origins: Any) -> None:
        operands = Operands(inputs, origins)
        found.extend(math.prod(query_grid(call_of(plan, operands, alignment(plan.problem)))) for plan in plans.values())

    jax.eval_shape(count, problem.origins())  # tables of parts of layouts would be computed
    return max(found)


@contextlib.contextmanager
def small_chunks(problem: Fuzzed) -> Iterator[None]:
    """Cut the boxes of a problem into chunks of so many keys as its seed says."""
    keys = CHUNKS[problem.seed % len(CHUNKS)]
    with pytest.MonkeyPatch.context() as patch:
        if keys is not None:
            patch.setattr(_tpu_call, "FEW_ROWS_CHUNK", keys)
            patch.setattr(_tpu_call, "MANY_ROWS_CHUNK", keys)
        yield


def complaints(problem: Fuzzed) -> list[str]:
    """What is wrong with the results of a problem, or what running it raised."""
    try:
        with interpreted_tpu.finding_races(), small_chunks(problem):
            operands, cotangents = problem.inputs()
            arguments = jax.tree.map(jax.numpy.asarray, (operands, cotangents))
            # One program, compiled quickly: operation by operation, compiling would be most of a problem's time.
            compiled = jax.jit(both_passes(problem), compiler_options=QUICK_COMPILATION)
            outputs, gradients = jax.tree.map(np.asarray, compiled(arguments, problem.origins()))
    except Exception as error:  # whatever the interpreter has to say
        return [f"{type(error).__name__}: {error}"[:2000]]
    return [str(excess) for excess in excesses(problem, expectation(problem), outputs, gradients)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run problems; the exit status."""
    interpreted_tpu.register()
    return run_problems("tests.fuzz.interpreted", __doc__, draw, complaints, "problems with their gradients", arguments)


if __name__ == "__main__":
    sys.exit(main())
