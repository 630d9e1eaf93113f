"""The differentiable operator, which can run on any backend, and its forward and backward passes.

When JAX traces a call, :func:`plain_backend` decides how the call is differentiated. If the same plain JAX backend runs
the call on all platforms, JAX differentiates that backend. Otherwise the passes are the rules of a ``custom_vjp``.

The backend of a pass is selected per platform, when JAX lowers the program. A traced function can therefore be
lowered for both CPUs and GPUs. A backend is traced only if JAX lowers the program for one of the backend's platforms.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from natten_jax import backends
from natten_jax.arrays.biases import per_head_key_bias, with_hidden_keys_of_inputs
from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import (
    Cotangents,
    Differentiable,
    Gradients,
    Operands,
    Output,
    Saved,
    key_arrays,
    types_like,
    vary_alike,
)
from natten_jax.backends.base import Backend, Earlier, PureJaxBackend
from natten_jax.backends.select import DeviceCall, device_calls
from natten_jax.execution import primitive, strips
from natten_jax.execution.kernel_operands import KernelOperands, converted, scaled
from natten_jax.execution.primitive import Computation, Spec, forward_only, in_reverse_only, named
from natten_jax.execution.strips import with_start_of
from natten_jax.plan.plan import Plan, Request
from natten_jax.sharding import explicit
from natten_jax.sharding.halos import exchange, overlap
from natten_jax.sharding.halos.exchange import Exchange, lines_of


def _compute_plain(plan: Plan, call: DeviceCall, operands: Operands) -> Differentiable:
    backend: Any = backends.by_id(plan.backend)
    operands = operands._replace(inputs=with_hidden_keys_of_inputs(operands.inputs))
    results = backend.forward_differentiable(plan, converted(plan.problem, operands))
    return results._replace(out=scaled(plan.problem, operands, results.out))


def _derive_plain(
    plan: Plan,
    structure: Any,
    primals: Sequence[jax.Array],
    results: Sequence[jax.Array],
    positions: Sequence[int],
    read: Sequence[int] | None,
    given: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Compute the analytic derivative of a plain JAX backend.

    The function returns tangents of the results in forward mode, and cotangents of the operands in reverse mode.

    Args:
        plan: The plan of the pass.
        structure: Tree structure of the operands.
        primals: Leaves of the operands.
        results: The results of the forward pass.
        positions: Indices of leaves: in forward mode the leaves that have tangents, in reverse mode the leaves whose
            cotangents are computed.
        read: In reverse mode, indices of the results that have cotangents. ``None`` in forward mode.
        given: Tangents of the leaves in forward mode, cotangents of the results in reverse mode.
    """
    (operands,) = jax.tree.unflatten(structure, primals)
    operands = operands._replace(inputs=with_hidden_keys_of_inputs(operands.inputs))
    outputs = Differentiable(*results)
    backend: Any = backends.by_id(plan.backend)  # only backends that define tangents and gradients have residuals
    by_position = dict(zip(positions if read is None else read, given, strict=True))
    if read is None:
        every = [by_position[i] if i in by_position else jnp.zeros_like(array) for i, array in enumerate(primals)]
        (tangents,) = jax.tree.unflatten(structure, every)
        return backend.tangents(plan, operands, outputs, tangents.inputs)
    cotangents = Cotangents(by_position[0] if 0 in by_position else jnp.zeros_like(outputs.out), by_position.get(1))
    (numbers,) = jax.tree.unflatten(structure, range(len(primals)))
    wanted = jax.tree.map(lambda number: number in positions, numbers.inputs)
    gradients = dict(zip(numbers.inputs, backend.gradients(plan, operands, outputs, cotangents, wanted), strict=True))
    return [gradients[i].astype(primals[i].dtype) for i in positions]


def _plain_types(request: Request, operands: Any) -> Differentiable:
    assert request.backend is not None
    backend = backends.find(request.backend, request.problem.operator)
    query, width = operands.inputs.query, backend.capabilities.residual_width
    per_query, dtype = query.shape[:-1], request.problem.element.accumulator
    shapes = (*per_query, request.problem.head_dim_v), per_query, (*per_query, width)
    out, logsumexp, residuals = types_like(query, *[(shape, dtype) for shape in shapes])
    return Differentiable(out, logsumexp, residuals if width else None)


def plain_backend(request: Request) -> PureJaxBackend | None:
    """Return the plain JAX backend that runs the forward pass on all platforms; ``None`` if there is no such backend.

    Raises:
        ValueError: No backend can run the request on any device that the program may be lowered for.
    """
    used = None
    for call in device_calls(request):
        backend = backends.by_id(call.plan("forward").backend)
        if used not in (None, backend) or not isinstance(backend, PureJaxBackend):
            return None
        used = backend
    return used


def _forward_plain(backend: PureJaxBackend, request: Request, operands: Operands) -> Output:
    """Compute output and logsumexp on a plain JAX backend. JAX can differentiate them to any order."""
    operands = operands._replace(inputs=per_head_key_bias(operands.inputs))
    request = dataclasses.replace(request, backend=f"{backend.family}-{request.problem.operator}")
    leaves, structure = jax.tree.flatten((operands,))
    rule = _derive_plain if backend.capabilities.residual_width else None
    spec = Spec("plain forward", "forward", _plain_types, _compute_plain, is_differentiable=True, rule=rule)
    out, logsumexp, *_ = primitive.bind(Computation(spec, structure), request, leaves)
    return Output(out.astype(request.problem.output_dtype), logsumexp)


def fuses_additional_kv(request: Request) -> bool:
    """Return True if the forward pass supports additional key/value tokens on every platform that can run the pass."""
    if request.problem.own_extents:  # in kernels, every query sees these tokens, but padding queries must see no key
        return False
    plans = (call.plan("forward") for call in device_calls(request))
    return all("additional_kv" in backends.by_id(plan.backend).capabilities.features for plan in plans)


def _output_types(request: Request, operands: Any) -> Output:
    problem, query = request.problem, operands.inputs.query
    per_query = query.shape[:-1]
    out = (*per_query, problem.head_dim_v), problem.output_dtype
    return Output(*types_like(query, out, (per_query, problem.element.accumulator)))


def _saved_types(request: Request, operands: Any, *_: Any) -> Saved:
    output = _output_types(request, operands)
    return Saved(*output, output.logsumexp)


def _gradient_types(request: Request, operands: Any, saved: Any, cotangents: Any) -> Gradients:
    inputs, structure = jax.tree.flatten(operands.inputs)
    types = types_like(inputs[0], *[(each.shape, each.dtype) for each in inputs])
    result: Gradients = jax.tree.unflatten(structure, types)
    return result


def _saved_with_strips(backend: Backend, plan: Plan, operands: Operands) -> Saved:
    """Compute a forward pass without wrapped keys, and continue it with one pass per strip of wrapped keys."""
    without_strips, inner = strips.without_strips(plan, operands)
    saved = backend.forward(without_strips, inner, saves=True)
    for strip in strips.strips_of(plan, operands):
        saved = _continued(backend, *strip.strip_pass(plan, operands), Earlier(saved, strip.query_box))
    return saved


def _continued(backend: Backend, plan: Plan, operands: Operands, earlier: Earlier) -> Saved:
    if backend.form(plan).continues:
        return backend.forward(plan, operands, saves=True, earlier=earlier)
    return strips.continued(functools.partial(backend.forward, plan, saves=True), operands, *earlier)


def _gradients_with_strips(
    backend: Backend, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents
) -> Gradients:
    """Add up the gradients of a pass without wrapped keys and of one pass per strip of wrapped keys."""
    total = backend.backward(*strips.without_strips(plan, operands), saved, cotangents)
    for strip in strips.strips_of(plan, operands):
        part_plan, part = strip.strip_pass(plan, operands)
        box = strip.query_box
        assert part.origins is not None
        query, part_saved, part_cotangents = jax.tree.map(box.cut, (part.inputs.query, saved, cotangents))
        part = part.with_origins(with_start_of(box, part.origins), query=query)
        more = backend.backward(part_plan, part, part_saved, part_cotangents)
        total = strip.add_gradients(total, more)._replace(
            query=box.update(total.query, box.cut(total.query) + more.query),
            scale=None if total.scale is None or more.scale is None else total.scale + more.scale,
        )
    return total


def _needs_strips(plan: Plan, operands: Operands) -> bool:
    return "wrap" in plan.problem.edges and strips.are_needed(plan, operands)


def _compute_forward(saves: bool, plan: Plan, call: DeviceCall, operands: Operands) -> Saved:
    kernels = KernelOperands.for_plan(plan, call.request.problem, operands)
    if _needs_strips(plan, kernels.operands):
        saved = _saved_with_strips(kernels.backend, plan, kernels.operands)
    else:
        saved = kernels.backend.forward(plan, kernels.operands, saves=saves)
    return kernels.result(saved if saves else saved._replace(remainder=None))


def _compute_continued(plan: Plan, call: DeviceCall, operands: Operands, saved: Saved, query_box: QueryBox) -> Saved:
    kernels = KernelOperands.for_plan(plan, call.request.problem, operands)
    operands, saved = kernels.operands, saved._replace(out=kernels.padded_output(saved.out))
    if _needs_strips(plan, kernels.operands):
        plan, operands = strips.unwrapped(plan, operands)
    return kernels.result(_continued(kernels.backend, plan, operands, Earlier(saved, query_box)))


def _compute_gradients(
    plan: Plan, call: DeviceCall, operands: Operands, saved: Saved, cotangents: Cotangents
) -> Gradients:
    if call.plan("forward").backend != plan.backend:
        saved = saved._replace(remainder=None)
    kernels = KernelOperands.for_plan(plan, call.request.problem, operands)
    saved_and_cotangents = kernels.saved(saved), cotangents._replace(out=kernels.padded_output(cotangents.out))
    if _needs_strips(plan, kernels.operands):
        gradients = _gradients_with_strips(kernels.backend, plan, kernels.operands, *saved_and_cotangents)
    else:
        gradients = kernels.backend.backward(plan, kernels.operands, *saved_and_cotangents)
    return kernels.gradients(gradients, saved, cotangents)


def _exchange(
    run_part: Callable[..., Any],
    spec: Spec,
    plan: Plan,
    request: Request,
    halos: Exchange,
    operands: Operands,
    *arguments: Any,
) -> Any:
    """Exchange halos and then run a pass, or overlap the exchange with the pass if that is predicted to be faster."""
    run_spec = functools.partial(run_part, spec)
    if overlap.overlaps_exchange(plan, request, halos, has_sinks=operands.inputs.sinks is not None):
        if spec is BACKWARD:
            return overlap.backward(run_spec, request, halos, operands, *arguments)
        saving, continued = functools.partial(run_part, SAVING), functools.partial(run_part, CONTINUED)
        saved = overlap.forward(saving, continued, request, halos, operands)
        return saved if spec is SAVING else Output(saved.out, saved.logsumexp)
    results = run_spec(request, halos.with_halos(operands), *arguments)
    if spec is not BACKWARD:
        return results
    return results._replace(**{name: halos.returned(array) for name, array in key_arrays(results).items()})


FORWARD = Spec("forward", "forward", _output_types, functools.partial(_compute_forward, False), _exchange)
SAVING = Spec("forward saving", "forward", _saved_types, functools.partial(_compute_forward, True), _exchange)
CONTINUED = Spec("forward continued", "forward", _saved_types, _compute_continued)
BACKWARD = Spec("backward", "backward", _gradient_types, _compute_gradients, _exchange)


#: The plans of the forward and the backward pass.
_Plans = tuple[Plan, Plan]


def run(spec: Spec, request: Request, operands: Operands, *arguments: Any, plans: _Plans | None = None) -> Any:
    """Run a pass on the backend that is selected for each platform.

    Args:
        spec: The pass: ``FORWARD``, ``SAVING``, ``CONTINUED`` or ``BACKWARD``.
        request: The call.
        operands: The arrays of the call.
        *others: Further arguments of the pass, such as saved results and cotangents.
        plans: Plans of the forward and of the backward pass, if each of these passes exchanges halos itself. ``None``
            if the operands already contain all keys that the device needs.

    Returns:
        :class:`Output` of ``FORWARD``, :class:`Gradients` of ``BACKWARD``, :class:`Saved` of the other passes.
    """
    if plans is not None:
        assert spec.exchange is not None
        halos, plan = (
            Exchange.for_problem(request.problem, lines_of(request.token_axes)),
            plans[spec.pass_ == "backward"],
        )
        return spec.exchange(run, spec, plan, _with_axes_as_parts(request), halos, operands, *arguments)
    leaves, structure = jax.tree.flatten((operands, *arguments))
    results = primitive.bind(Computation(spec, structure), request, leaves)
    if spec is BACKWARD:
        return jax.tree.unflatten(jax.tree.structure(operands.inputs), results)
    return Output(*results) if spec is FORWARD else Saved(*results)


@functools.partial(jax.jit, static_argnums=0)
def attend(request: Request, operands: Operands) -> Output:
    """Compute attention. The result is differentiable in all floating-point operands, except in calls on 8-bit arrays.

    JAX traces equal calls of a program only once.

    Raises:
        ValueError: No backend can run the request on any device that the program may be lowered for.
    """
    if request.problem.element.is_float8:
        operands = operands._replace(inputs=forward_only(operands.inputs))
    plain = plain_backend(_with_axes_as_parts(request))
    if explicit.mesh_of(operands) is not None:
        return explicit.over_explicit_axes(functools.partial(_attend_on_device, plain), request, operands)
    return _attend_on_device(plain, request, vary_alike(operands))


def _attend_on_device(plain: PureJaxBackend | None, request: Request, operands: Operands) -> Output:
    """Compute attention on the arrays of one device, and exchange halos if ``token_axes`` split token dimensions.

    Args:
        plain: The result of :func:`plain_backend`. JAX differentiates this backend. If it is ``None``, the passes are
            the rules of a ``custom_vjp``.
        request: The call.
        operands: The device's arrays.
    """
    part = _with_axes_as_parts(request)
    plans = None
    if request.token_axes:
        plans = _overlapping_plans(request)
        if plans is None:
            operands = vary_alike(exchange.with_halos(request.problem, request.token_axes, operands))
    # JAX differentiates the backend itself: in forward and reverse mode, and to any order.
    if plain is not None and plans is None:
        return _forward_plain(plain, part, operands)
    operands = operands._replace(inputs=in_reverse_only(operands.inputs))
    return _attend_with_kernels(part if plans is None else request, plans, operands)


def _with_axes_as_parts(request: Request) -> Request:
    """Return one device's request if ``token_axes`` split token dimensions, otherwise the request itself."""
    if not request.token_axes:
        return request
    return dataclasses.replace(request, token_axes=(), parts=exchange.parts_of(request.token_axes))


def _overlapping_plans(request: Request) -> _Plans | None:
    """Return the plans of both passes if at least one of the passes overlaps its halo exchange with computation.

    With these plans, each pass exchanges halos itself. Without plans (``None``), halos are exchanged once, before both
    passes. The decision is made for the default device. If the default device cannot run both passes, the decision is
    made for the first kind of device that can. Results do not depend on the decision.

    The operands never contain sinks here. If tokens are split over devices, sinks are added to the output later
    (:func:`natten_jax.ops.canonicalize.defer_sinks`).
    """
    part = _with_axes_as_parts(request)
    for call in device_calls(part):
        try:
            plans = call.plan("forward"), call.plan("backward")
        except ValueError:
            continue
        if any(backends.by_id(plan.backend).capabilities.is_plain_jax for plan in plans):
            return None  # JAX differentiates a plain JAX pass together with its halo exchange
        halos = Exchange.for_problem(request.problem, lines_of(request.token_axes))
        return plans if any(overlap.overlaps_exchange(plan, part, halos) for plan in plans) else None
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_with_kernels(request: Request, plans: _Plans | None, operands: Operands) -> Output:
    result: Output = run(FORWARD, request, operands, plans=plans)
    return result


def _attend_forward(request: Request, plans: _Plans | None, operands: Any) -> tuple[Output, tuple[Operands, Saved]]:
    # With symbolic zeros, JAX passes each array together with a flag that is True if the array is differentiated.
    operands = jax.tree.map(operator.attrgetter("value"), operands)
    saved = Saved(*named(run(SAVING, request, operands, plans=plans)))
    return Output(saved.out, saved.logsumexp), (operands, saved)


def _attend_backward(
    request: Request, plans: _Plans | None, residuals: tuple[Operands, Saved], given: Any
) -> tuple[Operands]:
    operands, saved = residuals
    # JAX passes a SymbolicZero for a cotangent that is zero.
    out, logsumexp = [None if isinstance(each, SymbolicZero) else each for each in given]
    if out is None:
        out, _ = vary_alike((jnp.zeros_like(saved.out), saved.out))
    gradients = run(BACKWARD, request, operands, saved, Cotangents(out, logsumexp), plans=plans)
    return (Operands(gradients),)  # origins and layouts are integers, which have no gradients


# Without symbolic zeros, JAX would allocate an array of zeros as cotangent of the logsumexp if a loss uses only the
# output.
_attend_with_kernels.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
