"""What only an NVIDIA GPU shows of the portable kernels: TF32 on request, reproducible gradients, command buffers.

Their results are checked with those of every other family in ``test_operators.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends, devices
from natten_jax.problem import TileConfig, neighborhood_problem

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


@pytest.mark.parametrize(("element_type", "first"), [("float32", "cutlass"), ("bfloat16", "hopper")])
def test_hopper_comes_first_where_it_can(element_type: str, first: str) -> None:
    device = devices.default_device()
    if device.compute_capability != (9, 0):
        pytest.skip("it is not a Hopper GPU")
    array = jax.ShapeDtypeStruct((1, 40, 4, 64), element_type)
    problem = neighborhood_problem(1, array, array, array, 9, 1, 1, False, None, None, None)
    assert backends.choose(problem, TileConfig(), device, "forward").family == first


def test_calls_in_command_buffers_follow_their_buffers() -> None:
    options = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
    run = functools.partial(gradients, backward_kv_splits=1)
    sets = [tuple(draw(3 * i + j, 1, 33, 47, 4, 64, dtype=jnp.bfloat16) for j in range(3)) for i in range(4)]
    plain = jax.jit(run).lower(*sets[0]).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    graphed = jax.jit(run).lower(*sets[0]).compile(compiler_options=options)
    expected = [jax.tree.map(np.asarray, plain(*each)) for each in sets]
    for each, reference in zip(sets, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, graphed(*each)), reference)
