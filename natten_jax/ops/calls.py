"""The common part of ``na1d``, ``na2d``, ``na3d`` and ``attention``: check arguments, run the sub-calls, merge them."""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from natten_jax import backends
from natten_jax.arguments.arrays import Counts, Origin, TokenAxes, checked_token_axes, number_or_array, per_head
from natten_jax.arguments.names import known_arguments
from natten_jax.arguments.static import checked_once, flag, shown
from natten_jax.arrays.operands import Inputs, Operands, Output
from natten_jax.autotuning.tables import table_for
from natten_jax.backends.base import Backend
from natten_jax.backends.select import CHOICES, DeviceCall, ignored
from natten_jax.execution import custom_vjp
from natten_jax.ops.canonicalize import (
    ArrayLike,
    BoxArguments,
    FinerGrid,
    LogitTerms,
    Placement,
    as_jax_array,
    attention_problem,
    checked_sinks,
    described,
    in_pass,
    neighborhood_problem,
    placement_of_sequences,
    placement_of_windows,
    with_biases,
    with_sinks,
)
from natten_jax.ops.float8 import NOTHING, Float8Arguments, in_8_bits, straight_through
from natten_jax.ops.merge import merge_attentions
from natten_jax.ops.sub_calls import KeySet, check_agreement, in_layout_of, operands_of, sub_calls_of
from natten_jax.performance import ATTENTION_NAMES, PASSES, PERFORMANCE_NAMES, Performance, performance_of
from natten_jax.plan.devices import Device, device_of, lowering_targets
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem
from natten_jax.sharding.explicit import with_whole_dimensions
from natten_jax.sharding.halos import exchange
from natten_jax.windows import WindowArguments

#: The packages whose frames stand between a user's line and the operators.
_BETWEEN = ("natten_jax", "jax", "flax")
_DEFAULTS = Performance()


class IgnoredArgumentWarning(UserWarning):
    """A performance argument was given that changes nothing on the backend that runs here."""


def warn_of_ignored(request: Request, query: jax.Array, of_attention: Collection[str] = ()) -> None:
    """Warn of what a request asks for that no pass heeds, on the device where it runs.

    The warning is of the line that calls this package, jax or flax: Python shows it once for each such line.

    Args:
        request: An attention call.
        query: Its query, which may say on which device that is. A program that is being traced is for the default one.
        of_attention: The names of the arguments that ``attention_kwargs`` gave.
    """
    if not _asks(request.performance):
        return
    for name, problem in _ignored(request, device_of(query), backends.registered()):
        prefix = "attention_kwargs: " if name in of_attention else ""
        warnings.warn(f"{prefix}{problem}", IgnoredArgumentWarning, stacklevel=_level_of_caller())


@functools.lru_cache(maxsize=4096)
def _asks(performance: Performance) -> bool:
    return any(getattr(performance, name) != getattr(_DEFAULTS, name) for name in CHOICES)


@functools.lru_cache(maxsize=4096)
def _ignored(request: Request, device: Device, registered: tuple[Backend, ...]) -> tuple[tuple[str, str], ...]:
    """Names of arguments and sentences, for the device or else the first other one that can run the request."""
    for each in dict.fromkeys((device, *lowering_targets().values())):
        try:
            plans = [DeviceCall(request, each).plan(pass_) for pass_ in PASSES]
        except ValueError:
            continue
        asked = request.performance
        reasons = {name: why for plan in plans for name, why in ignored(plan, asked).items()}
        return tuple(
            (name, f"{name}={_value(asked, name)} changes nothing on {each}: {why}") for name, why in reasons.items()
        )
    return ()  # it is refused later


def _value(asked: Performance, name: str) -> str:
    value = getattr(asked, name)
    return shown(value[0] if isinstance(value, tuple) and len(value) == 1 else value)


def _level_of_caller() -> int:
    """How many frames above the function that calls this one a user's line stands."""
    level = 1
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    return level + 1


class ExecutionArguments(NamedTuple):
    """The arguments that say how and on which devices the result is computed."""

    backend: str | None
    performance: Mapping[str, Any]
    attention_kwargs: Mapping[str, Any] | None
    try_fuse_additional_kv: bool | None
    token_axes: TokenAxes | None


def attend_windows(
    rank: int,
    arrays: Sequence[ArrayLike | None],
    window: WindowArguments,
    box: BoxArguments,
    terms: LogitTerms,
    float8: Float8Arguments,
    how: ExecutionArguments,
    return_lse: bool,
    *,
    quantizes: bool = True,
) -> Any:
    """``na{rank}d``, whose arguments are in groups; ``quantizes`` is internal, of calls with ``fp8``."""
    return_lse = flag("return_lse", return_lse)
    if quantizes and float8.fp8 is not None:

        def quantized(operands: tuple[Any, BoxArguments, LogitTerms], float8: Float8Arguments) -> Any:
            arrays, box, terms = operands
            return attend_windows(rank, arrays, window, box, terms, float8, how, True, quantizes=False)

        return straight_through(quantized, (arrays, box, terms), float8, return_lse)
    fuse = how.try_fuse_additional_kv
    if fuse is not None:
        fuse = flag("try_fuse_additional_kv", fuse, or_none=True)
    inputs = _as_jax_arrays(arrays)
    grid = FinerGrid.of(box.upsample, rank)
    if grid is not None:
        inputs = grid.folded(inputs)
    number, factors = number_or_array(terms.scale)
    facts = rank, flag("clamp_window", box.clamp_window), 1.0 if factors is not None else number, *window
    axes = checked_token_axes(how.token_axes, rank)
    is_box = box.query_origin is not None
    if axes:
        _check_unsplit({"query_origin": box.query_origin, "extents": box.extents, "fp8": float8.fp8})
    problem, performance = _window_problem(
        _described(inputs), facts, exchange.parts_of(axes) if axes else None, (*how.performance.items(),), is_box
    )
    place = placement_of_windows(inputs, box)
    is_cropped = box.clamp_window and terms.relative_bias is not None
    asked_size: Any = window.with_extents(problem.kv_layout).kernel_size if is_cropped else None
    problem, inputs = with_biases(problem, inputs, terms, window.edges, grid, asked_size)
    stated = problem = _placed(problem, place, box.extents is not None)
    inputs, rounding = _with_scale(inputs, factors, problem, grid), None
    if problem.element.is_float8 or float8 != NOTHING:
        problem, inputs, rounding = in_8_bits(problem, inputs, float8, place, grid)
    request = Request(problem, performance, how.backend, _precision(), axes, tuned=table_for(is_box=is_box))
    calls = sub_calls_of(request, how.attention_kwargs, fuse)
    sinks = None if terms.sinks is None else checked_sinks(terms.sinks, inputs, grid)
    has_sinks = sinks is not None
    if len(calls) == 1:
        inputs, sinks = in_pass(calls[0].request, inputs, sinks)
    if how.attention_kwargs:
        check_agreement(how.attention_kwargs, stated, terms.scale, return_lse)
    if how.performance or how.attention_kwargs:
        for call in calls:
            of_attention = () if call.kind is KeySet.WINDOWS else how.attention_kwargs or ()
            warn_of_ignored(call.request, inputs.query, of_attention)
    keeps_tokens = place.is_whole and {call.kind for call in calls} == {KeySet.WINDOWS}
    inputs = with_whole_dimensions(inputs, keeps_tokens=keeps_tokens)
    outputs = [custom_vjp.attend(*operands_of(call, inputs, place)) for call in calls]
    outputs = [
        output if call.kind is KeySet.WINDOWS else in_layout_of(inputs.query, output)
        for call, output in zip(calls, outputs, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else Output(*merge_attentions(*zip(*outputs, strict=True)))
    output = with_sinks(output if rounding is None else rounding.of(output), sinks)
    if problem.own_extents and (len(outputs) > 1 or has_sinks):
        output = place.with_nothing_outside(output)
    output = output if grid is None else grid.unfolded(output)
    return tuple(output) if return_lse else output.out


#: Why arguments do not go with token_axes.
_OF_WHOLE_LAYOUTS = {
    "query_origin": "halos are exchanged of whole layouts only, so split batch and heads instead",
    "extents": "halos are exchanged of whole layouts only, so split batch and heads instead",
    "fp8": "devices that share tokens would each find other factors, so quantise the whole arrays "
    "(natten_jax.fp8.quantize) before jax.shard_map",
}


def _check_unsplit(arguments: Mapping[str, Any]) -> None:
    """Reject arguments that are not supported for layouts that ``token_axes`` splits.

    Raises:
        ValueError: One is given.
    """
    for name, argument in arguments.items():
        if argument is not None:
            raise ValueError(f"{name} and token_axes were both given: {_OF_WHOLE_LAYOUTS[name]}")


def _placed(problem: Problem, place: Placement, own_extents: bool) -> Problem:
    """The problem of tokens that lie so.

    Raises:
        ValueError: A dimension wraps whose extent is not known.
    """
    if own_extents and "wrap" in problem.edges:
        raise ValueError(
            f"edges {problem.edges} and extents were both given: a dimension wraps around its whole extent, which is "
            "the same for all batch entries"
        )
    if place.layouts is None:
        return problem
    return dataclasses.replace(problem, own_origins=not own_extents, own_extents=own_extents)


def attend_all(
    arrays: Sequence[ArrayLike | None],
    is_causal: bool,
    query_origin: Origin | None,
    lengths: tuple[Counts | None, Counts | None],
    terms: LogitTerms,
    float8: Float8Arguments,
    backend: str | None,
    performance: Mapping[str, Any],
    return_lse: bool,
    *,
    quantizes: bool = True,
) -> Any:
    """``attention``, likewise; ``lengths`` of queries and of keys."""
    return_lse = flag("return_lse", return_lse)
    if quantizes and float8.fp8 is not None:

        def quantized(operands: tuple[Any, ...], float8: Float8Arguments) -> Any:
            arrays, query_origin, lengths, terms = operands
            return attend_all(
                arrays, is_causal, query_origin, lengths, terms, float8, backend, performance, True, quantizes=False
            )

        return straight_through(quantized, (arrays, query_origin, lengths, terms), float8, return_lse)
    inputs = _as_jax_arrays(arrays)
    number, factors = number_or_array(terms.scale)
    static_scale = 1.0 if factors is not None else number
    is_box = query_origin is not None
    problem, asked = _attention_problem(_described(inputs), static_scale, is_causal, (*performance.items(),), is_box)
    place = placement_of_sequences(inputs, query_origin, *lengths)
    problem = _placed(problem, place, any(each is not None for each in lengths))
    if backend is not None:
        backends.find(backend, "fmha")
    sinks = None if terms.sinks is None else checked_sinks(terms.sinks, inputs)
    problem, inputs = with_biases(problem, inputs, terms)
    inputs, rounding = _with_scale(inputs, factors, problem), None
    if problem.element.is_float8 or float8 != NOTHING:
        problem, inputs, rounding = in_8_bits(problem, inputs, float8, place)
    inputs = with_whole_dimensions(inputs, keeps_tokens=False)
    request = Request(problem, asked, backend, _precision(), tuned=table_for(is_box=is_box))
    has_sinks = sinks is not None
    inputs, sinks = in_pass(request, inputs, sinks)
    if performance:
        warn_of_ignored(request, inputs.query)
    output = custom_vjp.attend(request, Operands(inputs, *place))
    output = with_sinks(output if rounding is None else rounding.of(output), sinks)
    if problem.own_extents and has_sinks:
        output = place.with_nothing_outside(output)
    return tuple(output) if return_lse else output.out


#: What a problem is told of an array, or of one that is not there: its shape and element type.
_Described = tuple[tuple[Any, ...], Any] | None


def _described(inputs: Inputs) -> tuple[_Described, ...]:
    return tuple([None if each is None else (each.shape, each.dtype) for each in inputs])


def _shaped(arrays: tuple[_Described, ...]) -> Inputs:
    return Inputs._make([None if each is None else jax.ShapeDtypeStruct(*each) for each in arrays])


@checked_once
def _window_problem(
    arrays: tuple[_Described, ...],
    facts: tuple[Any, ...],
    parts: Sequence[int] | None,
    performance: tuple[tuple[str, Any], ...],
    is_box: bool,
) -> tuple[Problem, Performance]:
    """What a call of ``na{rank}d`` describes.

    Args:
        arrays: The inputs.
        facts: Rank, whether windows are clamped, scale and window arguments.
        parts: The part of each token dimension, if it is split.
        performance: The items of the performance arguments.
        is_box: Whether the queries are a box of the layout of the keys.
    """
    rank, clamp_window, scale, *window = facts

    def describe(inputs: Inputs) -> Problem:
        windows = WindowArguments(*window)
        return neighborhood_problem(rank, inputs, windows, scale, parts, clamp_window=clamp_window, is_box=is_box)

    problem = described(describe, _shaped(arrays))
    known = known_arguments(f"na{rank}d", dict(performance), PERFORMANCE_NAMES)
    return problem, performance_of(rank, **known)


@checked_once
def _attention_problem(
    arrays: tuple[_Described, ...], scale: Any, is_causal: Any, performance: tuple[tuple[str, Any], ...], is_box: bool
) -> tuple[Problem, Performance]:
    """What a call of ``attention`` describes; arguments as above."""

    def describe(inputs: Inputs) -> Problem:
        return attention_problem(inputs.query, inputs.key, inputs.value, scale, is_causal, is_box=is_box)

    problem = described(describe, _shaped(arrays))
    known = known_arguments("attention", dict(performance), ATTENTION_NAMES)
    asked = {ATTENTION_NAMES[name]: each for name, each in known.items()}
    return problem, performance_of(1, tile_suffix="size", **asked)


def _precision() -> str | None:
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    return None if precision is None else str(precision)


def _as_jax_arrays(arrays: Sequence[ArrayLike | None]) -> Inputs:
    """The first fields of :class:`Inputs`."""
    checked = [
        None if each is None and name in Inputs._field_defaults else as_jax_array(name, each)
        for name, each in zip(Inputs._fields, arrays, strict=False)
    ]
    return Inputs(*checked)  # type: ignore[arg-type]


def _with_scale(inputs: Inputs, factors: Any, problem: Problem, grid: FinerGrid | None = None) -> Inputs:
    if factors is None:
        return inputs
    batch, *_, heads, _ = inputs.query.shape
    if grid is None:
        return inputs._replace(scale=per_head(factors, batch, heads, problem.dtype))
    return inputs._replace(scale=grid.scales(per_head(factors, batch, heads // grid.queries, problem.dtype)))
