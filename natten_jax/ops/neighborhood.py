"""The public functions: neighborhood attention in one, two and three dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Unpack, cast, overload

import jax
from jax.typing import DTypeLike

from natten_jax.arguments.arrays import Counts, Origin, Scale, TokenAxes
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.arguments.static import Bools, Ints
from natten_jax.ops.calls import ExecutionArguments, OperatorOptions, run_operator
from natten_jax.ops.canonicalize import ArrayLike, BoxArguments, LogitTerms
from natten_jax.ops.float8 import Factor, Float8Arguments
from natten_jax.performance import PerformanceArguments
from natten_jax.windows import Edges, WindowArguments

#: Output and logsumexp.
Pair = tuple[jax.Array, jax.Array]


class NeighborhoodOptions(OperatorOptions, PerformanceArguments, total=False):
    """Keyword arguments of ``na1d``, ``na2d`` and ``na3d`` except ``return_lse``."""

    edges: Edges
    extents: Counts | None
    upsample: Ints
    clamp_window: bool
    try_fuse_additional_kv: bool | None
    token_axes: TokenAxes | None
    relative_bias: ArrayLike | None


class NeighborhoodAttention(Protocol):
    """Type of ``na1d``, ``na2d`` and ``na3d``."""

    __name__: str

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        scale: Scale | None = None,
        additional_keys: ArrayLike | None = None,
        additional_values: ArrayLike | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        backend: str | None = None,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[NeighborhoodOptions],
    ) -> jax.Array: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        scale: Scale | None = None,
        additional_keys: ArrayLike | None = None,
        additional_values: ArrayLike | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        backend: str | None = None,
        *,
        return_lse: Literal[True],
        **options: Unpack[NeighborhoodOptions],
    ) -> Pair: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        kernel_size: Ints,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        scale: Scale | None = None,
        additional_keys: ArrayLike | None = None,
        additional_values: ArrayLike | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        backend: str | None = None,
        *,
        return_lse: bool,
        **options: Unpack[NeighborhoodOptions],
    ) -> jax.Array | Pair: ...


def _operator(function: Callable[..., Any]) -> NeighborhoodAttention:
    """Report unknown keyword arguments before Python reports missing ones, and type the result by ``return_lse``."""
    return cast(NeighborhoodAttention, reject_unknown_kwargs(PerformanceArguments.__annotations__)(function))


@_operator
def na2d(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: Scale | None = None,
    additional_keys: ArrayLike | None = None,
    additional_values: ArrayLike | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    *,
    edges: Edges = "shift",
    query_origin: Origin | None = None,
    extents: Counts | None = None,
    upsample: Ints = 1,
    clamp_window: bool = False,
    try_fuse_additional_kv: bool | None = None,
    return_lse: bool = False,
    token_axes: TokenAxes | None = None,
    relative_bias: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_scale: Factor | None = None,
    key_scale: Factor | None = None,
    value_scale: Factor | None = None,
    out_dtype: DTypeLike | None = None,
    fp8: str | None = None,
    **performance: Unpack[PerformanceArguments],
) -> jax.Array | Pair:
    """Neighborhood attention over an image.

    Each query attends to the keys in a window of ``kernel_size`` tokens around it. At the edges the window is shifted
    by default (``edges``). ``stride`` queries share one window, ``dilation`` spreads the window, and ``is_causal``
    hides later keys. :mod:`natten_jax.windows` has the exact definition. Arguments per dimension take 2 values, or a
    single one; sequences may be NumPy arrays, or JAX arrays that are not traced.

    Arguments by subject, with guides:

    - windows (:doc:`/windows`): ``kernel_size``, ``stride``, ``dilation``, ``is_causal``, ``edges``, ``clamp_window``;
    - layout (:doc:`/boxes`): ``query_origin``, ``extents``, ``upsample``;
    - logits (:doc:`/biases`): ``scale``, ``relative_bias``, ``key_bias``, ``sinks``; and more keys:
      ``additional_keys``, ``additional_values``;
    - result (:doc:`/numerics`): ``return_lse``; 8-bit arrays (:doc:`/fp8`): ``out_dtype``, ``fp8``, ``query_scale``,
      ``key_scale``, ``value_scale``;
    - devices (:doc:`/scaling`): ``token_axes``;
    - speed (:doc:`/performance`, :doc:`/backends`): ``backend``, ``attention_kwargs``, ``try_fuse_additional_kv`` and
      ``performance``.

    Example:
        A 3 x 5 window around every pixel, which contains every second pixel.

        >>> import jax.numpy as jnp
        >>> from natten_jax import na2d
        >>> pixels = jnp.ones((1, 8, 12, 4, 16))
        >>> na2d(pixels, pixels, pixels, kernel_size=(3, 5), dilation=2).shape
        (1, 8, 12, 4, 16)

    Args:
        query: ``[batch, height, width, heads, head_dim]``, float16, bfloat16, float32 or float64;
            or, without gradients, float8_e4m3fn or float8_e5m2.
        key: ``[batch, height, width, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        value: ``[batch, height, width, heads_kv, head_dim_v]``.
        kernel_size: Window extent in tokens; -1 is the whole extent (with dilation, the largest window that fits).
        stride: Queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window; ``kernel_size * dilation`` fits the layout.
        is_causal: Hide later keys.
        edges: Boundary mode: ``"shift"`` moves a window that crosses an end inside, ``"cut"`` drops its keys beyond the
            end, ``"wrap"`` continues it at the other end (``dilation`` must divide the extent).
        clamp_window: Replace windows larger than the layout by the largest that fit, instead of raising
            (:func:`natten_jax.windows.fitted`); ``stride`` shrinks with them.
        query_origin: Offset of the queries in the layout of the keys; the queries may then be a smaller box. An
            int for each token dimension, or an int32 array ``[rank]`` or ``[batch, rank]``. It may be traced, so
            that one program serves all offsets. Traced values are clamped into range as by
            :func:`jax.lax.dynamic_slice`; concrete values must be in range.
        extents: int32 ``[batch, rank]``. Number of real tokens per dimension of the layout; the padding comes after
            them. Traced values are clamped into range; concrete values must be in range. Windows are the largest that
            fit a layout of these extents. Padding gets an output of 0, a logsumexp of ``-inf`` and gradients of 0,
            whatever its values are.
        upsample: Queries per key along each token dimension. Query ``i`` has the window of key
            ``i // upsample``, and the layout of the queries is this multiple of the layout of the keys.
        scale: Factor of the logits. ``None`` is ``head_dim ** -0.5``. A number must be finite, and so must its product
            with ``log2(e)`` in float32 (for float64 inputs only the number itself, in float64). An array, without
            dimensions or ``[heads]``, can be learned: kernels read it in float32, and traced values that would be
            invalid as a number give NaN. A concrete array without dimensions is treated as a number.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``, in a floating point dtype. If a key lies ``offset``
            neighbors (steps of the dilation) after the query, entry ``offset + kernel_size - 1`` is added to the
            scaled logit, with an index per dimension. Logits of additional keys are not changed.
        key_bias: ``[batch, height, width]`` or ``[batch, heads, height, width]``, in a floating point dtype: added to
            every scaled logit of a key. ``-inf``, and any number up to ``0.5 * finfo(dtype).min``, hides the key. A
            bool array hides the keys at ``False``. A query without visible keys gets an output of 0, a logsumexp of
            ``-inf`` and gradients of 0.
        sinks: ``[heads]``, in a floating point dtype: per query head, an extra logit in the softmax denominator,
            without a value.
        additional_keys: ``[batch, n, heads_kv, head_dim]``, tokens that every query sees.
        additional_values: ``[batch, n, heads_kv, head_dim_v]``.
        return_lse: Also return the logsumexp.
        query_scale: Factors of an 8-bit query: a positive number, or a float32 array without
            dimensions, ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors of the key: a number, or an array without dimensions, ``[batch, heads_kv]``, or
            ``[batch, *blocks, heads_kv]`` with a factor per block of tokens. All blocks of a dimension except the last
            have ``ceil(extent / blocks)`` tokens.
        value_scale: Factors of the value, with the shapes of ``key_scale``.
        out_dtype: Element type of the output of 8-bit arrays: ``"bfloat16"`` (the default),
            ``"float16"`` or ``"float32"``.
        fp8: ``"e4m3"`` or ``"e5m2"``: quantize wider arrays in the call. Gradients are computed without quantization.
        token_axes: Only inside ``jax.shard_map``. For each token dimension, the manual mesh axis that shards it, a
            sequence of axes (slowest first), or ``None``. Devices then exchange halos of keys and values, and the
            result equals attention over the whole layout.
        backend: ``"cpu-fna"``, ``"flex-fna"``, ... or ``None`` for the best backend that can run the problem.
        attention_kwargs: Performance arguments for the parts of the call that run :func:`attention`: windows as large
            as the layout, and additional keys and values. They are checked even if no part of the call uses them.
        try_fuse_additional_kv: Process additional tokens in the same kernel if the backend supports it, instead of
            in a second attention whose result is merged. ``None`` fuses unless ``attention_kwargs`` are given for
            the second attention: a single kernel was faster on every backend (``bench/``).
        **performance: :class:`natten_jax.performance.PerformanceArguments`: tiles, schedules, memory,
            determinism.

    Returns:
        Output ``[batch, height, width, heads, head_dim_v]`` in the query's dtype; with ``return_lse`` also the
        logsumexp of the scaled logits, including the sink, ``[batch, height, width, heads]``, natural logarithm,
        float32 (float64 for float64 inputs).

    Raises:
        ValueError: A value, shape or dtype breaks a rule above, or no backend can run the problem.
        TypeError: An argument is of the wrong type.
    """
    arrays = query, key, value, additional_keys, additional_values
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)
    box = BoxArguments(query_origin, extents, upsample, clamp_window)
    terms = LogitTerms(scale, relative_bias, key_bias, sinks)
    float8 = Float8Arguments(query_scale, key_scale, value_scale, out_dtype, fp8)
    execution = ExecutionArguments(backend, performance, attention_kwargs, try_fuse_additional_kv, token_axes)
    return run_operator("fna", 2, arrays, window, box, terms, float8, execution, return_lse)


def _documented_as_na2d(layout: str, values: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the other sections of :func:`na2d` to a docstring of summary and example.

    Args:
        layout: The token dimensions, in place of ``height, width``.
        values: The number of values of an argument per dimension.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own, shared = inspect.getdoc(function), inspect.getdoc(na2d)
        if own and shared:  # python -OO removes docstrings
            summary, example = own.split("\n\n", 1)
            description = shared[shared.index("\n\n") : shared.index("Example:")]
            text = f"{summary}{description}{example}\n\n{shared[shared.index('Args:') :]}"
            text = text.replace("2 values, or a single one", values).replace("height, width", layout)
            function.__doc__ = text
        return function

    return decorate


@_operator
@_documented_as_na2d("seqlen", "one value")
def na1d(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: Scale | None = None,
    additional_keys: ArrayLike | None = None,
    additional_values: ArrayLike | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    *,
    edges: Edges = "shift",
    query_origin: Origin | None = None,
    extents: Counts | None = None,
    upsample: Ints = 1,
    clamp_window: bool = False,
    try_fuse_additional_kv: bool | None = None,
    return_lse: bool = False,
    token_axes: TokenAxes | None = None,
    relative_bias: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_scale: Factor | None = None,
    key_scale: Factor | None = None,
    value_scale: Factor | None = None,
    out_dtype: DTypeLike | None = None,
    fp8: str | None = None,
    **performance: Unpack[PerformanceArguments],
) -> jax.Array | Pair:
    """Neighborhood attention over a sequence.

    Example:
        A causal window of 8 tokens.

        >>> import jax.numpy as jnp
        >>> from natten_jax import na1d
        >>> tokens = jnp.ones((2, 32, 4, 16))
        >>> na1d(tokens, tokens, tokens, kernel_size=8, is_causal=True).shape
        (2, 32, 4, 16)
    """
    arrays = query, key, value, additional_keys, additional_values
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)
    box = BoxArguments(query_origin, extents, upsample, clamp_window)
    terms = LogitTerms(scale, relative_bias, key_bias, sinks)
    float8 = Float8Arguments(query_scale, key_scale, value_scale, out_dtype, fp8)
    execution = ExecutionArguments(backend, performance, attention_kwargs, try_fuse_additional_kv, token_axes)
    return run_operator("fna", 1, arrays, window, box, terms, float8, execution, return_lse)


@_operator
@_documented_as_na2d("depth, height, width", "3 values, or a single one")
def na3d(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: Scale | None = None,
    additional_keys: ArrayLike | None = None,
    additional_values: ArrayLike | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    *,
    edges: Edges = "shift",
    query_origin: Origin | None = None,
    extents: Counts | None = None,
    upsample: Ints = 1,
    clamp_window: bool = False,
    try_fuse_additional_kv: bool | None = None,
    return_lse: bool = False,
    token_axes: TokenAxes | None = None,
    relative_bias: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_scale: Factor | None = None,
    key_scale: Factor | None = None,
    value_scale: Factor | None = None,
    out_dtype: DTypeLike | None = None,
    fp8: str | None = None,
    **performance: Unpack[PerformanceArguments],
) -> jax.Array | Pair:
    """Neighborhood attention over a video or a volume.

    Example:
        Windows that 2 x 2 x 2 queries share.

        >>> import jax.numpy as jnp
        >>> from natten_jax import na3d
        >>> voxels = jnp.ones((1, 4, 6, 8, 2, 16))
        >>> na3d(voxels, voxels, voxels, kernel_size=(2, 3, 4), stride=2).shape
        (1, 4, 6, 8, 2, 16)
    """
    arrays = query, key, value, additional_keys, additional_values
    window = WindowArguments(kernel_size, stride, dilation, is_causal, edges)
    box = BoxArguments(query_origin, extents, upsample, clamp_window)
    terms = LogitTerms(scale, relative_bias, key_bias, sinks)
    float8 = Float8Arguments(query_scale, key_scale, value_scale, out_dtype, fp8)
    execution = ExecutionArguments(backend, performance, attention_kwargs, try_fuse_additional_kv, token_axes)
    return run_operator("fna", 3, arrays, window, box, terms, float8, execution, return_lse)
