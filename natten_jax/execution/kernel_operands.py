"""The arrays of a pass as its kernels take them, and what they compute as the call has it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from natten_jax import backends
from natten_jax.arrays.added_logits import with_hidden_keys_of_inputs
from natten_jax.arrays.key_bias_columns import KeyBiasColumns
from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Output, Saved
from natten_jax.arrays.shared_key_bias import of_each_head, with_shared_gradient
from natten_jax.backends.native_backend import delta, sinks_gradient
from natten_jax.execution.conversion import converted, rounded, scaled
from natten_jax.execution.head_widths import HeadWidths
from natten_jax.execution.merge_saved import merged
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.problem import Problem

_Result = TypeVar("_Result", Output, Saved)


class KernelOperands(NamedTuple):
    """Arrays of a pass, and the way there and back.

    Attributes:
        of_call: The operands of the call.
        given: The same, with biases of keys of each head where the kernels, or columns, have none that heads share.
        operands: The operands of the kernels.
        heads: Widths of heads.
        columns: What stands for biases of keys.
        sinks: Those of a backend that takes none: one step behind the output.
        planned: The problem that they compute.
        out_dtype: Element type of the call's output.
    """

    of_call: Operands
    given: Operands
    operands: Operands
    heads: HeadWidths
    columns: KeyBiasColumns
    sinks: jax.Array | None
    planned: Problem
    out_dtype: str

    @classmethod
    def of(cls, plan: Plan, request: Request, operands: Operands) -> KernelOperands:
        """Those of a call's arrays."""
        heads = HeadWidths.of(request.problem, plan.problem)
        columns = KeyBiasColumns.of(dataclasses.replace(request.problem, dtype=plan.problem.dtype), plan.problem)
        is_known = plan.problem.own_extents or backends.of(plan.backend).takes_layouts_of(plan.problem)
        given = operands
        if columns.are_there or not backends.of(plan.backend).takes_shared_key_bias:
            given = operands._replace(inputs=of_each_head(operands.inputs))
        if not backends.of(plan.backend).hides_keys:
            given = given._replace(inputs=with_hidden_keys_of_inputs(given.inputs))
        sinks = None if backends.of(plan.backend).takes_sinks else given.inputs.sinks
        if sinks is not None:
            given = given._replace(inputs=given.inputs._replace(sinks=None))
        placed = given if is_known else given.with_origins_alone()
        of_kernels = heads.widen_operands(columns.added(converted(plan.problem, placed)))
        return cls(operands, given, of_kernels, heads, columns, sinks, plan.problem, request.problem.output_dtype)

    def result(self, found: _Result) -> _Result:
        """What the forward pass found, as the call has it."""
        out = scaled(self.planned, self.given, self.heads.narrow_values(found.out))
        result = self.columns.result(found._replace(out=rounded(out, self.out_dtype)), self.given)
        return result if self.sinks is None else _with_sinks(result, self.sinks)

    def saved(self, saved: Saved) -> Saved:
        """What the backward pass gets of the forward pass."""
        return self.columns.saved(saved._replace(out=self.heads.widen_values(saved.out)), self.given)

    def gradients(self, found: Gradients, saved: Saved, cotangents: Cotangents) -> Gradients:
        """The gradients of the call's inputs, given what the call's backward pass had besides."""
        found = self.heads.narrow_gradients(self.columns.gradients(found, self.given))
        if self.sinks is not None:
            of_sinks = sinks_gradient(self.sinks, saved.logsumexp, delta(saved.out, *cotangents))
            found = found._replace(sinks=of_sinks.astype(self.sinks.dtype))
        return with_shared_gradient(found, self.of_call.inputs)


def _with_sinks(found: _Result, sinks: jax.Array) -> _Result:
    """The results of a softmax that has sinks, too: these are a set of keys without values."""
    own = found if isinstance(found, Saved) else Saved(*found, jnp.zeros_like(found.logsumexp))
    _, *tokens, heads = own.logsumexp.shape
    of_sinks = jnp.broadcast_to(sinks.reshape(sinks.shape[0], *(1,) * len(tokens), heads), own.logsumexp.shape)
    both = merged(own, Saved(jnp.zeros_like(own.out), of_sinks, jnp.zeros_like(of_sinks)))
    return both if isinstance(found, Saved) else Output(*both[:2])  # type: ignore[return-value]
