"""Modules that quantise queries, keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from natten_jax.flax_modules import linen
from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D

from natten_jax import na2d

INPUTS = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 8, 32)), jnp.bfloat16)
SETTINGS: Any = {"num_heads": 2, "kernel_size": 3, "dtype": jnp.bfloat16}


def test_nnx() -> None:
    small, wide = (NeighborhoodAttention2D(32, fp8=fp8, rngs=nnx.Rngs(0), **SETTINGS) for fp8 in ("e4m3", None))
    out = na2d(small.query(INPUTS), small.key(INPUTS), small.value(INPUTS), 3, fp8="e4m3")
    assert jnp.array_equal(small(INPUTS), small.out(out))
    assert not jnp.array_equal(small(INPUTS), wide(INPUTS))

    def loss(module: NeighborhoodAttention2D) -> jax.Array:
        return module(INPUTS).astype(jnp.float32).sum()

    for name in ("query", "key", "value"):
        gradients, expected = (getattr(nnx.grad(loss)(module), name).kernel[...] for module in (small, wide))
        np.testing.assert_array_equal(np.asarray(gradients, np.float32), np.asarray(expected, np.float32))


def test_linen() -> None:
    small, wide = (linen.NeighborhoodAttention2D(fp8=fp8, **SETTINGS) for fp8 in ("e4m3", None))
    parameters = wide.init(jax.random.key(0), INPUTS)
    out, expected = (np.asarray(each.apply(parameters, INPUTS), np.float32) for each in (small, wide))
    assert 1e-4 < np.linalg.norm(out - expected) / np.linalg.norm(expected) < 0.1


def test_attention_fn() -> None:
    query = INPUTS.reshape(1, 6, 8, 2, 16)
    found = neighborhood_attention_fn(kernel_size=3, fp8="e4m3")(query, query, query)
    assert jnp.array_equal(found, na2d(query, query, query, 3, fp8="e4m3"))


def test_unknown_types_are_refused_where_modules_are_made() -> None:
    with pytest.raises(ValueError, match="fp8 must be one of e4m3"):
        NeighborhoodAttention2D(32, fp8="int8", rngs=nnx.Rngs(0), **SETTINGS)
