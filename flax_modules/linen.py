"""Neighborhood attention modules for :mod:`flax.linen`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from natten_jax.arguments.arrays import Counts, Origin
from natten_jax.arguments.names import explained
from natten_jax.arguments.static import Bools, Ints, array_of, hashable
from natten_jax.windows import Edges, WindowArguments

from . import arguments
from .arguments import Neighborhood, Performance
from .documentation import document
from .partitioning import annotating

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class Dropout(linen.Dropout):
    """Flax's dropout with a mask that is sharded over explicit mesh axes as its inputs are.

    Flax's own mask is not sharded, and JAX refuses to combine it with inputs that are.
    """

    @linen.compact
    def __call__(self, inputs: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None) -> jax.Array:
        """Drop each input with probability ``rate``, unless ``deterministic``, as Flax does."""
        is_off = linen.merge_param("deterministic", self.deterministic, deterministic)
        if is_off or self.rate in (0, 1):
            return jnp.zeros_like(inputs) if self.rate == 1 and not is_off else inputs
        key = self.make_rng(self.rng_collection) if rng is None else rng
        kept = jax.random.bernoulli(key, 1 - self.rate, inputs.shape, out_sharding=jax.typeof(inputs).sharding)
        return jax.lax.select(kept, inputs / (1 - self.rate), jnp.zeros_like(inputs))


class NeighborhoodAttention(linen.Module):
    """What the modules of all ranks have in common."""

    rank: ClassVar[int]

    in_features: int | None = None
    _: dataclasses.KW_ONLY
    num_heads: int
    kernel_size: Ints
    stride: Ints = 1
    dilation: Ints = 1
    is_causal: Bools = False
    edges: Edges = "shift"
    clamp_window: bool = False
    relative_bias: bool = False
    qkv_bias: bool = True
    qk_scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    num_kv_heads: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    normalize_qk: bool = False
    deterministic: bool | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    kv_kernel_init: Initializer | None = None
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = linen.initializers.zeros_init()
    kv_bias_init: Initializer | None = None
    out_bias_init: Initializer | None = None
    attention_kwargs: Mapping[str, Any] | None = None
    backend: str | None = None
    fp8: str | None = None
    q_tile_shape: Ints | None = None
    kv_tile_shape: Ints | None = None
    backward_q_tile_shape: Ints | None = None
    backward_kv_tile_shape: Ints | None = None
    backward_kv_splits: Ints | None = None
    backward_use_xla_reduction: bool = False
    backward_deterministic: bool = False
    memory_usage_preference: str = "default"
    run_persistent_kernel: bool = True
    kernel_schedule: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Make a class of fields, whose constructor explains names that it does not know."""
        super().__init_subclass__(**options)
        cls.__init__ = explained()(cls.__init__)  # type: ignore[method-assign]  # made of the fields

    def __post_init__(self) -> None:
        # Flax hashes a module by its fields.
        for name in (*WindowArguments._fields, *Performance.__annotations__):
            value = getattr(self, name)
            canonical = arguments.frozen(value) if isinstance(value, Mapping) else hashable(value)
            object.__setattr__(self, name, canonical)
        self._neighborhood()
        arguments.check_dropout(self.attn_drop, self.proj_drop)
        num_heads, _ = arguments.head_counts(self.num_heads, self.num_kv_heads)
        self._bias_shape()
        if self.in_features is not None:
            arguments.head_dim(num_heads, self.in_features, self.qkv_features)
        if self.out_features is not None:
            arguments.check_positive(out_features=self.out_features)
        super().__post_init__()

    @linen.nowrap  # computes nothing: not a call for Flax to name, to count or to show
    def _neighborhood(self) -> Neighborhood:
        performance: Any = {name: getattr(self, name) for name in Performance.__annotations__}
        window = WindowArguments._make(getattr(self, name) for name in WindowArguments._fields)
        return arguments.neighborhood(
            type(self).__name__,
            self.rank,
            window,
            self.qk_scale,
            scale_name="qk_scale",
            clamp_window=self.clamp_window,
            **performance,
        )

    @linen.nowrap
    def _bias_shape(self) -> tuple[int, ...] | None:
        return arguments.bias_shape(self.relative_bias, self.num_heads, self._neighborhood().window)

    @linen.compact
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
        dropout_rng: jax.Array | None = None,
    ) -> jax.Array:
        """Attend.

        Args:
            inputs: ``[*batch, *layout, in_features]``, with any number of batch dimensions.
            inputs_kv: What keys and values are made of, where that is not ``inputs``: a larger layout, or a coarser.
            query_origin: Where ``inputs`` begin in the layout of ``inputs_kv``, as in the operators.
            extents: How much of the layout is real, ``[*batch, rank]``, as in the operators.
            upsample: How many tokens of ``inputs`` there are for one of ``inputs_kv``, as in the operators.
            deterministic: Whether dropout is off; ``None`` is as constructed.
            dropout_rng: Random key for the dropout; ``None`` takes the ``dropout`` stream.

        Returns:
            ``[*batch, *layout, out_features]``.

        Raises:
            ValueError: ``inputs`` has another shape, or the window does not fit its layout.
        """
        inputs = array_of(inputs)
        arguments.check_input(inputs, self.rank, self.in_features)
        in_features = inputs.shape[-1]
        others = inputs if inputs_kv is None else array_of(inputs_kv)
        arguments.check_input(others, self.rank, in_features, "inputs_kv")
        num_heads, num_kv_heads = arguments.head_counts(self.num_heads, self.num_kv_heads)
        head_dim = arguments.head_dim(num_heads, in_features, self.qkv_features)
        project = functools.partial(
            linen.DenseGeneral, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision
        )

        def initializers(kernel_init: Initializer | None, bias_init: Initializer | None) -> dict[str, Any]:
            kernel_init, bias_init = kernel_init or self.kernel_init, bias_init or self.bias_init
            return {"kernel_init": annotating(kernel_init), "bias_init": annotating(bias_init)}

        of_query = initializers(None, None) | {"use_bias": self.qkv_bias}
        of_kv = initializers(self.kv_kernel_init, self.kv_bias_init) | {"use_bias": self.qkv_bias}
        of_out = initializers(self.out_kernel_init, self.out_bias_init)
        query = project((num_heads, head_dim), name="query", **of_query)(inputs)
        key = project((num_kv_heads, head_dim), name="key", **of_kv)(others)
        value = project((num_kv_heads, head_dim), name="value", **of_kv)(others)
        if self.normalize_qk:
            normalize = functools.partial(
                linen.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            with jax.numpy_dtype_promotion("standard"):  # which Flax's own module takes for granted
                query, key = normalize(name="query_ln")(query), normalize(name="key_ln")(key)
        out_features = in_features if self.out_features is None else self.out_features
        shape, table = self._bias_shape(), None
        if shape is not None:
            draw = jax.nn.initializers.truncated_normal(arguments.BIAS_DEVIATION)
            table = self.param("rpb", draw, shape, self.param_dtype)
        # Dropout rejects two flags. As in nnx, the flag of the call takes precedence.
        flag, drop = self.deterministic if deterministic is None else deterministic, None
        if self.attn_drop > 0 and flag is not True:
            key_of_weights = None if dropout_rng is None else jax.random.fold_in(dropout_rng, 1)
            drop = functools.partial(Dropout(self.attn_drop), deterministic=flag, rng=key_of_weights)
        outputs = self._neighborhood()(query, key, value, query_origin, extents, upsample, table, drop)
        outputs = project(out_features, axis=(-2, -1), name="out", **of_out)(outputs)
        if self.proj_drop > 0:
            outputs = Dropout(self.proj_drop)(outputs, deterministic=flag, rng=dropout_rng)
        return outputs


class NeighborhoodAttention1D(NeighborhoodAttention):
    __doc__ = document(1, "flax.linen")
    rank = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    __doc__ = document(2, "flax.linen")
    rank = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    __doc__ = document(3, "flax.linen")
    rank = 3
