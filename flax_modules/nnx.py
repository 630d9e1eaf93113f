"""Neighborhood attention modules for :mod:`flax.nnx`."""

from __future__ import annotations

import functools
from typing import ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from natten_jax.static_arguments import Bools, Ints

from . import arguments
from .arguments import Performance

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class _NeighborhoodAttention(nnx.Module):
    rank: ClassVar[int]

    def __init__(
        self,
        in_features: int,
        *,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        num_kv_heads: int | None = None,
        qkv_features: int | None = None,
        deterministic: bool | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        rngs: nnx.Rngs,
        **performance: Unpack[Performance],
    ) -> None:
        arguments.check_dropout(attn_drop, proj_drop)
        self.in_features = in_features
        self.num_heads, self.num_kv_heads = arguments.head_counts(num_heads, num_kv_heads)
        self.head_dim = arguments.head_dim(num_heads, in_features, qkv_features)
        self.neighborhood = arguments.neighborhood(
            self.rank, kernel_size, stride, dilation, is_causal, qk_scale, scale_name="qk_scale", **performance
        )
        project = functools.partial(
            nnx.LinearGeneral,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.query = project(in_features, (self.num_heads, self.head_dim), use_bias=qkv_bias)
        self.key = project(in_features, (self.num_kv_heads, self.head_dim), use_bias=qkv_bias)
        self.value = project(in_features, (self.num_kv_heads, self.head_dim), use_bias=qkv_bias)
        self.out = project((self.num_heads, self.head_dim), in_features, axis=(-2, -1))
        # Without dropout no random stream is kept, so that the state holds parameters only.
        self.dropout = nnx.Dropout(proj_drop, deterministic=deterministic, rngs=rngs) if proj_drop > 0 else None

    def __call__(
        self,
        inputs: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Attend.

        Args:
            inputs: ``[batch, *layout, in_features]``.
            deterministic: Whether dropout is off; ``None`` is as constructed, or as ``train()``, ``eval()`` and
                ``nnx.view`` set it.
            rngs: Random streams, or a key, for the dropout; ``None`` takes the one kept at construction.

        Returns:
            ``[batch, *layout, in_features]``.

        Raises:
            ValueError: ``inputs`` has another shape, or the window does not fit its layout.
        """
        arguments.check_input(inputs, self.rank, self.in_features)
        outputs = self.neighborhood(self.query(inputs), self.key(inputs), self.value(inputs))
        outputs = self.out(outputs)
        if self.dropout is not None:
            outputs = self.dropout(outputs, deterministic=deterministic, rngs=rngs)
        return outputs


class NeighborhoodAttention1D(_NeighborhoodAttention):
    __doc__ = arguments.document(1, "flax.nnx")
    rank = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    __doc__ = arguments.document(2, "flax.nnx")
    rank = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    __doc__ = arguments.document(3, "flax.nnx")
    rank = 3
