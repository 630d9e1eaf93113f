"""Neighborhood attention layers for the tests of Flax modules, one layer per rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from natten_jax.flax_modules import linen, nnx

NNX = {1: nnx.NeighborhoodAttention1D, 2: nnx.NeighborhoodAttention2D, 3: nnx.NeighborhoodAttention3D}
LINEN = {1: linen.NeighborhoodAttention1D, 2: linen.NeighborhoodAttention2D, 3: linen.NeighborhoodAttention3D}

# One window per rank. Together, these windows use every window parameter.
LAYOUTS = {1: (12,), 2: (6, 8), 3: (4, 5, 6)}
WINDOWS: dict[int, dict[str, Any]] = {
    1: {"kernel_size": 5, "stride": 2, "dilation": 2, "is_causal": True},
    2: {"kernel_size": (3, 4), "stride": (1, 2), "dilation": (2, 1), "is_causal": (False, True)},
    3: {"kernel_size": 3, "stride": (1, 2, 3), "is_causal": (True, False, False)},
}
FEATURES, HEADS = 16, 4
RANKS = (1, 2, 3)


def inputs_of(rank: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, *LAYOUTS[rank], FEATURES), dtype)


def nnx_module(rank: int, **overrides):
    # Initialize biases to nonzero values, so that tests detect a missing bias.
    settings = {"bias_init": flax_nnx.initializers.normal(), **WINDOWS[rank], **overrides}
    return NNX[rank](FEATURES, num_heads=HEADS, rngs=flax_nnx.Rngs(0), **settings)


def params_of(module) -> dict:
    return flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))


def shapes_of(params) -> dict:
    return jax.tree.map(jnp.shape, params)
