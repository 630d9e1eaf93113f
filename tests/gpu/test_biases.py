"""What kernels for NVIDIA GPUs add to logits, against the oracle: biases of keys as columns of wider heads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.execution.test_key_bias_columns import CASES
from tests.ops.test_biases import CASES as ALL_CASES
from tests.support.cases import random_case
from tests.support.families import FAMILIES, Family
from tests.support.problems import Case, Trial, check_all

pytestmark = pytest.mark.gpu

_GPU = [family for family in FAMILIES if family.name in ("hopper", "cutlass")]
_OF_EACH_TYPE = [pytest.param(family, dtype, id=f"{family.name}-{dtype}") for family in _GPU for dtype in family.dtypes]
#: Heads as wide as kernels with forms of their own.
_WIDTHS = (24, 32, 64, 128)


def _without_tables(case: Case) -> Case:
    return dataclasses.replace(case, relative_bias=False)


@pytest.mark.parametrize(("of", "dtype"), _OF_EACH_TYPE)
def test_biases_of_keys(of: Family, dtype: str) -> None:
    cases = [*CASES.values(), *(_without_tables(case) for case in ALL_CASES.values() if case.extents is None)]
    check_all([Trial(case.fitted(of), dtype) for case in cases if case.key_bias is not None], of)


@pytest.mark.parametrize(("of", "dtype"), _OF_EACH_TYPE)
def test_biases_of_keys_of_random_problems(of: Family, dtype: str) -> None:
    rng = np.random.default_rng(0)
    trials = []
    for seed in range(200, 224):
        case = dataclasses.replace(
            random_case(seed, tokens=200),
            key_bias=str(rng.choice(["tokens", "heads"])),
            hidden=float(rng.choice([0.0, 0.3, 0.7])),
            sinks=bool(rng.random() < 0.3),
            head_dim=int(rng.choice(_WIDTHS)),
        )
        trials.append(Trial(case.fitted(of).with_edges_of(of), dtype, seed))
    check_all(trials, of)
