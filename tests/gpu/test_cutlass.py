"""Portable kernels on an NVIDIA GPU: matrix products in TF32 if requested, and reproducible gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Inputs
from natten_jax.backends import cutlass
from natten_jax.backends.select import resolve
from natten_jax.native import module as native
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.performance import MemoryUsagePreference
from natten_jax.plan import devices
from natten_jax.plan.plan import Request
from natten_jax.windows import WindowArguments
from tests.support.families import BOUNDS
from tests.support.problems import Case, check_gradients_repeat, value_and_gradients

pytestmark = pytest.mark.gpu


CASE = Case((40, 48), (13, 13), batch=2, heads=4, heads_kv=4, head_dim=64)


def results(case: Case = CASE, dtype: str = "float32", **arguments: Any) -> list[np.ndarray]:
    """Return output, logsumexp and gradients."""
    operator = case.operator("cutlass-fna", **arguments)
    found = value_and_gradients(operator, case.operands(dtype, 0), case.cotangents(dtype, 0))
    return [np.asarray(array) for array in jax.tree.leaves(found)]


def worst_error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    pairs = [(one.astype(np.float64), other.astype(np.float64)) for one, other in zip(found, expected, strict=True)]
    return max(float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs)


@pytest.mark.parametrize(
    ("precision", "is_accurate"),
    [(None, True), ("highest", True), ("float32", True), ("tensorfloat32", False), ("high", False), ("default", False)],
)
def test_float32_products_have_the_requested_precision(precision: str | None, is_accurate: bool) -> None:
    with jax.default_matmul_precision("highest"):
        expected = results()
    with jax.default_matmul_precision(precision):
        worst = worst_error(results(), expected)
    if is_accurate:
        assert worst <= 1e-6  # the query gradient is summed in a different order in each run
    else:
        assert 1e-5 < worst <= 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_reproducible_with_one_split(dtype: str) -> None:
    check_gradients_repeat(CASE, "cutlass-fna", dtype=dtype, backward_kv_splits=1, dilation=2)


@pytest.mark.parametrize("splits", [1, (2, 1), (3, 2), 1000])
def test_splits_change_no_result(splits: Any) -> None:
    assert worst_error(results(backward_kv_splits=splits), results()) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim_v", [8, 72, 256])
def test_both_reductions_give_the_same_gradients(dtype: str, head_dim_v: int) -> None:
    case = Case((9, 13), (7, 7), batch=2, heads=3, heads_kv=3, head_dim=64, head_dim_v=head_dim_v)
    kernel, xla = (results(case, dtype, backward_use_xla_reduction=each) for each in (False, True))
    assert worst_error(kernel, xla) <= BOUNDS[dtype]


@pytest.mark.parametrize("rule", ["shape", "dtype", "head_dim"])
def test_malformed_reductions_are_refused(rule: str) -> None:
    out = jnp.ones((1, 1, 2, 3, 2, 12 if rule == "head_dim" else 16))
    cotangent = out[..., :8] if rule == "shape" else out.astype(jnp.float16) if rule == "dtype" else out
    statistic = out[..., 0]
    with pytest.raises(Exception, match="natten_jax"):
        types = [native.ResultType(statistic.shape, jnp.float32)]
        jax.block_until_ready(native.call("natten_jax_sm80_delta", types, out, cotangent, statistic))


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
def test_heads_that_take_turns_change_no_result(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((20, 24), (13, 13), batch=2, heads=6, heads_kv=3, head_dim=64, additional=7, fused=True)
    run = functools.partial(results, case, "float16", backward_kv_splits=1, memory_usage_preference="strict")
    expected = run()
    monkeypatch.setitem(cutlass._SCRATCH_BYTES, MemoryUsagePreference.STRICT, 4 * at_once * 20 * 24 * 2 * 64)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, run(), expected)


@pytest.mark.parametrize(("element_type", "first"), [("float32", "cutlass"), ("bfloat16", "hopper")])
def test_hopper_comes_first_where_it_can(element_type: str, first: str) -> None:
    device = devices.default_device()
    if device.compute_capability != (9, 0):
        pytest.skip("it is not a Hopper GPU")
    array = jax.ShapeDtypeStruct((1, 8192, 4, 64), element_type)
    problem = neighborhood_problem(1, Inputs(array, array, array), WindowArguments(1024))  # type: ignore[arg-type]
    assert resolve(Request(problem), device, "forward").backend.family == first
