"""Portable kernels on an NVIDIA GPU: TF32 on request and reproducible gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.operands import Inputs
from natten_jax.backends import cutlass
from natten_jax.backends.select import resolve
from natten_jax.native import module as native
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.performance import MemoryUsagePreference
from natten_jax.plan import devices
from natten_jax.plan.plan import Request
from natten_jax.windows import WindowArguments

pytestmark = pytest.mark.gpu


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays(dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    return tuple(draw(i, 2, 40, 48, 4, 64, dtype=dtype) for i in range(3))


def gradients(query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any) -> tuple[jax.Array, ...]:
    function = functools.partial(natten_jax.na2d, kernel_size=13, backend="cutlass-fna", **arguments)
    out, pullback = jax.vjp(function, query, key, value)
    return (out, *pullback(draw(9, *out.shape, dtype=out.dtype)))


def error(found: jax.Array, expected: jax.Array) -> float:
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


@pytest.mark.parametrize(
    ("precision", "is_accurate"),
    [(None, True), ("highest", True), ("float32", True), ("tensorfloat32", False), ("high", False), ("default", False)],
)
def test_products_of_float32_are_as_precise_as_asked_for(precision: str | None, is_accurate: bool) -> None:
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(gradients)(*arrays())
    with jax.default_matmul_precision(precision):
        found = jax.jit(gradients)(*arrays())
    worst = max(map(error, found, expected))
    if is_accurate:
        assert worst <= 1e-6  # sums of the query gradient are rounded in another order each time
    else:
        assert 1e-5 < worst <= 1e-3


@pytest.mark.parametrize("element_type", [jnp.float32, jnp.bfloat16])
def test_gradients_are_reproducible_with_one_split(element_type: Any) -> None:
    run = jax.jit(functools.partial(gradients, backward_kv_splits=1, dilation=2))
    first, *others = (jax.tree.map(np.asarray, run(*arrays(element_type))) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize("splits", [1, (2, 1), (3, 2), 1000])
def test_splits_change_no_result(splits: Any) -> None:
    found = jax.jit(functools.partial(gradients, backward_kv_splits=splits))(*arrays())
    expected = jax.jit(gradients)(*arrays())
    assert max(map(error, found, expected)) <= 1e-6


@pytest.mark.parametrize("element_type", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("head_dim_v", [8, 72, 256])
def test_both_reductions_give_the_same_gradients(element_type: Any, head_dim_v: int) -> None:
    query, key = (draw(i, 2, 9, 13, 3, 64, dtype=element_type) for i in range(2))
    value = draw(2, 2, 9, 13, 3, head_dim_v, dtype=element_type)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, use_xla: bool) -> tuple[jax.Array, ...]:
        function = functools.partial(
            natten_jax.na2d, kernel_size=7, backend="cutlass-fna", backward_use_xla_reduction=use_xla, return_lse=True
        )
        (out, lse), pullback = jax.vjp(function, query, key, value)
        return pullback((draw(9, *out.shape, dtype=out.dtype), draw(10, *lse.shape)))

    kernel, xla = (jax.jit(functools.partial(run, use_xla=each))(query, key, value) for each in (False, True))
    bound = 2e-6 if element_type == jnp.float32 else 1e-3 if element_type == jnp.float16 else 6e-3
    assert max(map(error, kernel, xla)) <= bound


@pytest.mark.parametrize("rule", ["shape", "dtype", "head_dim"])
def test_malformed_reductions_are_refused(rule: str) -> None:
    out = draw(0, 1, 1, 2, 3, 2, 12 if rule == "head_dim" else 16)
    cotangent = out[..., :8] if rule == "shape" else out.astype(jnp.float16) if rule == "dtype" else out
    statistic = out[..., 0]
    with pytest.raises(Exception, match="natten_jax"):
        types = [native.ResultType(statistic.shape, jnp.float32)]
        jax.block_until_ready(native.call("natten_jax_sm80_delta", types, out, cotangent, statistic))


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
def test_heads_that_take_turns_change_no_result(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query = draw(0, 2, 20, 24, 6, 64, dtype=jnp.float16)
    key, value, more = (draw(i, 2, n, 3, 64, dtype=jnp.float16) for i, n in ((1, 480), (2, 480), (3, 7)))
    key, value = (each.reshape(2, 20, 24, 3, 64) for each in (key, value))
    run = functools.partial(
        gradients, additional_keys=more, additional_values=more, backward_kv_splits=1, memory_usage_preference="strict"
    )
    expected = jax.jit(run)(query, key, value)
    monkeypatch.setitem(cutlass._SCRATCH_BYTES, MemoryUsagePreference.STRICT, 4 * at_once * 20 * 24 * 2 * 64)
    jax.clear_caches()
    found = jax.jit(functools.partial(run))(query, key, value)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("element_type", "first"), [("float32", "cutlass"), ("bfloat16", "hopper")])
def test_hopper_comes_first_where_it_can(element_type: str, first: str) -> None:
    device = devices.default_device()
    if device.compute_capability != (9, 0):
        pytest.skip("it is not a Hopper GPU")
    array = jax.ShapeDtypeStruct((1, 8192, 4, 64), element_type)
    problem = neighborhood_problem(1, Inputs(array, array, array), WindowArguments(1024))  # type: ignore[arg-type]
    assert resolve(Request(problem), device, "forward").backend.family == first
