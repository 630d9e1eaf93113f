"""``python -m tests.fuzz.interpreted_blackwell``: random problems on the Blackwell kernels, in JAX's interpreter.

Races between copies, products and threads are found, memory is full of NaN until it is written to, and output,
logsumexp and all gradients are compared with attention in float64. Problems are of all features: parts of layouts,
scales of each head, blocks that take several work items, and additional tokens, which are a second call whose result is
merged. Interpreting is slow, so that problems are small and have few work items.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax
from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Saved
from natten_jax.backends.pallas import _blackwell_call
from natten_jax.backends.pallas._blackwell_call import call_of
from natten_jax.backends.pallas.blackwell import are_supported, tile_sizes
from natten_jax.cost_model.tiles import tile_pairs_of_sizes
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, problem_of
from tests.support import oracle
from tests.support.cases import random_case
from tests.support.families import BOUNDS
from tests.support.interpreted_blackwell import Drawn, interpreting, mask_of, plan_of, run, run_backward

from .accuracy import CANCELLATION, CANCELLATION_OF_SCALED_INPUTS, SLACK
from .interpreted_session import run_problems

#: Most tokens of a problem, and work items of a call.
TOKENS, ITEMS = 320, 8
BACKWARD_ITEMS = 12
WIDTHS = (8, 32, 40, 64, 96, 128)
#: A difference of numbers of about 1 that float32 may make.
_NOTHING = 1e-6

Ranges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """A problem, and how it is run.

    Attributes:
        problem: The problem.
        tiles: Its tiles of the forward pass.
        backward_tiles: Those of the backward pass.
        seed: The seed of the inputs.
        factor: The factor of queries and keys.
        scales: Whether each head has a scale of its own.
        additional: Additional tokens.
        blocks: Blocks that share the work items; ``None``: a block for each.
        queries: The ranges of queries that are computed, where that is a part.
        keys: Those of keys that take part.
    """

    problem: Problem
    tiles: TilePair
    backward_tiles: TilePair
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
        if call_of(_plan(fuzzed, "forward"), _operands(fuzzed).operands).items > ITEMS:
            continue
        pairs = _pairs(fuzzed.problem, "backward")
        for pair in np.random.default_rng([seed, number, 1]).permutation(len(pairs)):
            found = dataclasses.replace(fuzzed, backward_tiles=pairs[pair])
            call = call_of(_plan(found, "backward"), _operands(found).operands)
            if max(call.items, call.key_items) <= BACKWARD_ITEMS:
                return found


def _pairs(problem: Problem, pass_: Pass) -> list[TilePair]:
    """All tiles of a pass."""
    sizes = tile_sizes(pass_)
    return [pair for each in sizes for pair in tile_pairs_of_sizes(*each, problem.rank) if are_supported(pair, pass_)]


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
        windows: Any = {**case.window_arguments, "edges": edges or "shift"}
        problem = problem_of(case.layout, **windows, **facts)
    pairs = _pairs(problem, "forward")
    fuzzed = Fuzzed(
        problem,
        pairs[int(rng.integers(len(pairs)))],
        _pairs(problem, "backward")[0],
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


def _plan(fuzzed: Fuzzed, pass_: Pass) -> Plan:
    tiles = fuzzed.tiles if pass_ == "forward" else fuzzed.backward_tiles
    return plan_of(fuzzed.problem, tiles, pass_, run_persistent_kernel=fuzzed.blocks is not None)


class _Arrays(NamedTuple):
    """What calls get, and the same numbers in float64."""

    operands: Operands
    cotangents: Cotangents
    exact: oracle.Tensors


def _operands(fuzzed: Fuzzed) -> _Arrays:
    problem, rng = fuzzed.problem, np.random.default_rng(fuzzed.seed)
    drawn = Drawn.of(problem, rng, fuzzed.factor, fuzzed.additional)
    inputs, exact = drawn.inputs, drawn.exact
    if fuzzed.scales:
        scales = np.asarray(rng.choice([0.0, -0.2, 0.1, 0.3], problem.heads), np.float32)
        inputs = inputs._replace(scale=jnp.broadcast_to(jnp.asarray(scales), (problem.batch, problem.heads)))
        exact = exact._replace(scale=scales.astype(np.float64))
    if fuzzed.queries is None or fuzzed.keys is None:
        return _Arrays(Operands(inputs), drawn.cotangents, exact)
    own, halo = _slices(fuzzed.queries), _slices(fuzzed.keys)

    def cut(arrays: Any) -> Any:
        return arrays._replace(query=arrays.query[own], key=arrays.key[halo], value=arrays.value[halo])

    padding = [0] * (3 - problem.rank)
    origins = [padding + [first for first, _ in ranges] for ranges in (fuzzed.queries, fuzzed.keys)]
    cotangents = jax.tree.map(lambda array: array[own], drawn.cotangents)
    return _Arrays(Operands(cut(inputs), jnp.asarray(origins, jnp.int32)), cotangents, cut(exact))


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return (slice(None), *(slice(*each) for each in ranges))


def _mask(fuzzed: Fuzzed) -> np.ndarray:
    mask, problem = mask_of(fuzzed.problem), fuzzed.problem
    if fuzzed.queries is None or fuzzed.keys is None:
        return mask
    own, halo = _slices(fuzzed.queries)[1:], _slices(fuzzed.keys)[1:]
    part = mask.reshape(*problem.query_layout, *problem.kv_layout)[own][(slice(None),) * problem.rank + halo]
    return part.reshape(math.prod(part.shape[: problem.rank]), -1)


def _calls(fuzzed: Fuzzed, operands: Operands) -> list[tuple[Problem, Operands]]:
    """A call of the kernels, or two where there are additional tokens, whose tokens are a line then."""
    inputs, problem = operands.inputs, fuzzed.problem
    own = operands._replace(inputs=inputs._replace(additional_keys=None, additional_values=None))
    if inputs.additional_keys is None or inputs.additional_values is None:
        return [(problem, own)]
    query = inputs.query.reshape(problem.batch, -1, *inputs.query.shape[-2:])
    of_tokens = Inputs(query, inputs.additional_keys, inputs.additional_values, scale=inputs.scale)
    return [(problem, own), (_extra(fuzzed), Operands(of_tokens))]


def _attended(fuzzed: Fuzzed, calls: Sequence[tuple[Problem, Operands]]) -> Saved:
    """Output and logsumexp, merged where there are two calls."""
    problem, operands = calls[0]
    saved = run(_plan(fuzzed, "forward"), problem, operands)
    if len(calls) == 1:
        return saved
    extra, of_tokens = calls[1]
    parts = saved, run(plan_of(extra), extra, of_tokens)
    shape = problem.batch, -1, problem.heads
    outs = [part.out.reshape(*shape, problem.head_dim_v) for part in parts]
    out, logsumexp = natten_jax.merge_attentions(outs, [part.logsumexp.reshape(shape) for part in parts])
    return Saved(out.reshape(saved.out.shape), logsumexp.reshape(saved.logsumexp.shape), None)


def _gradients(
    fuzzed: Fuzzed, calls: Sequence[tuple[Problem, Operands]], saved: Saved, cotangents: Cotangents
) -> oracle.Tensors:
    """Gradients of the inputs: with what was saved of all keys, those of two calls are parts of one sum."""
    problem, operands = calls[0]
    found = run_backward(_plan(fuzzed, "backward"), problem, operands, saved, cotangents)
    of_scale = None if found.scale is None else found.scale.sum(axis=0)
    if len(calls) == 1:
        return oracle.Tensors(found.query, found.key, found.value, scale=of_scale)
    extra, of_tokens = calls[1]
    flat = Saved(_as_line(saved.out, 2), _as_line(saved.logsumexp, 1), None)
    flat_cotangents = Cotangents(_as_line(cotangents.out, 2), _as_line(cotangents.logsumexp, 1))
    more = run_backward(plan_of(extra, pass_="backward"), extra, of_tokens, flat, flat_cotangents)
    if more.scale is not None and of_scale is not None:
        of_scale += more.scale.sum(axis=0)
    query = found.query + more.query.reshape(found.query.shape)
    return oracle.Tensors(query, found.key, found.value, more.key, more.value, of_scale)


def _as_line(array: Any, behind: int) -> Any:
    """Queries along one dimension, and so many dimensions behind it."""
    return array.reshape(array.shape[0], -1, *array.shape[-behind:])


def _extra(fuzzed: Fuzzed) -> Problem:
    """The attention of all queries to the additional tokens."""
    names = "heads", "heads_kv", "batch", "head_dim", "head_dim_v", "dtype", "scale"
    facts = {name: getattr(fuzzed.problem, name) for name in names}
    layout = (math.prod(fuzzed.problem.query_layout),)
    return problem_of(layout, operator="fmha", kv_layout=(fuzzed.additional,), **facts)


def complaints(fuzzed: Fuzzed) -> list[str]:
    """What is wrong with the results of a problem, or what running it raised."""
    operands, cotangents, exact = _operands(fuzzed)
    calls = _calls(fuzzed, operands)
    try:
        with (
            interpreting(),
            mock.patch.object(_blackwell_call, "MULTIPROCESSORS", fuzzed.blocks or 148),
        ):
            saved = jax.tree.map(np.asarray, _attended(fuzzed, calls))
            gradients = jax.tree.map(np.asarray, _gradients(fuzzed, calls, saved, cotangents))
    except Exception as error:  # whatever the interpreter has to say
        return [f"{type(error).__name__}: {str(error)[-2000:]}"]
    is_large = fuzzed.factor != 1 or fuzzed.additional > 0
    share = CANCELLATION_OF_SCALED_INPUTS if is_large else CANCELLATION
    return differences(fuzzed.problem, saved, gradients, cotangents, exact, _mask(fuzzed), share)


def differences(
    problem: Problem,
    saved: Saved,
    gradients: oracle.Tensors,
    cotangents: Cotangents,
    exact: oracle.Tensors,
    mask: np.ndarray,
    share: float = CANCELLATION,
) -> list[str]:
    """Where results are too far from attention in float64, gradients from at least this share of their terms."""
    of_out, of_logsumexp = (np.asarray(array, np.float64) for array in cotangents)
    expected = oracle.reference(exact, mask, problem.scale, of_out, of_logsumexp)
    magnitudes = [None if each is None else share * each for each in expected.gradient_magnitude]
    names = (f"d_{name}" for name in gradients._fields)
    of_gradients = zip(names, gradients, expected.gradients, magnitudes, strict=True)
    found: list[tuple[str, Any, Any, Any]] = [
        ("out", saved.out, expected.forward.out, None),
        ("lse", saved.logsumexp, expected.forward.lse, None),
        *(each for each in of_gradients if each[2] is not None),
    ]
    return [
        f"{name}: {reason}"
        for name, result, reference, terms in found
        if (reason := _difference(result, reference, terms, problem.dtype))
    ]


def _difference(result: Any, expected: np.ndarray, terms: np.ndarray | None, dtype: str) -> str | None:
    """Whether a result is far from what is expected; gradients from that, or from terms that cancel."""
    if result is None or result.shape != expected.shape:
        return f"it is {None if result is None else result.shape}, not {expected.shape}"
    found = np.asarray(result, np.float64)
    seen = np.isfinite(expected)
    if not np.array_equal(np.isfinite(found), seen) or not np.array_equal(found[~seen], expected[~seen]):
        return "a number is not finite, or other queries than expected see nothing"
    distance = float(np.linalg.norm(found[seen] - expected[seen]))
    norm = float(np.linalg.norm(expected[seen]))
    allowed = BOUNDS[dtype] * norm
    if terms is not None:
        allowed = SLACK * BOUNDS[dtype] * max(norm, float(np.linalg.norm(terms)))
    # A logsumexp may be about 0, and all of a small problem's outputs.
    if distance > allowed and distance > _NOTHING * math.sqrt(seen.sum()):
        return f"{distance:.2e} from results whose norm is {norm:.2e}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run problems; the exit status."""
    return run_problems(
        "tests.fuzz.interpreted_blackwell", __doc__, draw, complaints, "problems with their gradients", arguments
    )


if __name__ == "__main__":
    sys.exit(main())
