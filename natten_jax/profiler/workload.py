"""The program that the options describe: its problem, its inputs, the backends that run it, and it compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import natten_jax
from natten_jax import backends, op
from natten_jax.backends.base import Pass, TilePair, requested_pair
from natten_jax.devices import Device, default_device
from natten_jax.problem import Problem, TileConfig, attention_problem, neighborhood_problem, tile_config
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import Launch
from natten_jax.profiler.element_types import ELEMENT_TYPES
from natten_jax.profiler.families import KNOWN_FAMILIES
from natten_jax.profiler.options import Options
from natten_jax.profiler.program import Program, compile_for_trace

_MOST_ELEMENTS = 2**63 - 1


class UnavailableBackend(ValueError):
    """A backend that this package has no kernels for on the device at hand, or at all."""


class Part(NamedTuple):
    """One attention call of a workload.

    Attributes:
        name: ``""``, or ``"additional_kv_"`` for the attention to additional tokens.
        problem: What the backend gets.
        tiles: Tiles that were asked for.
        backend: The backend that was asked for.
    """

    name: str
    problem: Problem
    tiles: TileConfig
    backend: str | None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled program and its inputs.

    Attributes:
        options: What was asked for.
        problem: The problem; that of a baseline is self attention.
        backends: What runs the ``"forward"`` and ``"backward"`` pass, and ``"additional_kv_forward"`` and so on for
            additional tokens.
        tiles: Query and key/value tile of each pass of a backend of this package.
        device: Where it runs.
        compiled: The program.
        arguments: Its inputs.
        program: What it consists of.
    """

    options: Options
    problem: Problem
    backends: dict[str, str]
    tiles: dict[str, TilePair]
    device: Device
    compiled: jax.stages.Compiled
    arguments: tuple[jax.Array, ...]
    program: Program

    def run(self) -> Any:
        """Run it once, without waiting for the results."""
        return self.compiled(*self.arguments)

    @property
    def launch(self) -> Launch:
        """For a capture."""
        return Launch(self.run, self.program)

    @property
    def operator(self) -> str:
        """``"fna"`` or ``"fmha"``."""
        return "fmha" if self.problem.is_attention else "fna"


def compile_workload(
    options: Options, name: str = "profiled", arguments: tuple[jax.Array, ...] | None = None
) -> Workload:
    """Compile what the options describe for the default device.

    Args:
        options: What to run.
        name: Of the program; programs of one capture need different names.
        arguments: Inputs of an equal problem to use again; ``None`` makes new ones.

    Raises:
        UnavailableBackend: A backend that was named does not run on this device.
        ValueError: The problem cannot run as the options ask.
    """
    device = default_device()
    check_available(options, device)
    problem, _ = describe(options)
    parts = parts_of(options)
    chosen: dict[str, str] = {}
    tiles: dict[str, TilePair] = {}
    if options.is_baseline:
        chosen.update(dict.fromkeys(passes(options), str(options.backend)))
    for part in [] if options.is_baseline else parts:
        for pass_ in passes(options):
            backend = backends.choose_pass(part.problem, part.tiles, device, pass_, part.backend)
            chosen[f"{part.name}{pass_}"] = backends.backend_name(backend, part.problem.operator)
            if not part.name:
                requested = requested_pair(part.tiles, pass_)
                tiles[pass_] = requested or backend.tile_pairs(part.problem, device, pass_)[0]
    function = _function(options, problem, device)
    function.__name__ = name
    # Of another problem's inputs, the additional tokens at the end may be too many.
    arguments = make_inputs(options) if arguments is None else arguments[: len(shapes(options)) + options.backprop]
    compiled = compile_for_trace(function, *arguments)
    return Workload(options, problem, chosen, tiles, device, compiled, arguments, Program.of(compiled))


def passes(options: Options) -> tuple[Pass, ...]:
    """The passes that are profiled."""
    return ("forward", "backward") if options.backprop else ("forward",)


def check_available(options: Options, device: Device) -> None:
    """Check that every backend that the options name exists and is for this device.

    Raises:
        UnavailableBackend: One is not; the message says where it would run.
    """
    for name in (options.backend, options.fmha_backend):
        if name is None or name in baselines.BASELINES:
            continue
        family, _, operator = name.rpartition("-")
        capability = KNOWN_FAMILIES.get(family)
        if capability is None:
            continue
        version = "{}.{}".format(*capability)
        found = device.compute_capability or (0, 0)
        is_there = device.platform == "cuda" and (found >= capability if family == "cutlass" else found == capability)
        if name not in backends.backend_names(operator):
            raise UnavailableBackend(
                f"{name} is for NVIDIA GPUs of compute capability {version}, for which this version has no kernels of "
                "its own" + ("" if is_there else f", and this is {device}")
            )
        if not is_there:
            raise UnavailableBackend(
                f"{name} runs on NVIDIA GPUs of compute capability {version}{' and above' * (family == 'cutlass')} "
                f"only, and this is {device}"
            )


def describe(options: Options) -> tuple[Problem, TileConfig]:
    """The problem and the tiles that the options stand for.

    Raises:
        ValueError: The operators do not take this problem.
    """
    query, key, value, *additional = shapes(options)
    keys, values = additional or (None, None)
    problem = neighborhood_problem(
        options.rank, query, key, value,
        options.window_size, options.stride, options.dilation, options.causal, None, keys, values,
    )  # fmt: skip
    return problem, tile_config(options.rank, **tile_arguments(options))


def parts_of(options: Options) -> list[Part]:
    """The attention calls that the operators make of the options, as the backends see them."""
    problem, tiles = describe(options)
    query, key, value, *additional = (_flat(each) for each in shapes(options))
    fmha_backend = options.fmha_backend or _counterpart(options.backend)
    if problem.is_attention:
        whole = attention_problem(query, _longer(key, options.add_kv), _longer(value, options.add_kv), None, False)
        whole = dataclasses.replace(whole, is_causal=(any(problem.is_causal),))
        return [Part("", whole, _flat_tiles(options), fmha_backend)]
    backend = None if options.is_baseline else options.backend
    if additional and options.fmha_backend is None and op.fuses_additional_kv(op.Call(problem, tiles, backend)):
        return [Part("", problem, tiles, backend)]  # as the operators decide
    parts = [Part("", dataclasses.replace(problem, additional_kv=0), tiles, backend)]
    if additional:
        keys, values = additional
        context = attention_problem(query, keys, values, None, False)
        parts.append(Part("additional_kv_", context, TileConfig(), fmha_backend))
    return parts


def shapes(options: Options) -> list[Any]:
    """Query, key, value and additional keys and values, as shapes and dtypes."""

    def array(layout: tuple[int, ...], heads: int, dim: int) -> jax.ShapeDtypeStruct:
        shape = options.batch_size, *layout, heads, dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(ELEMENT_TYPES[options.dtype]))  # type: ignore[no-untyped-call]

    dims = options.dim, options.dim_value
    arrays = [array(options.input_size, options.heads, options.dim)]
    arrays += [array(options.input_size, options.heads_kv, dim) for dim in dims]
    if options.add_kv:
        arrays += [array((options.add_kv,), options.heads_kv, dim) for dim in dims]
    return arrays


def make_inputs(options: Options) -> tuple[jax.Array, ...]:
    """Random normal arrays, never zeros: easy data runs faster than real data, as it draws less power.

    Raises:
        ValueError: An array would have too many elements.
    """
    wanted = shapes(options)
    if options.backprop:
        query = wanted[0]
        wanted.insert(0, query.update(shape=(*query.shape[:-1], options.dim_value)))
    for each in wanted:
        if math.prod(each.shape) > _MOST_ELEMENTS:
            raise ValueError(f"an array of shape {each.shape} has more elements than XLA can count: 2**63 - 1")
    keys = jax.random.split(jax.random.key(0), len(wanted))
    return tuple(jax.random.normal(key, each.shape, each.dtype) for key, each in zip(keys, wanted, strict=True))


def tile_arguments(options: Options) -> dict[str, Any]:
    """The performance arguments of the operators."""
    return {
        "q_tile_shape": options.q_tile,
        "kv_tile_shape": options.kv_tile,
        "backward_q_tile_shape": options.backward_q_tile,
        "backward_kv_tile_shape": options.backward_kv_tile,
        "run_persistent_kernel": options.persistent,
        "kernel_schedule": options.schedule,
    }


def _function(options: Options, problem: Problem, device: Device) -> Callable[..., Any]:
    """The function to profile: of query, key, value, ...; with ``--backprop``, of the output's cotangent first."""
    if options.is_baseline:
        name = str(options.backend)
        baselines.check(name, problem, device)

        def forward(*arrays: jax.Array) -> Any:
            return baselines.attend(name, *arrays[:3])
    else:
        operator: Callable[..., Any] = getattr(natten_jax, f"na{options.rank}d")
        attention_kwargs = None if options.fmha_backend is None else {"backend": options.fmha_backend}

        def forward(*arrays: jax.Array) -> Any:
            query, key, value, *additional = arrays
            return operator(
                query,
                key,
                value,
                options.window_size,
                options.stride,
                options.dilation,
                options.causal,
                additional_keys=additional[0] if additional else None,
                additional_values=additional[1] if additional else None,
                attention_kwargs=attention_kwargs,
                backend=options.backend,
                **tile_arguments(options),
            )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward


def _counterpart(backend: str | None) -> str | None:
    return None if backend in baselines.BASELINES else backends.fmha_counterpart(backend)


def _flat_tiles(options: Options) -> TileConfig:
    arguments = tile_arguments(options)
    for name in ("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"):
        if arguments[name] is not None:
            arguments[name] = math.prod(arguments[name])
    return tile_config(1, **arguments)


def _flat(array: Any) -> Any:
    batch, *layout, heads, dim = array.shape
    return array.update(shape=(batch, math.prod(layout), heads, dim))


def _longer(array: Any, tokens: int) -> Any:
    batch, own, heads, dim = array.shape
    return array.update(shape=(batch, own + tokens, heads, dim))
