"""Every form of the GPU kernels, the machine code of the kernels, and some tests of plain JAX on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from natten_jax.native import module
from tests.support import sass
from tests.support.cases import attention_cases, feature_cases
from tests.support.families import Family
from tests.support.kernel_forms import FORMS, Form, run
from tests.support.problems import check

# Every form of the GPU kernels gives the same results with a single scale and with equal per-head scales.


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms()])
def test_scales_that_are_all_the_same_are_one_scale(name: str, form: Form) -> None:
    run(name, form)


# Machine code of the CUDA kernels.


needs_disassembler = pytest.mark.skipif(sass.missing() is not None, reason=str(sass.missing()))


def _library() -> Path:
    path = module.path()
    assert path is not None
    return Path(path).with_name("libnatten_jax.so")


@needs_disassembler
@pytest.mark.parametrize("names", ["sm80_fna", "sm90_", "small_ring", "small_(?!ring)"])
def test_buffers_are_released_after_loads_have_ended(names: str) -> None:
    kernels = sass.found_in_kernels(sass.early_arrivals, _library(), names)
    assert kernels
    assert {name: arrivals for name, arrivals in kernels.items() if arrivals} == {}


@needs_disassembler
def test_lanes_of_ring_kernels_stay_together() -> None:
    kernels = sass.found_in_kernels(sass.divergent_collectives, _library(), "small_ring")
    assert kernels
    assert [name for name, branches in kernels.items() if branches] == []


# Plain JAX on a GPU: some of the tests that also run on the CPU, because XLA compiles differently for a GPU.


CASES = {
    **{name: feature_cases()[name] for name in ("window-even", "3d-dilated", "gqa", "additional-fused")},
    "attention": attention_cases()["mqa-causal"],
}


@pytest.mark.parametrize("name", CASES)
def test_feature(pure_family: Family, dtype: str, name: str) -> None:
    check(CASES[name], pure_family, dtype)
