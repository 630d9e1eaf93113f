"""The public function ``attention``."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import DTypeLike

from natten_jax.arguments.arrays import Counts, Origin, Scale
from natten_jax.arguments.names import reject_unknown_kwargs
from natten_jax.ops.calls import ExecutionArguments, OperatorOptions, run_operator
from natten_jax.ops.canonicalize import ArrayLike, BoxArguments, LogitTerms
from natten_jax.ops.float8 import Factor, Float8Arguments
from natten_jax.performance import ATTENTION_NAMES, AttentionPerformanceArguments
from natten_jax.windows import WindowArguments

#: Output and logsumexp.
OutputAndLogsumexp = tuple[jax.Array, jax.Array]


class AttentionOptions(OperatorOptions, AttentionPerformanceArguments, total=False):
    """Keyword arguments of ``attention`` except ``return_lse``."""

    is_causal: bool
    query_lengths: Counts | None
    kv_lengths: Counts | None
    backend: str | None


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    scale: Scale | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...
@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    scale: Scale | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> OutputAndLogsumexp: ...
@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    scale: Scale | None = None,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | OutputAndLogsumexp: ...
@reject_unknown_kwargs(ATTENTION_NAMES)
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    scale: Scale | None = None,
    *,
    is_causal: bool = False,
    query_origin: Origin | None = None,
    query_lengths: Counts | None = None,
    kv_lengths: Counts | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    key_bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    query_scale: Factor | None = None,
    key_scale: Factor | None = None,
    value_scale: Factor | None = None,
    out_dtype: DTypeLike | None = None,
    fp8: str | None = None,
    **performance: Unpack[AttentionPerformanceArguments],
) -> jax.Array | OutputAndLogsumexp:
    """Dense attention over a sequence, without windows.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax import attention
        >>> query, key = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 24, 2, 8))
        >>> out, logsumexp = attention(query, key, key, is_causal=True, return_lse=True)
        >>> out.shape, logsumexp.shape
        ((2, 16, 4, 8), (2, 16, 4))

    Args:
        query: ``[batch, seqlen, heads, head_dim]``. float16, bfloat16, float32 or float64. Also float8_e4m3fn or
            float8_e5m2, which have no gradients.
        key: ``[batch, seqlen_kv, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        value: ``[batch, seqlen_kv, heads_kv, head_dim_v]``.
        scale: Factor of the logits: a number, or an array with the shape ``[]`` or ``[heads]``. ``None`` is
            ``head_dim ** -0.5``. A number must be finite, and its product with ``log2(e)`` must be finite in float32.
            For float64 inputs, only the number itself must be finite. An array can be learned. Kernels read it
            in float32 (in float64 for float64 inputs). Traced values that break the rules for numbers give NaN. A
            concrete array without dimensions is treated as a number.
        is_causal: If True, query ``i`` sees only keys ``j <= i`` (top-left aligned, also for unequal lengths).
        query_origin: Offset of the queries in the key sequence: query ``i`` sees the keys that query
            ``query_origin + i`` sees without an offset. The key sequence must be at least as long as the query
            sequence. An int, or an int32 array ``[1]`` or ``[batch, 1]``. Traced values are clamped into range as by
            :func:`jax.lax.dynamic_slice`; concrete values must be in range.
        query_lengths: int32 ``[batch]``. Number of valid queries in each sequence; the queries after them are padding.
            Traced values are clamped into range; concrete values must be in range. Padding gets an output of 0, a
            logsumexp of ``-inf`` and gradients of 0, whatever its elements contain.
        kv_lengths: int32 ``[batch]``. Number of valid keys and values in each sequence. The keys and values after them
            are padding, which is masked out and gets gradients of 0.
        backend: ``"cpu-fmha"``, ``"flex-fmha"``, ... or ``None`` for the best backend that can run the problem.
        return_lse: Also return the logsumexp.
        key_bias: ``[batch, seqlen_kv]`` or ``[batch, heads, seqlen_kv]``, in a floating point dtype. The bias of a key
            is added to all scaled logits of the key. A bias of ``0.5 * finfo(dtype).min`` or less, such as ``-inf``,
            masks the key out. A bool array masks out the keys at ``False``. A query whose keys are all masked out gets
            an output of 0, a logsumexp of ``-inf`` and gradients of 0.
        sinks: ``[heads]``, in a floating point dtype. One extra logit per query head. Its exponential is added only to
            the softmax denominator: there is no value for it.
        query_scale: Factors that an 8-bit query is multiplied by (``docs/fp8.md``): a positive number, or a float32
            array with the shape ``[]``, ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors that an 8-bit key is multiplied by: a positive number, or a float32 array with the shape
            ``[]``, ``[batch, heads_kv]`` or ``[batch, blocks, heads_kv]``. The last shape has a factor per block of
            tokens. All blocks except the last one have ``ceil(seqlen_kv / blocks)`` tokens.
        value_scale: Factors that an 8-bit value is multiplied by, with the shapes of ``key_scale``.
        out_dtype: Element type of the output of 8-bit arrays: ``"bfloat16"`` (the default), ``"float16"`` or
            ``"float32"``.
        fp8: ``"e4m3"`` or ``"e5m2"``. The call quantizes query, key and value, which must be 16-bit or 32-bit, to
            this 8-bit type. Gradients are computed without quantization.
        **performance: Arguments as in :class:`natten_jax.performance.PerformanceArguments`, except that tile sizes in
            tokens replace the tile shapes: ``q_tile_size``, ``kv_tile_size``, ``backward_q_tile_size`` and
            ``backward_kv_tile_size``.

    Returns:
        Output ``[batch, seqlen, heads, head_dim_v]`` in the query's dtype. With ``return_lse`` also the logsumexp
        ``[batch, seqlen, heads]``, which includes the sinks.

    Raises:
        ValueError: A value, shape or dtype breaks a rule above, or no backend can run the problem.
        TypeError: An argument is of the wrong type.
    """
    arrays, window = (query, key, value), WindowArguments(is_causal=is_causal)
    box = BoxArguments(query_origin, query_lengths=query_lengths, kv_lengths=kv_lengths)
    terms = LogitTerms(scale, key_bias=key_bias, sinks=sinks)
    float8 = Float8Arguments(query_scale, key_scale, value_scale, out_dtype, fp8)
    execution = ExecutionArguments(backend, performance)
    return run_operator("fmha", 1, arrays, window, box, terms, float8, execution, return_lse)
