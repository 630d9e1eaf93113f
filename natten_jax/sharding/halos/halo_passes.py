"""How a pass gets its halos where tokens are split over devices: before it computes, or while it does.

The one driver of the exchange, whoever splits a call: each pass does what is found to be faster for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Output, Saved
from natten_jax.cost_model.halos import overlap_that_pays
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.sharding.halos import overlap
from natten_jax.sharding.halos.exchange import FIRST_TOKEN_AXIS, Exchange, of_keys
from natten_jax.sharding.halos.overlap import ContinueForward, RunBackward, RunForward

_Result = TypeVar("_Result", Output, Saved)


def computes_meanwhile(plan: Plan, request: Request, exchange: Exchange, *, has_sinks: bool = False) -> bool:
    """Whether a pass computes while halos travel.

    Those with biases of keys do not, nor are outputs of 8-bit arrays merged; and where there are sinks, a single pass
    on all keys has them.
    """
    if has_sinks or request.problem.key_bias or request.problem.element.is_float8:
        return False
    return overlap_that_pays(plan, tuple(exchange.halos)) is not None


@dataclasses.dataclass(frozen=True)
class ForwardPass(Generic[_Result]):
    """The ways to run a forward pass.

    Attributes:
        on_all: On all keys; returns what is wanted of the call.
        on_some: On some of the keys; returns what others are merged with.
        continued: On more keys after that.
    """

    on_all: Callable[[Request, Operands], _Result]
    on_some: RunForward
    continued: ContinueForward


def forward(
    run: ForwardPass[_Result], plan: Plan, request: Request, exchange: Exchange, operands: Operands
) -> _Result | Saved:
    """A forward pass of all queries that a device has.

    Args:
        run: Runs it.
        plan: The plan of the pass, whose problem has the global layout.
        request: The whole call, with the device's batch and heads.
        exchange: What brings the halos.
        operands: What the device has, without origins.

    Returns:
        What ``run.on_all`` does, or what is saved.
    """
    if computes_meanwhile(plan, request, exchange, has_sinks=operands.inputs.sinks is not None):
        return overlap.forward(run.on_some, run.continued, request, exchange, operands)
    return run.on_all(request, exchange.brought(operands))


def backward(
    run: RunBackward,
    plan: Plan,
    request: Request,
    exchange: Exchange,
    operands: Operands,
    saved: Saved,
    cotangents: Cotangents,
) -> Gradients:
    """The gradients of all that a device has; arguments as for :func:`forward`, and what it saved."""
    if computes_meanwhile(plan, request, exchange, has_sinks=operands.inputs.sinks is not None):
        return overlap.backward(run, request, exchange, operands, saved, cotangents)
    layout = operands.inputs.key.shape[FIRST_TOKEN_AXIS:-2]
    found = run(request, exchange.brought(operands), saved, cotangents)
    return found._replace(**{name: exchange.returned(array, layout) for name, array in of_keys(found).items()})
