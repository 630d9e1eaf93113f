"""``python -m tests.fuzz.interpreted_blackwell``: random problems on the Blackwell kernels, in JAX's interpreter.

Races between copies, products and threads are found, memory is full of NaN until it is written to, and output and
logsumexp are compared with attention in float64. Problems are of all features: parts of layouts, scales of each head,
blocks that take several work items, and additional tokens, which are a second call whose result is merged.
Interpreting is slow, so that problems are small and have few work items.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax
from natten_jax.arrays.operands import Inputs, Operands, Saved
from natten_jax.backends.blackwell.call import call_of
from natten_jax.backends.blackwell.tiles import SIZES, is_taken
from natten_jax.cost.tile_shapes import pairs_of
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, problem_of
from tests.support import oracle
from tests.support.cases import random_case
from tests.support.families import BOUNDS
from tests.support.interpreted_blackwell import Drawn, interpreting, mask_of, plan_of, run

from .interpreted_session import run_problems

#: Most tokens of a problem, and work items of a call.
TOKENS, ITEMS = 320, 8
WIDTHS = (8, 32, 40, 64, 96, 128)
#: A difference of numbers of about 1 that float32 may make.
_NOTHING = 1e-6

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """A problem, and how it is run.

    Attributes:
        problem: The problem.
        tiles: Its tiles.
        seed: Of the inputs.
        factor: Of queries and keys.
        scales: Whether each head has a scale of its own.
        additional: Additional tokens.
        blocks: Blocks that share the work items; ``None``: a block for each.
        queries: The ranges of queries that are computed, where that is a part.
        keys: Those of keys that take part.
    """

    problem: Problem
    tiles: TilePair
    seed: int
    factor: float = 1.0
    scales: bool = False
    additional: int = 0
    blocks: int | None = None
    queries: Ranges | None = None
    keys: Ranges | None = None


def draw(seed: int, number: int) -> Fuzzed:
    """The problem with a number in the sequence that a seed stands for."""
    rng = np.random.default_rng([seed, number])
    while True:
        fuzzed = _drawn(rng)
        if call_of(_plan(fuzzed), _operands(fuzzed)[0]).items <= ITEMS:
            return fuzzed


def _drawn(rng: np.random.Generator) -> Fuzzed:
    heads_kv = int(rng.integers(1, 3))
    facts: dict[str, Any] = {
        "heads": heads_kv * int(rng.integers(1, 3)),
        "heads_kv": heads_kv,
        "batch": 1 if rng.random() < 0.7 else 2,
        "head_dim": int(rng.choice(WIDTHS)),
        "dtype": str(rng.choice(["float16", "bfloat16"])),
        "scale": None if rng.random() < 0.8 else float(rng.choice([-0.3, 0.0, 0.5])),
    }
    if rng.random() < 0.3:
        facts["head_dim_v"] = int(rng.choice(WIDTHS))
    if rng.random() < 0.2:
        queries, keys = (int(n) for n in rng.integers(1, TOKENS, 2))
        causal = bool(rng.random() < 0.5)
        problem = problem_of((queries,), None, 1, 1, causal, operator="fmha", kv_layout=(keys,), **facts)
    else:
        case = random_case(int(rng.integers(2**31)), tokens=TOKENS)
        edges = ["shift" if edge == "wrap" else edge for edge in case.edges or ()]
        windows: Any = case.kernel_size, case.stride, case.dilation, case.is_causal, edges
        problem = problem_of(case.layout, *windows, **facts)
    pairs = [pair for sizes in SIZES for pair in pairs_of(*sizes, problem.rank) if is_taken(pair)]
    fuzzed = Fuzzed(
        problem,
        pairs[int(rng.integers(len(pairs)))],
        seed=int(rng.integers(2**31)),
        factor=float(rng.choice([1.0, 1.0, 4.0])),
        scales=bool(rng.random() < 0.2),
        additional=int(rng.integers(1, 20)) if rng.random() < 0.15 else 0,
        blocks=None if rng.random() < 0.5 else int(rng.integers(1, 4)),
    )
    if problem.operator == "fna" and rng.random() < 0.2:
        of_queries, of_keys = (tuple(_range(rng, n) for n in problem.query_layout) for _ in range(2))
        fuzzed = dataclasses.replace(fuzzed, queries=of_queries, keys=of_keys, additional=0)
    return fuzzed


def _range(rng: np.random.Generator, extent: int) -> tuple[int, int]:
    first = int(rng.integers(0, extent))
    return first, int(rng.integers(first, extent)) + 1


def _plan(fuzzed: Fuzzed) -> Any:
    return plan_of(fuzzed.problem, fuzzed.tiles, run_persistent_kernel=fuzzed.blocks is not None)


def _operands(fuzzed: Fuzzed) -> tuple[Operands, oracle.Tensors]:
    """What the call gets, and the same numbers in float64."""
    problem, rng = fuzzed.problem, np.random.default_rng(fuzzed.seed)
    drawn = Drawn.of(problem, rng, fuzzed.factor, fuzzed.additional)
    inputs, exact = drawn.inputs, drawn.exact
    if fuzzed.scales:
        scales = np.asarray(rng.choice([0.0, -0.2, 0.1, 0.3], problem.heads), np.float32)
        inputs = inputs._replace(scale=jnp.broadcast_to(jnp.asarray(scales), (problem.batch, problem.heads)))
        exact = exact._replace(scale=scales.astype(np.float64))
    if fuzzed.queries is None or fuzzed.keys is None:
        return Operands(inputs), exact
    own, halo = _slices(fuzzed.queries), _slices(fuzzed.keys)

    def cut(arrays: Any) -> Any:
        return arrays._replace(query=arrays.query[own], key=arrays.key[halo], value=arrays.value[halo])

    padding = [0] * (3 - problem.rank)
    origins = [padding + [first for first, _ in ranges] for ranges in (fuzzed.queries, fuzzed.keys)]
    return Operands(cut(inputs), jnp.asarray(origins, jnp.int32)), cut(exact)


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return (slice(None), *(slice(*each) for each in ranges))


def _mask(fuzzed: Fuzzed) -> np.ndarray:
    mask, problem = mask_of(fuzzed.problem), fuzzed.problem
    if fuzzed.queries is None or fuzzed.keys is None:
        return mask
    own, halo = _slices(fuzzed.queries)[1:], _slices(fuzzed.keys)[1:]
    part = mask.reshape(*problem.query_layout, *problem.kv_layout)[own][(slice(None),) * problem.rank + halo]
    return part.reshape(math.prod(part.shape[: problem.rank]), -1)


def _attended(fuzzed: Fuzzed, operands: Operands) -> Saved:
    """The result of the kernels: of two calls, where there are additional tokens."""
    own = operands._replace(inputs=operands.inputs._replace(additional_keys=None, additional_values=None))
    saved = run(_plan(fuzzed), fuzzed.problem, own)
    inputs, problem = operands.inputs, fuzzed.problem
    if inputs.additional_keys is None or inputs.additional_values is None:
        return saved
    tokens, extra = math.prod(problem.query_layout), _extra(fuzzed)
    flat = problem.batch, tokens, problem.heads
    query = inputs.query.reshape(*flat, problem.head_dim)
    of_tokens = Inputs(query, inputs.additional_keys, inputs.additional_values, scale=inputs.scale)
    parts = saved, run(plan_of(extra), extra, Operands(of_tokens))
    outs = [part.out.reshape(*flat, problem.head_dim_v) for part in parts]
    out, logsumexp = natten_jax.merge_attentions(outs, [part.logsumexp.reshape(flat) for part in parts])
    return Saved(out.reshape(saved.out.shape), logsumexp.reshape(saved.logsumexp.shape), None)


def _extra(fuzzed: Fuzzed) -> Problem:
    """The attention of all queries to the additional tokens."""
    names = "heads", "heads_kv", "batch", "head_dim", "head_dim_v", "dtype", "scale"
    facts = {name: getattr(fuzzed.problem, name) for name in names}
    layout = (math.prod(fuzzed.problem.query_layout),)
    return problem_of(layout, operator="fmha", kv_layout=(fuzzed.additional,), **facts)


def complaints(fuzzed: Fuzzed) -> list[str]:
    """What is wrong with the results of a problem, or what running it raised."""
    operands, exact = _operands(fuzzed)
    try:
        with interpreting(), mock.patch("natten_jax.backends.blackwell.forward.MULTIPROCESSORS", fuzzed.blocks or 1):
            saved = jax.tree.map(np.asarray, _attended(fuzzed, operands))
    except Exception as error:  # whatever the interpreter has to say
        return [f"{type(error).__name__}: {error}"[:2000]]
    return differences(saved, exact, _mask(fuzzed), fuzzed.problem)


def differences(saved: Saved, exact: oracle.Tensors, mask: np.ndarray, problem: Problem) -> list[str]:
    """Where output and logsumexp are too far from attention in float64."""
    expected = oracle.forward(exact, mask, problem.scale)
    pairs = {"out": (saved.out, expected.out), "lse": (saved.logsumexp, expected.lse)}
    return [f"{name}: {reason}" for name, pair in pairs.items() if (reason := _difference(*pair, problem.dtype))]


def _difference(result: Any, expected: np.ndarray, dtype: str) -> str | None:
    found = np.asarray(result, np.float64)
    seen = np.isfinite(expected)
    if not np.array_equal(np.isfinite(found), seen) or not np.array_equal(found[~seen], expected[~seen]):
        return "a number is not finite, or other queries than expected see nothing"
    distance, norm = np.linalg.norm(found[seen] - expected[seen]), np.linalg.norm(expected[seen])
    # A logsumexp may be about 0, and all of a small problem's outputs.
    if distance > BOUNDS[dtype] * norm and distance > _NOTHING * math.sqrt(seen.sum()):
        return f"{distance:.2e} from results whose norm is {norm:.2e}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run problems; the exit status."""
    return run_problems("tests.fuzz.interpreted_blackwell", __doc__, draw, complaints, "problems", arguments)


if __name__ == "__main__":
    sys.exit(main())
