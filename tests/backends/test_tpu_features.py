"""What the operators' arguments come to on the TPU kernels, which XLA interprets: right results, or one sentence."""

from __future__ import annotations

import dataclasses

import pytest

from natten_jax import backends
from tests.ops.test_added_logits import CASES as ADDED
from tests.ops.test_added_logits import check
from tests.support.families import Family
from tests.support.interpreted_tpu import InterpretedTpuBackend
from tests.support.problems import Case, Trial, check_all

FAMILY = Family.of(InterpretedTpuBackend())

CASES = {
    "cut": Case((29,), (7,), edges=("cut",), heads=2),
    "cut, stride and dilation": Case((31, 24), (5, 6), stride=(1, 3), dilation=(3, 2), edges=("cut", "shift")),
    "wrap": Case((30,), (9,), edges=("wrap",), heads=2, heads_kv=1),
    "wrap in one of two": Case((18, 14), (5, 4), edges=("cut", "wrap")),
    "wrap in both": Case((12, 16), (5, 4), dilation=(1, 2), edges=("wrap", "wrap"), additional=3),
    "box": Case((20, 17), (5, 6), box=(7, 8), origins=((4, 9),)),
    "boxes": Case((40,), (9,), batch=3, box=(6,), origins=((0,), (17,), (34,)), is_causal=(True,)),
    "box of a layout that cuts": Case((24,), (7,), edges=("cut",), box=(8,), origins=((14,),)),
    "upsampled": Case((13, 9), (4, 3), upsample=(2, 3)),
    "sinks": Case((25,), (6,), heads=4, heads_kv=2, sinks=True),
    "queries of attention": Case((50,), queries=12, origins=((31,),), is_causal=(True,)),
}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    *others, last = backends.registered()
    monkeypatch.setattr(backends, "_registered", [*others, FAMILY.backend, last])


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_definition(name: str) -> None:
    check_all([Trial(CASES[name], "float32", len(name))], FAMILY)


@pytest.mark.parametrize("name", ["shared", "merged"])
def test_one_rule_for_biases_that_hide_keys(name: str) -> None:
    # Heads that share a register of lanes share what is not finite, so there is one head of keys.
    check(FAMILY, dataclasses.replace(ADDED[name], heads_kv=1), "float32", without=("0.49 min",))
