"""Neighborhood attention modules for :mod:`flax.nnx`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from natten_jax.arguments.arrays import Counts, Origin
from natten_jax.arguments.names import explained
from natten_jax.arguments.static import Bools, Ints, array_of
from natten_jax.windows import WINDOW_OPTIONS, WindowArguments

from . import arguments
from .arguments import Options, Performance
from .documentation import document
from .partitioning import check_metadata

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class NeighborhoodAttention(nnx.Module):
    """What the modules of all ranks have in common."""

    rank: ClassVar[int]

    @explained(Performance.__annotations__)
    @WINDOW_OPTIONS.shown(performance=Performance)
    def __init__(
        self,
        in_features: int,
        *,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        clamp_window: bool = False,
        relative_bias: bool = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        num_kv_heads: int | None = None,
        qkv_features: int | None = None,
        out_features: int | None = None,
        normalize_qk: bool = False,
        deterministic: bool | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        kv_kernel_init: Initializer | None = None,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        kv_bias_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        kv_kernel_metadata: Mapping[str, Any] | None = None,
        out_kernel_metadata: Mapping[str, Any] | None = None,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        kv_bias_metadata: Mapping[str, Any] | None = None,
        out_bias_metadata: Mapping[str, Any] | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[Options],
    ) -> None:
        arguments.check_dropout(attn_drop, proj_drop)
        self.in_features = in_features
        self.out_features = in_features if out_features is None else out_features
        self.num_heads, self.num_kv_heads = arguments.head_counts(num_heads, num_kv_heads)
        self.head_dim = arguments.head_dim(num_heads, in_features, qkv_features)
        arguments.check_positive(out_features=self.out_features)
        performance: Any = options
        window = WindowArguments(kernel_size, stride, dilation, is_causal).taking(performance)
        self.neighborhood = arguments.neighborhood(
            type(self).__name__,
            self.rank,
            window,
            qk_scale,
            scale_name="qk_scale",
            clamp_window=clamp_window,
            **performance,
        )
        project = functools.partial(
            nnx.LinearGeneral, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        of_query: dict[str, Any] = {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "kernel_metadata": kernel_metadata,
            "bias_metadata": bias_metadata,
        }
        of_kv = of_query | _given(
            kernel_init=kv_kernel_init,
            bias_init=kv_bias_init,
            kernel_metadata=kv_kernel_metadata,
            bias_metadata=kv_bias_metadata,
        )
        of_out = of_query | _given(
            kernel_init=out_kernel_init,
            bias_init=out_bias_init,
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
        )
        for prefix, settings, bias_rank in (("", of_query, 2), ("kv_", of_kv, 2), ("out_", of_out, 1)):
            check_metadata(f"{prefix}kernel_metadata", settings["kernel_metadata"], 3)
            check_metadata(f"{prefix}bias_metadata", settings["bias_metadata"], bias_rank)
        query_heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = project(in_features, query_heads, use_bias=qkv_bias, **of_query)
        self.key = project(in_features, kv_heads, use_bias=qkv_bias, **of_kv)
        self.value = project(in_features, kv_heads, use_bias=qkv_bias, **of_kv)
        self.out = project(query_heads, self.out_features, axis=(-2, -1), **of_out)
        normalize = functools.partial(
            nnx.LayerNorm, self.head_dim, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.query_ln = normalize() if normalize_qk else None
        self.key_ln = normalize() if normalize_qk else None
        shape = arguments.bias_shape(relative_bias, self.num_heads, self.neighborhood.window)
        draw = jax.nn.initializers.truncated_normal(arguments.BIAS_DEVIATION)
        self.rpb = None if shape is None else nnx.Param(draw(rngs.params(), shape, param_dtype))
        # Without dropout no random stream is kept, so that the state holds parameters only.
        self.dropout = nnx.Dropout(proj_drop, deterministic=deterministic, rngs=rngs) if proj_drop > 0 else None
        self.attn_dropout = nnx.Dropout(attn_drop, deterministic=deterministic, rngs=rngs) if attn_drop > 0 else None

    @explained()
    def __call__(
        self,
        inputs: jax.Array,
        *,
        inputs_kv: jax.Array | None = None,
        query_origin: Origin | None = None,
        extents: Counts | None = None,
        upsample: Ints = 1,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Attend.

        Args:
            inputs: ``[*batch, *layout, in_features]``, with any number of batch dimensions.
            inputs_kv: What keys and values are made of, where that is not ``inputs``: a larger layout, or a coarser.
            query_origin: Where ``inputs`` begin in the layout of ``inputs_kv``, as in the operators.
            extents: How much of the layout is real, ``[*batch, rank]``, as in the operators.
            upsample: How many tokens of ``inputs`` there are for one of ``inputs_kv``, as in the operators.
            deterministic: Whether dropout is off; ``None`` is as constructed, or as ``train()``, ``eval()`` and
                ``nnx.view`` set it.
            rngs: Random streams, or a key, for the dropout; ``None`` takes the one kept at construction.
            out_sharding: How the result is laid out over explicit mesh axes, such as ``P("data", None, None, None)``.
                Where heads are split over one, the output's projection sums over it and has to be told.
            qkv_sharding: The same for query, key and value ``[*batch, *layout, heads, head_dim]``; ``None`` is as
                inputs and kernels have it.

        Returns:
            ``[*batch, *layout, out_features]``.

        Raises:
            ValueError: ``inputs`` has another shape, or the window does not fit its layout.
        """
        inputs = array_of(inputs)
        arguments.check_input(inputs, self.rank, self.in_features)
        others = inputs if inputs_kv is None else array_of(inputs_kv)
        arguments.check_input(others, self.rank, self.in_features, "inputs_kv")
        projections = (self.query, inputs), (self.key, others), (self.value, others)
        query, key, value = (project(tokens, out_sharding=qkv_sharding) for project, tokens in projections)
        if self.query_ln is not None and self.key_ln is not None:
            with jax.numpy_dtype_promotion("standard"):  # which Flax's own module takes for granted
                query, key = self.query_ln(query), self.key_ln(key)
        table = None if self.rpb is None else self.rpb.get_value()
        drop = self._drop_of_weights(deterministic, rngs)
        attended = self.neighborhood(query, key, value, query_origin, extents, upsample, table, drop)
        outputs = self.out(attended, out_sharding=out_sharding)
        if self.dropout is not None:
            outputs = self.dropout(outputs, deterministic=deterministic, rngs=rngs)
        return outputs

    def _drop_of_weights(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
    ) -> Callable[[jax.Array], jax.Array] | None:
        """The dropout of the weights; ``None`` where there is none, or it is off."""
        dropout = self.attn_dropout
        if dropout is None:
            return None
        if (dropout.deterministic if deterministic is None else deterministic) is True:
            return None
        if isinstance(rngs, jax.Array):  # the same key drops outputs
            rngs = jax.random.fold_in(rngs, 1)
        return functools.partial(dropout, deterministic=deterministic, rngs=rngs)


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


class NeighborhoodAttention1D(NeighborhoodAttention):
    __doc__ = document(1, "flax.nnx")
    rank = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    __doc__ = document(2, "flax.nnx")
    rank = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    __doc__ = document(3, "flax.nnx")
    rank = 3
