"""The scales of heads as kernels take them: positive numbers beside a query that has the sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.scale import LARGEST
from natten_jax.arrays.operands import Gradients, Inputs
from natten_jax.arrays.roles import roles_of
from natten_jax.problem import Problem

#: Smaller factors of query gradients lose digits of these: float16 has no number below 2^-24.
_SMALLEST_FACTOR = {"float16": 2.0**-10}
_SMALLEST_FACTOR_OF_OTHERS = 2.0**-64


@dataclasses.dataclass(frozen=True)
class HeadScales:
    """Factors of the logits, one for each head of each batch entry.

    Kernels multiply logits with one number, and query gradients with another: where the scale is zero, or so small that
    a gradient would lose digits, the latter is larger. The scale's own gradient is found from what they return.

    Attributes:
        scale: ``[batch, heads]``, float32. NaN where no kernel can use it, as numbers are refused.
        query_factor: Likewise: of the query gradient.
    """

    scale: jax.Array
    query_factor: jax.Array

    @classmethod
    def of(cls, problem: Problem, scale: jax.Array) -> HeadScales:
        """Those of an operand."""
        scale = jnp.where(jnp.abs(scale) <= LARGEST, scale, jnp.nan)
        smallest = _SMALLEST_FACTOR.get(problem.dtype, _SMALLEST_FACTOR_OF_OTHERS)
        return cls(scale, jnp.maximum(jnp.where(jnp.isnan(scale), smallest, jnp.abs(scale)), np.float32(smallest)))

    def signed(self, query: jax.Array) -> jax.Array:
        """The query times the sign of the scale. What is not finite stays so, as in a product of logits."""
        return query * self._per_query(jnp.sign(self.scale), query).astype(query.dtype)

    def operand(self) -> jax.Array:
        """What kernels read: ``[batch, heads, 2]``, positive and finite."""
        # Where there is no number, the query is none; where it is zero, the query is.
        is_used = jnp.abs(self.scale) > 0
        return jnp.stack([jnp.where(is_used, jnp.abs(self.scale), 1), self.query_factor], axis=-1)

    def of_gradients(self, gradients: Gradients, query: jax.Array) -> Gradients:
        """The gradients of the query and of the scale.

        Args:
            gradients: As kernels have them, of the query they were given.
            query: That of the call.
        """
        wide = gradients.query.astype(jnp.float32)
        of_products = jnp.sum(wide * query.astype(jnp.float32), axis=(*range(1, query.ndim - 2), query.ndim - 1))
        of_query = wide * self._per_query(self.scale / self.query_factor, query)
        return gradients._replace(query=of_query.astype(query.dtype), scale=of_products / self.query_factor)

    @staticmethod
    def _per_query(factor: jax.Array, query: jax.Array) -> jax.Array:
        batch, *layout, heads, _ = query.shape
        return factor.reshape(batch, *(1,) * len(layout), heads, 1)


def with_heads_of_queries(inputs: Inputs) -> Inputs:
    """Keys and values of every query head: those that share some get copies."""
    groups = inputs.query.shape[-2] // inputs.key.shape[-2]

    return _of_key_values(lambda array: jnp.repeat(array, groups, axis=-2), inputs)


def of_shared_heads(gradients: Gradients, inputs: Inputs) -> Gradients:
    """The gradients of shared keys and values, from those of the copies that :func:`with_heads_of_queries` makes."""
    heads_kv = inputs.key.shape[-2]

    def summed(array: jax.Array) -> jax.Array:
        *outer, heads, width = array.shape
        groups = array.reshape(*outer, heads_kv, heads // heads_kv, width)
        return jnp.sum(groups, axis=-2, dtype=jnp.float32).astype(array.dtype)

    return _of_key_values(summed, gradients)


def _of_key_values(change: Callable[[jax.Array], jax.Array], inputs: Inputs) -> Inputs:
    """The inputs, those changed whose heads are those of keys and values."""
    roles = jax.tree.unflatten(jax.tree.structure(inputs), roles_of(inputs))
    found: Inputs = jax.tree.map(lambda array, role: change(array) if role.is_key_value else array, inputs, roles)
    return found
