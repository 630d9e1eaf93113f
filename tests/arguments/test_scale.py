"""The scale of the logits: a real number is valid if the compute type can represent its product with log2(e)."""

from __future__ import annotations

import fractions
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import natten_jax
from natten_jax.ops.canonicalize import attention_problem
from tests.support.problems import element_types

LARGEST = float(np.finfo(np.float32).max) / math.log2(math.e)


def operators(dtype: str = "float32") -> list[Callable[..., Any]]:
    """Return all public functions as functions of the scale."""
    line, plane, space = (jnp.zeros((1, *(4, 5, 6)[:rank], 1, 8), dtype) for rank in (1, 2, 3))
    return [
        lambda scale: natten_jax.na1d(line, line, line, 3, scale=scale),
        lambda scale: natten_jax.na2d(plane, plane, plane, 3, scale=scale),
        lambda scale: natten_jax.na3d(space, space, space, (4, 5, 6), scale=scale),
        lambda scale: natten_jax.attention(line, line, line, scale),
    ]


def scale_of(scale: Any, dtype: str) -> float:
    array = jax.ShapeDtypeStruct((1, 4, 1, 8), jnp.dtype(dtype))
    return attention_problem(array, array, array, scale, False).scale  # type: ignore[arg-type]


REAL = r"^scale must be None, a real number or an array of real numbers, without dimensions or .*, got"
#: Finite numbers outside the valid range. float32 can represent some of them, but not their products with log2(e).
LARGE = [-1e39, 10**39, 2.4e38, np.float64(1e300), fractions.Fraction(10**40, 3), jnp.bfloat16(3.3e38)]
INFINITE = [
    10**400,
    10**5000,
    fractions.Fraction(10**400),
    -math.inf,
    math.nan,
    np.float32("inf"),
    np.longdouble("1e4000"),
]
INFINITE_ARRAYS = [jnp.float32(np.inf), np.array(np.nan), np.array([np.inf])]
NOT_REAL = ["1", True, np.True_, 1j, np.complex64(1), [1.0], np.array(True), jnp.array(1j), b"1", (), {}]
REFUSED: list[tuple[type[Exception], str, list[Any]]] = [
    (ValueError, r"^scale must be within .*log2\(e\)", LARGE),
    (ValueError, r"^scale(\[0\])? must be finite", INFINITE + INFINITE_ARRAYS),
    (TypeError, REAL, NOT_REAL),
]


@pytest.mark.parametrize(("error", "message", "scales"), REFUSED, ids=["large", "infinite", "not real"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_other_scales_are_refused(error: type[Exception], message: str, scales: list[Any], dtype: str) -> None:
    if dtype == "float64" and "within" in message:
        pytest.skip("float64 holds these")
    with element_types(dtype):
        for call, scale in itertools.product(operators(dtype), scales):
            with pytest.raises(error, match=message) as caught:
                jax.eval_shape(lambda call=call, scale=scale: call(scale))
            assert "within" not in message or dtype in str(caught.value)


def test_float64_takes_every_finite_scale() -> None:
    with element_types("float64"):
        query = jnp.array([1e-300, -2e-300]).reshape(1, 2, 1, 1)
        key = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
        found = natten_jax.attention(query, key, key, 1e300)
        weights = jax.nn.softmax(jnp.array([[1.0, 2.0, 3.0], [-2.0, -4.0, -6.0]]))
        np.testing.assert_allclose(found[0, :, 0, 0], weights @ key[0, :, 0, 0], rtol=1e-13)


@pytest.mark.parametrize("backend", ["cpu-fmha", "flex-fmha"])
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-300, -1e-300])
def test_scales_that_are_zero_in_float32_weigh_all_keys_alike(backend: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 6, 1, 8)), "float32") for _ in range(3))

    def attend(query: jax.Array, key: jax.Array) -> jax.Array:
        return natten_jax.attention(query, key, value, scale, backend=backend)

    found, gradients_of = jax.vjp(attend, query, key)
    np.testing.assert_allclose(found, np.broadcast_to(value.mean(1, keepdims=True), found.shape), rtol=1e-5, atol=1e-6)
    for gradient in gradients_of(jnp.full_like(found, 1e30)):
        np.testing.assert_array_equal(gradient, 0)
    is_nan = np.isnan(attend(query.at[0, 2, 0, 3].set(jnp.nan), key)).all(-1).squeeze()
    np.testing.assert_array_equal(is_nan, np.arange(6) == 2)


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_scales_are_accepted_if_scale_times_log2_e_fits_float32(scale: float, dtype: str) -> None:
    with np.errstate(over="ignore"):
        product = np.float32(scale) * np.float32(math.log2(math.e))
    if abs(scale) < LARGEST * (1 - 1e-6):
        assert np.isfinite(product)
        assert scale_of(scale, dtype) == scale
    elif abs(scale) > LARGEST or not np.isfinite(product):
        with pytest.raises(ValueError, match=r"^scale must be within"):
            scale_of(scale, dtype)
    assert scale_of(scale, "float64") == scale


@pytest.mark.parametrize("scale", [0, 1, -2, 0.5, np.float16(0.5), np.int8(3), fractions.Fraction(1, 3), 1e-45, 1e-300])
def test_real_numbers_are_taken_as_they_are(scale: Any) -> None:
    found = scale_of(scale, "float32")
    assert type(found) is float
    assert found == float(scale)
