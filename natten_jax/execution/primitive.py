"""The JAX primitive of a pass: how it is batched, differentiated, and lowered for a device or for several.

What is traced is one equation per computation, whatever backends and platforms there are. A backend's own operations
are traced for the platforms that a program is lowered for, and for no other: one traced function serves CPU and GPU,
and costs nothing for the platform that it never runs on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax import backends
from natten_jax.arrays.avals import vary_alike
from natten_jax.arrays.roles import Role
from natten_jax.execution import debug_nans, taylor
from natten_jax.execution.checkpoint_names import named
from natten_jax.execution.computations import Computation, Transpose
from natten_jax.execution.entries import one_by_one
from natten_jax.execution.refused_derivatives import refuse
from natten_jax.plan import marks as plan_marks
from natten_jax.plan.devices import PLATFORMS, Device, lowering_target
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.sharding import _jax_internals, auto
from natten_jax.sharding.explicit import map_in_turn
from natten_jax.sharding.halos.device_line import DeviceLine
from natten_jax.sharding.halos.exchange import Exchange

_pass_p = Primitive("natten_jax_pass")
_pass_p.multiple_results = True


def bind(
    computation: Computation, request: Request, arguments: Sequence[jax.Array], mapped: int = 0
) -> list[jax.Array]:
    """Run a computation on arrays that begin with axes which ``jax.vmap`` maps, and then the batch.

    Args:
        computation: What to compute.
        request: What is asked for.
        arguments: Query, key and whatever else the computation wants.
        mapped: How many mapped axes there are.
    """
    if 0 in arguments[0].shape[: mapped + 1]:  # kernels and counts are for something
        types = _types(*map(jax.typeof, arguments), computation=computation, request=request, mapped=mapped)
        return [vary_alike([jnp.zeros(each.shape, each.dtype), arguments[0]])[0] for each in types]
    results: list[jax.Array] = _pass_p.bind(*arguments, computation=computation, request=request, mapped=mapped)
    return results


@_pass_p.def_abstract_eval
def _types(*arguments: Any, computation: Computation, request: Request, mapped: int) -> list[Any]:
    return [each.type for each in computation.results(request, arguments, arguments[0].shape[: mapped + 1])]


@_pass_p.def_impl
def _run_now(*arguments: Any, computation: Computation, request: Request, **parameters: Any) -> Any:
    """Run a computation whose arguments are known: as a program of its own, even where JAX compiles nothing else."""
    # What is not compiled here would come back to where it is called from.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _compiled(computation=computation, request=request, **parameters)(*arguments)
    debug_nans.check(results, f"{request.problem.describe()} of natten_jax")
    return results


@functools.lru_cache(maxsize=256)
def _compiled(**parameters: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_pass_p.bind, **parameters))


def _map(
    arguments: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    computation: Computation,
    request: Request,
    mapped: int,
) -> Any:
    """``jax.vmap``: the mapped axis joins those in front of the batch, where a mesh may split it."""
    (size,) = {array.shape[axis] for array, axis in zip(arguments, axes, strict=True) if axis is not None}

    def in_front(array: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)

    roles = computation.roles
    if any(role is Role.WHOLE and axis is not None for role, axis in zip(roles, axes, strict=True)):
        every = [in_front(array, axis) for array, axis in zip(arguments, axes, strict=True)]
        results = map_in_turn(lambda each: bind(computation, request, each, mapped), every)
    else:
        arrays = [
            array if role is Role.WHOLE else in_front(array, axis)
            for array, axis, role in zip(arguments, axes, roles, strict=True)
        ]
        results = bind(computation, request, arrays, mapped + 1)
    return results, [0] * len(results)


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, computation: Computation, **parameters: Any
) -> tuple[Any, Any]:
    """Results and their tangents."""
    given = [i for i, each in enumerate(tangents) if not isinstance(each, ad.Zero)]
    derivative = computation.derivative(given)
    results = bind(computation, arguments=primals, **parameters)
    if derivative.reads_results:
        results = named(results)
    known = [*primals, *results] if derivative.reads_results else primals
    changes = bind(derivative.computation, arguments=[*known, *(tangents[i] for i in given)], **parameters)
    constant = [ad.Zero(jax.typeof(each)) for each in results[len(changes) :]]
    return results, [*changes, *constant]


def _transpose(
    cotangents: Sequence[Any], *arguments: Any, computation: Computation, request: Request, mapped: int
) -> list[jax.Array | None]:
    """Cotangents of the arguments that the computation is linear in: those that have no value."""
    linear = [i for i, each in enumerate(arguments) if ad.is_undefined_primal(each)]
    if linear[0] < 2:  # a computation tells by query and key what it has of batch and heads
        refuse()
    read = [i for i, each in enumerate(cotangents) if not isinstance(each, ad.Zero)]
    known = [each for each in arguments if not ad.is_undefined_primal(each)]
    avals = [arguments[i].aval for i in linear]
    results = computation.results(
        request, [getattr(each, "aval", each) for each in arguments], known[0].shape[: mapped + 1]
    )
    transposed = Transpose(
        computation,
        tuple(linear),
        tuple((aval.shape[mapped + 1 :], aval.dtype.name) for aval in avals),
        tuple(read),
        tuple(results[i].role for i in read),
    )
    found = bind(transposed, request, [*known, *(cotangents[i] for i in read)], mapped)
    by_position = dict(zip(linear, found, strict=True))
    return [by_position.get(i) for i in range(len(arguments))]


def _lower_for(platform: str | None) -> None:
    def lower(
        ctx: mlir.LoweringRuleContext, *values: Any, computation: Computation, request: Request, mapped: int
    ) -> Any:
        device = lowering_target(platform or _platform_of(ctx))
        local = functools.partial(_run_local, computation=computation, request=request, mapped=mapped, device=device)
        if auto.is_needed(ctx):
            plan = computation.plan(request, device)
            if not _is_left_to_xla(ctx, plan):
                identity = f"{plan.payload()} {computation} {mapped}"
                arguments: Sequence[Any] = ctx.avals_in
                results = computation.results(request, arguments, arguments[0].shape[: mapped + 1])
                roles = computation.roles, [each.role for each in results]
                with plan_marks.of_plan(plan):
                    return auto.Partitioned(
                        ctx, identity, local, *roles, mapped + 1, splits_tokens=_splits_tokens(computation, request)
                    ).lower(values)
        return auto.lower_for_one(local, ctx, values)

    mlir.register_lowering(_pass_p, lower, platform=platform)


def _platform_of(ctx: mlir.LoweringRuleContext) -> str:
    """The platform that a program is lowered for, where it is none of JAX's own."""
    own, *others = (each for each in _jax_internals.platforms_of(ctx) if each not in PLATFORMS)
    return "other" if others else own


def _is_left_to_xla(ctx: mlir.LoweringRuleContext, plan: Plan) -> bool:
    """Whether XLA splits the operations of a computation as it can: where its partitioner asks nobody.

    An exported program has no callbacks, and the compiler for TPUs calls none.

    Raises:
        ValueError: The compiler for TPUs would have to split a kernel.
    """
    is_plain = backends.of(plan.backend).is_plain_xla
    if plan.platform == "tpu" and not is_plain:
        raise ValueError(f"{plan.backend} cannot be split over mesh axes of type Auto: {auto.NO_TPU}")
    return is_plain and (plan.platform == "tpu" or _jax_internals.is_exported(ctx))


def _splits_tokens(computation: Computation, request: Request) -> bool:
    """Whether a mesh may split token dimensions: those of whole layouts, which windows relate."""
    return request.problem.operator == "fna" and not {Role.WHOLE, Role.PER_ENTRY}.intersection(computation.roles)


def _run_local(
    *arguments: jax.Array,
    computation: Computation,
    request: Request,
    mapped: int,
    device: Device,
    lines: Sequence[DeviceLine | None] = (),
) -> list[jax.Array]:
    """Run a computation on all that one device has, mapped axes and batch as one.

    Args:
        *arguments: What the device has.
        computation: What to compute.
        request: The whole call.
        mapped: How many axes ``jax.vmap`` maps.
        device: What this runs on.
        lines: The devices that share each token dimension with this one; nothing where none is split.
    """
    batch_dims = arguments[0].shape[: mapped + 1]
    batch = math.prod(batch_dims)
    own = request.of_part(batch, arguments[0].shape[-2], arguments[1].shape[-2])
    expected = computation.results(own, arguments, batch_dims)
    arrays = [_as_one_batch(*each, batch_dims) for each in zip(arguments, computation.roles, strict=True)]
    run = functools.partial(_run_computation, device=device)
    if any(lines):
        exchange = Exchange.of(own.problem, lines)
        split = dataclasses.replace(own, parts=exchange.parts)
        results = computation.compute_exchanging(run, computation.plan(split, device), split, exchange, *arrays)
    else:
        results = run(computation, own, arrays)
    return [_as_mapped(array, each.role, batch_dims) for array, each in zip(results, expected, strict=True)]


def _as_one_batch(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """An argument whose mapped axes are a part of its batch; what batch entries share stays as it is without any."""
    if role is Role.WHOLE or (role is Role.PER_HEAD_OF_ALL and len(batch_dims) == 1):
        return array
    own = array.shape[len(batch_dims) :]
    if role is Role.PER_HEAD_OF_ALL:
        array = jnp.broadcast_to(array, (*batch_dims, *own))
    return array.reshape(math.prod(batch_dims), *own)


def _as_mapped(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """A result, with mapped axes again; the gradient of what batch entries share is added up over them."""
    if role is Role.PER_HEAD_OF_ALL and len(batch_dims) == 1:
        return array
    array = array.reshape(*batch_dims, *array.shape[1:])
    return jnp.sum(array, axis=len(batch_dims) - 1, keepdims=True) if role is Role.PER_HEAD_OF_ALL else array


def _run_computation(
    computation: Computation, request: Request, arrays: Sequence[jax.Array], *, device: Device
) -> list[jax.Array]:
    plan = computation.plan(request, device)
    if Role.PER_ENTRY in computation.roles and not backends.of(plan.backend).takes_layouts_of(plan.problem):
        run = functools.partial(_run_planned, computation, device=device)
        results = computation.results(request, arrays, arrays[0].shape[:1])
        return one_by_one(run, computation.roles, [each.role for each in results], request, arrays)
    return _run_planned(computation, request, arrays, device=device)


def _run_planned(
    computation: Computation, request: Request, arrays: Sequence[jax.Array], *, device: Device
) -> list[jax.Array]:
    plan = computation.plan(request, device)
    results: list[jax.Array] = _function(computation=computation, plan=plan, request=request, device=device)(*arrays)
    return results


@functools.lru_cache(maxsize=4096)
def _function(*, computation: Computation, plan: Plan, request: Request, device: Device) -> Callable[..., Any]:
    """One function for equal computations: a program with many equal layers holds it once."""

    def run_pass(*arguments: Any) -> Any:
        backend = backends.of(plan.backend)
        marks = plan_marks.of_plan(plan, on_all=not backend.carries_plan)
        with marks, jax.default_matmul_precision(plan.precision):
            return computation.compute(plan, request, device, *arguments)

    return jax.jit(run_pass)


for each in (*PLATFORMS, None):
    _lower_for(each)

ad.primitive_jvps[_pass_p] = _differentiate
ad.primitive_transposes[_pass_p] = _transpose
batching.primitive_batchers[_pass_p] = _map
taylor.use_nested_jvp(_pass_p)
taylor.use_linearity(_jax_internals.CHECKPOINT_NAME)
