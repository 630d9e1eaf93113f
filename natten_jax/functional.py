"""The public functions: neighborhood attention in one, two and three dimensions, and attention."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

import jax
import jax.numpy as jnp

from natten_jax import backends, op
from natten_jax.attention_arguments import checked_attention_kwargs, flattened
from natten_jax.backends.base import Operands, Output
from natten_jax.merge import merge_attentions
from natten_jax.problem import Bools, Ints, Problem, attention_problem, neighborhood_problem, tile_config
from natten_jax.static_arguments import flag

#: Output, or output and logsumexp.
Result = jax.Array | tuple[jax.Array, ...]


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    call: op.Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    additional_keys: jax.Array | None,
    additional_values: jax.Array | None,
) -> Output:
    return op.attend(call, Operands(query, key, value, additional_keys, additional_values, origins=None))


def _neighborhood(
    rank: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kernel_size: Ints,
    stride: Ints = 1,
    dilation: Ints = 1,
    is_causal: Bools = False,
    scale: float | None = None,
    additional_keys: jax.Array | None = None,
    additional_values: jax.Array | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Ints | None = None,
    kv_tile_shape: Ints | None = None,
    backward_q_tile_shape: Ints | None = None,
    backward_kv_tile_shape: Ints | None = None,
    backward_kv_splits: Ints | None = None,
    backward_use_xla_reduction: bool = False,
    backward_deterministic: bool = False,
    memory_usage_preference: str = "default",
    run_persistent_kernel: bool = True,
    kernel_schedule: str | None = None,
    try_fuse_additional_kv: bool | None = None,
    return_lse: bool = False,
) -> Result:
    """Neighborhood attention over {tokens}.

    Each query attends to the ``kernel_size`` window of keys around it; at the edges the window is shifted, not
    cut. ``stride`` queries share one window, ``dilation`` spreads it, and ``is_causal`` hides later keys.
    :mod:`natten_jax.windows` is the exact definition. Arguments that speak of a dimension take {per_dimension};
    sequences may be NumPy's arrays, or JAX's where they are not traced.

    Args:
        query: ``[batch, {layout}, heads, head_dim]``.
        key: ``[batch, {layout}, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        value: ``[batch, {layout}, heads_kv, head_dim_v]``.
        kernel_size: Window extent in tokens.
        stride: Queries that share a window; at most ``kernel_size``.
        dilation: Distance between neighboring tokens of a window; ``kernel_size * dilation`` fits the layout.
        is_causal: Whether later keys are hidden.
        scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``. Finite, and so is its product with ``log2(e)``
            in float32 (for float64 inputs only the factor itself, in float64).
        additional_keys: ``[batch, n, heads_kv, head_dim]``, tokens that every query sees.
        additional_values: ``[batch, n, heads_kv, head_dim_v]``.
        attention_kwargs: Performance arguments of :func:`attention`, where that runs: for windows as large as
            the layout, and for additional keys and values. They are checked in any case.
        backend: ``"cpu-fna"``, ``"flex-fna"``, ... or ``None`` for the best that can run the problem.
        q_tile_shape: Query tile of the forward pass; ``natten_jax.get_configs_for_*`` list the choices.
        kv_tile_shape: Key/value tile of the forward pass.
        backward_q_tile_shape: Query tile of the backward pass.
        backward_kv_tile_shape: Key/value tile of the backward pass.
        backward_kv_splits: Key/value tiles of the backward pass that may run in parallel.
        backward_use_xla_reduction: Let XLA compute the row sums that the backward pass needs.
        backward_deterministic: Make gradients bitwise equal from run to run where that takes time: on the ``hopper``
            backends, which else sum up the query gradient in any order, and on the ``cutlass`` ones, whose
            ``backward_kv_splits`` is then 1.
        memory_usage_preference: How much scratch memory the backward pass may take where the backend can trade
            it for speed: ``"strict"`` (64 MiB), ``"default"`` (1 GiB) or ``"unrestricted"``. Heads that do not
            fit together take turns; one head's share is the least. ``backward_kv_splits`` does not change it.
        run_persistent_kernel: Use persistent tile scheduling where the backend has it.
        kernel_schedule: ``None``, ``"non"``, ``"coop"`` or ``"pp"``, where the backend has schedules.
        try_fuse_additional_kv: Process additional tokens in the same kernel where the backend can, instead of
            in a second attention whose result is merged. ``None`` does so unless ``attention_kwargs`` speaks of
            that attention: one kernel was the faster way on every backend (``bench/``).
        return_lse: Return the logsumexp, too.

    Returns:
        Output ``[batch, {layout}, heads, head_dim_v]`` in the query's dtype; with ``return_lse`` also the
        logsumexp of the scaled logits, ``[batch, {layout}, heads]``, natural logarithm, float32 (float64 for
        float64 inputs).

    Raises:
        ValueError: A value, shape or dtype breaks a rule above, or no backend can run the problem.
        TypeError: An argument is of the wrong type.
    """
    return_lse = flag("return_lse", return_lse)
    if try_fuse_additional_kv is not None:
        try_fuse_additional_kv = flag("try_fuse_additional_kv", try_fuse_additional_kv, or_none=True)
    problem = neighborhood_problem(
        rank, query, key, value, kernel_size, stride, dilation, is_causal, scale, additional_keys, additional_values
    )
    tiles = tile_config(
        rank,
        q_tile_shape=q_tile_shape,
        kv_tile_shape=kv_tile_shape,
        backward_q_tile_shape=backward_q_tile_shape,
        backward_kv_tile_shape=backward_kv_tile_shape,
        backward_kv_splits=backward_kv_splits,
        backward_use_xla_reduction=backward_use_xla_reduction,
        backward_deterministic=backward_deterministic,
        memory_usage_preference=memory_usage_preference,
        run_persistent_kernel=run_persistent_kernel,
        kernel_schedule=kernel_schedule,
    )
    counterparts = flattened(tiles) if problem.is_attention else {}
    attention_arguments = checked_attention_kwargs(attention_kwargs, counterparts)
    attention_arguments.setdefault("backend", backends.fmha_counterpart(backend))
    if problem.is_attention:
        arguments = {**counterparts, **attention_arguments}
        output = _whole_layout(problem, arguments, query, key, value, additional_keys, additional_values)
        return tuple(output) if return_lse else output.out

    call = op.Call(problem, tiles, backend)
    if try_fuse_additional_kv is None:
        try_fuse_additional_kv = attention_kwargs is None
    if (
        additional_keys is None
        or additional_values is None
        or (try_fuse_additional_kv and op.fuses_additional_kv(call))
    ):
        output = _attend(call, query, key, value, additional_keys, additional_values)
        return tuple(output) if return_lse else output.out

    call = dataclasses.replace(call, problem=dataclasses.replace(problem, additional_kv=0))
    output = _attend(call, query, key, value, None, None)
    context = attention(
        _flat(query), additional_keys, additional_values, problem.scale, return_lse=True, **attention_arguments
    )
    parts = output, Output(*(each.reshape(own.shape) for each, own in zip(context, output, strict=True)))
    output = Output(*merge_attentions(*zip(*parts, strict=True)))
    return tuple(output) if return_lse else output.out


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0], -1, *array.shape[-2:])


def _whole_layout(
    problem: Problem,
    arguments: Mapping[str, Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    additional_keys: jax.Array | None,
    additional_values: jax.Array | None,
) -> Output:
    """Windows as large as the layout: attention over the flattened tokens and the additional ones."""
    flat_key, flat_value = _flat(key), _flat(value)
    if additional_keys is not None and additional_values is not None:
        flat_key = jnp.concatenate([flat_key, additional_keys], axis=1)
        flat_value = jnp.concatenate([flat_value, additional_values], axis=1)
    is_causal = any(problem.is_causal)
    output = attention(
        _flat(query), flat_key, flat_value, problem.scale, is_causal=is_causal, return_lse=True, **arguments
    )
    return Output(*(array.reshape(*query.shape[:-2], *array.shape[2:]) for array in output))


Arguments = ParamSpec("Arguments")


def _of_rank(
    rank: int, tokens: str, layout: str, template: Callable[Concatenate[int, Arguments], Result]
) -> Callable[Arguments, Result]:
    """The public function for one rank: the template's code, its signature without ``rank``, and its docs."""

    def function(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return template(rank, *args, **kwargs)

    signature = inspect.signature(template)
    function.__name__ = function.__qualname__ = f"na{rank}d"
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    function.__annotations__ = {k: v for k, v in template.__annotations__.items() if k != "rank"}
    per_dimension = "one value" if rank == 1 else f"{rank} values, or one for all dimensions"
    document = inspect.cleandoc(template.__doc__ or "")
    function.__doc__ = document.format(tokens=tokens, layout=layout, per_dimension=per_dimension)
    return function


na1d = _of_rank(1, "a sequence", "seqlen", _neighborhood)
na2d = _of_rank(2, "an image", "height, width", _neighborhood)
na3d = _of_rank(3, "a video or a volume", "depth, height, width", _neighborhood)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float | None = None,
    *,
    is_causal: bool = False,
    backend: str | None = None,
    q_tile_size: int | None = None,
    kv_tile_size: int | None = None,
    backward_q_tile_size: int | None = None,
    backward_kv_tile_size: int | None = None,
    backward_kv_splits: int | None = None,
    backward_use_xla_reduction: bool = False,
    backward_deterministic: bool = False,
    memory_usage_preference: str = "default",
    run_persistent_kernel: bool = True,
    kernel_schedule: str | None = None,
    return_lse: bool = False,
) -> Result:
    """Attention of every query to every key.

    Args:
        query: ``[batch, seqlen, heads, head_dim]``.
        key: ``[batch, seqlen_kv, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        value: ``[batch, seqlen_kv, heads_kv, head_dim_v]``.
        scale: Factor of the logits; ``None`` is ``head_dim ** -0.5``. Finite, and so is its product with ``log2(e)``
            in float32 (for float64 inputs only the factor itself, in float64).
        is_causal: Whether query ``i`` sees only keys ``j <= i`` (top-left aligned, also for unequal lengths).
        backend: ``"cpu-fmha"``, ``"flex-fmha"``, ... or ``None`` for the best that can run the problem.
        q_tile_size: Query tokens per tile of the forward pass; see ``natten_jax.get_configs_for_*``.
        kv_tile_size: Key/value tokens per tile of the forward pass.
        backward_q_tile_size: Query tokens per tile of the backward pass.
        backward_kv_tile_size: Key/value tokens per tile of the backward pass.
        backward_kv_splits: Key/value tiles of the backward pass that may run in parallel.
        backward_use_xla_reduction: Let XLA compute the row sums that the backward pass needs.
        backward_deterministic: Make gradients bitwise equal from run to run where that takes time: on the ``hopper``
            backends, which else sum up the query gradient in any order, and on the ``cutlass`` ones, whose
            ``backward_kv_splits`` is then 1.
        memory_usage_preference: How much scratch memory the backward pass may take where the backend can trade
            it for speed: ``"strict"`` (64 MiB), ``"default"`` (1 GiB) or ``"unrestricted"``. Heads that do not
            fit together take turns; one head's share is the least. ``backward_kv_splits`` does not change it.
        run_persistent_kernel: Use persistent tile scheduling where the backend has it.
        kernel_schedule: ``None``, ``"non"``, ``"coop"`` or ``"pp"``, where the backend has schedules.
        return_lse: Return the logsumexp, too.

    Returns:
        Output ``[batch, seqlen, heads, head_dim_v]`` in the query's dtype; with ``return_lse`` also the
        logsumexp ``[batch, seqlen, heads]``.

    Raises:
        ValueError: A value, shape or dtype breaks a rule above, or no backend can run the problem.
        TypeError: An argument is of the wrong type.
    """
    return_lse = flag("return_lse", return_lse)
    problem = attention_problem(query, key, value, scale, is_causal)
    tiles = tile_config(
        1,
        q_tile_shape=q_tile_size,
        kv_tile_shape=kv_tile_size,
        backward_q_tile_shape=backward_q_tile_size,
        backward_kv_tile_shape=backward_kv_tile_size,
        backward_kv_splits=backward_kv_splits,
        backward_use_xla_reduction=backward_use_xla_reduction,
        backward_deterministic=backward_deterministic,
        memory_usage_preference=memory_usage_preference,
        run_persistent_kernel=run_persistent_kernel,
        kernel_schedule=kernel_schedule,
        tile_suffix="size",
    )
    if backend is not None:
        backends.find(backend, "fmha")
    output = _attend(op.Call(problem, tiles, backend), query, key, value, None, None)
    return tuple(output) if return_lse else output.out
