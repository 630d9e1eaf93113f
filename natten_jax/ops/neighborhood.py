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

#: Result of an operator with ``return_lse=True``: the output and the logsumexp.
OutputAndLogsumexp = tuple[jax.Array, jax.Array]


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
    ) -> OutputAndLogsumexp: ...
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
    ) -> jax.Array | OutputAndLogsumexp: ...


def _operator(function: Callable[..., Any]) -> NeighborhoodAttention:
    """Decorate an operator so that unknown keyword arguments are reported before missing arguments.

    For type checkers, ``return_lse`` determines the type of the operator's result.
    """
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
) -> jax.Array | OutputAndLogsumexp:
    """Neighborhood attention over an image.

    Each query attends to the keys in a window of ``kernel_size`` tokens around the query. By default, a window that
    extends beyond an end of the layout is shifted back inside (``edges``). ``stride`` queries share one window,
    ``dilation`` increases the distance between the tokens of a window, and ``is_causal`` masks out the keys after the
    query. :mod:`natten_jax.windows` defines the windows exactly.

    Arguments that can differ per dimension take 2 values, or a single one. The values can also be given as a NumPy
    array, or as a JAX array that is not traced.

    Arguments by subject, and the guide to each subject:

    - windows (:doc:`/windows`): ``kernel_size``, ``stride``, ``dilation``, ``is_causal``, ``edges``, ``clamp_window``;
    - layout (:doc:`/boxes`): ``query_origin``, ``extents``, ``upsample``;
    - logits (:doc:`/biases`): ``scale``, ``relative_bias``, ``key_bias``, ``sinks``;
    - keys in addition to the window (:doc:`/windows`): ``additional_keys``, ``additional_values``;
    - result (:doc:`/numerics`): ``return_lse``;
    - 8-bit arrays (:doc:`/fp8`): ``out_dtype``, ``fp8``, ``query_scale``, ``key_scale``, ``value_scale``;
    - devices (:doc:`/scaling`): ``token_axes``;
    - speed (:doc:`/performance`, :doc:`/backends`): ``backend``, ``attention_kwargs``, ``try_fuse_additional_kv`` and
      ``performance``.

    Example:
        Every pixel attends to a window of 3 x 5 pixels, which are 2 pixels apart.

        >>> import jax.numpy as jnp
        >>> from natten_jax import na2d
        >>> pixels = jnp.ones((1, 8, 12, 4, 16))
        >>> na2d(pixels, pixels, pixels, kernel_size=(3, 5), dilation=2).shape
        (1, 8, 12, 4, 16)

    Args:
        query: ``[batch, height, width, heads, head_dim]``. float16, bfloat16, float32, float64, or one of the
            8-bit types float8_e4m3fn and float8_e5m2, which have no gradients.
        key: ``[batch, height, width, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        value: ``[batch, height, width, heads_kv, head_dim_v]``.
        kernel_size: Tokens in a window, per dimension. -1 is the extent of the layout or, with dilation, the largest
            window that fits.
        stride: Number of queries that share one window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window. ``kernel_size * dilation`` must not exceed the extent
            of the layout.
        is_causal: Mask out the keys after the query.
        edges: Boundary mode of windows that extend beyond an end of the layout. ``"shift"`` moves the window back
            inside. ``"cut"`` drops the keys beyond the end. ``"wrap"`` continues the window at the other
            end, and requires that ``dilation`` divides the extent.
        clamp_window: Reduce a window that does not fit the layout to the largest window that fits, instead of raising
            an error (:func:`natten_jax.windows.fitted`). A stride that exceeds the reduced window is also reduced.
        query_origin: Coordinates of the first query in the layout of the keys. With an origin, the layout of the
            queries can be smaller than the layout of the keys. An int per token dimension, or an int32 array ``[rank]``
            or ``[batch, rank]``. With a traced array, one compiled program serves all origins. Traced values are
            clamped into range as by :func:`jax.lax.dynamic_slice`; concrete values must be in range.
        extents: int32 ``[batch, rank]``. Number of valid tokens of each batch entry in each dimension of the layout.
            The tokens after the valid ones are padding. Traced values are clamped into range; concrete values must be
            in range. If a window does not fit the extents of a batch entry, it is reduced to the largest window that
            fits. Padding tokens get an output of 0, a logsumexp of ``-inf`` and gradients of 0, regardless of their
            values.
        upsample: Number of queries per key along each token dimension. The extents of the queries are ``upsample``
            times the extents of the keys. Query ``i`` has the window of key ``i // upsample``.
        scale: Factor of the logits: a number, or an array with the shape ``[]`` or ``[heads]``. ``None`` is
            ``head_dim ** -0.5``. A number must be finite, and its product with ``log2(e)`` must be finite in float32.
            For float64 inputs, only the number itself must be finite. An array can be a learned parameter, because the
            operator has gradients with respect to it. Kernels read the array in float32 (in float64 for float64
            inputs). The rules for a number also apply to each element of an array. If a traced element breaks a
            rule, the result is NaN. A concrete array without dimensions is treated as a number.
        relative_bias: ``[heads, 2 * kernel_size - 1, ...]``, in a floating point dtype. The head dimension is followed
            by one dimension per token dimension. The bias of a logit depends on the offset of the key from the query,
            in steps of ``dilation`` tokens. In each dimension, the index of the bias is ``offset + kernel_size - 1``.
            The bias is added to the scaled logit. Logits of additional keys do not get a bias.
        key_bias: ``[batch, height, width]`` or ``[batch, heads, height, width]``, in a floating point dtype. The bias
            of a key is added to all scaled logits of the key. A bias of ``0.5 * finfo(dtype).min`` or less, such as
            ``-inf``, masks the key out. A bool array masks out each key whose element is ``False``. A query whose keys
            are all masked out gets an output of 0, a logsumexp of ``-inf`` and gradients of 0.
        sinks: ``[heads]``, in a floating point dtype. One extra logit per query head. Its exponential is added only to
            the softmax denominator, because a sink has no value.
        additional_keys: ``[batch, n, heads_kv, head_dim]``. Keys that every query attends to, in addition to the keys
            in its window.
        additional_values: ``[batch, n, heads_kv, head_dim_v]``. Values of the additional keys.
        return_lse: Also return the logsumexp.
        query_scale: Factors that an 8-bit query is multiplied by: a positive number, or a float32 array with the shape
            ``[]``, ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors that an 8-bit key is multiplied by: a positive number, or a float32 array with the shape
            ``[]``, ``[batch, heads_kv]`` or ``[batch, *blocks, heads_kv]``. The last shape has a factor per block of
            tokens. If a dimension has ``blocks`` blocks, all of them except the last one have
            ``ceil(extent / blocks)`` tokens.
        value_scale: Factors that an 8-bit value is multiplied by, with the shapes of ``key_scale``.
        out_dtype: Element type of the output of 8-bit arrays: ``"bfloat16"`` (the default), ``"float16"`` or
            ``"float32"``.
        fp8: ``"e4m3"`` or ``"e5m2"``. 8-bit type to which the call quantizes 16-bit or 32-bit queries, keys and values.
            Gradients are computed without quantization.
        token_axes: Manual mesh axes that shard the token dimensions; only inside ``jax.shard_map``. One entry per token
            dimension: an axis, a sequence of axes (slowest first), or ``None`` if the dimension is not sharded. Devices
            exchange halos of keys and values, so that the result equals attention over the whole layout.
        backend: Name of a backend, such as ``"cpu-fna"`` or ``"flex-fna"``. ``None`` selects the best backend that can
            run the problem.
        attention_kwargs: Performance arguments for :func:`attention`, which this operator calls for windows as large as
            the layout, and for additional keys that are not fused. The arguments are checked even if the operator does
            not call :func:`attention`.
        try_fuse_additional_kv: If True, process additional keys in the kernel that processes the windows, if the
            backend supports this. If False, process them in a second attention call, and merge the results of the two
            calls. ``None`` means False if ``attention_kwargs`` has options for the second call. Otherwise ``None``
            means True, because one kernel was faster than two calls on every backend (``bench/``).
        **performance: Tiles, schedules, memory and determinism, as in
            :class:`natten_jax.performance.PerformanceArguments`.

    Returns:
        Output ``[batch, height, width, heads, head_dim_v]`` in the query's dtype (``out_dtype`` for 8-bit queries).
        With ``return_lse``, also the logsumexp ``[batch, height, width, heads]`` of the scaled and biased logits and
        the sinks. It is a natural logarithm, in float32 (float64 for float64 inputs).

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
    """Return a decorator that completes a docstring with the sections of the docstring of :func:`na2d`.

    The docstring of the decorated function has only a summary and an example.

    Args:
        layout: Names of the token dimensions, which replace ``height, width``.
        values: Number of values that an argument per dimension takes, in words.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        text_of_rank, shared = inspect.getdoc(function), inspect.getdoc(na2d)
        if text_of_rank and shared:  # python -OO removes docstrings
            summary, example = text_of_rank.split("\n\n", 1)
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
) -> jax.Array | OutputAndLogsumexp:
    """Neighborhood attention over a sequence.

    Example:
        Every token attends to itself and to at most 7 tokens before it.

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
) -> jax.Array | OutputAndLogsumexp:
    """Neighborhood attention over a video or a volume.

    Example:
        Groups of 2 x 2 x 2 queries share one window.

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
