"""Random problems with each feature of the operators. All outputs and gradients are compared with the oracle."""

from __future__ import annotations

import pytest

from natten_jax.problem import Operator
from tests.fuzz.execution import find_errors
from tests.fuzz.features import draw_with
from tests.fuzz.problem import Fuzzed
from tests.support.families import Family

#: For each test, the features that all its problems have, and the number of problems per family. Each problem also has
#: random other features.
FEATURES = {
    ("query_origin",): 12,
    ("extents",): 16,
    ("query_origin", "extents"): 4,
    ("upsample",): 6,
    ("relative_bias",): 10,
    ("key_bias",): 8,
    ("sinks",): 6,
    ("relative_bias", "key_bias", "sinks"): 6,
    ("relative_bias", "edges"): 4,
    ("key_bias", "extents"): 4,
    ("key_bias", "query_origin"): 2,
}


@pytest.mark.parametrize("features", FEATURES, ids=" ".join)
def test_random_problems_with_a_feature(family: Family, features: tuple[str, ...]) -> None:
    operators: tuple[Operator, ...] = ("fna", "fmha")
    problems: list[Fuzzed] = []
    # Families in plain JAX get a quarter of the problems, because XLA takes long to compile them.
    for number in range(FEATURES[features] if family.target else -(-FEATURES[features] // 4)):
        try:
            problems.append(draw_with(features, family, operators, 0, number, is_direct=False))
        except ValueError as error:
            pytest.skip(str(error))
    for start in range(0, len(problems), family.at_once):
        some = problems[start : start + family.at_once]
        wrong = {repr(problem): what for problem, what in zip(some, find_errors(some), strict=True) if what}
        assert not wrong
