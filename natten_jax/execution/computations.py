"""What one equation of a traced program computes: a pass, or what JAX derives of one.

A computation is hashable, and equal where the same is computed: equal ones share their compiled program. Its
derivatives are computations again. So plain JAX can be differentiated to any order, and is split over a mesh like
kernels are.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from natten_jax.arrays.avals import type_like
from natten_jax.arrays.roles import Role
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.sharding.halos.exchange import Exchange


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
