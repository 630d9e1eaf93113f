"""Biases of keys that all heads share, for kernels that read those of each head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Gradients, Inputs


def of_each_head(inputs: Inputs) -> Inputs:
    """The inputs, with biases of keys of each query head."""
    shared = inputs.shared_key_bias
    if shared is None:
        return inputs
    heads = inputs.query.shape[-2]
    of_heads = jax.lax.broadcast_in_dim(shared, (*shared.shape, heads, 1), range(shared.ndim))
    return inputs._replace(key_bias=of_heads, shared_key_bias=None)


def with_shared_gradient(found: Gradients, inputs: Inputs) -> Gradients:
    """The gradients of such inputs, from those that have biases of each head."""
    if inputs.shared_key_bias is None or found.key_bias is None:
        return found
    return found._replace(key_bias=None, shared_key_bias=jnp.sum(found.key_bias, axis=(-2, -1)))
