"""The shared implementation of ``na1d``, ``na2d``, ``na3d`` and ``attention``.

This module checks the arguments of an operator call, runs the attention calls that the operator call is split into (its
sub-calls), and merges their outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
from jax.typing import DTypeLike

from natten_jax import backends
from natten_jax.arguments.arrays import Origin, TokenAxes, checked_token_axes, number_or_array, per_head
from natten_jax.arguments.names import without_neutral
from natten_jax.arguments.static import checked_once, flag, shown, warn_of_line
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.autotuning.tables import table_for
from natten_jax.backends.base import Backend
from natten_jax.backends.select import DeviceCall, ignored
from natten_jax.execution import custom_vjp
from natten_jax.ops import canonicalize
from natten_jax.ops.canonicalize import ArrayLike, BoxArguments, LogitTerms, UpsampledGrid, neighborhood_problem
from natten_jax.ops.float8 import Factor, Float8Arguments, float8_operands, straight_through
from natten_jax.ops.merge import merge_attentions
from natten_jax.ops.sub_calls import KeySubset, check_agreement, in_layout_of, split_call, sub_call_operands
from natten_jax.performance import (
    PASSES,
    Performance,
    attention_performance,
    performance_of,
)
from natten_jax.plan.devices import Device, device_of, lowering_targets
from natten_jax.plan.plan import Request
from natten_jax.problem import Operator, Problem
from natten_jax.sharding.explicit import with_whole_dimensions
from natten_jax.sharding.halos import exchange
from natten_jax.windows import WindowArguments


class OperatorOptions(TypedDict, total=False):
    """Keyword arguments that all operators share, except ``return_lse``.

    Overloads of the operators declare ``return_lse`` separately, because the type of the result depends on it. A new
    argument must also be added to the signature of every operator.
    """

    query_origin: Origin | None
    key_bias: ArrayLike | None
    sinks: ArrayLike | None
    query_scale: Factor | None
    key_scale: Factor | None
    value_scale: Factor | None
    out_dtype: DTypeLike | None
    fp8: str | None


class IgnoredArgumentWarning(UserWarning):
    """Warning that a performance argument has no effect on the backend that runs the call."""


def warn_of_ignored(request: Request, query: jax.Array, attention_names: Collection[str] = ()) -> None:
    """Warn about performance arguments that have no effect on the backends that run a request.

    The warning points at the line of the user's code that calls this package, JAX or Flax. Python shows the warning
    once per line.

    Args:
        request: An attention call.
        query: The query of the call. A concrete query determines the device. If the query is traced, the device is the
            default device.
        attention_names: The names of the arguments in ``attention_kwargs``.
    """
    for name, sentence in _ignored(request, device_of(query), backends.registered()):
        prefix = "attention_kwargs: " if name in attention_names else ""
        warn_of_line(f"{prefix}{sentence}", IgnoredArgumentWarning)


@functools.lru_cache(maxsize=4096)
def _ignored(request: Request, device: Device, registered: tuple[Backend, ...]) -> tuple[tuple[str, str], ...]:
    """Return the name of each ignored argument, with a message.

    If the device cannot run the request, the first lowering target that can run the request replaces the device.
    """
    for each in dict.fromkeys((device, *lowering_targets().values())):
        try:
            plans = [DeviceCall(request, each).plan(pass_) for pass_ in PASSES]
        except ValueError:
            continue
        given = request.performance
        reasons = {name: why for plan in plans for name, why in ignored(plan, given).items()}
        return tuple(
            (name, f"{name}={_value(given, name)} has no effect on {each}: {why}") for name, why in reasons.items()
        )
    return ()  # no target can run the request, and the call raises an error later


def _value(given: Performance, name: str) -> str:
    value = getattr(given, name)
    return shown(value[0] if isinstance(value, tuple) and len(value) == 1 else value)


class ExecutionArguments(NamedTuple):
    """Arguments that select backends, performance options and devices. They do not change what is computed."""

    backend: str | None
    performance: Mapping[str, Any]
    attention_kwargs: Mapping[str, Any] | None = None
    try_fuse_additional_kv: bool | None = None
    token_axes: TokenAxes | None = None


def run_operator(
    operator: Operator,
    rank: int,
    arrays: Sequence[ArrayLike | None],
    window: WindowArguments,
    box: BoxArguments,
    terms: LogitTerms,
    float8: Float8Arguments,
    execution: ExecutionArguments,
    return_lse: bool,
    *,
    quantizes: bool = True,
) -> Any:
    """Run ``na{rank}d`` if ``operator`` is ``"fna"``, or ``attention`` if it is ``"fmha"``.

    With ``fp8``, the function calls itself with ``quantizes=False`` inside :func:`straight_through`, which defines the
    gradients.
    """
    return_lse = flag("return_lse", return_lse)
    if quantizes and float8.fp8 is not None:

        def quantized(operands: tuple[Any, BoxArguments, LogitTerms], float8: Float8Arguments) -> Any:
            arrays, box, terms = operands
            return run_operator(operator, rank, arrays, window, box, terms, float8, execution, True, quantizes=False)

        return straight_through(quantized, (arrays, box, terms), float8, return_lse)
    fuse = execution.try_fuse_additional_kv
    if fuse is not None:
        fuse = flag("try_fuse_additional_kv", fuse, or_none=True)
    inputs = _as_jax_arrays(arrays)
    grid, is_box = UpsampledGrid.from_upsample(box.upsample, rank), box.query_origin is not None
    if grid is not None:
        inputs = grid.folded(inputs, is_box)
    scale_number, scale_array = number_or_array(terms.scale)
    axes = checked_token_axes(execution.token_axes, rank)
    if axes:
        _check_unsplit({"query_origin": box.query_origin, "extents": box.extents, "fp8": float8.fp8})
    types = [None if each is None else (each.shape, each.dtype) for each in inputs]
    clamp_window, scale = flag("clamp_window", box.clamp_window), scale_number if scale_array is None else 1.0
    parts, options = exchange.parts_of(axes) if axes else None, [*execution.performance.items()]
    problem, performance = _describe_call(operator, rank, types, window, clamp_window, scale, parts, options, is_box)
    offsets = canonicalize.token_offsets(inputs, box)
    is_cropped = box.clamp_window and terms.relative_bias is not None
    asked_size: Any = window.with_extents(problem.kv_layout).kernel_size if is_cropped else None
    problem, inputs = canonicalize.with_biases(problem, inputs, terms, grid, asked_size)
    if offsets.layouts is not None:
        problem = _with_own_layouts(problem, box)
    problem_as_stated = problem
    if scale_array is not None:
        inputs = inputs._replace(scale=_scale_of_heads(scale_array, inputs, problem, grid))
    finish_float8 = None
    if problem.element.is_float8 or [each for each in float8 if each is not None]:
        problem, inputs, finish_float8 = float8_operands(problem, inputs, float8, offsets, grid)
    configured = jax.config.jax_default_matmul_precision
    precision = None if configured is None else str(configured)
    request = Request(problem, performance, execution.backend, precision, axes, tuned=table_for(is_box=is_box))
    calls = split_call(request, execution.attention_kwargs, fuse)
    inputs, sinks = canonicalize.defer_sinks([call.request for call in calls], inputs)
    if execution.attention_kwargs:
        check_agreement(execution.attention_kwargs, problem_as_stated, terms.scale, return_lse)
    if execution.performance or execution.attention_kwargs:
        for call in calls:
            attention_names = () if call.kind is KeySubset.WINDOWS else execution.attention_kwargs or ()
            warn_of_ignored(call.request, inputs.query, attention_names)
    keeps_tokens = operator == "fna" and offsets.is_whole and {call.kind for call in calls} == {KeySubset.WINDOWS}
    inputs = with_whole_dimensions(inputs, keeps_tokens=keeps_tokens)
    outputs = [custom_vjp.attend(*sub_call_operands(call, inputs, offsets)) for call in calls]
    outputs = [
        output if call.kind is KeySubset.WINDOWS else in_layout_of(inputs.query, output)
        for call, output in zip(calls, outputs, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else Output(*merge_attentions(*zip(*outputs, strict=True)))
    output = canonicalize.with_sinks(output if finish_float8 is None else finish_float8(output), sinks)
    if problem.own_extents and (len(outputs) > 1 or terms.sinks is not None):
        output = offsets.mask_padding(output)
    output = output if grid is None else grid.unfolded(output)
    return tuple(output) if return_lse else output.out


#: By argument, the reason why a call with ``token_axes`` rejects the argument.
_WHOLE_LAYOUT_REASONS = {
    "query_origin": "halo exchange requires whole layouts, so split batch and heads instead",
    "extents": "halo exchange requires whole layouts, so split batch and heads instead",
    "fp8": "each device would compute factors of its tokens only, so quantize the whole arrays "
    "(natten_jax.fp8.quantize) before jax.shard_map",
}


def _check_unsplit(arguments: Mapping[str, Any]) -> None:
    """Reject arguments that are not supported if ``token_axes`` splits the layout.

    Raises:
        ValueError: At least one of the arguments is not ``None``.
    """
    for name, argument in arguments.items():
        if argument is not None:
            raise ValueError(f"{name} and token_axes were both given: {_WHOLE_LAYOUT_REASONS[name]}")


def _with_own_layouts(problem: Problem, box: BoxArguments) -> Problem:
    """Mark a problem as one whose batch entries have different origins or extents.

    Raises:
        ValueError: The call has extents, and a dimension wraps.
    """
    if box.has_extents and "wrap" in problem.edges:
        raise ValueError(
            f"edges {problem.edges} and extents were both given: a dimension wraps around its whole extent, which is "
            "the same for all batch entries"
        )
    return dataclasses.replace(problem, own_origins=not box.has_extents, own_extents=box.has_extents)


@checked_once
def _describe_call(
    operator: Operator,
    rank: int,
    types: Sequence[tuple[tuple[Any, ...], Any] | None],
    window: WindowArguments,
    clamp_window: bool,
    scale: Any,
    parts: Sequence[int] | None,
    performance: Sequence[tuple[str, Any]],
    is_box: bool,
) -> tuple[Problem, Performance]:
    """Return the problem and the performance arguments of a call.

    Args:
        operator: The operator.
        rank: Number of token dimensions.
        types: Shapes and element types of the inputs.
        window: The window arguments.
        clamp_window: The argument ``clamp_window`` of the operator.
        scale: The scale if it is a number or ``None``; 1.0 if the scale is an array.
        parts: Number of shards per token dimension; ``None`` without ``token_axes``.
        performance: Names and values of the performance arguments.
        is_box: True if the call has a ``query_origin``. The queries are then a box inside the layout of the keys.

    Raises:
        ValueError: The arrays break a rule. If they seem to have heads before tokens, the message contains a hint.
    """

    def describe(inputs: Inputs) -> Problem:
        if operator == "fmha":
            return canonicalize.attention_problem(*inputs[:3], scale, window.is_causal, is_box=is_box)
        return neighborhood_problem(rank, inputs, window, scale, parts, clamp_window=clamp_window, is_box=is_box)

    inputs = Inputs._make([None if each is None else jax.ShapeDtypeStruct(*each) for each in types])
    try:
        problem = describe(inputs)
    except ValueError as error:
        raise ValueError(f"{error}{canonicalize.hint_of_heads_first(describe, inputs)}") from None
    if operator == "fmha":
        return problem, attention_performance(without_neutral("attention", dict(performance)))
    return problem, performance_of(rank, **without_neutral(f"na{rank}d", dict(performance)))


def _as_jax_arrays(arrays: Sequence[ArrayLike | None]) -> Inputs:
    """Convert the arrays to JAX arrays and return them as the first fields of :class:`Inputs`."""
    checked = [
        None if each is None and name in Inputs._field_defaults else canonicalize.as_jax_array(name, each)
        for name, each in zip(Inputs._fields, arrays, strict=False)
    ]
    return Inputs(*checked)  # type: ignore[arg-type]


def _scale_of_heads(factors: Any, inputs: Inputs, problem: Problem, grid: UpsampledGrid | None) -> jax.Array:
    """Expand an array of scales to ``[batch, heads]``.

    If ``grid`` is not ``None``, ``heads`` is the number of query heads times the number of queries in a cell of the
    grid.
    """
    batch, *_, heads, _ = inputs.query.shape
    if grid is None:
        return per_head(factors, batch, heads, problem.dtype)
    return grid.scales(per_head(factors, batch, heads // grid.queries, problem.dtype))
