"""cuDNN's dense attention with 8-bit arrays, called through a private module of JAX.

Each array has one scale factor, and the output is an 8-bit array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: Shape of cuDNN's scale factors.
_SHAPE = (1, 1, 1, 1)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    descale: tuple[Any, Any, Any] = (1.0, 1.0, 1.0),
    weight_scale: float = 1.0,
    out_scale: Any = 1.0,
) -> jax.Array:
    """Compute attention, multiply the output by ``out_scale``, and round it to 8 bits.

    Args:
        query: ``[batch, tokens, heads, head_dim]``.
        key: ``[batch, tokens, heads, head_dim]``.
        value: ``[batch, tokens, heads, head_dim]``.
        descale: Scale factors that dequantise query, key and value.
        weight_scale: Factor by which the weights are multiplied before they are rounded to 8 bits.
        out_scale: Factor by which the output is multiplied before it is rounded to 8 bits.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    query_factor, key_factor, value_factor = descale
    given = {
        "descale_q": query_factor,
        "descale_k": key_factor,
        "descale_v": value_factor,
        "descale_s": 1 / weight_scale,
        "scale_s": weight_scale,
        "scale_o": out_scale,
    }
    params: Any = {
        name: jnp.full(_SHAPE, given.get(name, 1.0), jnp.float32)  # the other entries are for the backward pass
        for name in cudnn.fp8_params_keys
    }
    found: jax.Array = cudnn.dot_product_attention(
        query,
        key,
        value,
        fp8_params=params,
        use_fp8=True,
        scale=query.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.NO_MASK,
    )[0]
    return found
