"""The public functions: neighborhood attention in one, two and three dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, Unpack, cast, overload

import jax
from jax.typing import DTypeLike

from natten_jax.arguments.arrays import Counts, Origin, Scale, TokenAxes
from natten_jax.arguments.names import explained
from natten_jax.arguments.static import Bools, Ints
from natten_jax.ops.calls import ExecutionArguments, LogitTerms, attend_windows
from natten_jax.ops.canonicalize import ArrayLike, Biases, BoxArguments
from natten_jax.ops.float8 import Factor, Float8Arguments, straight_through
from natten_jax.ops.options import NeighborhoodOptions, OptionsOfOthers
from natten_jax.performance import PERFORMANCE_NAMES, PerformanceArguments
from natten_jax.windows import DOCUMENTED_ARGUMENTS, WINDOW_OPTIONS, WindowArguments

#: Output and logsumexp.
Pair = tuple[jax.Array, jax.Array]


class NeighborhoodAttention(Protocol):
    """What ``na1d``, ``na2d`` and ``na3d`` take and return."""

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


class _Words(NamedTuple):
    """What the documentation of a rank says otherwise than that of the others.

    Attributes:
        tokens: What the tokens make up.
        layout: Names of the token dimensions.
        values: How many values an argument that speaks of a dimension has.
        example: A call.
    """

    tokens: str
    layout: str
    values: str
    example: str


_WORDS = {
    1: _Words(
        "a sequence",
        "seqlen",
        "one value",
        """A causal window of 8 tokens.

    >>> import jax.numpy as jnp
    >>> from natten_jax import na1d
    >>> tokens = jnp.ones((2, 32, 4, 16))
    >>> na1d(tokens, tokens, tokens, kernel_size=8, is_causal=True).shape
    (2, 32, 4, 16)""",
    ),
    2: _Words(
        "an image",
        "height, width",
        "2 values, or one for all dimensions",
        """A 3 x 5 window around every pixel, spread to every second pixel.

    >>> import jax.numpy as jnp
    >>> from natten_jax import na2d
    >>> pixels = jnp.ones((1, 8, 12, 4, 16))
    >>> na2d(pixels, pixels, pixels, kernel_size=(3, 5), dilation=2).shape
    (1, 8, 12, 4, 16)""",
    ),
    3: _Words(
        "a video or a volume",
        "depth, height, width",
        "3 values, or one for all dimensions",
        """Windows that 2 x 2 x 2 queries share.

    >>> import jax.numpy as jnp
    >>> from natten_jax import na3d
    >>> voxels = jnp.ones((1, 4, 6, 8, 2, 16))
    >>> na3d(voxels, voxels, voxels, kernel_size=(2, 3, 4), stride=2).shape
    (1, 4, 6, 8, 2, 16)""",
    ),
}


def _operator(rank: int) -> NeighborhoodAttention:
    @WINDOW_OPTIONS.shown(performance=PerformanceArguments)
    def attend(
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
        **options: Unpack[OptionsOfOthers],
    ) -> jax.Array | Pair:
        """Neighborhood attention over {tokens}.

        Each query attends to the ``kernel_size`` window of keys around it; at the edges the window is shifted, unless
        ``edges`` says otherwise. ``stride`` queries share one window, ``dilation`` spreads it, and ``is_causal`` hides
        later keys. :mod:`natten_jax.windows` is the exact definition. Arguments that speak of a dimension take
        {values}; sequences may be NumPy's arrays, or JAX's where they are not traced.

        Example:
            {example}

        Args:
            query: ``[batch, {layout}, heads, head_dim]``, float16, bfloat16, float32 or float64;
                or, without gradients, float8_e4m3fn or float8_e5m2.
            key: ``[batch, {layout}, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
            value: ``[batch, {layout}, heads_kv, head_dim_v]``.
            {window_arguments}
            scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``. A number is finite, and so is its product
                with ``log2(e)`` in float32 (for float64 inputs only the factor itself, in float64). Or an array,
                without dimensions or ``[heads]``, that kernels read in float32, so that it can be learned: a traced
                value that a number could not be gives NaN. An array without dimensions whose value is known is a
                number.
            additional_keys: ``[batch, n, heads_kv, head_dim]``, tokens that every query sees.
            additional_values: ``[batch, n, heads_kv, head_dim_v]``.
            attention_kwargs: Performance arguments of :func:`attention`, where that runs: for windows as large as
                the layout, and for additional keys and values. They are checked in any case.
            backend: ``"cpu-fna"``, ``"flex-fna"``, ... or ``None`` for the best that can run the problem.
            query_origin: Where the queries begin in the layout of the keys, of which they may then be a smaller box: an
                int for each token dimension, or an int32 array ``[rank]`` or ``[batch, rank]``. Arrays of JAX's may be
                traced, so that one program serves all places, and are moved into range as
                :func:`jax.lax.dynamic_slice` does.
            extents: int32 ``[batch, rank]``: how many tokens of the layout are real, from the first on; moved into
                range likewise. Windows are those of a layout that ends there, the largest that fit. Padding gets an
                output of 0, a logsumexp of ``-inf`` and gradients of 0, whatever it holds.
            upsample: How many queries there are along each token dimension for a key: query ``i`` has the window of key
                ``i // upsample``, and the layout of the queries is this multiple of that of the keys.
            clamp_window: Take the largest windows that fit, instead of an error, where they are larger than the
                layout (:func:`natten_jax.windows.fitted`); then ``stride`` shrinks with them.
            try_fuse_additional_kv: Process additional tokens in the same kernel where the backend can, instead of
                in a second attention whose result is merged. ``None`` does so unless ``attention_kwargs`` speaks of
                that attention: one kernel was the faster way on every backend (``bench/``).
            return_lse: Return the logsumexp, too.
            token_axes: Inside ``jax.shard_map``: for each token dimension the manual mesh axis that it is split over,
                several, the first one slowest, or ``None``. Neighbors then exchange the keys that windows reach, and
                the result is that of the whole layout (``docs/scaling.md``).
            relative_bias: ``[heads, 2 * kernel_size - 1, ...]``, in a floating point dtype: added to the scaled
                logit of a query and a key that lies ``offset`` neighbors (steps of the dilation) after it is the entry
                ``offset + kernel_size - 1``, dimension by dimension; nothing to those of additional keys.
            key_bias: ``[batch, {layout}]`` or ``[batch, heads, {layout}]``, in a floating point dtype: added to
                every scaled logit of a key. ``-inf``, and any number up to ``0.5 * finfo(dtype).min``, hides the key. A
                query without visible keys gets an output of 0, a logsumexp of ``-inf`` and gradients of 0.
            sinks: ``[heads]``, in a floating point dtype: a logit of each query head that the softmax has besides
                those of the keys, and that no value stands behind.
            query_scale: Factors of an 8-bit query (``docs/fp8.md``): a positive number, or a float32 array without
                dimensions, ``[batch, heads]`` or ``[batch, heads_kv]``.
            key_scale: Factors of the key: a number or an array without dimensions or ``[batch, heads_kv]``; or
                ``[batch, *blocks, heads_kv]``, one for each block of tokens. Of so many blocks of a dimension all but
                the last have ``ceil(extent / blocks)`` tokens.
            value_scale: Factors of the value, as ``key_scale``.
            out_dtype: Element type of the output of 8-bit arrays: ``"bfloat16"``, which ``None`` is, too,
                ``"float16"`` or ``"float32"``.
            fp8: ``"e4m3"`` or ``"e5m2"``: the call quantises wider arrays itself, and has the gradients of the call
                that does not.
            **performance: :class:`natten_jax.performance.PerformanceArguments`: tiles, schedules, memory,
                determinism.

        Returns:
            Output ``[batch, {layout}, heads, head_dim_v]`` in the query's dtype; with ``return_lse`` also the
            logsumexp of the scaled logits, the sink among them, ``[batch, {layout}, heads]``, natural logarithm,
            float32 (float64 for float64 inputs).

        Raises:
            ValueError: A value, shape or dtype breaks a rule above, or no backend can run the problem.
            TypeError: An argument is of the wrong type.
        """
        arrays = query, key, value, additional_keys, additional_values
        window = WindowArguments(kernel_size, stride, dilation, is_causal).taking(options)
        terms = LogitTerms(Biases(relative_bias, key_bias), sinks)
        how = ExecutionArguments(backend, options, attention_kwargs, try_fuse_additional_kv)
        float8 = Float8Arguments(query_scale, key_scale, value_scale, out_dtype, fp8)

        def call(operands: Any, float8: Float8Arguments, return_lse: bool = True) -> Any:
            arrays, scale, terms, query_origin, extents = operands
            box = BoxArguments(query_origin, extents, upsample)
            return attend_windows(
                rank, arrays, window, clamp_window, scale, token_axes, how, return_lse, box, terms, float8
            )

        operands = arrays, scale, terms, query_origin, extents
        return (
            call(operands, float8, return_lse) if fp8 is None else straight_through(call, operands, float8, return_lse)
        )

    attend.__name__ = attend.__qualname__ = f"na{rank}d"
    document = inspect.cleandoc(attend.__doc__ or "")  # none with python -OO
    attend.__doc__ = document.format(window_arguments=DOCUMENTED_ARGUMENTS, **_WORDS[rank]._asdict())
    return cast(NeighborhoodAttention, explained(PERFORMANCE_NAMES)(attend))


na1d, na2d, na3d = map(_operator, _WORDS)
