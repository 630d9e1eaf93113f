"""Conversion of a call's arrays to its kernels' arrays and back: element types, head dimensions, biases and sinks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax import backends
from natten_jax.arrays import biases
from natten_jax.arrays.operands import Cotangents, Gradients, Inputs, Operands, Saved, delta
from natten_jax.backends.base import Backend
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.execution.strips import merged
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem


def converted(planned: Problem, operands: Operands) -> Operands:
    """Convert 8-bit operands to the element type of the plan. The conversion is exact.

    Keys and values are also multiplied by their scale factors, if there are any. These products are float32. Operands
    are returned unchanged if they are not 8-bit, or if the kernels of the plan read 8-bit elements.
    """
    inputs = operands.inputs
    if not ELEMENT_TYPES[inputs.query.dtype.name].is_float8 or planned.element.is_float8:
        return operands

    def wide(array: jax.Array, factors: jax.Array | None = None) -> jax.Array:
        array = array.astype(planned.dtype)
        return array if factors is None else array * factors

    arrays: dict[str, Any] = dict.fromkeys(("key_scale", "value_scale", "out_scale"))
    arrays |= {"key": wide(inputs.key, inputs.key_scale), "value": wide(inputs.value, inputs.value_scale)}
    for name in ("query", "additional_keys", "additional_values"):
        array = getattr(inputs, name)
        arrays[name] = None if array is None else wide(array)
    return operands._replace(inputs=inputs._replace(**arrays))


def scaled(planned: Problem, operands: Operands, out: jax.Array) -> jax.Array:
    """Multiply the output by ``out_scale``, unless a kernel for 8-bit arrays has already done so."""
    factors = operands.inputs.out_scale
    if factors is None or planned.element.is_float8:
        return out
    return out * biases.over_tokens(factors, out)


def with_head_dim(array: jax.Array, head_dim: int) -> jax.Array:
    """Truncate the last dimension of an array to ``head_dim``, or pad it with zeros."""
    more = head_dim - array.shape[-1]
    if more <= 0:
        return array if more == 0 else array[..., :head_dim]
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)])


def with_heads_of(problem: Problem, inputs: Inputs) -> Inputs:
    """Truncate or zero-pad the last dimension of inputs or of gradients to the head dimensions of a problem."""
    widths = dict.fromkeys(("query", "key", "additional_keys"), problem.head_dim)
    widths |= dict.fromkeys(("value", "additional_values"), problem.head_dim_v)
    arrays = [(name, getattr(inputs, name), width) for name, width in widths.items()]
    narrow = [each for each in arrays if each[1] is not None and each[1].shape[-1] != each[2]]
    return inputs._replace(**{name: with_head_dim(array, width) for name, array, width in narrow})


class KernelOperands(NamedTuple):
    """The operands of a call, the operands of its kernels, and conversions of results between the two.

    Attributes:
        backend: The backend that runs the pass.
        call_operands: The operands of the call.
        prepared: The operands of the call after two changes. ``shared_key_bias`` is expanded to all heads if the
            backend does not support it, or if ``columns`` encode it. Sinks are removed if the backend does not support
            sinks.
        operands: The operands of the kernels.
        problem: The problem of the call.
        planned: The problem that the kernels compute.
        columns: Extra columns of queries and keys that encode key biases, if the kernels do not add key biases.
            Otherwise ``None``.
        sinks: Sinks to merge into the results of the kernels, if the backend does not support sinks. Otherwise
            ``None``.
    """

    backend: Backend
    call_operands: Operands
    prepared: Operands
    operands: Operands
    problem: Problem
    planned: Problem
    columns: biases.KeyBiasColumns | None
    sinks: jax.Array | None

    @classmethod
    def for_plan(cls, plan: Plan, problem: Problem, operands: Operands) -> KernelOperands:
        """Convert the operands of a call to operands of the kernels."""
        backend, planned = backends.by_id(plan.backend), plan.problem
        has = backend.capabilities
        columns = None
        if problem.key_bias and not planned.key_bias:
            columns = biases.KeyBiasColumns.for_problem(
                dataclasses.replace(problem, dtype=planned.dtype), operands.inputs.scale
            )
        prepared = operands
        has_shared = operands.inputs.shared_key_bias is not None
        if has_shared and (columns is not None or "shared_key_bias" not in has.features):
            prepared = operands._replace(inputs=biases.per_head_key_bias(operands.inputs))
        sinks = None
        if "sinks" not in has.features:
            inputs = biases.with_hidden_keys_of_inputs(prepared.inputs)
            sinks, prepared = inputs.sinks, prepared._replace(inputs=inputs._replace(sinks=None))
        is_known = prepared.layouts is None or planned.own_extents or backend.supports_layouts(planned)
        kernel_operands = converted(planned, prepared if is_known else prepared.with_layouts_as_origins())
        if columns is not None:
            kernel_operands = columns.append(kernel_operands)
        kernel_operands = kernel_operands._replace(inputs=with_heads_of(planned, kernel_operands.inputs))
        return cls(backend, operands, prepared, kernel_operands, problem, planned, columns, sinks)

    def result(self, saved: Saved) -> Saved:
        """Convert results of the kernels to results of the call."""
        out = scaled(self.planned, self.prepared, with_head_dim(saved.out, self.problem.head_dim_v))
        result = saved._replace(out=out.astype(self.problem.output_dtype))
        if self.columns is not None:
            result = self.columns.result(result)
        return result if self.sinks is None else _saved_with_sinks(result, self.sinks)

    def padded_output(self, array: jax.Array) -> jax.Array:
        """Truncate or zero-pad an output of the call, or the output's cotangent, to the kernels' ``head_dim_v``."""
        return with_head_dim(array, self.planned.head_dim_v)

    def saved(self, saved: Saved) -> Saved:
        """Convert saved results of the call to the form that the kernels read."""
        saved = saved._replace(out=self.padded_output(saved.out))
        return saved if self.columns is None else self.columns.saved(saved, self.prepared)

    def gradients(self, gradients: Gradients, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Convert gradients of the kernels to gradients of the call's inputs.

        Args:
            gradients: Gradients from the kernels.
            saved: Results that the call's forward pass saved.
            cotangents: Cotangents of the call's results.
        """
        if self.columns is not None:
            gradients = self.columns.gradients(gradients, self.prepared)
        gradients = with_heads_of(self.problem, gradients)
        if self.sinks is not None:
            sinks_gradient = biases.sinks_gradient(self.sinks, saved.logsumexp, delta(saved.out, *cotangents))
            gradients = gradients._replace(sinks=sinks_gradient.astype(self.sinks.dtype))
        inputs = self.call_operands.inputs
        return gradients if inputs.shared_key_bias is None else biases.with_shared_gradient(gradients, inputs)


def _saved_with_sinks(saved: Saved, sinks: jax.Array) -> Saved:
    """Merge sinks into saved results: a sink has the effect of a key whose value is zero."""
    zeros = jnp.zeros_like(saved.logsumexp)
    complete = saved if saved.remainder is not None else saved._replace(remainder=zeros)
    sink_logsumexp = jnp.broadcast_to(sinks.reshape(sinks.shape[0], *(1,) * (zeros.ndim - 2), -1), zeros.shape)
    both = merged(complete, Saved(jnp.zeros_like(complete.out), sink_logsumexp, zeros))
    return both if saved.remainder is not None else both._replace(remainder=None)
