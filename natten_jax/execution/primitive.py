"""The JAX primitive of a pass: its rules for batching, for differentiation, and for lowering to one or more devices.

A *computation* is a pass or a derivative of a pass. In a traced program, it is a single equation, which does not depend
on the backend or the platform. When JAX lowers the program for a platform, a backend is selected. Only then are the
operations of this backend traced. A traced function can therefore be lowered for both CPUs and GPUs. Platforms that it
is not lowered for cost no time.

A computation is hashable, and equal computations share one compiled program. The derivative of a computation is also a
computation. Plain JAX backends can therefore be differentiated to any order. Their derivatives are split over a mesh in
the same way as kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax import backends
from natten_jax.arrays.operands import Inputs, Role, roles_of, types_like, vary_alike
from natten_jax.backends.select import DeviceCall
from natten_jax.performance import Pass
from natten_jax.plan import plan as plan_marks
from natten_jax.plan.devices import PLATFORMS, lowering_target
from natten_jax.plan.plan import Plan, Request
from natten_jax.sharding import _jax_internals, auto
from natten_jax.sharding.explicit import map_sequentially
from natten_jax.sharding.halos.exchange import DeviceLine, Exchange

_Array = Any
_JET_RULES: dict[Primitive, Callable[..., Any]] = jet.jet_rules
#: One list per result: the result itself, followed by its derivatives of order 1, 2, ...
_Derivatives = list[list[jax.Array]]


def _compute_coefficients(
    primals: Sequence[_Array], series: Sequence[Sequence[_Array]], **parameters: Any
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Compute Taylor coefficients of a pass by nested ``jax.jvp``. This is the rule for ``jax.experimental.jet``.

    Each additional order doubles the time.
    """

    def evaluate(time: jax.Array) -> _Derivatives:
        arguments = [_evaluate_polynomial(time, *each) for each in zip(primals, series, strict=True)]
        return [[result] for result in _pass_p.bind(*arguments, **parameters)]

    function: Callable[[jax.Array], _Derivatives] = evaluate
    for _ in series[0]:
        function = _with_next_derivative(function)
    results = function(jnp.zeros((), jnp.float32))
    coefficients = [_divide_by_factorials(derivatives) for derivatives in results]
    return [first for first, *_ in coefficients], [rest for _, *rest in coefficients]


def _evaluate_polynomial(time: jax.Array, first: _Array, rest: Sequence[_Array]) -> _Array:
    """Return ``first + rest[0] * time + rest[1] * time**2 + ...``, or only ``first`` if it has an integer type."""
    if not jnp.issubdtype(jnp.result_type(first), jnp.inexact):
        return first
    first, *rest = vary_alike([jnp.asarray(first), *map(jnp.asarray, rest)])
    total = jnp.zeros_like(first)
    for term in rest[::-1]:
        total = (total + term) * time.astype(first.dtype)
    return first + total


def _with_next_derivative(function: Callable[[jax.Array], _Derivatives]) -> Callable[[jax.Array], _Derivatives]:
    """Return a function that calls ``function`` and appends the next derivative to each list of its result."""

    def extended(time: jax.Array) -> _Derivatives:
        values, changes = jax.jvp(function, (time,), (jnp.ones_like(time),))
        return [[*value, change[-1]] for value, change in zip(values, changes, strict=True)]

    return extended


def _divide_by_factorials(derivatives: Sequence[jax.Array]) -> list[jax.Array]:
    """Convert derivatives of order 0, 1, 2, ... to Taylor coefficients."""
    return [each / jnp.asarray(math.factorial(order), each.dtype) for order, each in enumerate(derivatives)]


#: Two names for ``checkpoint_name``: the name of the saved output, and the name of all other saved arrays (the
#: logsumexp, and a remainder or residuals).
CHECKPOINT_NAMES = ("natten_jax_output", "natten_jax_logsumexp")


def named(saved: Sequence[Any]) -> list[Any]:
    """Apply ``checkpoint_name`` to the saved arrays of a forward pass; the first array is the output."""
    output_name, rows_name = CHECKPOINT_NAMES
    return [checkpoint_name(array, rows_name if i else output_name) for i, array in enumerate(saved)]


REASON = (
    "native kernels have first derivatives in reverse mode only (jax.grad, jax.vjp): forward mode and higher "
    'derivatives require backend="flex-fna", or "flex-fmha" for attention'
)
REASON_OF_FLOAT8 = (
    "8-bit arrays have no gradients: give the operators wider arrays and fp8, which quantizes them and computes "
    "the gradients of the call without fp8"
)


def refuse(*_: Any, reason: str = REASON, **__: Any) -> Any:
    """Reject a transformation that a primitive does not support.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(reason)


def _identity(name: str, jvp: Callable[..., Any]) -> Primitive:
    """Create a primitive that returns its arguments unchanged, with ``jvp`` as its differentiation rule.

    With a primitive, JAX batches tangents only in forward mode. The batching rule of the tangents can therefore raise
    an error. With ``jax.custom_jvp``, JAX would trace the differentiation rule before batching it. A gradient through
    ``jax.vmap`` would then also batch the tangents.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays: arrays)
    primitive.def_abstract_eval(lambda *arrays: arrays)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = lambda arrays, axes: (primitive.bind(*arrays), axes)
    mlir.register_lowering(primitive, lambda _, *arrays: arrays)
    return primitive


def _in_reverse_only_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    given = iter(_tangent_p.bind(*[each for each in tangents if not isinstance(each, ad.Zero)]))
    return _in_reverse_only_p.bind(*primals), [each if isinstance(each, ad.Zero) else next(given) for each in tangents]


_in_reverse_only_p = _identity("natten_jax_in_reverse_only", _in_reverse_only_jvp)
_JET_RULES[_in_reverse_only_p] = refuse

# The transpose of this primitive returns cotangents unchanged. Evaluating, lowering or batching the primitive raises an
# error, because JAX does so only in forward mode. The custom_vjp that reads the arrays does not support forward mode.
_tangent_p = _identity("natten_jax_tangent", refuse)
_tangent_p.def_impl(refuse)
ad.primitive_transposes[_tangent_p] = lambda cotangents, *_: cotangents
batching.primitive_batchers[_tangent_p] = refuse
mlir.register_lowering(_tangent_p, refuse)

_refuse_float8 = functools.partial(refuse, reason=REASON_OF_FLOAT8)
_forward_only_p = _identity("natten_jax_forward_only", _refuse_float8)
_JET_RULES[_forward_only_p] = _refuse_float8


def _applied(primitive: Primitive, arrays: Inputs) -> Inputs:
    leaves, structure = jax.tree.flatten(arrays)
    result: Inputs = jax.tree.unflatten(structure, primitive.bind(*leaves))
    return result


def in_reverse_only(arrays: Inputs) -> Inputs:
    """Return the arrays unchanged. Reverse-mode differentiation is supported; forward mode raises an error."""
    return _applied(_in_reverse_only_p, arrays)


def forward_only(arrays: Inputs) -> Inputs:
    """Return the arrays unchanged. Differentiation in any mode raises an error: only the forward pass is supported."""
    return _applied(_forward_only_p, arrays)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A variant of the forward or backward pass, such as the forward pass that saves arrays for gradients.

    Attributes:
        name: Name in traced programs.
        pass_: ``"forward"`` or ``"backward"``. Tiles and backend are selected for this pass.
        types: Function ``(request, *arguments)`` that returns the abstract types of the results.
        compute: Function ``(plan, device_call, *arguments)`` that returns the results on one device.
        exchange: Function ``(run_part, spec, plan, request, exchange, *arguments)``, called if token dimensions are
            split over devices. It exchanges halos and returns the results. Its argument ``run_part`` is a function that
            runs a pass on one device. ``None`` if halos are always exchanged before the pass.
        is_differentiable: True if the pass has derivatives.
        rule: Function that computes the derivative of the pass from the arguments and the results of the pass. ``None``
            if JAX differentiates ``compute``.
    """

    name: str
    pass_: Pass
    types: Callable[..., Any]
    compute: Callable[..., Any]
    exchange: Callable[..., Any] | None = None
    is_differentiable: bool = False
    rule: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return self.name  # the default repr contains addresses of functions, which differ between processes


@dataclasses.dataclass(frozen=True)
class Computation:
    """A pass as a function of arrays. A backend is selected for each platform.

    The first two arrays are query and key. The leading axes of traced arrays are the *batch dimensions*: the axes that
    ``jax.vmap`` maps, followed by the batch axis.

    Attributes:
        spec: The pass.
        structure: Tree structure of the arguments of the pass; the first argument is :class:`Operands`.
    """

    spec: Spec
    structure: Any

    @property
    def is_differentiable(self) -> bool:
        """True if the pass has derivatives."""
        return self.spec.is_differentiable

    @property
    def rule(self) -> Callable[..., Any] | None:
        """Derivative of the pass; see :class:`Spec`."""
        return self.spec.rule

    @functools.cached_property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        return roles_of(*self.structured(range(self.structure.num_leaves)))

    def plan(self, call: DeviceCall) -> Plan:
        return call.plan(self.spec.pass_)

    def results(self, request: Request, arguments: Sequence[Any]) -> tuple[Sequence[Role], list[Any]]:
        """Return the roles and the abstract types of the results. The arguments are arrays or abstract types."""
        types = self.spec.types(request, *self.structured(arguments))
        return roles_of(types), jax.tree.leaves(types)

    def compute(self, plan: Plan, call: DeviceCall, *arguments: jax.Array) -> list[jax.Array]:
        """Compute the results on one device.

        Args:
            plan: Plan of the computation. Its ``pass_`` is ``"backward"`` if the caller computes a derivative.
            call: The device's part of the call.
            *arguments: Arrays ``[batch, ...]``, without mapped axes.
        """
        results: list[jax.Array] = jax.tree.leaves(self.spec.compute(plan, call, *self.structured(arguments)))
        return results

    def with_origins(self) -> tuple[Computation, int]:
        """Return a computation with ``Operands.origins`` as an additional argument, and the argument's position.

        The original computation must not have this argument.
        """
        operands, *arguments = self.structured(range(self.structure.num_leaves))
        position = len(jax.tree.leaves(operands))
        structure = jax.tree.structure((operands._replace(origins=position), *arguments))
        return dataclasses.replace(self, structure=structure), position

    def structured(self, leaves: Any) -> Any:
        """Build the arguments of the pass from their leaves."""
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a computation: tangents of its results, or cotangents of its arguments.

    The arguments have this order: the computation's arguments, the computation's results if it has a rule, and the
    given tangents or cotangents. Tangents or cotangents that are not given are zero.

    Attributes:
        computation: The computation.
        result_roles: Roles of the computation's results.
        positions: Indices of the computation's arguments: in forward mode the arguments that have tangents, in reverse
            mode the arguments whose cotangents are computed.
        read: In reverse mode, indices of the computation's results that have cotangents. ``None`` in forward mode.
    """

    computation: AnyComputation
    result_roles: tuple[Role, ...]
    positions: tuple[int, ...]
    read: tuple[int, ...] | None = None
    is_differentiable: ClassVar[bool] = True
    rule: ClassVar[None] = None

    @functools.cached_property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        roles, results = self.computation.roles, self.result_roles
        known = [*roles, *results] if self.computation.rule else [*roles]
        given = [roles[i] for i in self.positions] if self.read is None else [results[i] for i in self.read]
        return [*known, *given]

    @property
    def first_given(self) -> int:
        """Position of the first tangent or cotangent among the arguments."""
        return len(self.roles) - len(self.positions if self.read is None else self.read)

    def plan(self, call: DeviceCall) -> Plan:
        return dataclasses.replace(self.computation.plan(call), pass_="backward")

    def results(self, request: Request, arguments: Sequence[Any]) -> tuple[Sequence[Role], list[Any]]:
        """Return the roles and the abstract types of the results. The arguments are arrays or abstract types."""
        if self.read is None:
            roles, types = self.computation.results(request, arguments[: len(self.computation.roles)])
            # A rule returns only the tangents of output and logsumexp: residuals are treated as constants.
            return (roles[:2], types[:2]) if self.computation.rule else (roles, types)
        primals = [arguments[i] for i in self.positions]
        types = types_like(arguments[0], *[(primal.shape, primal.dtype) for primal in primals])
        return [self.computation.roles[i] for i in self.positions], types

    def compute(self, plan: Plan, call: DeviceCall, *arguments: jax.Array) -> list[jax.Array]:
        """Compute the tangents or cotangents."""
        count, first = len(self.computation.roles), self.first_given
        primals, results, given = arguments[:count], arguments[count:first], list(arguments[first:])
        if isinstance(self.computation, Computation) and self.computation.rule:
            return list(
                self.computation.rule(
                    plan, self.computation.structure, primals, results, self.positions, self.read, given
                )
            )

        def results_of(*some: jax.Array) -> list[jax.Array]:
            every = dict(enumerate(primals)) | dict(zip(self.positions, some, strict=True))
            results = self.computation.compute(plan, call, *every.values())
            return results if self.read is None else [results[i] for i in self.read]

        values = [primals[i] for i in self.positions]
        if self.read is None:
            return list(jax.jvp(results_of, values, given)[1])
        return list(jax.vjp(results_of, *values)[1](given))

    def with_origins(self) -> tuple[Derivative, int]:
        """Return a derivative with ``Operands.origins`` as an additional argument, and the argument's position."""
        computation, position = self.computation.with_origins()
        return dataclasses.replace(
            self, computation=computation, positions=tuple(i + (i >= position) for i in self.positions)
        ), position


AnyComputation = Computation | Derivative


def _compute_exchanging(
    computation: AnyComputation, call: DeviceCall, exchange: Exchange, arguments: Sequence[Any]
) -> list[Any]:
    """Exchange halos of keys and values between devices, and run a computation whose token dimensions are split.

    Args:
        computation: The computation.
        call: The device's part of the call.
        exchange: The halo exchange.
        arguments: The device's arrays.
    """
    if isinstance(computation, Computation) and computation.spec.exchange is not None:

        def run_part(spec: Spec, request: Request, *arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            types = jax.tree.structure(spec.types(request, *arguments))
            part = DeviceCall(request, call.device)
            return jax.tree.unflatten(types, _run_computation(Computation(spec, structure), part, leaves))

        spec, known = computation.spec, (computation.plan(call), call.request, exchange)
        structured = computation.spec.exchange(run_part, spec, *known, *computation.structured(arguments))
        results: list[Any] = jax.tree.leaves(structured)
        return results
    part, position = computation.with_origins()
    extended = list(arguments)
    with_halos = [i for i, role in enumerate(computation.roles) if role.tokens == "keys"]
    for i, array in zip(with_halos, exchange.extended([arguments[i] for i in with_halos]), strict=True):
        extended[i] = array
    extended.insert(position, exchange.origins())
    pairs = zip(_run_computation(part, call, extended), part.results(call.request, extended)[0], strict=True)
    return [exchange.returned(array) if role.tokens == "keys" else array for array, role in pairs]


def _run_entries(computation: AnyComputation, call: DeviceCall, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a computation on each batch entry, sequentially."""
    request = call.request.for_part(1, arrays[0].shape[-2], arrays[1].shape[-2])
    entry_call = DeviceCall(request, call.device)

    def run_one(entry: list[jax.Array]) -> list[jax.Array]:
        split = iter(entry)
        every = [array if is_same else next(split)[None] for is_same, array in zip(are_same, arrays, strict=True)]
        return [result[0] for result in _run_computation(computation, entry_call, every)]

    # True for arrays that all batch entries share. A bias table is shared if the extent of its batch axis is 1.
    are_same = [
        role is Role.WHOLE or (role is Role.PER_HEAD_OF_ALL_ENTRIES and array.shape[0] == 1)
        for role, array in zip(computation.roles, arrays, strict=True)
    ]
    results = jax.lax.map(run_one, [array for is_same, array in zip(are_same, arrays, strict=True) if not is_same])
    has_one_table = (Role.PER_HEAD_OF_ALL_ENTRIES, True) in zip(computation.roles, are_same, strict=True)
    roles, _ = computation.results(call.request, arrays)
    return [
        result.sum(axis=0, keepdims=True) if role is Role.PER_HEAD_OF_ALL_ENTRIES and has_one_table else result
        for role, result in zip(roles, results, strict=True)
    ]


_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "jax_debug_nans": ("nan", np.isnan),
    "jax_debug_infs": ("inf", np.isinf),
}


def check(results: Iterable[jax.Array], what: str) -> None:
    """Check results for NaN if ``jax_debug_nans`` is set, and for infinity if ``jax_debug_infs`` is set.

    Args:
        results: The results of an operation.
        what: Name of the operation, for the message.

    Raises:
        FloatingPointError: A result contains NaN or infinity, and the option for this value is set.
    """
    for option, (name, is_invalid) in _CHECKS.items():
        if getattr(jax.config, option):
            parts = [part.data for array in results for part in array.addressable_shards]
            if any(np.any(is_invalid(np.asarray(part))) for part in parts if part.dtype.kind != "i"):
                raise FloatingPointError(f"invalid value ({name}) encountered in {what}")


_pass_p = Primitive("natten_jax_pass")
_pass_p.multiple_results = True


def bind(
    computation: AnyComputation, request: Request, arguments: Sequence[jax.Array], mapped: int = 0
) -> list[jax.Array]:
    """Bind the primitive to arrays ``[*mapped, batch, ...]``. ``jax.vmap`` maps the axes before the batch axis.

    Args:
        computation: The computation.
        request: The call.
        arguments: Query, key and the other arguments of the computation.
        mapped: Number of axes that ``jax.vmap`` maps.
    """
    if 0 in arguments[0].shape[: mapped + 1]:  # kernels reject empty batches
        types = _types(*map(jax.typeof, arguments), computation=computation, request=request, mapped=mapped)
        return [vary_alike([jnp.zeros(each.shape, each.dtype), arguments[0]])[0] for each in types]
    results: list[jax.Array] = _pass_p.bind(*arguments, computation=computation, request=request, mapped=mapped)
    return results


@_pass_p.def_abstract_eval
def _types(*arguments: Any, computation: AnyComputation, request: Request, mapped: int) -> list[Any]:
    return computation.results(request, arguments)[1]


@_pass_p.def_impl
def _run_now(*arguments: Any, computation: AnyComputation, request: Request, **parameters: Any) -> Any:
    """Run a computation on concrete arguments as a compiled program, even under ``jax.disable_jit``."""
    # Under jax.disable_jit, jax.jit would call this function again, in an endless recursion.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        results = _compiled(computation=computation, request=request, **parameters)(*arguments)
    check(results, f"{request.problem.describe()} of natten_jax")
    return results


@functools.lru_cache(maxsize=256)
def _compiled(**parameters: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_pass_p.bind, **parameters))


def _map(
    arguments: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    computation: AnyComputation,
    request: Request,
    mapped: int,
) -> Any:
    """Batching rule: move the mapped axis to the front. It becomes a batch dimension, which a mesh may split."""
    (size,) = {array.shape[axis] for array, axis in zip(arguments, axes, strict=True) if axis is not None}

    def in_front(array: jax.Array, axis: int | None) -> jax.Array:
        return jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)

    roles = computation.roles
    if any(role is Role.WHOLE and axis is not None for role, axis in zip(roles, axes, strict=True)):
        every = [in_front(array, axis) for array, axis in zip(arguments, axes, strict=True)]
        results = map_sequentially(lambda each: bind(computation, request, each, mapped), every)
    else:
        arrays = [
            array if role is Role.WHOLE else in_front(array, axis)
            for array, axis, role in zip(arguments, axes, roles, strict=True)
        ]
        results = bind(computation, request, arrays, mapped + 1)
    return results, [0] * len(results)


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, computation: AnyComputation, request: Request, mapped: int
) -> tuple[Any, Any]:
    """Return the results and their tangents."""
    if not computation.is_differentiable:
        refuse()
    given = {i: each for i, each in enumerate(tangents) if not isinstance(each, ad.Zero)}
    results = bind(computation, request, primals, mapped)
    known = list(primals)
    if computation.rule:
        results = named(results)
        known += results
    derivative = Derivative(computation, tuple(computation.results(request, primals)[0]), tuple(given))
    changes = bind(derivative, request, [*known, *given.values()], mapped)
    constant = [ad.Zero(jax.typeof(each)) for each in results[len(changes) :]]
    return results, [*changes, *constant]


def _transpose(
    cotangents: Sequence[Any], *arguments: Any, computation: AnyComputation, request: Request, mapped: int
) -> list[jax.Array | None]:
    """Return cotangents of the arguments in which the computation is linear.

    JAX gives no values for these arguments. They are replaced with zeros, because the derivative of a linear function
    does not depend on the values of its arguments.
    """
    linear = [i for i, each in enumerate(arguments) if ad.is_undefined_primal(each)]
    if linear[0] < 2:  # no computation is linear in query or key
        refuse()
    known: list[Any] = [
        jnp.zeros(each.aval.shape, each.aval.dtype) if ad.is_undefined_primal(each) else each for each in arguments
    ]
    given = {i: each for i, each in enumerate(cotangents) if not isinstance(each, ad.Zero)}
    if isinstance(computation, Derivative) and computation.read is None and linear[0] >= computation.first_given:
        first = computation.first_given
        positions = tuple([computation.positions[i - first] for i in linear])
        derivative = dataclasses.replace(computation, positions=positions, read=tuple(given))
        known = known[:first]
    else:
        roles = tuple(computation.results(request, known)[0])
        if computation.rule:
            known += bind(computation, request, known, mapped)
        derivative = Derivative(computation, roles, tuple(linear), tuple(given))
    gradients = bind(derivative, request, [*known, *given.values()], mapped)
    by_position = dict(zip(linear, gradients, strict=True))
    return [by_position.get(i) for i in range(len(arguments))]


def _lower_for(platform: str | None) -> None:
    def lower(
        ctx: mlir.LoweringRuleContext, *values: Any, computation: AnyComputation, request: Request, mapped: int
    ) -> Any:
        call = DeviceCall(request, lowering_target(platform or _platform_of(ctx)))
        local = functools.partial(_run_local, computation=computation, call=call, mapped=mapped)
        if auto.is_needed(ctx):
            plan = computation.plan(call)
            if not _is_left_to_xla(ctx, plan):
                identity = f"{plan.payload()} {computation} {mapped}"
                roles = computation.roles, computation.results(request, ctx.avals_in)[0]
                # A mesh may split token dimensions only if the arrays cover the whole layout. The arguments then
                # contain neither origins nor layouts.
                has_places = not {Role.WHOLE, Role.PER_ENTRY}.isdisjoint(computation.roles)
                splits_tokens = request.problem.operator == "fna" and not has_places
                with plan_marks.annotate_with_plan(plan):
                    return auto.Partitioned(ctx, identity, local, *roles, mapped + 1, splits_tokens).lower(values)
        return auto.lower_for_one(local, ctx, values)

    mlir.register_lowering(_pass_p, lower, platform=platform)


def _platform_of(ctx: mlir.LoweringRuleContext) -> str:
    """Return the platform outside :data:`PLATFORMS` that JAX lowers for; "other" if there are several of these."""
    platform, *more = (each for each in _jax_internals.platforms_of(ctx) if each not in PLATFORMS)
    return "other" if more else platform


def _is_left_to_xla(ctx: mlir.LoweringRuleContext, plan: Plan) -> bool:
    """Return True if XLA must split a computation over a mesh itself, because it cannot call the partitioner.

    The partitioner is a Python callback. An exported program cannot contain callbacks, and the compiler for TPUs does
    not call them.

    Raises:
        ValueError: The plan runs a kernel on TPUs. XLA cannot split such a kernel.
    """
    is_plain_jax = backends.by_id(plan.backend).capabilities.is_plain_jax
    if plan.platform == "tpu" and not is_plain_jax:
        raise ValueError(f"{plan.backend} cannot be split over mesh axes of type Auto: {auto.NO_TPU}")
    return is_plain_jax and (plan.platform == "tpu" or _jax_internals.is_exported(ctx))


def _run_local(
    *arguments: jax.Array,
    computation: AnyComputation,
    call: DeviceCall,
    mapped: int,
    lines: Sequence[DeviceLine | None] = (),
) -> list[jax.Array]:
    """Merge the batch dimensions of one device's arrays into one axis, and run a computation on these arrays.

    Args:
        *arguments: The device's arrays.
        computation: The computation.
        call: The whole call.
        mapped: Number of axes that ``jax.vmap`` maps.
        lines: Per token dimension, the devices that the dimension is split over, or ``None`` if it is not split. Empty
            if no token dimension is split.
    """
    batch_dims = arguments[0].shape[: mapped + 1]
    request = call.request.for_part(math.prod(batch_dims), arguments[0].shape[-2], arguments[1].shape[-2])
    arrays: Sequence[jax.Array] = arguments
    if mapped:
        arrays = [_as_one_batch(*each, batch_dims) for each in zip(arguments, computation.roles, strict=True)]
    if any(lines):
        exchange = Exchange.for_problem(request.problem, lines)
        part = DeviceCall(dataclasses.replace(request, parts=exchange.parts), call.device)
        results = _compute_exchanging(computation, part, exchange, arrays)
    else:
        results = _run_computation(computation, DeviceCall(request, call.device), arrays)
    if not mapped:
        return results
    roles, _ = computation.results(request, arguments)
    return [_as_mapped(array, role, batch_dims) for array, role in zip(results, roles, strict=True)]


def _as_one_batch(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """Merge the batch dimensions of an argument into one axis. Return an array without a batch axis unchanged."""
    if role is Role.WHOLE:
        return array
    shape = array.shape[len(batch_dims) :]
    if role is Role.PER_HEAD_OF_ALL_ENTRIES:
        array = jnp.broadcast_to(array, (*batch_dims, *shape))
    return array.reshape(math.prod(batch_dims), *shape)


def _as_mapped(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """Split the first axis of a result into the batch dimensions of the call.

    The gradient of an array that all batch entries share, such as a bias table, is summed over the batch axis.
    """
    array = array.reshape(*batch_dims, *array.shape[1:])
    return jnp.sum(array, axis=len(batch_dims) - 1, keepdims=True) if role is Role.PER_HEAD_OF_ALL_ENTRIES else array


def _run_computation(computation: AnyComputation, call: DeviceCall, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a computation on one device. If kernels do not support per-entry layouts, run one batch entry at a time."""
    plan, batch = computation.plan(call), arrays[0].shape[0]
    has_entries = Role.PER_ENTRY in computation.roles and not (isinstance(batch, int) and batch == 1)
    if has_entries and not backends.by_id(plan.backend).supports_layouts(plan.problem):
        return _run_entries(computation, call, arrays)
    results: list[jax.Array] = _function(computation, plan, call)(*arrays)
    return results


@functools.lru_cache(maxsize=4096)
def _function(computation: AnyComputation, plan: Plan, call: DeviceCall) -> Callable[..., Any]:
    """Return a jitted function that runs a computation.

    Equal computations get the same function, so that a program with many equal layers contains the function once.
    """

    def run_pass(*arguments: Any) -> Any:
        marks = plan_marks.annotate_with_plan(plan, on_all=not backends.by_id(plan.backend).capabilities.carries_plan)
        with marks, jax.default_matmul_precision(plan.precision):
            return computation.compute(plan, call, *arguments)

    return jax.jit(run_pass)


for each in (*PLATFORMS, None):
    _lower_for(each)

ad.primitive_jvps[_pass_p] = _differentiate
ad.primitive_transposes[_pass_p] = _transpose
batching.primitive_batchers[_pass_p] = _map
_JET_RULES[_pass_p] = _compute_coefficients
if _jax_internals.CHECKPOINT_NAME not in _JET_RULES:
    jet.deflinear(_jax_internals.CHECKPOINT_NAME)
