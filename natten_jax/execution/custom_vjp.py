"""One differentiable operator over every backend: ``custom_vjp`` of the two passes.

Which backend runs a pass is decided when the program is lowered, per pass and platform: one traced function serves CPU
and GPU, and nothing is traced for platforms that a program is not lowered for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from natten_jax import backends
from natten_jax.arrays.avals import vary_alike
from natten_jax.arrays.operands import Cotangents, Operands, Output, Saved
from natten_jax.backends.select import resolve
from natten_jax.execution import passes
from natten_jax.execution.checkpoint_names import named
from natten_jax.execution.refused_derivatives import forward_only, in_reverse_only
from natten_jax.plan.devices import lowering_targets
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.sharding import explicit
from natten_jax.sharding.halos import device_line, halo_passes, manual_exchange
from natten_jax.sharding.halos.exchange import Exchange

_Result = TypeVar("_Result", Output, Saved)


def attend(request: Request, operands: Operands) -> Output:
    """Run the operator; differentiable in every floating-point operand.

    Raises:
        ValueError: No backend can run the request on any device that the program may be lowered for.
    """
    check_runs_somewhere(request)
    if request.problem.element.is_float8:
        operands = operands._replace(inputs=jax.tree.map(forward_only, operands.inputs))

    return explicit.over_explicit_axes(_attend_locally, request, operands)


def check_runs_somewhere(request: Request) -> None:
    """Check that some device which the program may be lowered for can run the request.

    Raises:
        ValueError: None can; the message speaks of the default device.
    """
    errors = []
    for device in lowering_targets().values():
        try:
            resolve(request, device, "forward")
            if request.performance.tiles("backward") is not None:
                resolve(request, device, "backward")
        except ValueError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


def _attend_locally(request: Request, operands: Operands) -> Output:
    """The operator on what a device has, or all that share its tokens in one ``jax.shard_map`` have."""
    if not request.token_axes:
        return _attend_to_all(request, operands)
    if _exchanging_call_of(request) is not None:
        return _attend_in_reverse(request, operands)
    brought = manual_exchange.brought(request.problem, request.token_axes, operands)
    return _attend_to_all(_of_part(request), vary_alike(brought))


def _attend_to_all(request: Request, operands: Operands) -> Output:
    """The operator where all keys are there; plain JAX differentiates itself: forward mode and higher orders, too."""
    output = passes.forward_plain(request, operands)
    return _attend_in_reverse(request, operands) if output is None else output


def _attend_in_reverse(request: Request, operands: Operands) -> Output:
    return _attend(request, operands._replace(inputs=jax.tree.map(in_reverse_only, operands.inputs)))


def _of_part(request: Request) -> Request:
    """What one of the devices runs that ``token_axes`` speaks of."""
    return dataclasses.replace(request, token_axes=(), parts=device_line.parts_of(request.token_axes))


@dataclasses.dataclass(frozen=True)
class _ExchangingCall:
    """A call inside ``jax.shard_map`` of which a pass computes while its halos travel.

    Attributes:
        request: What a device runs.
        exchange: What brings the halos.
        plans: The plans of the forward and the backward pass: each gets its halos on its own.
    """

    request: Request
    exchange: Exchange
    plans: tuple[Plan, Plan]


def _exchanging_call_of(request: Request) -> _ExchangingCall | None:
    """How both passes run where one computes meanwhile; ``None`` where both have their halos first, and share them.

    Which backend runs is decided later: this is for the one that would run here. Where another does, results are the
    same. Sinks are none of the operands: where a caller splits tokens, they follow the pass (``ops/sinks.py``).
    """
    if not request.token_axes:
        return None
    part = _of_part(request)
    for device in lowering_targets().values():
        try:
            plans = resolve(part, device, "forward"), resolve(part, device, "backward")
        except ValueError:
            continue
        if any(backends.of(plan.backend).is_differentiable for plan in plans):
            return None  # JAX differentiates it, exchange and all
        exchange = Exchange.of(request.problem, device_line.lines_of(request.token_axes))
        if not any(halo_passes.computes_meanwhile(plan, request, exchange) for plan in plans):
            return None
        return _ExchangingCall(part, exchange, plans)
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(request: Request, operands: Operands) -> Output:
    return Output(*_run_forward(passes.forward, request, operands)[:2])


def _run_forward(
    function: Callable[[Request, Operands], _Result], request: Request, operands: Operands
) -> _Result | Saved:
    call = _exchanging_call_of(request)
    if call is None:
        return function(request, operands)
    forward = halo_passes.ForwardPass(function, passes.forward_saving, passes.forward_continued)
    return halo_passes.forward(forward, call.plans[0], call.request, call.exchange, operands)


def _attend_forward(request: Request, operands: Any) -> tuple[Output, tuple[Operands, Saved]]:
    operands = jax.tree.map(lambda operand: operand.value, operands)
    result = _run_forward(passes.forward_saving, request, operands)
    saved = Saved(*named(result))
    return Output(saved.out, saved.logsumexp), (operands, saved)


def _attend_backward(request: Request, residuals: tuple[Operands, Saved], given: Output) -> tuple[Operands]:
    cotangents = _cotangents(given, residuals[1])
    call = _exchanging_call_of(request)
    if call is None:
        gradients = passes.backward(request, *residuals, cotangents)
    else:
        gradients = halo_passes.backward(
            passes.backward, call.plans[1], call.request, call.exchange, *residuals, cotangents
        )
    return (Operands(gradients),)  # origins are integers and have no gradient


def _cotangents(given: Any, saved: Saved) -> Cotangents:
    """Those that JAX gives, which may say that they are zero."""
    out, logsumexp = (None if isinstance(each, SymbolicZero) else each for each in given)
    if out is None:
        out, _ = vary_alike((jnp.zeros_like(saved.out), saved.out))
    return Cotangents(out, logsumexp)


# A loss that reads the output alone has no cotangent of the logsumexp: zeros would be written and read.
_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
