"""Heads that are narrower than kernels' heads, by the kernels for the host, as if these had the widths of GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from natten_jax import backends
from natten_jax.backends.cpu import CpuBackend
from natten_jax.backends.select import resolve
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support.families import family_named
from tests.support.problems import Case, Trial, check_all

CASES = [
    Case((23,), (5,), head_dim=12, head_dim_v=20, batch=2, heads=4, heads_kv=2),
    Case((6, 7), (3, 3), head_dim=1, head_dim_v=17, additional=3, fused=True, is_causal=(True, False)),
    Case((6, 7), (3, 2), head_dim=9, additional=2, heads=2, scales=(0.3, -0.5)),
    Case((24,), (5,), head_dim=13, heads=4, heads_kv=2, scales=(0.3, -0.5, 0.0, 1.7)),
    Case((30,), queries=17, is_causal=(True,), head_dim=3, head_dim_v=8, scale=-0.4),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_behind_heads_change_nothing(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before what was decided for equal problems is asked for.
    monkeypatch.setattr(CpuBackend, "capabilities", dataclasses.replace(CpuBackend.capabilities, head_dim_step=8))
    backends.select.decided.cache_clear()
    problem = problem_of((23,), 5, head_dim=12, head_dim_v=20, dtype=dtype)
    plan = resolve(Request(problem, backend="cpu-fna"), default_device(), "forward")
    assert (plan.problem.head_dim, plan.problem.head_dim_v, plan.problem.scale) == (16, 24, 12**-0.5)
    check_all([Trial(case, dtype) for case in CASES], family_named("cpu"))
    backends.select.decided.cache_clear()
