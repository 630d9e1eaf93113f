"""Plans of both passes of a problem with a given backend, as the operators make them."""

from __future__ import annotations

from natten_jax import backends
from natten_jax.backends.base import Backend
from natten_jax.backends.select import plan_with
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem


def plans_of(
    name: str,
    problem: Problem,
    performance: Performance | None = None,
    device: Device | None = None,
    precision: str | None = None,
) -> tuple[Backend, dict[Pass, Plan]]:
    """The backend of that name and its plan of each pass."""
    backend = backends.find(name, problem.operator)
    request = Request(problem, performance or Performance(), name, precision)
    return backend, {pass_: plan_with(backend, request, device or default_device(), pass_) for pass_ in PASSES}
