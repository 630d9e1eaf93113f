"""Run random problems one after another in a Pallas interpreter. It is slow, so the problems are small."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.performance import PASSES, Performance
from natten_jax.plan.plan import Plan
from tests.support.cases import as_attention, random_case
from tests.support.families import Family
from tests.support.plans import plans_of
from tests.support.problems import QUICK_COMPILATION

from .accuracy import excesses, expectation
from .execution import both_passes
from .problem import Fuzzed, _factor, _range

#: Number of times that tiles are drawn for a problem. If each draw needs too many programs, the problem is discarded.
_TILES = 8


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels that run in an interpreter, and the problems to run on them. The kernels are called directly.

    Attributes:
        family: Backend family of the kernels.
        tokens: Maximum number of tokens of a problem.
        draw_heads: Draws the number of query heads, the number of key/value heads, and the head dimensions of keys and
            of values.
        draw_tiles: Draws tiles for both passes, and other fields of ``Performance``.
        size: Returns the number of programs that a plan needs for given operands, divided by the maximum number.
        interpreting: Returns the context manager in which a problem runs.
    """

    family: Family
    tokens: int
    draw_heads: Callable[[np.random.Generator], tuple[int, int, Sequence[int]]]
    draw_tiles: Callable[[Fuzzed, np.random.Generator], dict[str, Any]]
    size: Callable[[Plan, Operands], float]
    interpreting: Callable[[Fuzzed], contextlib.AbstractContextManager[None]]

    def draw(self, seed: int, number: int) -> Fuzzed:
        """Draw problem ``number`` of the sequence that a seed determines."""
        rng = np.random.default_rng([seed, number])
        while True:
            problem = self._drawn(rng)
            for _ in range(_TILES):
                tiled = dataclasses.replace(problem, tiles=self.draw_tiles(problem, rng))
                if self._size(tiled) <= 1:
                    return tiled

    def _drawn(self, rng: np.random.Generator) -> Fuzzed:
        case = random_case(int(rng.integers(2**31)), tokens=self.tokens)
        heads, heads_kv, (width, width_v) = self.draw_heads(rng)
        case = dataclasses.replace(
            case.with_heads(heads, heads_kv),
            batch=1 if heads_kv > 1 and rng.random() < 0.7 else int(rng.integers(1, 3)),
            additional=0,
            fused=False,
            head_dim=width,
            head_dim_v=width_v,
            scale=None if case.scale is None else float(np.copysign(width**-0.5, case.scale)),
        )
        if rng.random() < 0.2:
            case = as_attention(rng, case, self.tokens)
        case = case.with_edges_of(self.family, is_direct=True)
        problem = Fuzzed(
            family=self.family.name,
            case=case,
            dtype=str(rng.choice(self.family.dtypes)),
            seed=int(rng.integers(2**31)),
            query_factor=_factor(rng),
            value_factor=_factor(rng),
            is_direct=True,
        )
        if case.queries is None and rng.random() < 0.25:
            query_ranges, key_ranges = (tuple(_range(rng, extent) for extent in case.layout) for _ in range(2))
            problem = dataclasses.replace(problem, queries=query_ranges, keys=key_ranges)
        return problem

    def _size(self, problem: Fuzzed) -> float:
        inputs = Inputs(*problem.inputs()[0][:3])
        _, plans = plans_of(problem.backend, problem.description(), Performance(**problem.tiles))
        found: list[float] = []

        def count(origins: Any) -> None:
            found.extend(self.size(plans[pass_], Operands(inputs, origins)) for pass_ in PASSES)

        jax.eval_shape(count, problem.origins())  # abstract evaluation, which computes no tables
        return max(found)

    def find_errors(self, problem: Fuzzed) -> list[str]:
        """Run a problem, and return the errors in its results, or the exception that was raised."""
        try:
            with self.interpreting(problem):
                arguments = jax.tree.map(jax.numpy.asarray, problem.inputs())
                # All operations are compiled as one program. Separate compilations would take most of the time.
                compiled = jax.jit(both_passes(problem), compiler_options=QUICK_COMPILATION)
                outputs, gradients = jax.tree.map(np.asarray, compiled(arguments, problem.origins()))
        except Exception as error:  # any error of the interpreter
            return [f"{type(error).__name__}: {str(error)[-2000:]}"]
        return [str(excess) for excess in excesses(problem, expectation(problem), outputs, gradients)]

    def main(self, module: str, description: str | None, arguments: Sequence[str] | None = None) -> int:
        """Run the problems that the command line selects, and return the exit status."""
        parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
        parser.add_argument("--problems", type=int, default=10**9, help="number of problems")
        parser.add_argument("--minutes", type=float, default=1.0, help="time limit (default 1)")
        parser.add_argument("--seed", type=int, default=0, help="seed of the sequence of problems")
        parser.add_argument("--first", type=int, default=0, help="number of the first problem")
        options = parser.parse_args(arguments)
        end = time.monotonic() + 60 * options.minutes
        done = bad = 0
        for number in range(options.first, options.first + options.problems):
            if time.monotonic() > end:
                break
            problem = self.draw(options.seed, number)
            found = self.find_errors(problem)
            done, bad = done + 1, bad + bool(found)
            if found:
                print(f"problem {number}: {'; '.join(found)}\n  {problem}", flush=True)
            if done % 10 == 0:
                print(f"{done} problems, {bad} bad", flush=True)
            jax.clear_caches()
        print(f"{done} problems with their gradients, {bad} bad")
        return 1 if bad else 0
