"""Layouts that are padded: what is real of each batch entry, whatever the padding holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import attention, na1d, na2d


@pytest.mark.parametrize("backend", ["cpu", "flex"])
def test_one_program_for_all_extents(backend: str) -> None:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.standard_normal((2, 12, 10, 1, 8)), "float32")
    traced = []

    @jax.jit
    def padded(tokens: jax.Array, extents: jax.Array) -> jax.Array:
        traced.append(extents)
        return na2d(tokens, tokens, tokens, (5, 3), extents=extents, backend=f"{backend}-fna")

    for number, extents in enumerate(rng.integers(1, (12, 10), (100, 2, 2), endpoint=True)):
        found = padded(tokens, jnp.asarray(extents, jnp.int32))
        if number % 25 == 0:
            for entry, (height, width) in enumerate(extents):
                real = tokens[entry : entry + 1, :height, :width]
                expected = na2d(real, real, real, (5, 3), clamp_window=True, backend=f"{backend}-fna")
                np.testing.assert_allclose(found[entry, :height, :width], expected[0], atol=2e-6)
    assert len(traced) == 1


@pytest.mark.parametrize("backend", ["flex-fmha", "cpu-fmha"])
def test_padded_attention_of_more_queries_than_keys(backend: str) -> None:
    query = jax.random.normal(jax.random.key(0), (1, 90, 1, 8))
    key, value = jax.random.normal(jax.random.key(1), (2, 1, 3, 1, 8))

    def gradients(**lengths: Any) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(attention(*arrays, backend=backend, **lengths) ** 2)

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    for one, other in zip(gradients(kv_lengths=jnp.array([3])), gradients(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_entries_without_a_token() -> None:
    tokens = jnp.ones((2, 6, 2, 8))
    for backend in ("cpu", "flex"):

        def both(tokens: jax.Array, extents: jax.Array, name: str = f"{backend}-fna") -> Any:
            return na1d(tokens, tokens, tokens, 3, extents=extents, backend=name, return_lse=True)

        out, lse = both(tokens, jnp.array([[0], [6]]))
        assert (out[0] == 0).all()
        assert (lse[0] == -jnp.inf).all()
        gradient = jax.grad(lambda tokens: both(tokens, jnp.array([[0], [6]]))[0].sum())(tokens)
        assert (gradient[0] == 0).all()
        assert jnp.isfinite(gradient).all()
        out, lse = attention(
            tokens, tokens, tokens, kv_lengths=jnp.array([0, 6]), backend=f"{backend}-fmha", return_lse=True
        )
        assert (out[0] == 0).all()
        assert (lse[0] == -jnp.inf).all()


def test_traced_extents_are_moved_into_range() -> None:
    tokens = jax.random.normal(jax.random.key(0), (2, 7, 1, 8))
    padded = jax.jit(lambda extents: na1d(tokens, tokens, tokens, 3, extents=extents))
    np.testing.assert_array_equal(padded(jnp.array([[-3], [20]])), padded(jnp.array([[0], [7]])))


def test_higher_derivatives_of_padded_layouts() -> None:
    tokens = jnp.where(jnp.arange(9)[None, :, None, None] < 5, 0.3, jnp.nan) * jnp.ones((1, 9, 1, 4))
    real = jax.random.normal(jax.random.key(1), (1, 5, 1, 4))
    tokens = tokens.at[:, :5].set(real)

    def padded(tokens: jax.Array) -> jax.Array:
        return jnp.sum(na1d(tokens, tokens, tokens, 3, extents=jnp.array([[5]]), backend="flex-fna") ** 2)

    def cropped(tokens: jax.Array) -> jax.Array:
        return jnp.sum(na1d(tokens, tokens, tokens, 3, backend="flex-fna") ** 2)

    direction = jax.random.normal(jax.random.key(2), (1, 9, 1, 4))
    found = jax.jvp(jax.grad(padded), (tokens,), (direction,))[1]
    expected = jax.jvp(jax.grad(cropped), (real,), (direction[:, :5],))[1]
    np.testing.assert_allclose(found[:, :5], expected, atol=1e-5)
    assert (found[:, 5:] == 0).all()


_TOKENS, _LINE = jnp.ones((2, 6, 9, 1, 8)), jnp.ones((2, 9, 1, 8))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"extents": (3, 4)}, TypeError, ("extents", "int32 array", "(3, 4)")),
        ({"extents": jnp.ones((2, 2))}, TypeError, ("extents", "integers", "float32")),
        ({"extents": jnp.ones((2,), int)}, ValueError, ("extents", "(2,)", "(2, 2)")),
        ({"extents": np.array([[3, 4], [7, 9]])}, ValueError, ("extents", "(6, 9)", "7")),
        ({"extents": np.array([[3, 4], [-1, 9]])}, ValueError, ("extents", "between 0", "-1")),
    ],
    ids=str,
)
def test_wrong_extents(arguments: dict[str, Any], error: type[Exception], words: Sequence[str]) -> None:
    with pytest.raises(error) as caught:
        na2d(_TOKENS, _TOKENS, _TOKENS, 3, **arguments)
    for word in words:
        assert word in str(caught.value)


def test_wrong_lengths() -> None:
    with pytest.raises(ValueError, match=r"query_lengths has shape \(3,\), but must have \(2,\)"):
        attention(_LINE, _LINE, _LINE, query_lengths=jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"kv_lengths must lie between 0 and the token layout \(9,\)"):
        attention(_LINE, _LINE, _LINE, kv_lengths=np.array([3, 10]))
