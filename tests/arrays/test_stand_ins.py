"""Objects with ``__jax_array__`` wherever an array is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.rotary import apply_rotary, rotary_angles


class Wrapped:
    """An array, and nothing that arrays have."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __jax_array__(self) -> Any:
        return self._array


def kinds() -> list[Callable[[Any], Any]]:
    """Ways to wrap an array."""
    nnx = pytest.importorskip("flax.nnx")
    return [nnx.Param, Wrapped]


TOKENS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 2, 8)), "float32")


@pytest.mark.parametrize("kind", [0, 1], ids=["param", "wrapped"])
@pytest.mark.parametrize(
    "call",
    [
        lambda w: natten_jax.na1d(w(TOKENS), w(TOKENS), w(TOKENS), 3),
        lambda w: natten_jax.na2d(*(w(TOKENS.reshape(2, 2, 3, 2, 8)) for _ in range(3)), 2),  # type: ignore[call-overload]
        lambda w: natten_jax.na3d(*(w(TOKENS.reshape(2, 1, 2, 3, 2, 8)) for _ in range(3)), 1),  # type: ignore[call-overload]
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, additional_keys=w(TOKENS), additional_values=w(TOKENS)),
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, scale=w(jnp.float32(0.3))),
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, scale=w(jnp.array([0.3, -0.4]))),
        lambda w: natten_jax.attention(w(TOKENS), w(TOKENS), w(TOKENS), w(jnp.float32(0.3))),
        lambda w: natten_jax.merge_attentions([w(TOKENS), w(2 * TOKENS)], [w(TOKENS[..., 0]), w(TOKENS[..., 1])]),
        lambda w: apply_rotary(w(TOKENS), w(rotary_angles((6,), head_dim=8))),
    ],
)
def test_functions(call: Callable[[Callable[[Any], Any]], Any], kind: int) -> None:
    wrap = kinds()[kind]
    expected = call(lambda array: array)
    for found in (call(wrap), jax.jit(lambda: call(wrap))()):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [0, 1], ids=["param", "wrapped"])
def test_gradients(kind: int) -> None:
    wrap = kinds()[kind]

    def loss(query: jax.Array, scale: jax.Array, wrap: Callable[[Any], Any]) -> jax.Array:
        return jnp.sum(natten_jax.na1d(wrap(query), TOKENS, TOKENS, 3, scale=wrap(scale)) ** 2)

    scale = jnp.float32(0.3)
    found = jax.grad(loss, (0, 1))(TOKENS, scale, wrap)
    expected = jax.grad(loss, (0, 1))(TOKENS, scale, lambda array: array)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [0, 1], ids=["param", "wrapped"])
def test_inputs_of_modules(kind: int) -> None:
    wrap = kinds()[kind]
    from flax import nnx
    from natten_jax.flax_modules import linen as linen_modules
    from natten_jax.flax_modules import nnx as nnx_modules
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    inputs = jnp.ones((1, 8, 16))
    module = nnx_modules.NeighborhoodAttention1D(16, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module(wrap(inputs)), module(inputs))
    linen = linen_modules.NeighborhoodAttention1D(num_heads=2, kernel_size=3)
    parameters = linen.init(jax.random.key(0), inputs)
    np.testing.assert_array_equal(linen.apply(parameters, wrap(inputs)), linen.apply(parameters, inputs))
    attend = neighborhood_attention_fn(3)
    np.testing.assert_array_equal(attend(*map(wrap, [TOKENS] * 3)), attend(TOKENS, TOKENS, TOKENS))
