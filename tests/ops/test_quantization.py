"""Arrays in 8 bits, and the factors that give them their sizes back."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax.fp8
from natten_jax.fp8 import quantize

SHAPE = (2, 9, 7, 3, 16)


def drawn(dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def sizes(array: jax.Array) -> np.ndarray:
    return np.abs(np.asarray(array, np.float64))


@pytest.mark.parametrize(("dtype", "bits", "most"), [("e4m3", 3, 448.0), ("float8_e5m2", 2, 57344.0)])
@pytest.mark.parametrize("scale", ["tensor", "head", "block"])
def test_elements_are_off_by_half_of_their_last_bit(dtype: str, bits: int, most: float, scale: Any) -> None:
    array = drawn()
    small, factors, mean = quantize(array, dtype, scale=scale, block_shape=3 if scale == "block" else None)
    assert mean is None and factors.dtype == jnp.float32
    wide = np.asarray(factors, np.float64)
    if scale == "head":
        wide = wide[:, None, None, :, None]
    elif scale == "block":
        wide = wide.repeat(3, axis=1).repeat(3, axis=2)[:, :9, :7, :, None]
    found, expected = np.asarray(small, np.float64) * wide, np.asarray(array, np.float64)
    # A last bit is as large as the leading one says, or as that of the smallest normal number.
    exponent = np.maximum(np.floor(np.log2(np.abs(expected / wide))), np.log2(float(jnp.finfo(small.dtype).tiny)))
    assert (np.abs(found - expected) <= wide * 2.0 ** (exponent - bits - 1) * (1 + 1e-5)).all()
    of_all = {"tensor": None, "head": (1, 2, 4), "block": None}[scale]
    if scale != "block":
        assert (sizes(small).max(axis=of_all) == most).all()


def test_blocks_are_as_equal_as_can_be() -> None:
    array = jnp.ones(SHAPE).at[:, 6:].set(4)
    small, factors, _ = quantize(array, scale="block", block_shape=(4, 7))
    assert factors.shape == (2, 3, 1, 3)  # nine tokens in three blocks of at most four: of three
    np.testing.assert_allclose(factors * 448, np.broadcast_to(np.array([1, 1, 4])[None, :, None, None], (2, 3, 1, 3)))
    assert (sizes(small) == 448).all()
    assert quantize(drawn(shape=(1, 300, 1, 8)), scale="block").scale.shape == (1, 3, 1)
    assert quantize(drawn(shape=(1, 4, 16, 16, 1, 8)), scale="block").scale.shape == (1, 2, 2, 2, 1)


def test_mean_and_rotation_leave_differences_of_logits() -> None:
    query, key = drawn(), drawn(shape=SHAPE) * 0.5 + 3
    turned, turned_key = quantize(query, rotate=True), quantize(key, rotate=True, subtract_mean=True)
    assert turned_key.mean is not None
    np.testing.assert_allclose(turned_key.mean, key.mean((1, 2)), rtol=1e-5)

    def wide(each: natten_jax.fp8.Quantized) -> jax.Array:
        return each.array.astype(jnp.float32) * each.scale[:, None, None, :, None]

    products = jnp.einsum("bxyhd,buvhd->bhxyuv", wide(turned), wide(turned_key))
    expected = jnp.einsum("bxyhd,buvhd->bhxyuv", query, key - key.mean((1, 2), keepdims=True))
    assert np.linalg.norm(products - expected) < 0.06 * np.linalg.norm(expected)


def test_rotation_spreads_what_one_feature_has() -> None:
    array = jnp.zeros(SHAPE).at[..., 5].set(8)
    small, factors, _ = quantize(array, rotate=True)
    np.testing.assert_allclose(sizes(small), 448)
    np.testing.assert_allclose(factors * 448, 2)  # 8 / sqrt(16)


def test_nothing_and_almost_nothing() -> None:
    small, factors, _ = quantize(jnp.zeros(SHAPE))
    assert (factors == 1).all() and (sizes(small) == 0).all()
    small, factors, _ = quantize(jnp.full(SHAPE, 1e-38))
    assert np.isfinite(factors).all() and (factors > 0).all()
    smallest = factors * jnp.asarray(jnp.finfo(small.dtype).smallest_subnormal, jnp.float32)
    assert (smallest >= np.finfo(np.float32).tiny).all()


def test_numbers_that_are_not_finite_spoil_what_shares_their_factor_alone() -> None:
    for number in (jnp.inf, jnp.nan):
        small, factors, _ = quantize(drawn().at[0, 0, 0, 1, 0].set(number))
        wide = np.asarray(small.astype(jnp.float32) * factors[:, None, None, :, None])
        is_spoiled = ~np.isfinite(wide).all(axis=(1, 2, 4))
        assert is_spoiled.tolist() == [[False, True, False], [False, False, False]]
        if number == jnp.inf:
            assert not np.isfinite(wide[0, :, :, 1]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_transformations(dtype: str) -> None:
    array = drawn(dtype)
    for arguments in ({}, {"scale": "tensor"}, {"scale": "block"}, {"subtract_mean": True, "rotate": True}):

        def run(array: jax.Array, arguments: Any = arguments) -> Any:
            return quantize(array, **arguments)

        expected = run(array)
        for found in (jax.jit(run)(array), jax.tree.map(lambda each: each[0], jax.vmap(run)(array[None]))):
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of e4m3, float8_e4m3fn, e5m2, float8_e5m2, got 'int8'"),
        ({"scale": "row"}, "scale must be one of tensor, head, block, got 'row'"),
        ({"block_shape": 4}, "block_shape=4 is for scale=\"block\", but scale is 'head'"),
        ({"scale": "block", "block_shape": (4, 4, 4)}, "block_shape"),
        ({"scale": "block", "block_shape": 0}, "block_shape must be at least 1 in every dimension, got 0"),
        ({"rotate": True, "array": drawn(shape=(1, 4, 1, 24))}, "a power of two, got head_dim 24"),
        ({"array": drawn(shape=(4, 1, 24))}, "array has shape (4, 1, 24) and dtype float32, but floats [batch,"),
        ({"array": jnp.ones(SHAPE, jnp.int8)}, "and dtype int8, but floats"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(**{"array": drawn(), **arguments})


def test_arguments_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="rotate must be"):
        quantize(drawn(), rotate=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="array must be an array"):
        quantize([1.0])  # type: ignore[arg-type]
