"""The program that the options describe: its problem, its inputs, the backends that run it, and it compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from natten_jax import backends
from natten_jax.backends.base import Platform
from natten_jax.backends.select import resolve
from natten_jax.ops import neighborhood, sub_calls
from natten_jax.ops.sub_calls import KeySet, SubCall
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import BackendId, Plan
from natten_jax.plan.request import Request
from natten_jax.plan.tuned import table_in_force
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import Launch
from natten_jax.profiler.options import ELEMENT_TYPES, Options
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.profiler.run.inputs import check_fits, is_room, make_inputs, shapes
from natten_jax.profiler.run.split import of_each_device

#: Families of backends that run only on some devices.
KNOWN_FAMILIES: dict[str, Platform] = {
    backend.family: backend.platform for backend in backends.registered() if backend.platform is not None
}


class UnavailableBackend(ValueError):
    """A backend that this package has no kernels for on the device at hand, or at all."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A compiled program and its inputs.

    Attributes:
        options: What was asked for.
        problem: The problem; that of a baseline is self attention.
        backends: What runs the ``"forward"`` and ``"backward"`` pass, and ``"additional_kv_forward"`` and so on for
            additional tokens.
        plans: How each pass of the tokens themselves runs; empty for baselines.
        device: The device that runs it.
        compiled: The program.
        arguments: Its inputs.
        program: What it consists of.
    """

    options: Options
    problem: Problem
    backends: dict[str, str]
    plans: dict[Pass, Plan]
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
    def tiles(self) -> dict[Pass, TilePair]:
        """Query and key/value tile of each pass of a backend of this package."""
        return {pass_: plan.tiles for pass_, plan in self.plans.items()}

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
        name: The program's name; programs of one capture need different names.
        arguments: Inputs of an equal problem to use again; ``None`` makes new ones.

    Raises:
        UnavailableBackend: A backend that was named does not run on this device.
        ValueError: The problem cannot run as the options ask.
        MemoryError: It is too large for the device.
    """
    device = default_device()
    check_runs(options, device)
    problem = request_of(options).problem
    chosen: dict[str, str] = {}
    plans: dict[Pass, Plan] = {}
    if options.is_baseline:
        chosen.update(dict.fromkeys(passes(options), str(options.backend)))
    for call in () if options.is_baseline else sub_calls_of_device(options):
        for pass_ in passes(options):
            plan = resolve(call.request, device, pass_)
            is_additional = call.kind is KeySet.ADDITIONAL
            chosen[f"additional_kv_{pass_}" if is_additional else pass_] = str(plan.backend)
            if not is_additional:
                plans[pass_] = plan
    function = _function(options)
    function.__name__ = name
    # Inputs of another problem may end with additional tokens that this one does not have.
    arguments = make_inputs(options) if arguments is None else arguments[: len(shapes(options)) + options.backprop]
    compiled = compile_for_trace(function, *arguments)
    return Workload(options, problem, chosen, plans, device, compiled, arguments, Program.from_compiled(compiled))


def passes(options: Options) -> tuple[Pass, ...]:
    """The passes that are profiled."""
    return ("forward", "backward") if options.backprop else ("forward",)


def check_runs(options: Options, device: Device) -> None:
    """Check what can be known before anything is compiled: devices, memory, and what baselines need.

    Raises:
        UnavailableBackend: A backend that was named does not run on this device.
        ValueError: The baseline does not, or an array has too many elements.
        MemoryError: The problem is too large for the device.
    """
    check_available(options, device)
    check_fits(options)
    if options.is_baseline:
        problem = request_of(options).problem
        name = str(options.backend)
        flag = "--compare" if name == options.compare else "--backend"
        baselines.check(name, flag, problem, device, functools.partial(is_room, options))


def check_available(options: Options, device: Device) -> None:
    """Check that every backend that the options name is for this device.

    Raises:
        UnavailableBackend: One is not; the message says where it would run.
    """
    for name in (options.backend, options.fmha_backend):
        if name is None or name in baselines.BASELINES:
            continue
        platform = KNOWN_FAMILIES.get(BackendId.parse(name).family)
        if platform is None:
            continue
        if not platform.has(device):
            raise UnavailableBackend(f"{name} runs on {platform}, and this is {device}")


def request_of(options: Options) -> Request:
    """What the options ask of the operators.

    Raises:
        ValueError: The operators do not take this problem.
    """
    problem = problem_of(
        options.input_size,
        **options.window._asdict(),
        batch=options.batch_size,
        heads=options.heads,
        heads_kv=options.heads_kv,
        head_dim=options.dim,
        head_dim_v=options.dim_value,
        dtype=ELEMENT_TYPES[options.dtype],
        additional_kv=options.add_kv,
    )
    backend = None if options.is_baseline else options.backend
    return Request(problem, options.performance, backend, tuned=table_in_force())


def attention_kwargs(options: Options) -> dict[str, Any] | None:
    """The operators' argument of that name."""
    return None if options.fmha_backend is None else {"backend": options.fmha_backend}


def sub_calls_of(options: Options) -> tuple[SubCall, ...]:
    """The attention calls that the operators make of the options."""
    return sub_calls.sub_calls_of(request_of(options), attention_kwargs(options))


def sub_calls_of_device(options: Options) -> tuple[SubCall, ...]:
    """The attention calls as they run on each device: of its share."""
    every = sub_calls_of(options)
    if options.devices == 1:
        return every
    one = request_of(of_each_device(options)).problem
    return tuple(each._replace(request=each.request.of_part(one.batch, one.heads, one.heads_kv)) for each in every)


def _function(options: Options) -> Callable[..., Any]:
    """The function to profile: of query, key, value, ...; with ``--backprop``, of the output's cotangent first."""
    if options.is_baseline:
        name = str(options.backend)

        def forward(*arrays: jax.Array) -> Any:
            return baselines.attend(name, *arrays[:3])
    else:
        operator: Callable[..., Any] = getattr(neighborhood, f"na{options.rank}d")

        def forward(*arrays: jax.Array) -> Any:
            query, key, value, *additional = arrays
            return operator(
                query,
                key,
                value,
                **options.window._asdict(),
                additional_keys=additional[0] if additional else None,
                additional_values=additional[1] if additional else None,
                attention_kwargs=attention_kwargs(options),
                backend=options.backend,
                **dataclasses.asdict(options.performance),
            )

    def forward_and_backward(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        output, gradients = jax.vjp(forward, *arrays)
        return output, gradients(cotangent)

    return forward_and_backward if options.backprop else forward
