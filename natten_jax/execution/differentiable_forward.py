"""The forward pass in plain JAX and its derivative, as computations: JAX derives everything else from these two.

The derivative is a rule for *tangents*, linear in them. Transposed by JAX it is the backward pass; differentiated
again, forwards or backwards, it gives derivatives of any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from natten_jax import backends
from natten_jax.arrays.biases import with_hidden_keys_of_inputs
from natten_jax.arrays.operands import Cotangents, Differentiable, Operands, Output, Role, roles_of, type_like
from natten_jax.backends.base import PureJaxBackend
from natten_jax.backends.select import resolve
from natten_jax.execution.kernel_operands import converted, scaled
from natten_jax.execution.primitive import Computation, Derivative, Result
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Plan, Request


@dataclasses.dataclass(frozen=True)
class PlainForward(Computation):
    """The forward pass.

    Attributes:
        backend: What computes it.
        operands: The structure of the operands: which there are.
    """

    backend: BackendId
    operands: Any

    @property
    def roles(self) -> Sequence[Role]:
        """Role of each argument, in call order."""
        return roles_of(jax.tree.unflatten(self.operands, range(self.operands.num_leaves)))

    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device.

        Raises:
            ValueError: The backend cannot run there.
        """
        plan = resolve(request, device, "forward")
        if plan.backend == self.backend:
            return plan
        return resolve(dataclasses.replace(request, backend=str(self.backend)), device, "forward")

    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns: the leaves of :class:`Differentiable`."""
        query, problem = arguments[0], request.problem
        per_query = query.shape[:-1]
        dtype, width = problem.element.accumulator, _backend(self.backend).residual_width
        types = Differentiable(
            type_like(query, (*per_query, problem.head_dim_v), dtype),
            type_like(query, per_query, dtype),
            type_like(query, (*per_query, width), dtype) if width else None,
        )
        return [Result(*each) for each in zip(roles_of(types), jax.tree.leaves(types), strict=True)]

    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The results on a device."""
        given = self.with_hidden_keys(jax.tree.unflatten(self.operands, arguments))
        found = _backend(self.backend).forward_differentiable(plan, converted(plan.problem, given))
        results: list[jax.Array] = jax.tree.leaves(found._replace(out=scaled(plan.problem, given, found.out)))
        return results

    def with_hidden_keys(self, operands: Operands) -> Operands:
        """Apply :func:`with_hidden_keys_of_inputs` unless the backend hides keys itself.

        Hidden numbers are constants: all their derivatives are 0.
        """
        if _backend(self.backend).hides_keys:
            return operands
        return operands._replace(inputs=with_hidden_keys_of_inputs(operands.inputs))

    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies."""
        position = self.operands.num_leaves
        operands = jax.tree.unflatten(self.operands, range(position))._replace(origins=position)
        return dataclasses.replace(self, operands=jax.tree.structure(operands)), position

    def derivative(self, given: Sequence[int]) -> Derivative:
        """What computes tangents of output and logsumexp."""
        return Derivative(PlainTangents(self, tuple(given)), reads_results=True)


@dataclasses.dataclass(frozen=True)
class PlainTangents(Computation):
    """Tangents of output and logsumexp.

    Attributes:
        forward: What computed these.
        given: The operands that have tangents. Those of others are zero.
    """

    forward: PlainForward
    given: tuple[int, ...]

    @property
    def roles(self) -> Sequence[Role]:
        """Role of each argument: operands, what the forward pass returned, tangents."""
        roles = self.forward.roles
        returned = [Role.QUERY, Role.PER_QUERY, *(Role.QUERY,) * self._residuals]
        return [*roles, *returned, *(roles[i] for i in self.given)]

    @property
    def _residuals(self) -> int:
        """How many arrays the forward pass returned besides output and logsumexp."""
        return int(_backend(self.forward.backend).residual_width > 0)

    def plan(self, request: Request, device: Device) -> Plan:
        """How it runs on a device: as the forward pass, whose logits it needs."""
        return dataclasses.replace(self.forward.plan(request, device), pass_="backward")

    def results(self, request: Request, arguments: Sequence[Any], batch_dims: Sequence[int]) -> list[Result]:
        """What it returns: the leaves of :class:`Output`."""
        return self.forward.results(request, arguments, batch_dims)[:2]

    def with_origins(self) -> tuple[Computation, int]:
        """The same for a part of the layout, and which of its arguments says where that lies."""
        forward, position = self.forward.with_origins()
        assert isinstance(forward, PlainForward)
        return PlainTangents(forward, self.given), position

    def compute(self, plan: Plan, request: Request, device: Device, *arguments: jax.Array) -> list[jax.Array]:
        """The results on a device."""
        operands, returned, tangents = self._parted(arguments)
        changes = dict(zip(self.given, tangents, strict=True))
        primals = jax.tree.leaves(operands)
        every = [changes[i] if i in changes else jnp.zeros_like(array) for i, array in enumerate(primals)]
        of_operands = jax.tree.unflatten(self.forward.operands, every).inputs
        return list(_backend(self.forward.backend).tangents(plan, operands, returned, of_operands))

    def compute_transposed(
        self,
        plan: Plan,
        request: Request,
        device: Device,
        known: Sequence[jax.Array],
        cotangents: Mapping[int, jax.Array],
        linear: Mapping[int, jax.ShapeDtypeStruct],
    ) -> list[jax.Array]:
        """Cotangents of the tangents: the backward pass."""
        first_tangent = len(self.roles) - len(self.given)
        if min(linear) < first_tangent:  # of a derivative's derivative
            return super().compute_transposed(plan, request, device, known, cotangents, linear)
        operands, returned, _ = self._parted(known)
        output = Output(returned.out, returned.logsumexp)
        of_out = cotangents[0] if 0 in cotangents else jnp.zeros_like(output.out)
        given = Cotangents(of_out, cotangents.get(1))
        leaves = [self.given[i - first_tangent] for i in linear]
        numbers: Operands = jax.tree.unflatten(self.forward.operands, range(self.forward.operands.num_leaves))
        wanted = jax.tree.map(lambda number: number in leaves, numbers.inputs)
        found = _backend(self.forward.backend).gradients(plan, operands, returned, given, wanted)
        by_leaf: dict[Any, Any] = dict(zip(numbers.inputs, found, strict=True))
        return [by_leaf[leaf].astype(type_.dtype) for leaf, type_ in zip(leaves, linear.values(), strict=True)]

    def _parted(self, arguments: Sequence[jax.Array]) -> tuple[Operands, Differentiable, Sequence[jax.Array]]:
        """Operands, what the forward pass returned, tangents."""
        count = self.forward.operands.num_leaves
        first_tangent = count + 2 + self._residuals
        operands: Operands = jax.tree.unflatten(self.forward.operands, arguments[:count])
        return (
            self.forward.with_hidden_keys(operands),
            Differentiable(*arguments[count:first_tangent]),
            arguments[first_tangent:],
        )


def _backend(name: BackendId) -> PureJaxBackend:
    backend = backends.of(name)
    assert isinstance(backend, PureJaxBackend)
    return backend
