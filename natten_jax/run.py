"""Runs one pass: a JAX primitive that becomes a backend's operations when the program is lowered.

What is traced is one equation per pass, whatever backends and platforms there are. A backend's own operations are
traced for the platforms that a program is lowered for, and for no other: one traced function serves CPU and GPU, and
costs nothing for the platform that it never runs on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from natten_jax import backends, mesh
from natten_jax.backends.base import Backend, Gradients, Operands, Output, Saved
from natten_jax.devices import CPU, Device, cuda_device
from natten_jax.differentiation import refuse
from natten_jax.passes import Pass
from natten_jax.plan import Plan
from natten_jax.resolve import Request, resolve

_OTHER_PLATFORMS = Device("other")


@dataclasses.dataclass(frozen=True)
class _Step:
    """Something to compute.

    Attributes:
        pass_: The pass that it belongs to.
        types: Abstract types of its results, from the request and the abstract types of its arguments.
        compute: Computes them, from the plan, the request, the device and the arguments.
    """

    pass_: Pass
    types: Callable[..., Any]
    compute: Callable[..., Any]


def forward(request: Request, operands: Operands) -> Output:
    """Output and logsumexp."""
    plan = _inline_plan(request)
    if plan is not None and operands.query.shape[0] != 0:
        with _marked(plan):
            return _backend(plan).forward(plan, operands)
    result: Output = _run(_FORWARD, request, operands)
    return result


def forward_saving(request: Request, operands: Operands) -> Saved:
    """Output and logsumexp, and what the backward pass wants to know besides."""
    result: Saved = _run(_FORWARD_SAVING, request, operands)
    return result


def backward(request: Request, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
    """The gradients of the differentiable operands."""
    result: Gradients = _run(_BACKWARD, request, operands, saved, cotangents)
    return result


def is_inline(request: Request) -> bool:
    """Whether one backend runs the forward pass everywhere in plain JAX: then it is traced as it is."""
    return _inline_plan(request) is not None


def fuses_additional_kv(request: Request) -> bool:
    """Whether the forward pass takes additional key/value tokens on every platform that can run it."""
    return all(_backend(plan).fuses_additional_kv for plan in _forward_plans(request) if plan is not None)


def _inline_plan(request: Request) -> Plan | None:
    plans = set(_forward_plans(request))
    plan = plans.pop()
    return plan if plan is not None and not plans and _backend(plan).is_pure_jax else None


def _forward_plans(request: Request) -> list[Plan | None]:
    """By platform, how the forward pass runs; ``None`` where it does not."""
    plans: list[Plan | None] = []
    for device in (CPU, cuda_device(), _OTHER_PLATFORMS):
        try:
            plans.append(resolve(request, device, "forward"))
        except ValueError:
            plans.append(None)
    return plans


def _backend(plan: Plan) -> Backend:
    return backends.find(plan.backend, plan.backend.operator)


def _marked(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Writes the plan into the metadata of the operations traced inside: the profiler reads there what ran."""
    return set_xla_metadata(natten_jax=plan.payload())


def _output_types(request: Request, operands: Any) -> Output:
    problem, query = request.problem, operands.query
    per_query = query.shape[:-1]
    return Output(
        mesh.type_like(query, (*per_query, problem.head_dim_v), query.dtype),
        mesh.type_like(query, per_query, problem.accumulator_dtype),
    )


def _saved_types(request: Request, operands: Any) -> Saved:
    output = _output_types(request, operands)
    return Saved(*output, output.logsumexp)


def _gradient_types(request: Request, operands: Any, saved: Any, cotangents: Any) -> Gradients:
    types = [None if each is None else mesh.type_like(operands.query, each.shape, each.dtype) for each in operands[:5]]
    return Gradients._make(types)


def _compute_forward(plan: Plan, request: Request, device: Device, operands: Operands) -> Output:
    return _backend(plan).forward(plan, operands)


def _compute_saved(plan: Plan, request: Request, device: Device, operands: Operands) -> Saved:
    return _backend(plan).forward_saving(plan, operands)


def _compute_gradients(
    plan: Plan, request: Request, device: Device, operands: Operands, saved: Saved, cotangents: Output
) -> Gradients:
    if resolve(request, device, "forward").backend != plan.backend:
        saved = saved._replace(remainder=None)
    return _backend(plan).backward(plan, operands, saved, cotangents)


_FORWARD = _Step("forward", _output_types, _compute_forward)
_FORWARD_SAVING = _Step("forward", _saved_types, _compute_saved)
_BACKWARD = _Step("backward", _gradient_types, _compute_gradients)


def _run(step: _Step, request: Request, *arguments: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    types = step.types(request, *jax.tree.unflatten(structure, map(jax.typeof, leaves)))
    if arguments[0].query.shape[0] == 0:  # kernels and counts are for something
        arrays = [mesh.vary_alike([jnp.zeros(each.shape, each.dtype), leaves[0]])[0] for each in jax.tree.leaves(types)]
    else:
        arrays = _pass_p.bind(*leaves, step=step, request=request, structure=structure)
    return jax.tree.unflatten(jax.tree.structure(types), arrays)


_pass_p = Primitive("natten_jax_pass")
_pass_p.multiple_results = True


@_pass_p.def_abstract_eval
def _types(*arguments: Any, step: _Step, request: Request, structure: Any) -> list[Any]:
    return jax.tree.leaves(step.types(request, *jax.tree.unflatten(structure, arguments)))


@_pass_p.def_impl
def _run_now(*arrays: Any, **parameters: Any) -> Any:
    return _compiled(**parameters)(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(**parameters: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_pass_p.bind, **parameters))


def _lower_for(device_at_hand: Callable[[], Device], platform: str | None) -> None:
    def compute(*leaves: Any, **parameters: Any) -> list[Any]:
        return list(_function(device=device_at_hand(), **parameters)(*leaves))

    mlir.register_lowering(_pass_p, mlir.lower_fun(compute, multiple_results=True), platform=platform)


@functools.lru_cache(maxsize=4096)
def _function(*, step: _Step, request: Request, structure: Any, device: Device) -> Callable[..., Any]:
    """One function for equal steps: a program with many equal layers holds it once."""
    plan = resolve(request, device, step.pass_)

    def run_pass(*leaves: Any) -> Any:
        arguments = jax.tree.unflatten(structure, leaves)
        with _marked(plan), jax.default_matmul_precision(request.precision):
            return jax.tree.leaves(step.compute(plan, request, device, *arguments))

    return jax.jit(run_pass)


_lower_for(lambda: CPU, "cpu")
_lower_for(lambda: cuda_device(), "cuda")
_lower_for(lambda: _OTHER_PLATFORMS, None)


ad.primitive_jvps[_pass_p] = refuse
