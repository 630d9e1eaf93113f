"""A failing problem made as simple as it gets while it still fails, and written down as a program."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from .execution import complaints
from .problem import Fuzzed

PROGRAM = '''"""{what}

Problem {number} of seed {seed}, made simpler where it still failed. Run it in the repository's root.
"""

from tests.fuzz.execution import complaints
from tests.fuzz.problem import Case, Fuzzed
from tests.fuzz.spoiled import Spoiled
from tests.fuzz.spoiled_bias import SpoiledBias

problem = {problem}
print("\\n".join(complaints([problem])[0]) or "nothing is wrong")
'''


def program_of(problem: Fuzzed, what: str, seed: int, number: int) -> str:
    """A program that runs a problem and says what is wrong."""
    what = what.replace("\\", "\\\\").replace('"""', "'''")
    return PROGRAM.format(what=what, number=number, seed=seed, problem=problem)


def simplest(
    problem: Fuzzed, fails: Callable[[Fuzzed], bool] = lambda each: bool(complaints([each])[0]), seconds: float = 40
) -> Fuzzed:
    """The simplest problem that simplifying step by step leads to and that still fails."""
    end = time.monotonic() + seconds
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for candidate in _simpler(problem):
            if time.monotonic() > end:
                return problem
            if fails(candidate):
                problem, is_simpler = candidate, True
                break
    return problem


def _simpler(problem: Fuzzed) -> Iterator[Fuzzed]:
    """Problems one step simpler, the largest steps first."""
    changes: dict[str, Any]
    for changes in (
        {"queries": None, "keys": None},
        {"query_factor": 1.0},
        {"value_factor": 1.0},
        {"tiles": {}},
        {"factors": None},
        {"copies": 1},
        {"copies": (problem.copies + 1) // 2},
    ):
        yield from _changed(problem, changes)
    if problem.spoiled is not None:
        for changes in ({"extent": "number"}, {"batch": 0}, {"head": 0}, {"place": (0, 0)}):
            yield from _changed(problem, {"spoiled": dataclasses.replace(problem.spoiled, **changes)})
    if problem.spoiled_bias is not None:
        if problem.spoiled_bias.extent != "number":
            for fewer in ("number", "head"):
                smaller = dataclasses.replace(problem.spoiled_bias, extent=fewer)
                yield from _changed(problem, {"spoiled_bias": smaller})
        for field in ("batch", "head", "place"):
            first: dict[str, Any] = {field: 0}
            yield from _changed(problem, {"spoiled_bias": dataclasses.replace(problem.spoiled_bias, **first)})
    for name in problem.tiles:
        partner = name.replace("kv_tile", "q_tile") if "kv_tile" in name else name.replace("q_tile", "kv_tile")
        other_tiles = {key: value for key, value in problem.tiles.items() if key not in (name, partner)}
        yield from _changed(problem, {"tiles": other_tiles})
    if problem.queries is not None:
        return  # the ranges would have to follow the layout
    case = problem.case
    rank = case.rank
    if case.is_placed:
        unplaced: tuple[dict[str, Any], ...] = (
            {"box": None, "origins": None, "extents": None, "query_lengths": None, "upsample": None},
            {"extents": None, "query_lengths": None},
            {"box": None, "origins": None},
            {"upsample": None},
        )
        for changes in unplaced:
            yield from _changed(problem, {"case": dataclasses.replace(case, **changes)})
        return  # places would have to follow the layout and the batch
    steps: list[dict[str, Any]] = [
        {"additional": 0, "fused": False},
        {"relative_bias": False},
        {"key_bias": None},
        {"key_bias": case.key_bias and "tokens", "hidden": 0.0},
        {"sinks": False},
        *({"batch": batch} for batch in (1, 2, case.batch // 2) if 0 < batch < case.batch),
        {"scales": None},
        {"scale": None},
        {"head_dim_v": None},
        {"head_dim": min(case.head_dim, 8)},
        {"edges": None},
        {"relative_bias": False},
        {"key_bias": None},
        {"sinks": False},
        {"is_causal": (False,) * rank},
    ]
    if case.queries is None:
        steps += [{"dilation": (1,) * rank}, {"stride": (1,) * rank}]
        for i in range(rank):
            least = case.window_arguments["kernel_size"][i] * case.window_arguments["dilation"][i]
            for extent in (least, (case.layout[i] + least) // 2, case.layout[i] - 1):
                if least <= extent < case.layout[i]:
                    steps.append({"layout": (*case.layout[:i], extent, *case.layout[i + 1 :])})
    else:
        steps += [{"queries": case.queries // 2}] if case.queries > 1 else []
        steps += [{"layout": (case.layout[0] // 2,)}] if case.layout[0] > 1 else []
    for heads, heads_kv in ((case.heads_kv, case.heads_kv), (case.heads // case.heads_kv, 1), (1, 1)):
        yield from _changed(problem, {"case": case.with_heads(heads, heads_kv)})
    for step in steps:
        yield from _changed(problem, {"case": dataclasses.replace(case, **step)})


def _changed(problem: Fuzzed, changes: dict[str, Any]) -> Iterator[Fuzzed]:
    changed = dataclasses.replace(problem, **changes)
    if changed != problem:
        yield changed
