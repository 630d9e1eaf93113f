"""Implementations to compare: functions that compute a problem's windows, or dense attention over its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from benchmarks import Benchmark

import natten_jax
from natten_jax.profiler import baselines

Function = Callable[..., Any]

#: Block sizes of the Mosaic kernel: the number of query tokens, and the number of key/value tokens. The key of an entry
#: is the largest head_dim for which these blocks fit into shared memory.
_MOSAIC_BLOCKS = {128: (64, 128), 256: (64, 64)}
_MOSAIC_STEPS = 2


def ours(benchmark: Benchmark, family: str | None = None, **arguments: Any) -> Function:
    """Build natten_jax's function for the default backend or for a named family, with further operator arguments."""
    problem = benchmark.problem
    backend = None if family is None else f"{family}-{problem.operator}"
    if benchmark.kernel_size is None:
        return lambda q, k, v: natten_jax.attention(
            q, k, v, is_causal=benchmark.is_causal, backend=backend, **arguments
        )
    operator = getattr(natten_jax, f"na{problem.rank}d")

    def function(query: jax.Array, key: jax.Array, value: jax.Array, *additional: jax.Array) -> Any:
        keys, values = additional or (None, None)
        return operator(
            query,
            key,
            value,
            problem.kernel_size,
            problem.stride,
            problem.dilation,
            problem.is_causal,
            additional_keys=keys,
            additional_values=values,
            backend=backend,
            **arguments,
        )

    return function


def dot_product_attention(benchmark: Benchmark, implementation: Literal["cudnn", "xla"]) -> Function:
    """Build attention over all tokens (causal or not) through ``jax.nn``, with ``"cudnn"`` or ``"xla"``."""
    if benchmark.is_causal:
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return lambda q, k, v: baselines.attend(implementation, q, k, v)


def sliding_window(benchmark: Benchmark, implementation: Literal["cudnn", "xla"]) -> Function:
    """Build attention with causal windows over a sequence through ``jax.nn``; the windows equal natten_jax's."""
    if len(benchmark.layout) != 1 or benchmark.kernel_size is None or not benchmark.is_causal:
        raise ValueError("jax.nn does not support windows other than causal windows over sequences")
    if {*(benchmark.stride or (1,)), *(benchmark.dilation or (1,))} != {1} or benchmark.additional_kv:
        raise ValueError("jax.nn does not support strides, dilation or additional tokens")
    before = benchmark.kernel_size[0] - 1
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(before, 0), implementation=implementation
    )


def mosaic(benchmark: Benchmark) -> Function:
    """Build attention over all tokens with JAX's Pallas kernel for Hopper GPUs, which has only a forward pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    width = min((width for width in _MOSAIC_BLOCKS if width >= benchmark.head_dim), default=None)
    if width is None:
        raise ValueError(f"head_dim {benchmark.head_dim} leaves no block of the Mosaic kernel enough shared memory")
    block_q, block_kv = _MOSAIC_BLOCKS[width]
    config = attention_mgpu.TuningConfig(
        block_q=block_q, block_kv=block_kv, max_concurrent_steps=_MOSAIC_STEPS, causal=benchmark.is_causal
    )

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        # The kernel has no scale argument, so the scale is applied to the query.
        arrays = query * benchmark.head_dim**-0.5, key, value
        flat = (array.reshape(array.shape[0], -1, *array.shape[-2:]) for array in arrays)
        return attention_mgpu.attention(*flat, config).reshape(query.shape)

    return function


#: Builders of functions for a problem, by name.
IMPLEMENTATIONS: Mapping[str, Callable[[Benchmark], Function]] = {
    "natten_jax": ours,
    "natten_jax-merged": lambda benchmark: ours(benchmark, try_fuse_additional_kv=False),
    "cutlass-xla-reduction": lambda benchmark: ours(benchmark, "cutlass", backward_use_xla_reduction=True),
    "cudnn": lambda benchmark: dot_product_attention(benchmark, "cudnn"),
    "mosaic-float16": mosaic,
    "xla": lambda benchmark: dot_product_attention(benchmark, "xla"),
    "cudnn-window": lambda benchmark: sliding_window(benchmark, "cudnn"),
    "xla-window": lambda benchmark: sliding_window(benchmark, "xla"),
}


#: Element type of each implementation that supports only one element type. The Mosaic kernel always has float16
#: buffers.
ELEMENT_TYPES: Mapping[str, str] = {"mosaic-float16": "float16"}


def default_names(benchmark: Benchmark) -> tuple[str, ...]:
    """Return the names of the default implementations to compare; natten_jax comes first."""
    return ("natten_jax", "natten_jax-merged") if benchmark.additional_kv else ("natten_jax", "cudnn", "mosaic-float16")
