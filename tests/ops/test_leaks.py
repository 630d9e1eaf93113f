"""A non-finite number affects only its batch entry, and only the heads that depend on it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tests.fuzz.execution import find_errors
from tests.fuzz.problem import Fuzzed, draw
from tests.fuzz.spoiled import EXTENTS, NAMES, NUMBERS, Spoiled
from tests.support.families import Family
from tests.support.problems import Case

#: Problems and their tile arguments, by name. Tiles have room for more tokens than kernels load into them. GPU
#: kernels run with 150 times the batch size, so that each SM computes several batch entries in sequence.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "wide-values": (Case((48,), (16,), head_dim=64, head_dim_v=192, batch=3), {}),
    "wider-values": (Case((48,), (16,), head_dim=72, head_dim_v=200, batch=3), {}),
    "narrow-values": (Case((48,), (16,), head_dim=128, head_dim_v=32, batch=3), {}),
    "narrow-heads": (Case((48,), (16,), head_dim=40, head_dim_v=24, heads=4, heads_kv=2, batch=2), {}),
    "short-query-tiles": (
        Case((12, 5), (4, 3), head_dim=160, head_dim_v=136, heads=2, heads_kv=2, batch=2),
        {"q_tile_shape": (3, 3), "kv_tile_shape": (4, 5), "backward_q_tile_shape": (3, 3)}
        | {"backward_kv_tile_shape": (4, 5)},
    ),
    "additional-and-short-key-tiles": (
        Case((9, 4, 5), (3, 3, 3), head_dim=64, heads=2, heads_kv=2, additional=150, fused=True, batch=2),
        {"q_tile_shape": (2, 4, 5), "kv_tile_shape": (3, 3, 5), "backward_q_tile_shape": (3, 3, 5)}
        | {"backward_kv_tile_shape": (2, 4, 5)},
    ),
    "additional-and-wide-short-tiles": (
        Case((30,), (9,), head_dim=136, head_dim_v=256, heads=2, additional=100, fused=True, batch=2),
        {"q_tile_shape": (21,), "kv_tile_shape": (13,), "backward_q_tile_shape": (11,)}
        | {"backward_kv_tile_shape": (19,)},
    ),
    # The call computes a part of the layout. In this part, some dilation groups have no keys. In memory, the part is
    # followed by the keys of the next batch entry.
    "groups-without-keys": (Case((2, 15), (2, 1), dilation=(1, 13), head_dim=136, heads=3, heads_kv=3, batch=3), {}),
    "small-windows": (Case((14, 14), (5, 5), head_dim=32, heads=4, heads_kv=2, batch=2), {}),
    "dilated": (Case((20, 9), (4, 3), dilation=(3, 2), head_dim=32, heads=2, heads_kv=2, batch=2), {}),
}


def problems_of(family: Family, dtype: str, names: list[str], is_direct: bool) -> list[Fuzzed]:
    """Return each case once per array, with NaN or an infinity in this array."""
    found = []
    for name in names:
        case, tiles = CASES[name]
        if family.needs_gpu:
            case = dataclasses.replace(case, batch=150 * case.batch)
        for i, array in enumerate(array for array in NAMES if case.additional or not array.startswith("additional")):
            found.append(
                Fuzzed(
                    family.name,
                    case.fitted(family),
                    dtype,
                    seed=i,
                    query_factor=(1.0, 8.0)[i % 2],
                    tiles={**tiles, "backward_deterministic": True},
                    is_direct=is_direct,
                    queries=((0, 2), (2, 13)) if name == "groups-without-keys" else None,
                    keys=((1, 2), (1, 11)) if name == "groups-without-keys" else None,
                    spoiled=Spoiled(array, NUMBERS[i % 3], EXTENTS[i % 2], i, i, 12 * i),
                )
            )
    return found


#: Groups of problems. All problems of a group run in one compiled program.
TOGETHER = (
    ("wide-values", "narrow-heads", "small-windows"),
    ("wider-values", "narrow-values", "groups-without-keys"),
    ("short-query-tiles", "additional-and-short-key-tiles", "additional-and-wide-short-tiles"),
)


@pytest.mark.parametrize("names", TOGETHER, ids=("wide", "narrow", "short"))
def test_non_finite_numbers_stay_in_their_entry(native_family: Family, dtype: str, names: tuple[str, ...]) -> None:
    problems = problems_of(native_family, dtype, list(names), is_direct=True)
    found = [error for error in find_errors(problems) if error]
    assert not found


@pytest.mark.parametrize("name", ["narrow-heads", "dilated"])
def test_non_finite_numbers_stay_in_their_entry_in_operators(family: Family, name: str) -> None:
    problems = problems_of(family, family.dtype, [name], is_direct=False)
    if family.capabilities.is_plain_jax:
        problems = problems[1:4]
    found = [error for error in find_errors(problems) if error]
    assert not found


def test_other_entries_are_found_by_the_same_products(pure_family: Family) -> None:
    """Backward passes recompute the softmax statistics of the whole batch if a logit is large.

    A logit that is not finite must not count as a large logit. Otherwise, the results of other batch entries would be
    rounded differently.
    """
    case = Case((150,), (33,), batch=3, heads=2, heads_kv=2, head_dim=48)
    tiles = dict(zip(("q_tile_shape", "kv_tile_shape"), ((64,), (128,)), strict=True))
    tiles |= dict(zip(("backward_q_tile_shape", "backward_kv_tile_shape"), ((16,), (32,)), strict=True))
    problems = [
        Fuzzed(
            pure_family.name,
            case,
            pure_family.dtype,
            seed=3,
            tiles=tiles,
            spoiled=Spoiled(array, number, "number", 1, 0, 5 * 48 + 2),
        )
        for array, number in itertools.product(("query", "key"), ("inf", "nan"))
    ]
    found = [error for error in find_errors(problems) if error]
    assert not found


def test_random_problems_contain_non_finite_numbers_to_their_entry(native_family: Family) -> None:
    numbers = [draw(native_family, ("fna", "fmha"), 11, number, is_direct=True) for number in range(120)]
    problems = [problem for problem in numbers if problem.spoiled is not None]
    assert len(problems) > 10
    found = [(problem, error) for problem, error in zip(problems, find_errors(problems), strict=True) if error]
    assert not found
