"""One differentiable operator over every backend: ``custom_vjp`` of the two passes.

Which backend runs a pass is decided when the program is lowered, per pass and platform: one traced function serves CPU
and GPU, and nothing is traced for platforms that a program is not lowered for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from natten_jax import backends
from natten_jax.arrays.biases import of_each_head
from natten_jax.arrays.boxes import QueryBox
from natten_jax.arrays.operands import (
    Cotangents,
    Gradients,
    Operands,
    Output,
    Role,
    Saved,
    roles_of,
    type_like,
    vary_alike,
)
from natten_jax.backends.select import resolve
from natten_jax.execution import primitive, strips
from natten_jax.execution.differentiable_forward import PlainForward
from natten_jax.execution.kernel_operands import KernelOperands
from natten_jax.execution.primitive import (
    Computation,
    Derivative,
    Result,
    Run,
    forward_only,
    in_reverse_only,
    named,
    refuse,
)
from natten_jax.execution.strips import continued, with_start_of
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device, lowering_targets
from natten_jax.plan.plan import BackendId, Plan, Request
from natten_jax.sharding import explicit
from natten_jax.sharding.halos import exchange, overlap
from natten_jax.sharding.halos.exchange import Exchange, lines_of


@dataclasses.dataclass(frozen=True)
class _PassSpec:
    """What the computation of a pass is.

    Attributes:
        pass_: The pass that it belongs to.
        types: Abstract types of its results, from the request and the abstract types of its arguments.
        compute: Computes them, from the plan, the request, the device and the arguments.
    """

    pass_: Pass
    types: Callable[..., Any]
    compute: Callable[..., Any]

    def __repr__(self) -> str:
        return self.compute.__name__  # the same in every process


@dataclasses.dataclass(frozen=True)
class _PassComputation(Computation):
    """A pass, on whatever backend a platform has for it.

    Attributes:
        kind: What is computed.
        structure: The structure of the arguments that :class:`_PassSpec` speaks of.
    """

    kind: _PassSpec
    structure: Any

    @functools.cached_property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        return roles_of(*self._arguments(range(self.structure.num_leaves)))

    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device."""
        return resolve(request, device, self.kind.pass_)

    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns."""
        types = self.kind.types(request, *self._arguments(arguments))
        return [Result(*each) for each in zip(roles_of(types), jax.tree.leaves(types), strict=True)]

    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The results on a device."""
        found = self.kind.compute(plan, request, device, *self._arguments(arguments))
        results: list[jax.Array] = jax.tree.leaves(found)
        return results

    def compute_exchanging(
        self, run: Run, plan: Plan, request: Request, exchange: Exchange, *arguments: Any
    ) -> list[Any]:
        """The results where token dimensions are split; if it pays, most of them while keys and values travel."""

        def run_part(kind: _PassSpec, request: Request, *arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            types = kind.types(request, *arguments)
            return jax.tree.unflatten(
                jax.tree.structure(types), run(_PassComputation(kind, structure), request, leaves)
            )

        every = self._arguments(arguments)
        found: Any
        if self.kind.pass_ == "forward":
            kinds = self.kind, _FORWARD_SAVING, _FORWARD_CONTINUED
            forward = overlap.ForwardPass(*(functools.partial(run_part, kind) for kind in kinds))
            found = overlap.forward(forward, plan, request, exchange, *every)
        else:
            found = overlap.backward(functools.partial(run_part, self.kind), plan, request, exchange, *every)
        results: list[Any] = jax.tree.leaves(Output(*found[:2]) if self.kind is _FORWARD else found)
        return results

    def derivative(self, given: Sequence[int]) -> Derivative:
        """None: it may be native kernels that run.

        Raises:
            NotImplementedError: Always.
        """
        refuse()
        raise AssertionError

    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies."""
        operands, *others = self._arguments(range(self.structure.num_leaves))
        position = len(jax.tree.leaves(operands))
        structure = jax.tree.structure((operands._replace(origins=position), *others))
        return dataclasses.replace(self, structure=structure), position

    def _arguments(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self.structure, leaves)


def forward(request: Request, operands: Operands) -> Output:
    """Output and logsumexp."""
    return Output(*_run(_FORWARD, request, operands))


def plain_backend(request: Request) -> BackendId | None:
    """The backend that runs the forward pass on every platform, if JAX differentiates it; ``None`` otherwise."""
    used: BackendId | None = None
    for plan in _forward_plans(request):
        if used not in (None, plan.backend) or not backends.of(plan.backend).is_differentiable:
            return None
        used = plan.backend
    return used


def forward_plain(request: Request, operands: Operands) -> Output | None:
    """Output and logsumexp, differentiable to any order; ``None`` unless JAX differentiates one backend everywhere."""
    used = plain_backend(request)
    if used is None or operands.inputs.sinks is not None:
        return None
    operands = operands._replace(inputs=of_each_head(operands.inputs))
    leaves, structure = jax.tree.flatten(operands)
    out, logsumexp, *_ = primitive.bind(PlainForward(used, structure), request, leaves)
    return Output(out.astype(request.problem.output_dtype), logsumexp)


def forward_saving(request: Request, operands: Operands) -> Saved:
    """Output and logsumexp, and what the backward pass wants to know besides."""
    return Saved(*_run(_FORWARD_SAVING, request, operands))


def forward_continued(request: Request, operands: Operands, saved: Saved, seeing: QueryBox) -> Saved:
    """What is saved of attention to these keys, too, after a pass on others.

    Args:
        request: The call.
        operands: The operands of all queries, and of keys that only queries of the box see.
        saved: What earlier passes saved.
        seeing: The box.
    """
    return Saved(*_run(_FORWARD_CONTINUED, request, operands, saved, seeing))


def backward(request: Request, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """The gradients of the differentiable operands."""
    gradients = _run(_BACKWARD, request, operands, saved, cotangents)
    result: Gradients = jax.tree.unflatten(jax.tree.structure(operands.inputs), gradients)
    return result


def fuses_additional_kv(request: Request) -> bool:
    """Whether the forward pass takes additional key/value tokens on every platform that can run it."""
    if request.problem.own_extents:  # every query sees additional tokens, but padding is none
        return False
    return all(backends.of(plan.backend).fuses_additional_kv for plan in _forward_plans(request))


def _forward_plans(request: Request) -> Iterator[Plan]:
    """How the forward pass runs, on each platform where it does."""
    for device in lowering_targets().values():
        with contextlib.suppress(ValueError):
            yield resolve(request, device, "forward")


def _output_types(request: Request, operands: Any) -> Output:
    problem, query = request.problem, operands.inputs.query
    per_query = query.shape[:-1]
    return Output(
        type_like(query, (*per_query, problem.head_dim_v), jnp.dtype(problem.output_dtype)),
        type_like(query, per_query, problem.element.accumulator),
    )


def _saved_types(request: Request, operands: Any, *_: Any) -> Saved:
    output = _output_types(request, operands)
    return Saved(*output, output.logsumexp)


def _gradient_types(request: Request, operands: Any, saved: Any, cotangents: Any) -> Gradients:
    query, types = operands.inputs.query, operands.inputs
    return Gradients._make([None if each is None else type_like(query, each.shape, each.dtype) for each in types])


def _saved_with_strips(plan: Plan, operands: Operands) -> Saved:
    """What is saved where keys behind the ends of dimensions that wrap are strips of their own."""
    backend = backends.of(plan.backend)
    saved = backend.forward_saving(*strips.without_strips(plan, operands))
    for strip in strips.strips_of(plan, operands):
        saved = _continued(*strip.placed(plan, operands), saved, strip.seeing)
    return saved


def _continued(plan: Plan, operands: Operands, saved: Saved, seeing: QueryBox) -> Saved:
    backend = backends.of(plan.backend)
    found = backend.forward_continued(plan, operands, saved, seeing)
    return (
        continued(functools.partial(backend.forward_saving, plan), operands, saved, seeing) if found is None else found
    )


def _gradients_with_strips(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """The gradients, likewise: those by some of the keys add up."""
    backend = backends.of(plan.backend)
    found = backend.backward(*strips.without_strips(plan, operands), saved, cotangents)
    for strip in strips.strips_of(plan, operands):
        part_plan, part = strip.placed(plan, operands)
        box = strip.seeing
        assert part.origins is not None
        query, part_saved, part_cotangents = jax.tree.map(box.cut, (part.inputs.query, saved, cotangents))
        part = part._replace(inputs=part.inputs._replace(query=query), origins=with_start_of(box, part.origins))
        more = backend.backward(part_plan, part, part_saved, part_cotangents)
        found = strip.with_added(found, more)._replace(
            query=box.put(found.query, box.cut(found.query) + more.query),
            scale=None if found.scale is None or more.scale is None else found.scale + more.scale,
        )
    return found


def _needs_strips(plan: Plan, operands: Operands) -> bool:
    return "wrap" in plan.problem.edges and strips.are_needed(plan, operands)


def _compute_forward(plan: Plan, request: Request, device: Device, operands: Operands) -> Output:
    kernels = KernelOperands.of(plan, request, operands)
    if _needs_strips(plan, kernels.operands):
        output = Output(*_saved_with_strips(plan, kernels.operands)[:2])
    else:
        output = backends.of(plan.backend).forward(plan, kernels.operands)
    return kernels.result(output)


def _compute_saved(plan: Plan, request: Request, device: Device, operands: Operands) -> Saved:
    kernels = KernelOperands.of(plan, request, operands)
    if _needs_strips(plan, kernels.operands):
        saved = _saved_with_strips(plan, kernels.operands)
    else:
        saved = backends.of(plan.backend).forward_saving(plan, kernels.operands)
    return kernels.result(saved)


def _compute_continued(
    plan: Plan, request: Request, device: Device, operands: Operands, saved: Saved, seeing: QueryBox
) -> Saved:
    kernels = KernelOperands.of(plan, request, operands)
    operands, saved = kernels.operands, saved._replace(out=kernels.heads.widen_values(saved.out))
    if _needs_strips(plan, kernels.operands):
        plan, operands = strips.on_line(plan, operands)
    return kernels.result(_continued(plan, operands, saved, seeing))


def _compute_gradients(
    plan: Plan, request: Request, device: Device, operands: Operands, saved: Saved, cotangents: Cotangents
) -> Gradients:
    if resolve(request, device, "forward").backend != plan.backend:
        saved = saved._replace(remainder=None)
    kernels = KernelOperands.of(plan, request, operands)
    of_kernels = kernels.saved(saved), cotangents._replace(out=kernels.heads.widen_values(cotangents.out))
    if _needs_strips(plan, kernels.operands):
        found = _gradients_with_strips(plan, kernels.operands, *of_kernels)
    else:
        found = backends.of(plan.backend).backward(plan, kernels.operands, *of_kernels)
    return kernels.gradients(found, saved, cotangents)


_FORWARD = _PassSpec("forward", _output_types, _compute_forward)
_FORWARD_SAVING = _PassSpec("forward", _saved_types, _compute_saved)
_FORWARD_CONTINUED = _PassSpec("forward", _saved_types, _compute_continued)
_BACKWARD = _PassSpec("backward", _gradient_types, _compute_gradients)


def _run(kind: _PassSpec, request: Request, *arguments: Any) -> list[jax.Array]:
    leaves, structure = jax.tree.flatten(arguments)
    return primitive.bind(_PassComputation(kind, structure), request, leaves)


@functools.partial(jax.jit, static_argnums=0)
def attend(request: Request, operands: Operands) -> Output:
    """Run the operator; differentiable in every floating-point operand. Equal calls of a program are traced once.

    Raises:
        ValueError: No backend can run the request on any device that the program may be lowered for.
    """
    _check_runs_somewhere(request)
    if request.problem.element.is_float8:
        operands = operands._replace(inputs=jax.tree.map(forward_only, operands.inputs))
    if explicit.mesh_of(operands) is not None:
        return explicit.over_explicit_axes(_attend_locally, request, operands)
    return _attend_locally(request, vary_alike(operands))


def _check_runs_somewhere(request: Request) -> None:
    """Check that some device which the program may be lowered for can run the request.

    Raises:
        ValueError: None can; the message is about the default device.
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
    if request.token_axes and _exchanging_call_of(request) is None:
        operands = vary_alike(exchange.brought(request.problem, request.token_axes, operands))
        request = _of_part(request)
    # Plain JAX differentiates itself: forward mode and higher orders, too.
    output = None if request.token_axes else forward_plain(request, operands)
    if output is not None:
        return output
    return _attend(request, operands._replace(inputs=jax.tree.map(in_reverse_only, operands.inputs)))


def _of_part(request: Request) -> Request:
    """What one of the devices runs that ``token_axes`` speaks of."""
    return dataclasses.replace(request, token_axes=(), parts=exchange.parts_of(request.token_axes))


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
    same. Sinks are not among the operands: if a caller splits tokens, they are added after the pass
    (:func:`natten_jax.ops.canonicalize.in_pass`).
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
        exchange = Exchange.of(request.problem, lines_of(request.token_axes))
        if not any(overlap.computes_meanwhile(plan, request, exchange) for plan in plans):
            return None
        return _ExchangingCall(part, exchange, plans)
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(request: Request, operands: Operands) -> Output:
    call = _exchanging_call_of(request)
    if call is None:
        return Output(*_run(_FORWARD, request, operands))
    return Output(*_forward_exchanging(forward, call, operands)[:2])


def _forward_exchanging(
    function: Callable[[Request, Operands], Any], call: _ExchangingCall, operands: Operands
) -> Output | Saved:
    passes = overlap.ForwardPass(function, forward_saving, forward_continued)
    result: Output | Saved = overlap.forward(passes, call.plans[0], call.request, call.exchange, operands)
    return result


def _attend_forward(request: Request, operands: Any) -> tuple[Output, tuple[Operands, Saved]]:
    operands = jax.tree.map(operator.attrgetter("value"), operands)
    call = _exchanging_call_of(request)
    found = forward_saving(request, operands) if call is None else _forward_exchanging(forward_saving, call, operands)
    saved = Saved(*named(found))
    return Output(saved.out, saved.logsumexp), (operands, saved)


def _attend_backward(request: Request, residuals: tuple[Operands, Saved], given: Output) -> tuple[Operands]:
    cotangents = _cotangents(given, residuals[1])
    call = _exchanging_call_of(request)
    if call is None:
        gradients = backward(request, *residuals, cotangents)
    else:
        gradients = overlap.backward(backward, call.plans[1], call.request, call.exchange, *residuals, cotangents)
    return (Operands(gradients),)  # origins are integers and have no gradient


def _cotangents(given: Any, saved: Saved) -> Cotangents:
    """Those that JAX gives, which may say that they are zero."""
    out, logsumexp = [None if isinstance(each, SymbolicZero) else each for each in given]
    if out is None:
        out, _ = vary_alike((jnp.zeros_like(saved.out), saved.out))
    return Cotangents(out, logsumexp)


# A loss that reads the output alone has no cotangent of the logsumexp: zeros would be written and read.
_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
