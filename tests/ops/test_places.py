"""Queries in a box of the key layout, upsampled queries, and padded layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import attention, na1d, na2d
from tests.support.families import Family
from tests.support.problems import Case, Trial, check_all

# Queries in a box, upsampled queries, and invalid arguments for boxes, upsampling and padding.


def test_one_program_for_all_origins() -> None:
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
    assert len(traced) == 2  # traced once for a shared position, and once for a position per batch entry


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
        ({"upsample": (1, 2)}, ValueError, ("query has token layout (3, 4)", "upsample (1, 2)", "requires")),
        ({"extents": (3, 4)}, TypeError, ("extents", "int32 array", "(3, 4)")),
        ({"extents": jnp.ones((2, 2))}, TypeError, ("extents", "integers", "float32")),
        ({"extents": jnp.ones((2,), int)}, ValueError, ("extents", "(2,)", "(2, 2)")),
        ({"extents": np.array([[3, 4], [7, 9]])}, ValueError, ("extents", "(6, 9)", "7")),
        ({"extents": np.array([[3, 4], [-1, 9]])}, ValueError, ("extents", "between 0", "-1")),
    ],
    ids=str,
)
def test_invalid_origins(arguments: dict[str, Any], error: type[Exception], words: Sequence[str]) -> None:
    with pytest.raises(error) as caught:
        na2d(_TOKENS if "extents" in arguments else _FEW, _TOKENS, _TOKENS, 3, **arguments)
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
        ValueError, match=r"query has token layout \(6, 9\), which is larger than key's token layout, \(3, 4\)"
    ):
        na2d(_TOKENS, _FEW, _FEW, 3, query_origin=(0, 0))
    with pytest.raises(ValueError, match=r"between 0 and \(5,\)"):
        attention(_PART, _LINE, _LINE, query_origin=6)
    with pytest.raises(TypeError, match="query_origin must be one array if it is traced"):
        jax.jit(lambda x: na2d(_FEW, _TOKENS, _TOKENS, 3, query_origin=(x, 0)))(1)
    with pytest.raises(ValueError, match="query has 1 heads, which is not a multiple of the 2 heads"):
        na1d(jnp.ones((1, 8, 1, 8)), jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), 3, upsample=2)


def test_keys_are_not_copied_for_finer_queries() -> None:
    """The compiled program of a call with upsampled queries does not repeat the keys."""
    query, key = jnp.ones((1, 32, 36, 4, 8)), jnp.ones((1, 16, 12, 2, 8))
    attend = jax.jit(lambda query, key: natten_jax.na2d(query, key, key, 3, upsample=(2, 3), backend="cpu-fna"))
    text = attend.lower(query, key).compile().as_text() or ""
    assert "16,12,24,8]" in text  # the 6 queries at each key become heads: 4 x 6 = 24
    assert "32,36,2,8]" not in text


# Padded layouts, in which the results of valid tokens do not depend on the padding.


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


def test_padding_of_all_tokens_and_of_few_keys(family: Family) -> None:
    """Test batch entries without tokens, and a call with 90 queries and 3 keys."""
    cases = [
        Case((6,), (3,), heads=2, batch=2, extents=((0,), (6,))),
        Case((6,), queries=6, heads=2, batch=2, extents=((0,), (6,))),
        Case((3,), queries=90, extents=((3,),)),
    ]
    check_all([Trial(case, family.dtype) for case in cases], family)


def test_traced_extents_and_origins_are_clamped() -> None:
    tokens = jax.random.normal(jax.random.key(0), (2, 7, 1, 8))
    padded = jax.jit(lambda extents: na1d(tokens, tokens, tokens, 3, extents=extents))
    np.testing.assert_array_equal(padded(jnp.array([[-3], [20]])), padded(jnp.array([[0], [7]])))
    at = jax.jit(lambda position: na1d(tokens[:, :3], tokens, tokens, 3, query_origin=position))
    np.testing.assert_array_equal(at(jnp.array([-7])), at(jnp.array([0])))
    np.testing.assert_array_equal(at(jnp.array([50])), at(jnp.array([4])))


@pytest.mark.parametrize("library", [np, jnp])
def test_known_extents_and_origins_out_of_range_are_rejected(library: Any) -> None:
    for arguments in (
        {"extents": library.array([[8]])},
        {"extents": library.array([[-1]])},
        {"query_origin": library.array([5])},
    ):
        (name,) = arguments
        query = _LINE[:1, :3] if name == "query_origin" else _LINE[:1, :7]
        with pytest.raises(ValueError, match=f"{name} must lie between 0 and"):
            na1d(query, _LINE[:1, :7], _LINE[:1, :7], 3, **arguments)


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


def test_wrong_lengths() -> None:
    with pytest.raises(ValueError, match=r"query_lengths has shape \(3,\), but must have \(2,\)"):
        attention(_LINE, _LINE, _LINE, query_lengths=jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"kv_lengths must lie between 0 and the token layout \(9,\)"):
        attention(_LINE, _LINE, _LINE, kv_lengths=np.array([3, 10]))
