"""Compare ``neighborhood_weights`` and ``neighborhood_apply`` with the oracle's dense weights, key by key."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import neighborhood_apply, neighborhood_weights
from tests.support import oracle
from tests.support.cases import random_case
from tests.support.problems import OPERATORS, Case


def places(case: Case) -> np.ndarray:
    """Return the flat index of the key at each position of each window, ``[queries, places]``; -1 without a key."""
    by_dimension = []
    for extent, size, stride, dilation, is_causal, edges in zip(
        case.layout, *case.window_arguments.values(), strict=True
    ):
        windows: list[list[int]] = [[]] * extent
        for residue in range(dilation):
            line = range(residue, extent, dilation)
            for position, query in enumerate(line):
                seen = oracle.window(position, len(line), size, stride, is_causal, edges)
                windows[query] = [*(line[place] for place in seen), *[-1] * (size - len(seen))]
        by_dimension.append(windows)
    found = [
        [-1 if -1 in keys else np.ravel_multi_index(keys, case.layout) for keys in itertools.product(*windows)]
        for windows in itertools.product(*by_dimension)
    ]
    return np.array(found)


def by_place(dense: np.ndarray, where: np.ndarray, case: Case, missing: float) -> np.ndarray:
    """Gather an array for all pairs, ``[batch, heads, queries, keys]``, at the positions of the windows.

    Returns:
        ``[batch, *layout, heads, places]``, with ``missing`` at positions without a key.
    """
    found = np.take_along_axis(dense, np.maximum(where, 0)[None, None], axis=-1)
    found = np.where(where < 0, missing, found).swapaxes(1, 2)
    return found.reshape(case.batch, *case.layout, case.heads, -1)


def dense_logits(case: Case, operands: oracle.Tensors) -> np.ndarray:
    """Return the scaled logits of all pairs of a query and a key, ``[batch, heads, queries, keys]``."""
    query, key = (
        np.asarray(array, np.float64).reshape(case.batch, -1, *array.shape[-2:]).swapaxes(1, 2)
        for array in (operands.query, operands.key)
    )
    products = query @ key.repeat(case.heads // case.heads_kv, axis=1).swapaxes(-1, -2)
    scale = case.actual_scale if operands.scale is None else np.asarray(operands.scale, np.float64)
    logits = np.reshape(scale, (-1, 1, 1)) * products
    if operands.relative_bias is None:
        return logits
    return logits + operands.relative_bias.reshape(case.heads, -1).astype(np.float64)[:, case.entries()]


def drawn(seed: int) -> Case:
    return dataclasses.replace(random_case(seed, tokens=60), additional=0, relative_bias=seed % 3 != 0)


@pytest.mark.parametrize("seed", range(24))
def test_weights_equal_the_dense_mask(seed: int) -> None:
    case = drawn(seed)
    operands = case.host_operands("float32", seed)
    where, dense = places(case), dense_logits(case, operands)

    @jax.jit
    def both(query: Any, key: Any, table: Any, scale: Any) -> tuple[Any, ...]:
        windows: Any = {**case.window_arguments, "relative_bias": table}
        windows["scale"] = case.scale if scale is None else scale
        return tuple(neighborhood_weights(query, key, **windows, return_logits=logits) for logits in (True, False))

    logits, weights = both(operands.query, operands.key, operands.relative_bias, operands.scale)
    expected = by_place(dense, where, case, -np.inf)
    assert logits.shape == expected.shape
    np.testing.assert_array_equal(np.isinf(logits), np.isinf(expected))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=2e-5)
    exponentials = np.exp(expected - expected.max(-1, keepdims=True))
    np.testing.assert_allclose(weights, exponentials / exponentials.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(24, 40))
def test_values_are_mixed_with_any_weights(seed: int) -> None:
    case = drawn(seed)
    where = places(case)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((case.batch, *case.layout, case.heads, where.shape[1])).astype(np.float32)
    value = case.host_operands("float32", seed).value
    flat = value.reshape(case.batch, -1, *value.shape[-2:]).repeat(case.heads // case.heads_kv, axis=-2)
    mixed = np.where(where[None, :, :, None, None] < 0, 0, flat[:, np.maximum(where, 0)].astype(np.float64))
    by_query = weights.reshape(case.batch, -1, case.heads, where.shape[1])
    expected = np.einsum("bqhp,bqphd->bqhd", by_query, mixed)
    windows: Any = case.window_arguments
    out = jax.jit(lambda *arrays: neighborhood_apply(*arrays, **windows))(weights, value)
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(40, 48))
def test_both_are_the_operator(seed: int) -> None:
    """``neighborhood_apply`` of ``neighborhood_weights`` has the output and gradients of the operator."""
    case = drawn(seed)
    operands = case.host_operands("float32", seed)
    arrays = [jnp.asarray(array) for array in (*operands[:3], operands.relative_bias) if array is not None]
    windows: Any = case.window_arguments

    def in_halves(query: jax.Array, key: jax.Array, value: jax.Array, table: Any = None) -> jax.Array:
        weights = neighborhood_weights(query, key, **windows, relative_bias=table)
        return neighborhood_apply(weights, value, **windows)

    def fused(query: jax.Array, key: jax.Array, value: jax.Array, table: Any = None) -> jax.Array:
        return OPERATORS[case.rank](query, key, value, **windows, relative_bias=table, backend="flex-fna")

    shape = (*operands.query.shape[:-1], operands.value.shape[-1])
    cotangent = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)

    @jax.jit
    def differentiated(cotangent: jax.Array, *arrays: jax.Array) -> list[tuple[Any, Any]]:
        results = [jax.vjp(function, *arrays) for function in (in_halves, fused)]
        return [(out, pullback(cotangent)) for out, pullback in results]

    (out, gradients), (expected_out, expected_gradients) = differentiated(cotangent, *arrays)
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-5)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_gradients_keep_no_copy_of_the_keys_for_each_place() -> None:
    array = jax.ShapeDtypeStruct((1, 40, 40, 1, 64), jnp.float32)

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return neighborhood_apply(neighborhood_weights(query, key, 7), value, 7).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(array, array, array).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    copies = analysis.temp_size_in_bytes / (40 * 40 * 64 * 4)
    assert copies < 20, copies  # one copy for each of the 49 positions of a window would be too many


def test_half_precision_and_float64() -> None:
    query = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
    weights = neighborhood_weights(query, query, 3)
    assert weights.dtype == jnp.bfloat16
    assert neighborhood_weights(query, query, 3, return_logits=True).dtype == jnp.float32
    assert neighborhood_apply(weights, query, 3).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        wide = jnp.ones((1, 8, 2, 4), jnp.float64)
        assert neighborhood_weights(wide, wide, 3).dtype == jnp.float64


TOKENS = jnp.ones((2, 12, 4, 8))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: neighborhood_weights(TOKENS[0], TOKENS, 3), ("query", "(12, 4, 8)")),
        (lambda: neighborhood_weights(TOKENS, TOKENS[:, :, :3], 3), ("4 heads", "3 heads")),
        (lambda: neighborhood_weights(TOKENS, TOKENS, 3, scale=jnp.ones(3)), ("scale", "(3,)")),
        (lambda: neighborhood_apply(jnp.ones((2, 12, 4, 5)), TOKENS, 3), ("weights", "(2, 12, 4, 5)", "3)")),
        (lambda: neighborhood_apply(jnp.ones((2, 12, 6, 3)), TOKENS, 3), ("weights", "multiple of the 4")),
        (lambda: neighborhood_apply(jnp.ones((2, 12, 4, 3), int), TOKENS, 3), ("weights", "int32")),
        (lambda: neighborhood_apply(jnp.ones((2, 12, 4, 3)), TOKENS.astype(int), 3), ("value", "int32")),
        (lambda: neighborhood_apply(jnp.ones((2, 12, 4, 3)), TOKENS, 3, dilation=5), ("dilation", "15 > 12")),
    ],
)
def test_errors(call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match="query must be an array"):
        neighborhood_weights([1.0], TOKENS, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="return_logits"):
        neighborhood_weights(TOKENS, TOKENS, 3, return_logits="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kernel_size"):
        neighborhood_apply(jnp.ones((2, 12, 4, 3)), TOKENS, None)  # type: ignore[arg-type]
