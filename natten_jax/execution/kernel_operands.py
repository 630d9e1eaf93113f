"""The arrays of a pass as its kernels take them, and results as the call has them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from natten_jax import backends
from natten_jax.arrays.biases import KeyBiasColumns, of_each_head, with_hidden_keys_of_inputs, with_shared_gradient
from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Output, Saved
from natten_jax.backends.ffi import delta, sinks_gradient
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.execution.strips import merged
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem


def converted(planned: Problem, operands: Operands) -> Operands:
    """The operands in the elements of the plan's problem, which have every number of 8 bits.

    Factors of keys and values are multiplied with these, in float32.
    """
    inputs = operands.inputs
    if not ELEMENT_TYPES[inputs.query.dtype.name].is_float8 or planned.element.is_float8:
        return operands

    def wide(array: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        array = array.astype(planned.dtype)
        return array if factors is None else array * factors

    more = inputs.additional_keys, inputs.additional_values
    additional_keys, additional_values = (None if each is None else wide(each) for each in more)
    wider = inputs._replace(
        query=wide(inputs.query),
        key=wide(inputs.key, inputs.key_scale),
        value=wide(inputs.value, inputs.value_scale),
        additional_keys=additional_keys,
        additional_values=additional_values,
        key_scale=None,
        value_scale=None,
        out_scale=None,
    )
    return operands._replace(inputs=wider)


def scaled(planned: Problem, operands: Operands, out: jax.Array) -> jax.Array:
    """The output times the call's factors of it, unless a kernel has multiplied them."""
    factors = operands.inputs.out_scale
    if factors is None or planned.element.is_float8:
        return out
    return out * factors.reshape(out.shape[0], *(1,) * (out.ndim - 3), -1, 1)


def rounded(out: jax.Array, dtype: str) -> jax.Array:
    """The output in the elements that the call asks for."""
    return out if out.dtype == dtype else out.astype(dtype)


class HeadWidths(NamedTuple):
    """Widths of heads.

    Attributes:
        own: The widths of the call: those of query and key, and those of value and output.
        kernels: The widths of the kernels, likewise; no smaller.
    """

    own: tuple[int, int]
    kernels: tuple[int, int]

    @classmethod
    def of(cls, problem: Problem, planned: Problem) -> HeadWidths:
        """Those of a call's problem and of its plan's."""
        return cls((problem.head_dim, problem.head_dim_v), (planned.head_dim, planned.head_dim_v))

    def widen_operands(self, operands: Operands) -> Operands:
        """What kernels get."""
        return operands._replace(inputs=self._changed(operands.inputs, self.kernels))

    def widen_values(self, array: jax.Array) -> jax.Array:
        """The output, or its cotangent, as kernels get it."""
        return _of_width(array, self.kernels[1])

    def narrow_values(self, array: jax.Array) -> jax.Array:
        """The output of the call."""
        return _of_width(array, self.own[1])

    def narrow_gradients(self, gradients: Gradients) -> Gradients:
        """The gradients of the call's inputs."""
        return self._changed(gradients, self.own)

    def _changed(self, inputs: Inputs, widths: tuple[int, int]) -> Inputs:
        if self.own == self.kernels:
            return inputs
        of_keys, of_values = widths
        return inputs._replace(
            query=_of_width(inputs.query, of_keys),
            key=_of_width(inputs.key, of_keys),
            value=_of_width(inputs.value, of_values),
            additional_keys=None if inputs.additional_keys is None else _of_width(inputs.additional_keys, of_keys),
            additional_values=None
            if inputs.additional_values is None
            else _of_width(inputs.additional_values, of_values),
        )


def _of_width(array: jax.Array, width: int) -> jax.Array:
    """The array, cut or filled up with zeros along its last dimension."""
    more = width - array.shape[-1]
    if more <= 0:
        return array if more == 0 else array[..., :width]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])


_Result = TypeVar("_Result", Output, Saved)


class KernelOperands(NamedTuple):
    """Arrays of a pass, and the way there and back.

    Attributes:
        of_call: The operands of the call.
        given: The same, with biases of keys of each head where the kernels, or columns, have none that heads share.
        operands: The operands of the kernels.
        heads: Widths of heads.
        columns: Columns of heads that stand for biases of keys, if the kernels add none.
        sinks: Those of a backend that takes none: one step behind the output.
        planned: The problem that they compute.
        out_dtype: Element type of the call's output.
    """

    of_call: Operands
    given: Operands
    operands: Operands
    heads: HeadWidths
    columns: KeyBiasColumns | None
    sinks: jax.Array | None
    planned: Problem
    out_dtype: str

    @classmethod
    def of(cls, plan: Plan, request: Request, operands: Operands) -> KernelOperands:
        """Those of a call's arrays."""
        heads = HeadWidths.of(request.problem, plan.problem)
        columns = None
        if request.problem.key_bias and not plan.problem.key_bias:
            columns = KeyBiasColumns(dataclasses.replace(request.problem, dtype=plan.problem.dtype))
        given = operands
        backend = backends.of(plan.backend)
        has_shared = operands.inputs.shared_key_bias is not None
        if has_shared and (columns is not None or not backend.takes_shared_key_bias):
            given = operands._replace(inputs=of_each_head(operands.inputs))
        if not backend.hides_keys:
            given = given._replace(inputs=with_hidden_keys_of_inputs(given.inputs))
        sinks = None if backend.takes_sinks else given.inputs.sinks
        if sinks is not None:
            given = given._replace(inputs=given.inputs._replace(sinks=None))
        is_known = given.layouts is None or plan.problem.own_extents or backend.takes_layouts_of(plan.problem)
        of_kernels = converted(plan.problem, given if is_known else given.with_origins_alone())
        if columns is not None:
            of_kernels = columns.added(of_kernels)
        of_kernels = heads.widen_operands(of_kernels)
        return cls(operands, given, of_kernels, heads, columns, sinks, plan.problem, request.problem.output_dtype)

    def result(self, found: _Result) -> _Result:
        """What the forward pass found, as the call has it."""
        out = scaled(self.planned, self.given, self.heads.narrow_values(found.out))
        result = found._replace(out=rounded(out, self.out_dtype))
        if self.columns is not None:
            result = self.columns.result(result, self.given)
        return result if self.sinks is None else _with_sinks(result, self.sinks)

    def saved(self, saved: Saved) -> Saved:
        """What the backward pass gets of the forward pass."""
        saved = saved._replace(out=self.heads.widen_values(saved.out))
        return saved if self.columns is None else self.columns.saved(saved, self.given)

    def gradients(self, found: Gradients, saved: Saved, cotangents: Cotangents) -> Gradients:
        """The gradients of the call's inputs, given what the call's backward pass had besides."""
        if self.columns is not None:
            found = self.columns.gradients(found, self.given)
        found = self.heads.narrow_gradients(found)
        if self.sinks is not None:
            of_sinks = sinks_gradient(self.sinks, saved.logsumexp, delta(saved.out, *cotangents))
            found = found._replace(sinks=of_sinks.astype(self.sinks.dtype))
        inputs = self.of_call.inputs
        return found if inputs.shared_key_bias is None else with_shared_gradient(found, inputs)


def _with_sinks(found: _Result, sinks: jax.Array) -> _Result:
    """The results of a softmax that has sinks, too: these are a set of keys without values."""
    own = found if isinstance(found, Saved) else Saved(*found, jnp.zeros_like(found.logsumexp))
    _, *tokens, heads = own.logsumexp.shape
    of_sinks = jnp.broadcast_to(sinks.reshape(sinks.shape[0], *(1,) * len(tokens), heads), own.logsumexp.shape)
    both = merged(own, Saved(jnp.zeros_like(own.out), of_sinks, jnp.zeros_like(of_sinks)))
    return both if isinstance(found, Saved) else Output(*both[:2])  # type: ignore[return-value]
