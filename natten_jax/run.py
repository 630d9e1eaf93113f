"""Runs one pass: a JAX primitive that becomes a backend's operations when the program is lowered.

What is traced is one equation per pass, whatever backends and platforms there are. A backend's own operations are
traced for the platforms that a program is lowered for, and for no other: one traced function serves CPU and GPU, and
costs nothing for the platform that it never runs on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax import backends
from natten_jax.backends.base import Backend, Gradients, Operands, Output, Saved
from natten_jax.devices import CPU, Device, cuda_device
from natten_jax.differentiation import refuse
from natten_jax.mesh import exchange, partition
from natten_jax.mesh.exchange import Line
from natten_jax.mesh.roles import Role, roles_of
from natten_jax.mesh.types import type_like, vary_alike
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
    result: Output = _run(_FORWARD, request, operands)
    return result


def forward_inline(request: Request, operands: Operands) -> Output | None:
    """Output and logsumexp, traced as plain JAX; ``None`` unless one backend runs the pass everywhere so."""
    plan = _inline_plan(request)
    if plan is None:
        return None
    if operands.query.shape[0] == 0:
        return forward(request, operands)
    with _marked(plan):
        return _backend(plan).forward(plan, operands)


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
        type_like(query, (*per_query, problem.head_dim_v), query.dtype),
        type_like(query, per_query, problem.accumulator_dtype),
    )


def _saved_types(request: Request, operands: Any) -> Saved:
    output = _output_types(request, operands)
    return Saved(*output, output.logsumexp)


def _gradient_types(request: Request, operands: Any, saved: Any, cotangents: Any) -> Gradients:
    types = [None if each is None else type_like(operands.query, each.shape, each.dtype) for each in operands[:5]]
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
    arrays = _bind(leaves, step=step, request=request, structure=structure, mapped=0)
    return jax.tree.unflatten(jax.tree.structure(types), arrays)


_pass_p = Primitive("natten_jax_pass")
_pass_p.multiple_results = True
partition.is_lowered_for_devices(_pass_p)


def _bind(leaves: Sequence[jax.Array], **parameters: Any) -> list[jax.Array]:
    """Run a step on arrays that begin with axes which ``jax.vmap`` maps, and then the batch."""
    if 0 in leaves[0].shape[: parameters["mapped"] + 1]:  # kernels and counts are for something
        types = _types(*map(jax.typeof, leaves), **parameters)
        return [vary_alike([jnp.zeros(each.shape, each.dtype), leaves[0]])[0] for each in types]
    results: list[jax.Array] = _pass_p.bind(*leaves, **parameters)
    return results


@_pass_p.def_abstract_eval
def _types(*leaves: Any, step: _Step, request: Request, structure: Any, mapped: int) -> list[Any]:
    return jax.tree.leaves(step.types(request, *jax.tree.unflatten(structure, leaves)))


@_pass_p.def_impl
def _run_now(*arrays: Any, **parameters: Any) -> Any:
    return _compiled(**parameters)(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(**parameters: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_pass_p.bind, **parameters))


def _map(leaves: Sequence[jax.Array], axes: Sequence[int | None], *, mapped: int, **parameters: Any) -> Any:
    """``jax.vmap``: the mapped axis joins those in front of the batch, where a mesh may split it."""
    (size,) = {array.shape[axis] for array, axis in zip(leaves, axes, strict=True) if axis is not None}

    def in_front(array: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)

    roles = roles_of(*jax.tree.unflatten(parameters["structure"], leaves))
    if any(role is Role.WHOLE and axis is not None for role, axis in zip(roles, axes, strict=True)):
        every = [in_front(array, axis) for array, axis in zip(leaves, axes, strict=True)]
        results = jax.lax.map(lambda each: _bind(each, mapped=mapped, **parameters), every)
    else:
        arrays = [
            array if role is Role.WHOLE else in_front(array, axis)
            for array, axis, role in zip(leaves, axes, roles, strict=True)
        ]
        results = _bind(arrays, mapped=mapped + 1, **parameters)
    return results, [0] * len(results)


def _lower_for(device_at_hand: Callable[[], Device], platform: str | None) -> None:
    def lower(ctx: mlir.LoweringRuleContext, *values: Any, step: _Step, structure: Any, **parameters: Any) -> Any:
        inputs = jax.tree.unflatten(structure, ctx.avals_in)
        device = device_at_hand()

        def local(*leaves: jax.Array, lines: Sequence[Line | None] = ()) -> list[jax.Array]:
            return _run_local(leaves, lines, device=device, step=step, structure=structure, **parameters)

        if partition.is_needed(ctx):
            request, mapped = parameters["request"], parameters["mapped"]
            plan = resolve(request, device, step.pass_)
            identity = f"{plan.payload()} {step.compute.__name__} {structure} {request.precision} {mapped}"
            roles = roles_of(*inputs), roles_of(step.types(request, *inputs))
            with _marked(plan):
                return partition.Partitioned(
                    ctx, identity, local, *roles, mapped + 1, splits_tokens=_splits_tokens(request, inputs[0])
                ).lower(values)
        return mlir.lower_fun(local, multiple_results=True)(ctx, *values)

    mlir.register_lowering(_pass_p, lower, platform=platform)


def _splits_tokens(request: Request, operands: Operands) -> bool:
    """Whether a mesh may split token dimensions: those of whole layouts, which windows relate."""
    return request.problem.operator == "fna" and operands.origins is None


def _run_local(
    leaves: Sequence[jax.Array],
    lines: Sequence[Line | None],
    *,
    step: _Step,
    request: Request,
    structure: Any,
    mapped: int,
    device: Device,
) -> list[jax.Array]:
    """Run a step on all that one device has, mapped axes and batch as one.

    Args:
        leaves: The arguments.
        lines: The devices that share each token dimension with this one; nothing where none is split.
        step: What to compute.
        request: The whole call.
        structure: Of the arguments.
        mapped: How many axes ``jax.vmap`` maps.
        device: What this runs on.
    """
    operands = jax.tree.unflatten(structure, leaves)[0]
    outer = operands.query.shape[: mapped + 1]
    batch = math.prod(outer)
    request = request.of_part(batch, operands.query.shape[-2], operands.key.shape[-2])
    roles = roles_of(*jax.tree.unflatten(structure, leaves))
    arrays = [
        array if role is Role.WHOLE else array.reshape(batch, *array.shape[mapped + 1 :])
        for array, role in zip(leaves, roles, strict=True)
    ]
    if lines:
        own, *others = jax.tree.unflatten(structure, arrays)
        arrays, structure = jax.tree.flatten((exchange.with_halos(request.problem, own, lines), *others))
    results = _function(step=step, request=request, structure=structure, device=device)(*arrays)
    if lines and step.pass_ == "backward":
        of_operands = jax.tree.structure(own._replace(origins=None))
        gradients = Gradients._make(jax.tree.unflatten(of_operands, results)[:5])
        results = jax.tree.leaves(exchange.returned(request.problem, own, gradients, lines))
    return [array.reshape(*outer, *array.shape[1:]) for array in results]


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
batching.primitive_batchers[_pass_p] = _map
