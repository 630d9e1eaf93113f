"""Plain JAX on a GPU, where XLA compiles it in another way: some of what all its tests compute on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cases import attention_cases, feature_cases
from tests.support.families import Family
from tests.support.problems import check

pytestmark = pytest.mark.gpu

CASES = {
    **{name: feature_cases()[name] for name in ("window-even", "3d-dilated", "gqa", "additional-fused")},
    "attention": attention_cases()["mqa-causal"],
}


@pytest.mark.parametrize("name", CASES)
def test_feature(pure_family: Family, dtype: str, name: str, record_property: Callable[[str, object], None]) -> None:
    check(CASES[name], pure_family, dtype, record=record_property)
