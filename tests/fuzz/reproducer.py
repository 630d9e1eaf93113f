"""Simplify a failing problem as long as it still fails, and write a program that runs it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from natten_jax.performance import PASSES, tile_names
from tests.support.problems import Case

from .execution import find_errors
from .problem import Fuzzed

PROGRAM = '''"""{what}

Problem {number} of seed {seed}, made simpler where it still failed. Run it in the repository's root.
"""

from tests.fuzz.execution import find_errors
from tests.fuzz.problem import Case, Fuzzed
from tests.fuzz.spoiled import Spoiled

problem = {problem}
print("\\n".join(find_errors([problem])[0]) or "nothing is wrong")
'''


def program_of(problem: Fuzzed, what: str, seed: int, number: int) -> str:
    """Return the source of a program that runs a problem and prints its errors."""
    what = what.replace("\\", "\\\\").replace('"""', "'''")
    return PROGRAM.format(what=what, number=number, seed=seed, problem=problem)


def simplest(
    problem: Fuzzed, fails: Callable[[Fuzzed], bool] = lambda each: bool(find_errors([each])[0]), seconds: float = 40
) -> Fuzzed:
    """Simplify a problem step by step within ``seconds``, and return the last problem that failed."""
    end = time.monotonic() + seconds
    candidates = _simpler(problem)
    while time.monotonic() < end and (candidate := next(candidates, None)) is not None:
        if candidate != problem and fails(candidate):
            problem, candidates = candidate, _simpler(candidate)
    return problem


#: Default values of the fields of a case. A step of the simplification resets some fields to these values. Each entry
#: of ``_STEPS`` contains the fields that one step resets. Steps that simplify the most come first.
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Case)}
_PLACES = ("box", "origins", "extents", "query_lengths", "upsample")
_STEPS = (
    *(("additional", "fused"), ("relative_bias",), ("key_bias",), ("hidden",), ("sinks",), ("batch",), ("scales",)),
    *(("scale",), ("head_dim_v",), ("head_dim",), ("edges",), ("is_causal",), ("dilation",), ("stride",)),
)


def _simpler(problem: Fuzzed) -> Iterator[Fuzzed]:
    """Yield problems that are one step simpler than a problem. Steps that simplify the most come first."""

    def changed(**changes: Any) -> Fuzzed:
        return dataclasses.replace(problem, **changes)

    yield changed(queries=None, keys=None)
    yield from (changed(query_factor=1.0), changed(value_factor=1.0), changed(tiles={}), changed(factors=None))
    yield from (changed(copies=1), changed(copies=(problem.copies + 1) // 2))
    if problem.spoiled is not None:
        for extent in ("number", "head") if problem.spoiled.extent != "number" else ():
            yield changed(spoiled=dataclasses.replace(problem.spoiled, extent=extent))
        for field in ("batch", "head", "place"):
            first: dict[str, Any] = {field: 0}
            yield changed(spoiled=dataclasses.replace(problem.spoiled, **first))
    for names in (*map(tile_names, PASSES), *((name,) for name in problem.tiles if "_tile_" not in name)):
        yield changed(tiles={name: value for name, value in problem.tiles.items() if name not in names})
    if problem.queries is None:  # otherwise, the ranges of queries and keys may exceed a smaller layout
        yield from (changed(case=case) for case in _simpler_cases(problem.case))


def _simpler_cases(case: Case) -> Iterator[Case]:
    def changed(**changes: Any) -> Case:
        return dataclasses.replace(case, **changes)

    def without(*fields: str) -> Case:
        return changed(**{field: _DEFAULTS[field] for field in fields})

    if case.is_placed:  # origins and extents require this layout and batch
        yield from (without(*_PLACES), without("extents", "query_lengths"), without("box", "origins"))
        yield without("upsample")
        return
    for heads, heads_kv in ((case.heads_kv, case.heads_kv), (case.heads // case.heads_kv, 1), (1, 1)):
        yield case.with_heads(heads, heads_kv)
    yield from (without(*fields) for fields in _STEPS)
    if case.key_bias is not None:
        yield changed(key_bias="tokens")
    for i, extent in enumerate(case.layout):
        least = (
            case.window_arguments["kernel_size"][i] * case.window_arguments["dilation"][i] if not case.queries else 1
        )
        for fewer in (least, (extent + least) // 2, extent - 1):
            if least <= fewer < extent:
                yield changed(layout=(*case.layout[:i], fewer, *case.layout[i + 1 :]))
    if case.queries is not None and case.queries > 1:
        yield changed(queries=case.queries // 2)
