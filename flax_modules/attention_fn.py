"""Code that the Flax modules share, and an ``attention_fn`` for Flax's own ``MultiHeadAttention``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack, cast

import jax
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from natten_jax import backends
from natten_jax.arguments.arrays import checked_scale
from natten_jax.arguments.names import reject_unknown_kwargs, without_neutral
from natten_jax.arguments.static import Bools, Ints, array_of, flag, hashable, shown, warn_of_line
from natten_jax.ops.canonicalize import check_array
from natten_jax.ops.float8 import float8_name
from natten_jax.ops.neighborhood import na1d, na2d, na3d
from natten_jax.ops.neighborhood_weights import neighborhood_apply, neighborhood_weights
from natten_jax.ops.sub_calls import checked_attention_kwargs
from natten_jax.performance import PerformanceArguments, performance_of
from natten_jax.windows import Edges, WindowArguments

__all__ = ["NeighborhoodAttentionFn", "neighborhood_attention_fn"]

_OPERATORS = {1: na1d, 2: na2d, 3: na3d}
#: Names of the token dimensions, by rank.
_LAYOUTS = {1: "seqlen", 2: "height, width", 3: "depth, height, width"}
#: Hint for error messages: the caller may have flattened the tokens to ``[batch, tokens, features]``.
_FLATTENED = (
    "the last dimensions are the token layout and the features, so that tokens which are flattened to "
    "[batch, tokens, features] need their layout of {rank} dimensions back"
)
#: Initializer of relative biases. Published models use the same standard deviation.
draw_bias = jax.nn.initializers.truncated_normal(0.02)


class AttentionDropoutWarning(UserWarning):
    """Warning that dropout of attention weights is on: the weights are then stored as an array in memory."""


class Performance(PerformanceArguments, total=False):
    """Arguments of :func:`natten_jax.na1d`, ``na2d`` and ``na3d`` that affect speed and memory."""

    attention_kwargs: Mapping[str, Any] | None
    backend: str | None
    fp8: str | None


# Attention with fixed arguments --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Neighborhood:
    """Neighborhood attention with fixed window and performance arguments; a call passes the arrays.

    Instances are hashable and comparable, as Flax requires for static attributes of modules. Modules with equal
    arguments share a compiled program.
    """

    rank: int
    window: WindowArguments
    scale_name: str
    arguments: Mapping[str, Any]

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        drop: Callable[[jax.Array], jax.Array] | None = None,
        **terms: Any,
    ) -> jax.Array:
        """Compute the attention.

        Args:
            query: ``[*batch, *layout, heads, head_dim]``, with any number of batch dimensions.
            key: ``[*batch, *layout, heads_kv, head_dim]``.
            value: ``[*batch, *layout, heads_kv, head_dim_v]``.
            drop: Function that applies dropout to the attention weights, which are then stored as an array. ``None``
                turns this dropout off.
            **terms: The arguments ``query_origin``, ``extents``, ``upsample``, ``relative_bias``, ``key_bias`` and
                ``sinks`` of the operators. ``query_origin``, ``extents`` and ``key_bias`` may begin with the batch
                dimensions of ``query``, whatever the number of these dimensions.

        Returns:
            ``[*batch, *layout, heads, head_dim_v]``.

        Raises:
            ValueError: The window does not fit the layout, the scale is too large for the arrays' type, no backend can
                run the problem, or ``drop`` is combined with ``query_origin``, ``extents``, ``upsample``,
                ``clamp_window``, ``fp8``, ``key_bias`` or ``sinks``.
        """
        checked_scale(self.arguments["scale"], query.dtype.name, name=self.scale_name)
        batch = query.shape[: query.ndim - self.rank - 2]
        if len(batch) != 1:  # operators require a single batch dimension
            arrays = (query, key, value)
            query, key, value = (array.reshape(math.prod(batch), *array.shape[len(batch) :]) for array in arrays)
            for name, rank in (("query_origin", 1), ("extents", 1), ("key_bias", None)):
                terms[name] = _with_one_batch_dimension(terms.get(name), batch, rank)
        attend: Any = _OPERATORS[self.rank] if drop is None else functools.partial(_attend_dropping, drop)
        try:
            output: jax.Array = attend(query, key, value, **self.arguments, **terms)
        except ValueError as error:
            flattened = f" (without a batch dimension, {_FLATTENED.format(rank=self.rank)})"
            message = f"{error}{'' if batch or self.rank == 1 else flattened}"
            if self.scale_name == "qk_scale":  # the caller is a Flax module: use the names of its arguments
                message = message.replace("query, key and value", "inputs and inputs_kv").replace(
                    "query has", "inputs has"
                )
                message = re.sub(r"\bkey(?= has|,|'s token)", "inputs_kv", message)
            raise ValueError(message) from None
        return output if len(batch) == 1 else output.reshape(*batch, *output.shape[1:])


def _with_one_batch_dimension(array: Any, batch: tuple[int, ...], rank: int | None) -> Any:
    """Flatten the batch dimensions of an array to one dimension.

    An array is returned unchanged if its shape does not begin with ``batch``. If ``rank`` is not ``None``, an array is
    also returned unchanged if ``batch`` is empty, or if the number of dimensions after ``batch`` is not ``rank``.
    """
    shape = getattr(array, "shape", ())
    rest = shape[len(batch) :]
    if array is None or shape[: len(batch)] != batch or (rank is not None and (not batch or len(rest) != rank)):
        return array
    return array.reshape(math.prod(batch), *rest)


def _attend_dropping(
    drop: Callable[[jax.Array], jax.Array], query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any
) -> jax.Array:
    """Compute neighborhood attention with dropout of the weights; ``arguments`` are arguments of the operator."""
    names = "query_origin", "extents", "clamp_window", "fp8"
    given = [name for name in names if not (arguments.get(name) is None or arguments.get(name) is False)]
    if given or query.shape[:-2] != key.shape[:-2]:
        beside = ", ".join(given) or "inputs_kv of another layout"
        raise ValueError(
            f"attn_drop was given with {beside}: dropout requires queries that cover the whole layout of the keys"
        )
    for name in ("key_bias", "sinks"):
        if arguments.get(name) is not None:
            raise ValueError(f"attn_drop was given with {name}: attention with dropout does not support {name}")
    warn_of_line(
        "attn_drop: attention weights are formed as an array, which is slower than the operators and takes "
        "prod(kernel_size) numbers for each query and head; without dropout, the operators run",
        AttentionDropoutWarning,
    )
    window: dict[str, Any] = {name: arguments[name] for name in WindowArguments._fields}
    terms: dict[str, Any] = {name: arguments.get(name) for name in ("scale", "relative_bias")}
    return neighborhood_apply(drop(neighborhood_weights(query, key, **window, **terms)), value, **window)


def neighborhood(module: str, rank: int, settings: Mapping[str, Any], scale_name: str = "scale") -> Neighborhood:
    """Check all arguments that can be checked without the arrays, and return the attention with these arguments.

    Args:
        module: Name of the module or function, for error messages.
        rank: Number of token dimensions.
        settings: The window arguments, ``clamp_window``, the scale, and the arguments of :class:`Performance`.
        scale_name: Key of the scale in ``settings``. Error messages contain this name.

    Raises:
        ValueError: A value breaks a rule of the operator, or ``backend`` is unknown.
        TypeError: An argument is of the wrong type, or its name is unknown.
    """
    remaining = dict(settings)
    window = WindowArguments(**{name: remaining.pop(name) for name in WindowArguments._fields}).checked(rank)
    clamp_window = flag("clamp_window", remaining.pop("clamp_window"))
    scale = checked_scale(remaining.pop(scale_name), name=scale_name)
    options = {name: remaining.pop(name, None) for name in ("backend", "attention_kwargs", "fp8")}
    if options["fp8"] is not None:
        float8_name("fp8", options["fp8"])
    if options["backend"] is not None:
        backends.find(options["backend"], "fna")
    config = performance_of(rank, **without_neutral(module, remaining))
    if options["attention_kwargs"] is not None:
        checked_attention_kwargs(options["attention_kwargs"], config.flattened())
    fixed = {**window._asdict(), "clamp_window": clamp_window, "scale": scale}
    arguments = {**fixed, **options, **dataclasses.asdict(config)}
    return Neighborhood(rank, window, scale_name, frozen(arguments))


def frozen(value: Any) -> Any:
    """Return a hashable copy of an argument.

    :func:`hashable` converts sequences and arrays. A mapping becomes a ``FrozenDict``, with converted values.
    """
    if not isinstance(value, Mapping):
        return hashable(value)
    return cast(Any, FrozenDict)({name: frozen(each) for name, each in value.items()})


# Modules -------------------------------------------------------------------------------------------------------------


class NeighborhoodModule:
    """Base class of the modules for ``flax.nnx`` and ``flax.linen``; their docstrings are built from this docstring.

    The module maps ``[*batch, {layout}, in_features]`` to ``[*batch, {layout}, out_features]``, with zero or more batch
    dimensions. If the tokens of an image are flattened to ``[batch, tokens, in_features]``, reshape them to the image's
    layout first.

    Projections and normalizations have the names and shapes of Flax's ``MultiHeadAttention``. The parameters are:

    - ``query``, ``key`` and ``value``: kernels ``[in_features, heads, head_dim]`` and biases ``[heads, head_dim]``. For
      ``key`` and ``value``, ``heads`` is ``num_kv_heads``.
    - ``out``: a kernel ``[num_heads, head_dim, out_features]`` and a bias ``[out_features]``.
    - ``query_ln`` and ``key_ln``, if ``normalize_qk`` is set: scales ``[head_dim]``.
    - ``rpb``, if ``relative_bias`` is set: biases ``[num_heads, 2 * kernel_size - 1, ...]``.
    - ``sinks``, if ``sinks`` is set: logits ``[num_heads]``.

    Window arguments take one value per token dimension, or a single value for all dimensions.

    Arguments:
        num_heads: Number of query heads.
        kernel_size: Window extent in tokens; -1 is the whole extent (with dilation, the largest window that fits).
        stride: Number of queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window; ``kernel_size * dilation`` must fit the layout.
        is_causal: Mask out the keys after each query.
        edges: Boundary mode of windows that cross an end of the layout: ``"shift"`` moves the window inside, ``"cut"``
            drops its keys beyond the end, ``"wrap"`` continues it at the other end (``dilation`` must divide the
            extent).
        clamp_window: Shrink windows that are larger than the layout to the largest that fit, instead of raising.
        qkv_bias: Give the query, key and value projections a bias; the output projection always has a bias.
        qk_scale: Factor of the logits. The default is ``head_dim ** -0.5``.
        attn_drop: Dropout rate of the attention weights. While dropout is on, the weights are stored as an array. This
            is slower than the fused operators and emits a warning. While dropout is off, the fused operators run.
        proj_drop: Dropout rate of the output projection's result.
        num_kv_heads: Number of key/value heads. It must divide ``num_heads`` (GQA, MQA). The default is ``num_heads``.
        qkv_features: Features of all query heads together. The default is ``in_features``.
        out_features: Features per token of the output. The default is ``in_features``.
        relative_bias: Add a learned bias ``rpb`` to the logits, with one value per head and per offset of a key from a
            query, like the operators' argument ``relative_bias``.
        sinks: Add a learned logit per query head to the softmax denominator, like the operators' argument ``sinks``.
            The initial value is 0.
        normalize_qk: Apply layer normalization with a learned scale to the features of each query head and key head.
        deterministic: Turn dropout off. The argument ``deterministic`` of a call takes precedence. If ``attn_drop`` or
            ``proj_drop`` is above 0, ``deterministic`` must be given to the constructor or to the call.
        dtype: Computation type; ``None`` uses the type to which inputs and parameters promote.
        param_dtype: Type of the parameters.
        precision: Precision of the projections.
        kernel_init: Initializer of the projections' kernels.
        kv_kernel_init: Initializer of the kernels of the key and value projections. The default is ``kernel_init``.
        out_kernel_init: Initializer of the output projection's kernel. The default is ``kernel_init``.
        bias_init: Initializer of the projections' biases.
        kv_bias_init: Initializer of the biases of the key and value projections. The default is ``bias_init``.
        out_bias_init: Initializer of the output projection's bias. The default is ``bias_init``.
        attention_kwargs: As in :func:`natten_jax.na{rank}d`. The module also accepts these arguments of the operator:
            ``backend``, ``fp8``, ``q_tile_shape``, ``kv_tile_shape``, ``backward_q_tile_shape``,
            ``backward_kv_tile_shape``, ``backward_kv_splits``, ``backward_use_xla_reduction``,
            ``backward_deterministic``, ``memory_usage_preference``, ``run_persistent_kernel`` and ``kernel_schedule``.

    Raises:
        ValueError: A value breaks a rule above, or ``backend`` is unknown.
        TypeError: An argument is of the wrong type.
    """

    rank: ClassVar[int]

    def __init_subclass__(cls, **options: Any) -> None:
        """If the class defines ``rank``, build its docstring from the docstring templates of its base classes."""
        super().__init_subclass__(**options)
        if "rank" not in vars(cls):
            return
        _, *common, arguments, raises = inspect.cleandoc(NeighborhoodModule.__doc__ or "").split("\n\n")
        text = inspect.cleandoc(cls.__bases__[0].__doc__ or "")
        for name, part in {
            "common": "\n\n".join(common),
            "arguments": arguments.removeprefix("Arguments:").strip(),
            "raises": raises,
            "shape": str((1, *(4,) * cls.rank, 32)),
            "layout": _LAYOUTS[cls.rank],
            "rank": str(cls.rank),
        }.items():
            text = text.replace(f"{{{name}}}", part)
        cls.__doc__ = text

    def _tokens(self, inputs: Any, inputs_kv: Any, in_features: int | None) -> tuple[jax.Array, jax.Array]:
        """Check the inputs. Return the input of the query projection and the input of the key and value projections."""
        inputs = array_of(inputs)
        _check_input(inputs, self.rank, in_features)
        kv_inputs = inputs if inputs_kv is None else array_of(inputs_kv)
        _check_input(kv_inputs, self.rank, inputs.shape[-1], "inputs_kv")
        return inputs, kv_inputs


def bias_shape(relative_bias: bool, num_heads: int, window: WindowArguments) -> tuple[int, ...] | None:
    """Return the shape of a module's relative bias; ``None`` if the module has no relative bias.

    Raises:
        ValueError: A window extent is -1. It then depends on the layout, which is unknown here.
        TypeError: ``relative_bias`` is not a bool.
    """
    if not flag("relative_bias", relative_bias):
        return None
    sizes = cast(tuple[int, ...], window.kernel_size)  # checked before
    if min(sizes) < 1:
        raise ValueError(
            f"relative_bias=True with kernel_size {sizes}: a bias per offset requires a window extent in tokens"
        )
    return num_heads, *(2 * size - 1 for size in sizes)


def drop_of_weights(
    dropout: nnx.Dropout | None, deterministic: bool | None, rngs: Any
) -> Callable[[jax.Array], jax.Array] | None:
    """Return a function that drops attention weights; ``None`` if dropout is off."""
    if dropout is None or (dropout.deterministic if deterministic is None else deterministic) is True:
        return None
    if isinstance(rngs, jax.Array):  # derive a new key, because output dropout uses the given key
        rngs = jax.random.fold_in(rngs, 1)
    return functools.partial(dropout, deterministic=deterministic, rngs=rngs)


def settings_of(common: Mapping[str, Any], *values: Any) -> dict[str, Any]:
    """Return the settings of a projection by name.

    ``values`` are in the order of ``common``. A value of ``None`` is replaced by the setting in ``common``.
    """
    pairs = zip(common.items(), values, strict=True)
    return {name: default if value is None else value for (name, default), value in pairs}


def head_sizes(
    num_heads: int, num_kv_heads: int | None, in_features: int | None, qkv_features: int | None
) -> tuple[int, int, int]:
    """Return the number of query heads, the number of key/value heads, and the head dimension.

    The head dimension is 0 if ``in_features`` is ``None``.

    Raises:
        ValueError: A size is less than 1, ``num_heads`` is not a multiple of ``num_kv_heads``, or the number of
            features is not a multiple of ``num_heads``.
        TypeError: An argument is not an int.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: "
            "every key/value head serves the same number of query heads"
        )
    if in_features is None:
        return num_heads, num_kv_heads, 0
    name, features = ("in_features", in_features) if qkv_features is None else ("qkv_features", qkv_features)
    check_positive(**{name: features})
    if features % num_heads:
        raise ValueError(f"{name} {features} is not a multiple of num_heads {num_heads}: all heads have the same size")
    return num_heads, num_kv_heads, features // num_heads


def check_positive(**sizes: int) -> None:
    """Check that sizes are positive.

    Raises:
        ValueError: A size is less than 1.
        TypeError: A size is not an int.
    """
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {shown(value)}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {shown(value)}")


def check_dropout(attn_drop: float, proj_drop: float) -> None:
    """Check both dropout rates.

    Raises:
        ValueError: A rate is not a probability.
        TypeError: A rate is not a number.
    """
    for name, rate in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
            raise TypeError(f"{name} must be a real number, got {shown(rate)}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {shown(rate)}")


def _check_input(inputs: jax.Array, rank: int, in_features: int | None, name: str = "inputs") -> None:
    """Check that an array has the shape ``[*batch, *layout, in_features]``."""
    check_array(name, inputs)
    if inputs.ndim < rank + 1:
        raise ValueError(
            f"{name} has shape {inputs.shape}, but NeighborhoodAttention{rank}D takes arrays of at least {rank + 1} "
            f"dimensions [*batch, {_LAYOUTS[rank]}, in_features]"
            + (f": {_FLATTENED.format(rank=rank)}" if rank > 1 else "")
        )
    if 0 in inputs.shape[-rank - 1 :]:
        raise ValueError(f"{name} has shape {inputs.shape}: every extent but the batch must be at least 1")
    if in_features is not None and inputs.shape[-1] != in_features:
        hint = "they must be equal"
        if inputs.ndim > rank and inputs.shape[-rank - 1] == in_features:
            hint = f"jnp.moveaxis({name}, {-rank - 1}, -1) moves features behind tokens"
        raise ValueError(
            f"{name} has {inputs.shape[-1]} features (shape {inputs.shape}), but in_features is {in_features}: {hint}"
        )


# Functions for Flax's own modules ------------------------------------------------------------------------------------


@reject_unknown_kwargs(Performance.__annotations__)
def neighborhood_attention_fn(
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    *,
    edges: Edges = "shift",
    clamp_window: bool = False,
    **performance: Unpack[Performance],
) -> NeighborhoodAttentionFn:
    """Return an ``attention_fn`` for the ``MultiHeadAttention`` of ``flax.nnx`` or ``flax.linen``.

    The number of token dimensions follows from the query's shape: if the inputs of ``MultiHeadAttention`` are
    ``[batch, height, width, features]``, windows have two dimensions. Window arguments take one value per token
    dimension, or a single value for all dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn
        >>> over_windows = neighborhood_attention_fn(kernel_size=(3, 3))
        >>> layer = nnx.MultiHeadAttention(
        ...     2, 32, attention_fn=over_windows, decode=False, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((1, 4, 4, 32))).shape
        (1, 4, 4, 32)

    Args:
        kernel_size: Window extent in tokens.
        stride: Number of queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window; ``kernel_size * dilation`` must fit the layout.
        is_causal: Mask out the keys after each query.
        scale: Factor of the logits. The default is ``head_dim ** -0.5``, as in Flax.
        edges: Boundary mode of windows that cross an end of the layout: ``"shift"`` moves the window inside, ``"cut"``
            drops its keys beyond the end, ``"wrap"`` continues it at the other end (``dilation`` must divide the
            extent).
        clamp_window: Shrink windows that are larger than the layout to the largest that fit, instead of raising.
        **performance: ``backend``, ``fp8`` and the other performance arguments of :func:`natten_jax.na1d`.

    Returns:
        The function. Two functions with equal arguments compare equal, so modules that use them can share a compiled
        program.

    Raises:
        ValueError: A value breaks a rule above, or ``backend`` is unknown.
        TypeError: An argument is of the wrong type.
    """
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)
    settings = {**window._asdict(), "scale": scale, "clamp_window": clamp_window, **performance}
    return NeighborhoodAttentionFn(frozen(settings))


@dataclasses.dataclass(frozen=True)
class NeighborhoodAttentionFn:
    """A function with the signature of Flax's ``dot_product_attention``; see :func:`neighborhood_attention_fn`."""

    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.for_rank(self.rank or 1)

    @property
    def rank(self) -> int | None:
        """Number of token dimensions: the length of the first argument that is a tuple; ``None`` if none is a tuple."""
        return next((len(v) for v in self.settings.values() if isinstance(v, tuple)), None)

    def for_rank(self, rank: int) -> Neighborhood:
        """Return the attention for ``rank`` token dimensions."""
        return neighborhood("neighborhood_attention_fn", rank, self.settings)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        *,
        promote_dtype: Callable[..., Any] = flax_promote_dtype,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., jax.Array] | None = None,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the attention.

        An argument of Flax that neighborhood attention does not support raises an error, unless it is documented as
        ignored.

        Args:
            query: ``[batch, *layout, heads, head_dim]``, not yet multiplied by the scale of the logits.
            key: ``[batch, *layout, heads_kv, head_dim]``.
            value: ``[batch, *layout, heads_kv, head_dim_v]``.
            bias: Must be ``None``.
            mask: Must be ``None``.
            broadcast_dropout: Ignored, because dropout is not supported.
            dropout_rng: Ignored, because dropout is not supported.
            dropout_rate: Must be 0 unless ``deterministic``.
            deterministic: Turn dropout off.
            dtype: Computation type; ``None`` uses the type to which the arrays promote.
            precision: Ignored: products always accumulate in float32 or better.
            module: Must be ``None``: attention weights are not stored, so they cannot be sown.
            promote_dtype: Function that casts the arrays to a common type.
            is_causal: Must be False, unless there is one token dimension and the function was made with ``is_causal``.
            force_fp32_for_softmax: Ignored: the softmax is always computed in float32 or better.
            einsum_dot_general: Must be ``None``.
            qk_attn_weights_einsum: Must be ``None``.
            attn_weights_value_einsum: Must be ``None``.
            input_positions: Must be ``None``. For rotary embeddings, wrap this function in one that rotates query and
                key.

        Returns:
            ``[batch, *layout, heads, head_dim_v]``.

        Raises:
            ValueError: An argument is not supported, or the window does not fit the layout.
        """
        unsupported: dict[str, Any] = {"bias": bias, "mask": mask, "module": module, "input_positions": input_positions}
        unsupported |= {"einsum_dot_general": einsum_dot_general, "qk_attn_weights_einsum": qk_attn_weights_einsum}
        unsupported |= {"attn_weights_value_einsum": attn_weights_value_einsum}
        for name, argument in unsupported.items():
            if argument is not None:
                kind = f"an array of shape {argument.shape}" if hasattr(argument, "shape") else type(argument).__name__
                raise ValueError(f"{name} must be None, got {kind}: {_REASONS.get(name, _NO_EINSUM)}")
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"dropout_rate must be 0 unless deterministic, got {dropout_rate}: neighborhood attention "
                "does not support dropout of attention weights"
            )
        query, key, value = map(array_of, (query, key, value))
        rank = query.ndim - 3
        if rank not in (1, 2, 3) or self.rank not in (None, rank):
            expected = "1, 2 or 3" if self.rank is None else self.rank
            raise ValueError(
                f"query has shape {query.shape}, which is [batch, *layout, heads, head_dim] with {rank} token "
                f"dimension(s), but this attention_fn takes {expected}"
            )
        attend = self.for_rank(rank)
        if is_causal and attend.window.is_causal != (True,):
            raise ValueError(
                "is_causal=True means a causal mask over the token sequence, which would cut windows: "
                "give is_causal to neighborhood_attention_fn instead"
            )
        return attend(*promote_dtype((query, key, value), dtype=dtype))


_REASONS = {
    "bias": "neighborhood attention does not add a bias to the logits",
    "mask": "use natten_jax's modules to mask padding, and the operators for decode=True, which also passes a mask",
    "module": "attention weights are never formed, so they cannot be sown",
    "input_positions": "rotate query and key in a function that wraps this one",
}
_NO_EINSUM = "the products are computed inside the operator"
