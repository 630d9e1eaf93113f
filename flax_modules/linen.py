"""Neighborhood attention modules for :mod:`flax.linen`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import meta
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike

from natten_jax.arguments.arrays import Counts, Origin
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints, flag
from natten_jax.windows import Edges, WindowArguments

from . import attention_fn as common
from .attention_fn import Neighborhood, NeighborhoodModule, Performance

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "NeighborhoodAttention3D"]


class NeighborhoodAttention(NeighborhoodModule, linen.Module):
    """Multi-head neighborhood attention over {rank} token dimension(s), with projections, for :mod:`flax.linen`.

    {common} To shard the parameters over a device mesh, pass initializers made with ``linen.with_partitioning``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from natten_jax.flax_modules.linen import NeighborhoodAttention{rank}D
        >>> inputs = jnp.ones({shape})  # [batch, {layout}, in_features]
        >>> module = NeighborhoodAttention{rank}D(num_heads=2, kernel_size=3)
        >>> module.init_with_output(jax.random.key(0), inputs)[0].shape
        {shape}

    Args:
        in_features: Features per token of the input; ``None`` accepts any number of features.
        {arguments}

    {raises}
    """

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
    sinks: bool = False
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
        """Wrap the constructor, so that errors about unknown arguments suggest the intended argument."""
        super().__init_subclass__(**options)
        cls.__init__ = reject_unknown_kwargs()(cls.__init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        # Flax hashes a module by its fields, so they must be hashable.
        for name in (*WindowArguments._fields, *Performance.__annotations__):
            object.__setattr__(self, name, common.frozen(getattr(self, name)))
        self._checked()
        common.check_dropout(self.attn_drop, self.proj_drop)
        common.head_sizes(self.num_heads, self.num_kv_heads, self.in_features, self.qkv_features)
        for name in ("sinks", "qkv_bias", "normalize_qk"):
            flag(name, getattr(self, name))
        if self.out_features is not None:
            common.check_positive(out_features=self.out_features)
        super().__post_init__()

    @linen.nowrap  # excludes the method from Flax's scopes, call counts and summaries
    def _checked(self) -> tuple[Neighborhood, tuple[int, ...] | None]:
        """Check the arguments. Return the attention with these arguments, and the shape of the relative bias."""
        names = *WindowArguments._fields, *Performance.__annotations__, "clamp_window", "qk_scale"
        settings = {name: getattr(self, name) for name in names}
        attend = common.neighborhood(type(self).__name__, self.rank, settings, "qk_scale")
        return attend, common.bias_shape(self.relative_bias, self.num_heads, attend.window)

    @linen.compact
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
        dropout_rng: jax.Array | None = None,
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
            deterministic: Turn dropout off. The default is the value that was given to the constructor.
            dropout_rng: Random key for dropout. The default is a key of the random stream ``dropout``.

        Returns:
            ``[*batch, *layout, out_features]``.

        Raises:
            ValueError: An array has a wrong shape, or the window does not fit the layout of ``inputs_kv``.
        """
        inputs, kv_inputs = self._tokens(inputs, inputs_kv, self.in_features)
        in_features = inputs.shape[-1]
        sizes = common.head_sizes(self.num_heads, self.num_kv_heads, in_features, self.qkv_features)
        num_heads, num_kv_heads, head_dim = sizes
        typed: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        common_init = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}

        def project(features: Any, name: str, *initializers: Initializer | None, **options: Any) -> linen.DenseGeneral:
            chosen = common.settings_of(common_init, *initializers)
            annotating: Any = {name: _annotating(initializer) for name, initializer in chosen.items()}
            return linen.DenseGeneral(features, name=name, precision=self.precision, **typed, **annotating, **options)

        kv_initializers = self.kv_kernel_init, self.kv_bias_init
        query = project((num_heads, head_dim), "query", None, None, use_bias=self.qkv_bias)(inputs)
        key = project((num_kv_heads, head_dim), "key", *kv_initializers, use_bias=self.qkv_bias)(kv_inputs)
        value = project((num_kv_heads, head_dim), "value", *kv_initializers, use_bias=self.qkv_bias)(kv_inputs)
        if self.normalize_qk:
            normalize = functools.partial(linen.LayerNorm, use_bias=False, **typed)
            with jax.numpy_dtype_promotion("standard"):  # required by Flax's LayerNorm
                query, key = normalize(name="query_ln")(query), normalize(name="key_ln")(key)
        out_features = in_features if self.out_features is None else self.out_features
        attend, shape = self._checked()
        table = None if shape is None else self.param("rpb", common.draw_bias, shape, self.param_dtype)
        zeros = linen.initializers.zeros_init()
        sinks = self.param("sinks", zeros, (num_heads,), self.param_dtype) if self.sinks else None
        flag, rates = self.deterministic if deterministic is None else deterministic, (self.attn_drop, self.proj_drop)
        attn_dropout, dropout = (nnx.Dropout(rate, deterministic=flag) if rate > 0 else None for rate in rates)
        if dropout_rng is None and flag is not None and not flag and any(rates):
            dropout_rng = self.make_rng("dropout")
        drop = common.drop_of_weights(attn_dropout, flag, dropout_rng)
        terms = {"query_origin": query_origin, "extents": extents, "upsample": upsample, "key_bias": key_bias}
        outputs = attend(query, key, value, drop, relative_bias=table, sinks=sinks, **terms)
        outputs = project(out_features, "out", self.out_kernel_init, self.out_bias_init, axis=(-2, -1))(outputs)
        return outputs if dropout is None else dropout(outputs, rngs=dropout_rng)


def _annotating(initializer: Initializer) -> Initializer:
    """Return an initializer for ``linen.DenseGeneral`` whose partitioning annotations also work while a mesh is set.

    ``DenseGeneral`` initializes a kernel as a matrix and a bias as a vector, and then reshapes both. The annotations
    are for the final shape. While a mesh is set, however, Flax applies them before the reshape.
    """

    def initialize(*args: Any, **kwargs: Any) -> Any:
        value = initializer(*args, **kwargs)
        return _NotYetShaped(value) if isinstance(value, meta.Partitioned) else value

    return initialize


@dataclasses.dataclass(frozen=True)
class _NotYetShaped(meta.AxisMetadata[jax.Array]):
    """A value that has partitioning annotations, but does not have its final shape yet."""

    annotated: meta.Partitioned[jax.Array]

    def unbox(self) -> jax.Array:
        return self.annotated.unbox(apply_constraint=False)

    def replace_boxed(self, val: Any) -> Any:
        return self.annotated.replace_boxed(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        raise NotImplementedError("exists only during the initialization of one parameter")

    remove_axis = add_axis


class NeighborhoodAttention1D(NeighborhoodAttention):
    rank = 1


class NeighborhoodAttention2D(NeighborhoodAttention):
    rank = 2


class NeighborhoodAttention3D(NeighborhoodAttention):
    rank = 3
