"""Heads as wide as kernels have them: zeros behind those of a call, and without them again.

The zeros of queries and keys add nothing to logits, those of values and of the output's cotangent nothing to gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Gradients, Inputs, Operands
from natten_jax.problem import Problem


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
