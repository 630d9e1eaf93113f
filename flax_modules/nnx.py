"""Neighborhood attention modules for :mod:`flax.nnx`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax.sharding import PartitionSpec

from natten_jax.arguments.arrays import Counts, Origin
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, flag, shown
from natten_jax.windows import Edges, WindowArguments

from . import attention_fn as common
from .attention_fn import NeighborhoodModule, Performance

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class NeighborhoodAttention(NeighborhoodModule, nnx.Module):
    """Multi-head neighborhood attention over {rank} token dimension(s), with projections, for :mod:`flax.nnx`.

    {common} To shard the parameters over a device mesh, pass metadata, or initializers made with
    ``nnx.with_partitioning``.

    Example:
        >>> import jax.numpy as jnp; from flax import nnx
        >>> from natten_jax.flax_modules.nnx import NeighborhoodAttention{rank}D
        >>> inputs = jnp.ones({shape})  # [batch, {layout}, in_features]
        >>> layer = NeighborhoodAttention{rank}D(32, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))
        >>> layer(inputs).shape
        {shape}

    Args:
        in_features: Features per token of the input.
        {arguments}
        kernel_metadata: Metadata of the projections' kernels, such as ``{"out_sharding": (None, "model", None)}``.
        kv_kernel_metadata: Metadata of the kernels of the key and value projections. The default is
            ``kernel_metadata``.
        out_kernel_metadata: Metadata of the output projection's kernel. The default is ``kernel_metadata``.
        bias_metadata: Metadata of the projections' biases, such as ``{"out_sharding": ("model", None)}``.
        kv_bias_metadata: Metadata of the biases of the key and value projections. The default is ``bias_metadata``.
        out_bias_metadata: Metadata of the output projection's bias. The default is ``bias_metadata``.
        rngs: The random stream ``params``, and also ``dropout`` if a dropout rate is above 0.

    {raises}
    """

    @reject_unknown_kwargs(Performance.__annotations__)
    def __init__(
        self,
        in_features: int,
        *,
        num_heads: int,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        edges: Edges = "shift",
        clamp_window: bool = False,
        relative_bias: bool = False,
        sinks: bool = False,
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
        **performance: Unpack[Performance],
    ) -> None:
        common.check_dropout(attn_drop, proj_drop)
        common.check_positive(in_features=in_features)
        qkv_bias, normalize_qk = flag("qkv_bias", qkv_bias), flag("normalize_qk", normalize_qk)
        self.in_features = in_features
        self.out_features = in_features if out_features is None else out_features
        sizes = common.head_sizes(num_heads, num_kv_heads, in_features, qkv_features)
        self.num_heads, self.num_kv_heads, self.head_dim = sizes
        common.check_positive(out_features=self.out_features)
        window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)._asdict()
        settings = {**window, "clamp_window": clamp_window, "qk_scale": qk_scale, **performance}
        self.neighborhood = common.neighborhood(type(self).__name__, self.rank, settings, "qk_scale")
        typed: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        project: Any = functools.partial(nnx.LinearGeneral, precision=precision, **typed)
        for_query: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init}
        for_query |= {"kernel_metadata": kernel_metadata, "bias_metadata": bias_metadata}
        for_kv = common.settings_of(for_query, kv_kernel_init, kv_bias_init, kv_kernel_metadata, kv_bias_metadata)
        for_out = common.settings_of(for_query, out_kernel_init, out_bias_init, out_kernel_metadata, out_bias_metadata)
        for prefix, projection, bias_rank in (
            ("", for_query, 2),
            ("kv_", for_kv, 2),
            ("out_", for_out, 1),
        ):
            _check_metadata(f"{prefix}kernel_metadata", projection["kernel_metadata"], 3)
            _check_metadata(f"{prefix}bias_metadata", projection["bias_metadata"], bias_rank)
        query_heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = project(in_features, query_heads, use_bias=qkv_bias, **for_query)
        self.key = project(in_features, kv_heads, use_bias=qkv_bias, **for_kv)
        self.value = project(in_features, kv_heads, use_bias=qkv_bias, **for_kv)
        self.out = project(query_heads, self.out_features, axis=(-2, -1), **for_out)
        normalize = functools.partial(nnx.LayerNorm, self.head_dim, use_bias=False, **typed)
        self.query_ln = normalize() if normalize_qk else None
        self.key_ln = normalize() if normalize_qk else None
        shape = common.bias_shape(relative_bias, self.num_heads, self.neighborhood.window)
        self.rpb = None if shape is None else nnx.Param(common.draw_bias(rngs.params(), shape, param_dtype))
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if flag("sinks", sinks) else None
        # Modules without dropout store no random streams, so that their state consists of parameters only.
        self.dropout = nnx.Dropout(proj_drop, deterministic=deterministic, rngs=rngs) if proj_drop > 0 else None
        self.attn_dropout = nnx.Dropout(attn_drop, deterministic=deterministic, rngs=rngs) if attn_drop > 0 else None

    @reject_unknown_kwargs()
    def __call__(
        self,
        inputs: jax.Array,
        *,
        inputs_kv: jax.Array | None = None,
        query_origin: Origin | None = None,
        extents: Counts | None = None,
        upsample: Ints = 1,
        key_bias: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
    ) -> jax.Array:
        """Apply the projections and neighborhood attention.

        Args:
            inputs: ``[*batch, *layout, in_features]``, with any number of batch dimensions.
            inputs_kv: Input of the key and value projections. The default is ``inputs``. The layout of ``inputs_kv``
                may be larger than the layout of ``inputs`` (see ``query_origin``) or coarser (see ``upsample``).
            query_origin: Offset of ``inputs`` in the layout of ``inputs_kv``, as in the operators.
            extents: ``[*batch, rank]``. Number of valid tokens in each dimension of the layout of ``inputs_kv``, as in
                the operators. The other tokens are padding.
            upsample: Number of tokens of ``inputs`` per token of ``inputs_kv`` in each dimension, as in the operators.
            key_bias: ``[*batch, *layout]`` or ``[*batch, num_heads, *layout]``. Bias that is added to all logits of a
                key. A bool array masks out the keys at ``False``.
            deterministic: Turn dropout off. The default is the value that was given to the constructor, or that
                ``train()``, ``eval()`` or ``nnx.view`` set later.
            rngs: Random streams, or a random key, for dropout. The default is the streams that were given to the
                constructor.
            out_sharding: Sharding of the result over explicit mesh axes, such as ``P("data", None, None, None)``.
                Required if heads are sharded over an explicit mesh axis, because the output projection sums over heads.
            qkv_sharding: Sharding of query, key and value ``[*batch, *layout, heads, head_dim]`` over explicit mesh
                axes. ``None`` derives it from the shardings of the inputs and the kernels.

        Returns:
            ``[*batch, *layout, out_features]``.

        Raises:
            ValueError: An array has a wrong shape, or the window does not fit the layout of ``inputs_kv``.
        """
        inputs, kv_inputs = self._tokens(inputs, inputs_kv, self.in_features)
        projections = (self.query, inputs), (self.key, kv_inputs), (self.value, kv_inputs)
        query, key, value = (project(tokens, out_sharding=qkv_sharding) for project, tokens in projections)
        if self.query_ln is not None and self.key_ln is not None:
            with jax.numpy_dtype_promotion("standard"):  # required by Flax's LayerNorm
                query, key = self.query_ln(query), self.key_ln(key)
        table, sinks = (None if each is None else each.get_value() for each in (self.rpb, self.sinks))
        terms = {"query_origin": query_origin, "extents": extents, "upsample": upsample, "key_bias": key_bias}
        drop = common.drop_of_weights(self.attn_dropout, deterministic, rngs)
        attended = self.neighborhood(query, key, value, drop, relative_bias=table, sinks=sinks, **terms)
        outputs = self.out(attended, out_sharding=out_sharding)
        if self.dropout is not None:
            outputs = self.dropout(outputs, deterministic=deterministic, rngs=rngs)
        return outputs


def _check_metadata(name: str, metadata: Mapping[str, Any], rank: int) -> None:
    """Check the metadata of a parameter.

    Args:
        name: Name of the argument, for error messages.
        metadata: Value of the argument, or its default.
        rank: Number of dimensions of the parameter.

    Raises:
        ValueError: ``out_sharding`` has more entries than the parameter has dimensions.
        TypeError: The metadata are not a mapping with strings as keys.
    """
    if not isinstance(metadata, Mapping) or not all(isinstance(each, str) for each in metadata):
        raise TypeError(f"{name} must be a mapping from names, got {shown(metadata)}")
    names = metadata.get("out_sharding")
    if isinstance(names, (tuple, PartitionSpec)) and len(names) > rank:
        raise ValueError(
            f"{name} has out_sharding {tuple(names)} (given, or inherited from the query projection) with {len(names)} "
            f"entries, but the parameter has {rank} dimension(s): give at most one entry per dimension"
        )


class NeighborhoodAttention1D(NeighborhoodAttention):
    rank = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    rank = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    rank = 3
