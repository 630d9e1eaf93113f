"""Memory: nothing grows with the number of query and key pairs, and scratch is bounded where the caller says so."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax import simulator
from natten_jax.backends import cpu, cutlass
from natten_jax.performance import Performance
from natten_jax.plan.plan import Plan
from tests.support.families import Family
from tests.support.programs import output_of, run_python

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
import natten_jax

backend = sys.argv[1]
query, key, value, cotangent = (
    jax.random.normal(jax.random.key(i), (1, 256, 256, 1, 32), jnp.float32) for i in range(4)
)
jax.block_until_ready((query, key, value, cotangent))

@jax.jit
def both(query, key, value, cotangent):
    out, pullback = jax.vjp(lambda *a: natten_jax.na2d(*a, kernel_size=7, backend=backend), query, key, value)
    return out, pullback(cotangent)

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(both(query, key, value, cotangent))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6)
"""
LARGEST = 400  # MB; the operands, results and gradients together are 64, all logits would be 16384


@pytest.mark.usefixtures("without_stored_programs")
def test_peak_of_both_passes(family: Family) -> None:
    if family.needs_gpu:
        pytest.skip("this is about the host's memory")
    megabytes = float(output_of(run_python(PROGRAM, family.fna, quick=False, fresh=True)))
    assert megabytes < LARGEST


LIMITS = {"strict": 64 << 20, "default": 1 << 30, "unrestricted": math.inf}


@given(
    preference=st.sampled_from(sorted(LIMITS)),
    batch=st.integers(1, 9),
    heads_kv=st.integers(1, 24),
    group=st.integers(1, 4),
    tokens=st.integers(1, 200_000),
    head_dim=st.sampled_from([8, 64, 128, 256]),
)
def test_query_gradients_are_summed_up_within_the_preference(
    preference: str, batch: int, heads_kv: int, group: int, tokens: int, head_dim: int
) -> None:
    heads = heads_kv * group
    problem = simulator.problem_of((tokens,), 1, batch=batch, heads=heads, heads_kv=heads_kv, head_dim=head_dim)
    query: Any = jax.ShapeDtypeStruct((batch, 1, 1, tokens, heads, head_dim), jnp.bfloat16)
    elements = cutlass.scratch_elements(problem, query, Performance(memory_usage_preference=preference))
    of_head, limit = tokens * group * head_dim, LIMITS[preference]
    assert elements % of_head == 0
    at_once = elements // of_head
    # Some heads of a batch entry, or all of some entries: no fewer than fit, no more than there are.
    assert 1 <= at_once <= batch * heads_kv and (at_once < heads_kv or at_once % heads_kv == 0)
    assert at_once == 1 or 4 * elements <= limit
    if 4 * batch * heads_kv * of_head <= limit:
        assert at_once == batch * heads_kv
    if at_once < heads_kv:  # one turn less would not do
        turns = math.ceil(heads_kv / at_once)
        assert 4 * of_head * math.ceil(heads_kv / (turns - 1)) > limit


@pytest.mark.parametrize("preference", [None, "strict", "unrestricted"])
def test_preference_reaches_the_backend(preference: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backward = cpu.CpuBackend.backward

    def record(self: cpu.CpuBackend, plan: Plan, *arguments: Any) -> Any:
        seen.append(plan.performance.memory_usage_preference)
        return backward(self, plan, *arguments)

    monkeypatch.setattr(cpu.CpuBackend, "backward", record)
    chosen: dict[str, Any] = {} if preference is None else {"memory_usage_preference": preference}
    array = jnp.ones((1, 12, 2, 8))
    for kernel_size in (5, 12):  # neighborhood attention, and attention where the window is the layout
        jax.grad(lambda x, k=kernel_size: natten_jax.na1d(x, x, x, k, **chosen).sum())(array)
    jax.grad(lambda x: natten_jax.attention(x, x, x, **chosen).sum())(array)
    assert seen and set(seen) == {preference or "default"}
