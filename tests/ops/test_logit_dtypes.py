"""Operands that are added to logits may have another floating point dtype than the query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.element_types import ELEMENT_TYPES
from tests.support.families import Family
from tests.support.problems import OPERATORS, QUICK_COMPILATION

LAYOUT, HEADS, WIDTH = (6, 5), 2, 8
WINDOW = (3, 4)
#: Shapes of the operands that are added to logits.
SHAPES = {
    "relative_bias": (HEADS, *(2 * size - 1 for size in WINDOW)),
    "key_bias": (2, *LAYOUT),
    "key_bias of heads": (2, HEADS, *LAYOUT),
    "sinks": (HEADS,),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def _has_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def operand(name: str, dtype: str) -> jax.Array:
    """Numbers that every dtype has, some of which hide keys."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-8, 8, SHAPES[name]) / 4
    return jnp.asarray(np.where(rng.random(SHAPES[name]) < 0.2, -np.inf, numbers), dtype)


def assert_nearly_equal(found: jax.Array, expected: jax.Array) -> None:
    """XLA may fuse the same computation in other ways, with other roundings."""
    tolerance = 8 * float(jnp.finfo(expected.dtype).eps)
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())


@pytest.mark.parametrize("name", SHAPES)
def test_every_dtype_is_converted_to_the_accumulator(family: Family, name: str) -> None:
    argument = name.split()[0]
    if argument in ("relative_bias", "key_bias") and argument not in family.backend.biases:
        pytest.skip("the backend has no such bias")
    dtypes = family.dtypes
    if family.needs_gpu and argument == "relative_bias":
        dtypes = tuple(dtype for dtype in dtypes if ELEMENT_TYPES[dtype].bytes == 2)
    for query_dtype in dtypes:
        accumulator = ELEMENT_TYPES[query_dtype].accumulator
        query = jax.random.normal(jax.random.key(0), (2, *LAYOUT, HEADS, WIDTH), query_dtype)

        def results(array: jax.Array, query: jax.Array = query) -> Any:
            def loss(query: jax.Array, array: jax.Array) -> jax.Array:
                out = OPERATORS[2](query, query, query, WINDOW, backend=family.fna, **{argument: array})
                return jnp.sum(jnp.sin(out.astype("float32")))

            return jax.value_and_grad(loss, argnums=(0, 1))(query, array)

        programs = jax.jit(
            lambda *arrays, results=results: [results(array) for array in arrays], compiler_options=QUICK_COMPILATION
        )
        expected, *found = programs(*(operand(name, dtype) for dtype in (accumulator, *DTYPES)))
        total, (of_query, of_operand) = expected
        assert of_operand.dtype == accumulator
        assert np.isfinite(np.asarray(total))
        assert np.abs(np.asarray(of_operand)).max() > 0
        for dtype, (other_total, (other_of_query, other_of_operand)) in zip(DTYPES, found, strict=True):
            assert_nearly_equal(other_total, total)
            assert_nearly_equal(other_of_query, of_query)
            assert other_of_operand.dtype == dtype
            assert_nearly_equal(other_of_operand, of_operand.astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_mask_of_the_documentation(dtype: str) -> None:
    """``jnp.where(valid, 0.0, -jnp.inf)`` is float64 where JAX has 64-bit numbers."""
    query = jax.random.normal(jax.random.key(0), (2, 9, HEADS, WIDTH), dtype)
    bias = jnp.where(jnp.ones((2, 9), bool).at[:, 7:].set(False), 0.0, -jnp.inf)
    table, sinks = jnp.where(jnp.arange(5) > 0, 0.0, -jnp.inf) * jnp.ones((HEADS, 1)), jnp.zeros(HEADS)
    assert bias.dtype == table.dtype == sinks.dtype == jnp.float64
    out = natten_jax.na1d(query, query, query, 3, key_bias=bias, relative_bias=table, sinks=sinks)
    assert out.dtype == dtype
    assert (out[:, 8] == 0).all()
    assert (out[:, :7] != 0).any(axis=-1).all()
    assert natten_jax.attention(query, query, query, key_bias=bias, sinks=sinks).dtype == dtype
    assert natten_jax.neighborhood_weights(query, query, 3, relative_bias=table).dtype == dtype


def test_float64_operands_keep_their_digits() -> None:
    query = jnp.zeros((1, 1, 1, WIDTH), "float64")
    sink = 1e-12
    lse = natten_jax.na1d(query, query, query, 1, sinks=jnp.array([sink]), backend="flex-fna", return_lse=True)[1]
    np.testing.assert_allclose(lse.item(), np.logaddexp(0, sink), rtol=1e-15)
    bias = jnp.full((1, 1), sink)
    lse = natten_jax.na1d(query, query, query, 1, key_bias=bias, backend="flex-fna", return_lse=True)[1]
    assert lse.item() == sink


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
@pytest.mark.parametrize(("low", "is_hidden"), [(-2e38, False), (-1e300, False), (-1e308, True)])
def test_the_rule_of_float64_biases_is_tested_before_conversion(backend: str, low: float, is_hidden: bool) -> None:
    query = jnp.ones((1, 3, 1, WIDTH), "float32")
    bias = jnp.full((1, 3), low, "float64")
    out, lse = natten_jax.na1d(query, query, query, 3, key_bias=bias, backend=backend, return_lse=True)
    np.testing.assert_array_equal(jnp.isneginf(lse), is_hidden)
    np.testing.assert_allclose(out, 0 if is_hidden else 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint16", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    query = jnp.ones((2, *LAYOUT, HEADS, WIDTH))
    for name, shape in SHAPES.items():
        argument = name.split()[0]
        with pytest.raises(ValueError, match=rf"^{argument} has dtype {dtype}, but .* are supported"):
            natten_jax.na2d(query, query, query, WINDOW, **{argument: jnp.ones(shape, dtype)})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=rf"^relative_bias has dtype {dtype}"):
        natten_jax.neighborhood_weights(query, query, WINDOW, relative_bias=jnp.ones(SHAPES["relative_bias"], dtype))
