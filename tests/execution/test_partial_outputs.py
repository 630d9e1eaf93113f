"""Forward passes on parts of the keys, merged: that on all keys, to the digits that backward passes need."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.arrays.operands import Inputs, Operands, Saved
from natten_jax.execution import custom_vjp
from natten_jax.execution.strips import merged
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from natten_jax.windows import Axis

TOKENS, HEADS, WIDTH = 24, 2, 8


def saved(backend: str, query: jax.Array, key: jax.Array, value: jax.Array) -> Saved:
    """What attention to these keys saves."""
    problem = problem_of((TOKENS,), TOKENS, heads=HEADS, head_dim=WIDTH, dtype=query.dtype.name)
    keys = key.shape[1]
    problem = dataclasses.replace(problem, axes=(Axis(TOKENS, keys, keys),))
    return custom_vjp.forward_saving(Request(problem, backend=backend), Operands(Inputs(query, key, value)))


def base2(each: Saved) -> np.ndarray:
    """The logsumexp in base 2, to all digits that there are."""
    assert each.remainder is not None
    rounded = np.float32(each.logsumexp) * np.float32(1 / np.log(2))
    return np.asarray(rounded, np.float64) + np.asarray(each.remainder, np.float64)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [
        ("cpu-fna", "float32", 2e-6),
        pytest.param("hopper-fna", "bfloat16", 2e-2, marks=pytest.mark.gpu),
        pytest.param("cutlass-fna", "bfloat16", 2e-2, marks=pytest.mark.gpu),
        pytest.param("cutlass-fna", "float32", 2e-6, marks=pytest.mark.gpu),
    ],
)
def test_of_two_parts(backend: str, dtype: str, bound: float, jit: bool, size: float) -> None:
    keys = jax.random.split(jax.random.key(int(size)), 3)
    query, key, value = (jax.random.normal(each, (1, TOKENS, HEADS, WIDTH), dtype) for each in keys)
    query = query * jnp.asarray(size, dtype)

    def of_parts(query: jax.Array, key: jax.Array, value: jax.Array) -> Saved:
        halves = [saved(backend, query, key[:, part], value[:, part]) for part in (slice(10), slice(10, None))]
        return merged(*halves)

    found = (jax.jit(of_parts) if jit else of_parts)(query, key, value)
    expected = saved(backend, query, key, value)
    np.testing.assert_allclose(np.float32(found.out), np.float32(expected.out), atol=bound)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, rtol=3e-7)
    # A float32 number alone is off by 0.06 where logits are of the order of a million.
    np.testing.assert_allclose(base2(found), base2(expected), atol=3e-6)


def test_of_parts_that_are_not_seen() -> None:
    out = jnp.array([1.0, 0.0])[:, None, None] * jnp.ones((2, 1, 4))
    one = Saved(out, jnp.array([[0.5], [-jnp.inf]]), jnp.zeros((2, 1)))
    nothing = Saved(jnp.zeros_like(out), jnp.full((2, 1), -jnp.inf), jnp.zeros((2, 1)))
    for found in (merged(one, nothing), merged(nothing, one)):
        np.testing.assert_array_equal(found.out, out)
        np.testing.assert_allclose(found.logsumexp, one.logsumexp, rtol=1e-7)
        assert found.remainder is not None and bool(jnp.isfinite(found.remainder).all())
