"""Queries that are a box of the layout of the keys, on a finer grid than keys, and layouts that are padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import attention, na1d, na2d


def test_one_program_for_all_places() -> None:
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((2, 60, 2, 8)), "float32") for _ in range(2))
    whole = np.asarray(na1d(query, key, key, 9, is_causal=True))
    traced = []

    @jax.jit
    def decode(query: jax.Array, position: jax.Array) -> jax.Array:
        traced.append(position)
        return na1d(query, key, key, 9, is_causal=True, query_origin=position)

    for position in range(60):
        token = query[:, position : position + 1]
        np.testing.assert_allclose(decode(token, jnp.array([position])), whole[:, position : position + 1], atol=2e-6)
    assert len(traced) == 1
    for first, second in np.random.default_rng(1).integers(0, 60, (40, 2)):
        token = jnp.stack([query[0, first], query[1, second]])[:, None]
        found = decode(token, jnp.array([[first], [second]], jnp.int32))
        np.testing.assert_allclose(found[:, 0], [whole[0, first], whole[1, second]], atol=2e-6)
    assert len(traced) == 2  # a place for all, and one for each


def test_traced_places_are_moved_into_range() -> None:
    query, key = jnp.ones((1, 3, 1, 8)), jax.random.normal(jax.random.key(0), (1, 20, 1, 8))

    @jax.jit
    def at(position: jax.Array) -> jax.Array:
        return na1d(query, key, key, 5, query_origin=position)

    np.testing.assert_array_equal(at(jnp.array([-7])), at(jnp.array([0])))
    np.testing.assert_array_equal(at(jnp.array([50])), at(jnp.array([17])))


_TOKENS, _FEW = jnp.ones((2, 6, 9, 4, 8)), jnp.ones((2, 3, 4, 4, 8))
_LINE, _PART = jnp.ones((2, 9, 4, 8)), jnp.ones((2, 4, 4, 8))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"query_origin": (4, 0)}, ValueError, ("query_origin", "between 0 and (3, 5)", "[4, 0]")),
        ({"query_origin": (0, -1)}, ValueError, ("query_origin", "at least 0", "(0, -1)")),
        ({"query_origin": 2}, TypeError, ("query_origin", "sequence of 2 ints", "2")),
        ({"query_origin": (1, 2, 3)}, ValueError, ("query_origin", "2 value", "(1, 2, 3)")),
        ({"query_origin": (1.0, 2)}, TypeError, ("query_origin", "ints", "(1.0, 2)")),
        ({"query_origin": np.array([[0, 0], [3, 6]])}, ValueError, ("query_origin", "between 0 and (3, 5)", "6")),
        ({"query_origin": jnp.zeros((3, 2), int)}, ValueError, ("query_origin", "(3, 2)", "(2, 2)")),
        ({"query_origin": jnp.zeros((2,))}, TypeError, ("query_origin", "integers", "float32")),
        ({}, ValueError, ("key has token layout (6, 9)", "query has (3, 4)")),
        ({"upsample": 0}, ValueError, ("upsample", "at least 1", "0")),
        ({"upsample": 2}, ValueError, ("query has token layout (3, 4)", "upsample (2, 2)")),
    ],
    ids=str,
)
def test_wrong_places(arguments: dict[str, Any], error: type[Exception], words: Sequence[str]) -> None:
    with pytest.raises(error) as caught:
        na2d(_FEW, _TOKENS, _TOKENS, 3, **arguments)
    for word in words:
        assert word in str(caught.value)


def test_wrong_boxes() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "x")
    with pytest.raises(ValueError, match="query_origin and token_axes were both given"):
        jax.shard_map(
            lambda few, all_: na1d(few, all_, all_, 3, query_origin=0, token_axes=("x",)),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=spec,
        )(_PART, _LINE)
    with pytest.raises(
        ValueError, match=r"query has token layout \(6, 9\), which is larger than that of key, \(3, 4\)"
    ):
        na2d(_TOKENS, _FEW, _FEW, 3, query_origin=(0, 0))
    with pytest.raises(ValueError, match=r"between 0 and \(5,\)"):
        attention(_PART, _LINE, _LINE, query_origin=6)
    with pytest.raises(TypeError, match="query_origin must be one array where it is traced"):
        jax.jit(lambda x: na2d(_FEW, _TOKENS, _TOKENS, 3, query_origin=(x, 0)))(1)
    with pytest.raises(ValueError, match="query has 1 heads, which is not a multiple of the 2 heads"):
        na1d(jnp.ones((1, 8, 1, 8)), jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), 3, upsample=2)


def test_keys_are_not_copied_for_finer_queries() -> None:
    """No array of the compiled program has as many tokens as queries and the heads of keys."""
    query, key = jnp.ones((1, 32, 36, 4, 8)), jnp.ones((1, 16, 12, 2, 8))
    attend = jax.jit(lambda query, key: natten_jax.na2d(query, key, key, 3, upsample=(2, 3), backend="cpu-fna"))
    text = attend.lower(query, key).compile().as_text() or ""
    assert "16,12,24,8]" in text  # queries of a cell are heads of it
    assert "32,36,2,8]" not in text


def test_gradients_of_a_box_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    query, key, value = (jnp.asarray(rng.standard_normal((2, 30, 2, 8)), "float32") for _ in range(3))
    first = jnp.array([[4], [21]])

    def of_box(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        part = jax.vmap(lambda line, at: jax.lax.dynamic_slice_in_dim(line, at[0], 7))(query, first)
        return jnp.sum(jnp.sin(na1d(part, key, value, 6, query_origin=first)))

    def of_whole(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = na1d(query, key, value, 6)
        part = jax.vmap(lambda line, at: jax.lax.dynamic_slice_in_dim(line, at[0], 7))(out, first)
        return jnp.sum(jnp.sin(part))

    for found, expected in zip(
        jax.grad(of_box, (0, 1, 2))(query, key, value), jax.grad(of_whole, (0, 1, 2))(query, key, value), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=5e-6)
