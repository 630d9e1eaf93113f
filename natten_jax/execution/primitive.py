"""The JAX primitive of a pass: how it is batched, differentiated, and lowered for a device or for several.

What is traced is one equation per computation, whatever backends and platforms there are. A backend's own operations
are traced for the platforms that a program is lowered for, and for no other: one traced function serves CPU and GPU,
and costs nothing for the platform that it never runs on.

A computation is hashable, and equal where the same is computed: equal ones share their compiled program. Its
derivatives are computations again. So plain JAX can be differentiated to any order, and is split over a mesh like
kernels are.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from natten_jax import backends
from natten_jax.arrays.operands import Role, type_like, vary_alike
from natten_jax.plan import plan as plan_marks
from natten_jax.plan.devices import PLATFORMS, Device, lowering_target
from natten_jax.plan.plan import Plan, Request
from natten_jax.sharding import _jax_internals, auto
from natten_jax.sharding.explicit import map_in_turn
from natten_jax.sharding.halos.exchange import DeviceLine, Exchange

_Array = Any
#: For each result the array, followed by its derivatives of order 1, 2, ...
_Derivatives = list[list[jax.Array]]

_RULES: dict[Primitive, Callable[..., Any]] = jet.jet_rules


def use_nested_jvp(primitive: Primitive) -> None:
    """Register a rule that computes the coefficients of a primitive with several results by nested ``jax.jvp``.

    Each order takes twice the time of the order below it.
    """

    def compute_coefficients(
        primals: Sequence[_Array], series: Sequence[Sequence[_Array]], **parameters: Any
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        def evaluate(time: jax.Array) -> _Derivatives:
            arguments = [_evaluate_polynomial(time, *each) for each in zip(primals, series, strict=True)]
            return [[result] for result in primitive.bind(*arguments, **parameters)]

        function: Callable[[jax.Array], _Derivatives] = evaluate
        for _ in series[0]:
            function = _with_next_derivative(function)
        results = function(jnp.zeros((), jnp.float32))
        coefficients = [_divide_by_factorials(derivatives) for derivatives in results]
        return [first for first, *_ in coefficients], [rest for _, *rest in coefficients]

    _RULES[primitive] = compute_coefficients


def use_linearity(primitive: Primitive) -> None:
    """Register a rule for a primitive that is linear in all of its arguments, unless it has a rule."""
    if primitive not in _RULES:
        jet.deflinear(primitive)


def use_refusal(primitive: Primitive, refuse: Callable[..., Any]) -> None:
    """Register a rule that calls ``refuse``, which raises."""
    _RULES[primitive] = refuse


def _evaluate_polynomial(time: jax.Array, first: _Array, rest: Sequence[_Array]) -> _Array:
    """Return ``first + rest[0] * time + rest[1] * time**2 + ...``; integers are constant."""
    if not jnp.issubdtype(jnp.result_type(first), jnp.inexact):
        return first
    first, *rest = vary_alike([jnp.asarray(first), *map(jnp.asarray, rest)])
    total = jnp.zeros_like(first)
    for term in rest[::-1]:
        total = (total + term) * time.astype(first.dtype)
    return first + total


def _with_next_derivative(function: Callable[[jax.Array], _Derivatives]) -> Callable[[jax.Array], _Derivatives]:
    """Append to each list that ``function`` returns the derivative of its last array."""

    def extended(time: jax.Array) -> _Derivatives:
        values, changes = jax.jvp(function, (time,), (jnp.ones_like(time),))
        return [[*value, change[-1]] for value, change in zip(values, changes, strict=True)]

    return extended


def _divide_by_factorials(derivatives: Sequence[jax.Array]) -> list[jax.Array]:
    """Convert derivatives of order 0, 1, 2, ... to Taylor coefficients."""
    factorial = 1.0
    coefficients = []
    for order, derivative in enumerate(derivatives):
        factorial *= max(order, 1)
        coefficients.append(derivative / jnp.asarray(factorial, derivative.dtype))
    return coefficients


#: Names of the saved output, and of the logsumexp and whatever else is saved of each row.
CHECKPOINT_NAMES = ("natten_jax_output", "natten_jax_logsumexp")


def named(saved: Sequence[Any]) -> list[Any]:
    """What a forward pass saves, the output first, under its names."""
    of_output, of_rows = CHECKPOINT_NAMES
    return [checkpoint_name(array, of_rows if i else of_output) for i, array in enumerate(saved)]


REASON = (
    "native kernels have first derivatives in reverse mode only (jax.grad, jax.vjp): forward mode and higher "
    'derivatives take backend="flex-fna", or for attention "flex-fmha"'
)


def refuse(*_: Any, **__: Any) -> Any:
    """A rule of a primitive that has none.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(REASON)


def in_reverse_only(array: jax.Array) -> jax.Array:
    """``array``, whose tangents may be transposed but not computed."""
    result: jax.Array = _in_reverse_only_p.bind(array)
    return result


def _in_reverse_only_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (primal,), (tangent,) = primals, tangents
    return in_reverse_only(primal), tangent if isinstance(tangent, ad.Zero) else _tangent_p.bind(tangent)


def _identity(name: str, jvp: Callable[..., Any]) -> Primitive:
    """The identity with a derivative of its own.

    A primitive, not a custom_jvp, whose rule JAX would trace first and batch afterwards: so a gradient through jax.vmap
    has tangents of whole batches, and only forward mode batches tangents.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda array: array)
    primitive.def_abstract_eval(lambda array: array)
    ad.primitive_jvps[primitive] = jvp
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda _, array: [array])
    return primitive


_in_reverse_only_p = _identity("natten_jax_in_reverse_only", _in_reverse_only_jvp)
use_refusal(_in_reverse_only_p, refuse)

# A linear function that has a transpose (the identity) and no value. Whatever comes of its value is refused here, in
# front of the custom_vjp that takes it: what runs it, what compiles it, what maps it.
_tangent_p = Primitive("natten_jax_tangent")
_tangent_p.def_impl(refuse)
_tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent_p] = refuse
mlir.register_lowering(_tangent_p, refuse)


REASON_OF_FLOAT8 = (
    "8-bit arrays have no gradients: give the operators wider arrays and fp8, which quantises them and has the "
    "gradients of the call without it"
)


def forward_only(array: jax.Array) -> jax.Array:
    """``array``, which is not differentiated."""
    result: jax.Array = _forward_only_p.bind(array)
    return result


def _forward_only_jvp(primals: Sequence[Any], tangents: Sequence[Any], **_: Any) -> Any:
    raise NotImplementedError(REASON_OF_FLOAT8)


_forward_only_p = _identity("natten_jax_forward_only", _forward_only_jvp)
use_refusal(_forward_only_p, _forward_only_jvp)


class Result(NamedTuple):
    """What a result is, and its abstract type."""

    role: Role
    type: Any


#: Runs a computation on one device.
Run = Callable[["Computation", Request, Sequence[jax.Array]], list[jax.Array]]


class Computation(abc.ABC):
    """A function of arrays, of which query and key are the first.

    Where it is traced, arrays begin with axes that ``jax.vmap`` maps, and then the batch: its *batch dimensions*.
    """

    @property
    @abc.abstractmethod
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""

    @abc.abstractmethod
    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device."""

    @abc.abstractmethod
    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns for arguments (abstract types will do) with these batch dimensions."""

    @abc.abstractmethod
    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The results on a device, of arrays without mapped axes: the batch comes first.

        Args:
            plan: That of the computation, or of a computation that is derived of it, which counts as another pass.
            request: What is asked for, of the part that the device has.
            device: The device.
            *arguments: The arrays.
        """

    def compute_transposed(
        self,
        plan: Plan,
        request: Request,
        device: Device,
        known: Sequence[jax.Array],
        cotangents: Mapping[int, jax.Array],
        linear: Mapping[int, jax.ShapeDtypeStruct],
    ) -> list[jax.Array]:
        """The cotangents of the arguments that the computation is linear in.

        Args:
            plan: As for :meth:`compute`.
            request: Likewise.
            device: Likewise.
            known: All other arguments.
            cotangents: The cotangents of the results, by position; others are zero.
            linear: Types of the arguments, by position.
        """
        rest = [i for i in range(len(self.roles)) if i not in linear]

        def results_of(*some: jax.Array) -> list[jax.Array]:
            every = _merged([None] * len(self.roles), (*rest, *linear), (*known, *some))
            results = self.compute(plan, request, device, *every)
            return [results[i] for i in cotangents]

        return list(jax.linear_transpose(results_of, *linear.values())(list(cotangents.values())))

    @abc.abstractmethod
    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies (``Operands.origins``).

        Only for a computation that has no such argument yet. Its other arguments are the same, in the same order.
        """

    def compute_exchanging(
        self, run: Run, plan: Plan, request: Request, exchange: Exchange, *arguments: Any
    ) -> list[Any]:
        """The results where token dimensions are split: keys and values come from all devices that have them.

        Args:
            run: Runs a computation on one device, of its arguments.
            plan: That of the computation.
            request: What is asked for, of the part that the device has.
            exchange: What brings the halos.
            *arguments: What the device has.
        """
        layout = arguments[0].shape[1:-2]
        part, position = self.with_origins()
        extended = list(arguments)
        with_halos = [i for i, role in enumerate(self.roles) if role.tokens == "keys"]
        for i, array in zip(with_halos, exchange.extended([arguments[i] for i in with_halos]), strict=True):
            extended[i] = array
        extended.insert(position, exchange.origins())
        roles = [each.role for each in part.results(request, extended, extended[0].shape[:1])]
        return [
            exchange.returned(array, layout) if role.tokens == "keys" else array
            for array, role in zip(run(part, request, extended), roles, strict=True)
        ]

    def derivative(self, given: Sequence[int]) -> Derivative:
        """What computes tangents, from those of the arguments at the positions ``given``.

        Raises:
            NotImplementedError: It has no derivative.
        """
        return Derivative(Jvp(self, tuple(given)), reads_results=False)


class Derivative(NamedTuple):
    """A computation that is linear in its last arguments.

    Attributes:
        computation: Its arguments are those of the computation that it is derived of, and their tangents. It returns
            tangents of that one's results, or of the first of them: the others are constant.
        reads_results: Whether the results of that computation come in between.
    """

    computation: Computation
    reads_results: bool


@dataclasses.dataclass(frozen=True)
class Jvp(Computation):
    """The tangents of a computation's results.

    Attributes:
        of: The computation.
        given: The positions of the arguments that have tangents, which come behind all arguments of the computation.
    """

    of: Computation
    given: tuple[int, ...]

    @property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        roles = self.of.roles
        return [*roles, *(roles[i] for i in self.given)]

    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device."""
        return dataclasses.replace(self.of.plan(request, device), pass_="backward")

    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns."""
        return self.of.results(request, arguments[: len(self.of.roles)], batch_dims)

    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies."""
        of, position = self.of.with_origins()
        return Jvp(of, tuple(i + (i >= position) for i in self.given)), position

    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The tangents."""
        count = len(self.of.roles)
        primals, tangents = arguments[:count], arguments[count:]

        def changed(*some: jax.Array) -> list[jax.Array]:
            return self.of.compute(plan, request, device, *_merged(primals, self.given, some))

        results: list[jax.Array] = jax.jvp(changed, [primals[i] for i in self.given], list(tangents))[1]
        return results


@dataclasses.dataclass(frozen=True)
class Transpose(Computation):
    """The transpose of a computation that is linear in some arguments.

    Attributes:
        of: The computation.
        linear: The positions of these arguments. All others are the first arguments of the transpose.
        shapes: Their shapes, without batch dimensions, and the names of their element types.
        read: The positions of the results whose cotangents are the other arguments of the transpose. Other cotangents
            are zero.
        read_roles: What these results are.
    """

    of: Computation
    linear: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    read: tuple[int, ...]
    read_roles: tuple[Role, ...]

    @property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        return [*(role for i, role in enumerate(self.of.roles) if i not in self.linear), *self.read_roles]

    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device."""
        return dataclasses.replace(self.of.plan(request, device), pass_="backward")

    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns."""
        return [
            Result(role, type_like(arguments[0], (*_leading(role, batch_dims), *shape), dtype))
            for role, shape, dtype in self._linear_types(arguments)
        ]

    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies."""
        of, position = self.of.with_origins()
        linear = tuple(i + (i >= position) for i in self.linear)
        return dataclasses.replace(self, of=of, linear=linear), position - sum(i < position for i in linear)

    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The cotangents."""
        count = len(self.of.roles) - len(self.linear)
        known, cotangents = arguments[:count], arguments[count:]
        # Tables are one, or one for each batch entry, as those are that they change.
        batches = {role: array.shape[0] for role, array in zip(self.roles, known, strict=False)}
        types = [
            jax.ShapeDtypeStruct((batches.get(role, known[0].shape[0]), *shape), np.dtype(dtype))
            for role, shape, dtype in self._linear_types(arguments)
        ]
        by_result = dict(zip(self.read, cotangents, strict=True))
        by_argument = dict(zip(self.linear, types, strict=True))
        return self.of.compute_transposed(plan, request, device, known, by_result, by_argument)

    def _linear_types(self, arguments: Sequence[Any]) -> Iterable[tuple[Role, tuple[int, ...], str]]:
        """With as many tokens and heads as query and key have: a device's may be fewer."""
        query, key = arguments[:2]
        for position, (shape, dtype) in zip(self.linear, self.shapes, strict=True):
            role = self.of.roles[position]
            like = key if role.tokens == "keys" else query
            heads = (key if role.is_key_value else query).shape[-2]
            axis = len(shape) + role.heads_axis
            layout = like.shape[like.ndim - 2 - axis : -2] if role.has_layout else shape[:axis]
            yield role, (*layout, *((heads, *shape[axis + 1 :]) if role.heads_axis else ())), dtype


def _leading(role: Role, batch_dims: Sequence[int]) -> Sequence[int]:
    """The dimensions that an array begins with."""
    return (*batch_dims[:-1], 1) if role is Role.PER_HEAD_OF_ALL else batch_dims


def _merged(arrays: Sequence[Any], positions: Sequence[int], replaced: Sequence[Any]) -> list[Any]:
    result = list(arrays)
    for position, array in zip(positions, replaced, strict=True):
        result[position] = array
    return result


#: Runs a computation of a request on arrays.
RunEntry = Callable[[Request, Sequence[jax.Array]], list[jax.Array]]


def one_by_one(
    run: RunEntry, roles: Sequence[Role], of_results: Sequence[Role], request: Request, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results of ``run`` on one entry of the batch after the other.

    Args:
        run: Runs the computation.
        roles: The roles of the arrays.
        of_results: The roles of the results.
        request: What is asked for, of the whole batch.
        arrays: The arrays; those that are not the same for the whole batch begin with it.
    """
    of_entry = request.of_part(1, arrays[0].shape[-2], arrays[1].shape[-2])
    batch = arrays[0].shape[0]
    if isinstance(batch, int) and batch == 1:
        return run(of_entry, arrays)

    def run_one(entry: list[jax.Array]) -> list[jax.Array]:
        own = iter(entry)
        every = [array if is_same else next(own)[None] for is_same, array in zip(are_same, arrays, strict=True)]
        return [result[0] for result in run(of_entry, every)]

    # There may be one table for all entries, or one for each.
    are_same = [
        role is Role.WHOLE or (role is Role.PER_HEAD_OF_ALL and array.shape[0] == 1)
        for role, array in zip(roles, arrays, strict=True)
    ]
    results = jax.lax.map(run_one, [array for is_same, array in zip(are_same, arrays, strict=True) if not is_same])
    is_shared = any(role is Role.PER_HEAD_OF_ALL for role, is_same in zip(roles, are_same, strict=True) if is_same)
    return [
        result.sum(axis=0, keepdims=True) if role is Role.PER_HEAD_OF_ALL and is_shared else result
        for role, result in zip(of_results, results, strict=True)
    ]


_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "jax_debug_nans": ("nan", np.isnan),
    "jax_debug_infs": ("inf", np.isinf),
}


def check(results: Iterable[jax.Array], what: str) -> None:
    """Check the results of an operation, where JAX is set to do so.

    Args:
        results: The results.
        what: What computed them, for the message.

    Raises:
        FloatingPointError: One of them holds a value that is not wanted.
    """
    for option, (name, is_invalid) in _CHECKS.items():
        if not getattr(jax.config, option):
            continue
        for array in results:
            if not np.issubdtype(array.dtype, np.integer) and any(
                np.any(is_invalid(np.asarray(shard.data))) for shard in array.addressable_shards
            ):
                raise FloatingPointError(f"invalid value ({name}) encountered in {what}")


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
    check(results, f"{request.problem.describe()} of natten_jax")
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
    arrays: Sequence[jax.Array] = arguments
    if mapped:
        arrays = [_as_one_batch(*each, batch_dims) for each in zip(arguments, computation.roles, strict=True)]
    run = functools.partial(_run_computation, device=device)
    if any(lines):
        exchange = Exchange.of(own.problem, lines)
        split = dataclasses.replace(own, parts=exchange.parts)
        results = computation.compute_exchanging(run, computation.plan(split, device), split, exchange, *arrays)
    else:
        results = run(computation, own, arrays)
    if not mapped:
        return results
    expected = computation.results(own, arguments, batch_dims)
    return [_as_mapped(array, each.role, batch_dims) for array, each in zip(results, expected, strict=True)]


def _as_one_batch(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """An argument whose mapped axes are a part of its batch; what batch entries share stays as it is without any."""
    if role is Role.WHOLE:
        return array
    own = array.shape[len(batch_dims) :]
    if role is Role.PER_HEAD_OF_ALL:
        array = jnp.broadcast_to(array, (*batch_dims, *own))
    return array.reshape(math.prod(batch_dims), *own)


def _as_mapped(array: jax.Array, role: Role, batch_dims: Sequence[int]) -> jax.Array:
    """A result, with mapped axes again; the gradient of what batch entries share is added up over them."""
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
    found: list[jax.Array] = _function(computation=computation, plan=plan, request=request, device=device)(*arrays)
    return found


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
use_nested_jvp(_pass_p)
use_linearity(_jax_internals.CHECKPOINT_NAME)
