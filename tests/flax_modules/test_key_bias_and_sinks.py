"""Modules with biases of keys and with sinks."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from tests.support.flax_layers import FEATURES, HEADS, LAYOUTS, LINEN, NNX, RANKS, inputs_of, params_of

SINKS = np.linspace(-1.0, 2.0, HEADS)


def reference(params: Any, inputs: Any, key_bias: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """Attention of all tokens to each other in float64."""
    params = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
    tokens = np.asarray(inputs, np.float64).reshape(len(inputs), -1, FEATURES)

    def project(name: str) -> np.ndarray:
        return np.einsum("btf,fhd->bthd", tokens, params[name]["kernel"]) + params[name]["bias"]

    query, key, value = map(project, ("query", "key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    weights = np.exp(logits + key_bias.reshape(len(inputs), -1, 1, tokens.shape[1]))
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None, None]
    attended = np.einsum("bhqk,bkhd->bqhd", weights, value)
    out = np.einsum("bqhd,hdf->bqf", attended, params["out"]["kernel"]) + params["out"]["bias"]
    return out.reshape(inputs.shape)


def attend(flavor: str, rank: int, inputs: jax.Array, **arguments: Any) -> tuple[Any, jax.Array]:
    """Parameters and output of a module whose windows are the whole layout, with sinks."""
    settings: Any = {"num_heads": HEADS, "kernel_size": LAYOUTS[rank], "sinks": True}
    if flavor == "nnx":
        module = NNX[rank](FEATURES, rngs=nnx.Rngs(0), **settings)
        assert not np.any(module.sinks.get_value())
        module.sinks[...] = jnp.asarray(SINKS, jnp.float32)
        return params_of(module), module(inputs, **arguments)
    linen = LINEN[rank](**settings)
    params = linen.init(jax.random.key(0), inputs)["params"]
    assert not np.any(params["sinks"])
    params = {**params, "sinks": jnp.asarray(SINKS, jnp.float32)}
    return params, linen.apply({"params": params}, inputs, **arguments)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("per_head", [False, True])
def test_results(flavor: str, rank: int, per_head: bool) -> None:
    inputs = inputs_of(rank)
    shape = (len(inputs), *([HEADS] if per_head else []), *LAYOUTS[rank])
    key_bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    params, found = attend(flavor, rank, inputs, key_bias=jnp.asarray(key_bias))
    expected = reference(params, inputs, key_bias.astype(np.float64), SINKS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_biases_of_keys_have_the_batch_dimensions_of_inputs(flavor: str) -> None:
    inputs = inputs_of(2)
    key_bias = jax.random.normal(jax.random.key(1), inputs.shape[:-1])
    _, expected = attend(flavor, 2, inputs, key_bias=key_bias)
    _, found = attend(flavor, 2, inputs[:, None], key_bias=key_bias[:, None])
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5, atol=1e-6)
    _, found = attend(flavor, 2, inputs[0], key_bias=key_bias[0])
    np.testing.assert_allclose(found, expected[0], rtol=1e-5, atol=1e-6)


def test_sinks_are_learned() -> None:
    module = NNX[2](FEATURES, num_heads=HEADS, kernel_size=3, sinks=True, param_dtype="bfloat16", rngs=nnx.Rngs(0))
    assert module.sinks.get_value().dtype == jnp.bfloat16
    gradient = nnx.grad(lambda module: jnp.sum(module(inputs_of(2)) ** 2))(module)["sinks"].get_value()
    assert gradient.shape == (HEADS,) and np.all(np.asarray(gradient, np.float32) != 0)
    assert NNX[2](FEATURES, num_heads=HEADS, kernel_size=3, rngs=nnx.Rngs(0)).sinks is None


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_what_cannot_be(flavor: str) -> None:
    def make(**settings: Any) -> Any:
        settings = {"num_heads": HEADS, "kernel_size": 3, **settings}
        return NNX[2](FEATURES, rngs=nnx.Rngs(0), **settings) if flavor == "nnx" else LINEN[2](**settings)

    with pytest.raises(TypeError, match=re.escape("sinks must be")):
        make(sinks=jnp.zeros(HEADS))
    module, inputs = make(attn_drop=0.5, deterministic=False), inputs_of(2)
    key_bias = jnp.zeros(inputs.shape[:-1])
    with pytest.raises(ValueError, match="attn_drop was given with key_bias"):
        if flavor == "nnx":
            module(inputs, key_bias=key_bias)
        else:
            module.init(dict.fromkeys(("params", "dropout"), jax.random.key(0)), inputs, key_bias=key_bias)
