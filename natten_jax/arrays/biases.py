"""Operands that change logits: biases in the forms that backends take, sinks, and factors per head.

A bias hides a key (masks it out) if it is ``-inf``, or less than or equal to half the lowest finite number of its type.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.boxes import is_real, without_padding
from natten_jax.arrays.operands import Gradients, Inputs, Operands, Saved
from natten_jax.problem import Problem

#: Fields of :class:`Inputs` that are biases of logits, or logits themselves (sinks).
ADDED = ("relative_bias", "key_bias", "shared_key_bias", "sinks")


def in_accumulator(operand: Any, accumulator: Any) -> jax.Array:
    """Convert a bias or sinks to the accumulator's element type, such that the same keys are hidden.

    An operand that already has this type is returned unchanged. In that case, the numbers that hide keys are replaced
    by ``-inf`` later: by the kernels if ``Capabilities.features`` contains ``"sinks"``, otherwise by
    :func:`with_hidden_keys`.
    """
    operand = jnp.asarray(operand)
    if operand.dtype == accumulator:
        return operand
    hiding = with_hidden_keys(operand)
    limits = jnp.finfo(accumulator)
    if float(jnp.finfo(operand.dtype).max) > float(limits.max):
        # The accumulator's range is smaller. Clip the numbers that do not hide keys, so that they neither overflow nor
        # hide keys in the accumulator's type.
        lowest = np.nextafter(np.asarray(limits.min / 2, accumulator), np.asarray(0, accumulator))
        hiding = jnp.where(jnp.isinf(hiding), hiding, jnp.clip(hiding, float(lowest), float(limits.max)))
    return hiding.astype(accumulator)


def with_hidden_keys(operand: jax.Array) -> jax.Array:
    """Replace numbers that hide keys by ``-inf``. The gradient of the replaced numbers is 0."""
    return jnp.where(operand <= float(jnp.finfo(operand.dtype).min) / 2, -jnp.inf, operand)


def with_hidden_keys_of_inputs(inputs: Inputs) -> Inputs:
    """Replace numbers that hide keys by ``-inf`` in biases and sinks, for kernels that do not replace them."""
    given = {name: getattr(inputs, name) for name in ADDED}
    return inputs._replace(**{name: with_hidden_keys(array) for name, array in given.items() if array is not None})


def per_head_key_bias(inputs: Inputs) -> Inputs:
    """Expand a key bias that all heads share to one bias per query head."""
    shared = inputs.shared_key_bias
    if shared is None:
        return inputs
    heads = inputs.query.shape[-2]
    per_head = jax.lax.broadcast_in_dim(shared, (*shared.shape, heads, 1), range(shared.ndim))
    return inputs._replace(key_bias=per_head, shared_key_bias=None)


def with_shared_gradient(gradients: Gradients, inputs: Inputs) -> Gradients:
    """Sum the gradient of a key bias over the heads that share it."""
    if gradients.key_bias is None:
        return gradients
    return gradients._replace(key_bias=None, shared_key_bias=jnp.sum(gradients.key_bias, axis=(-2, -1)))


def table_of_each_entry(inputs: Inputs) -> jax.Array:
    """Return the tables of relative biases, with one table per batch entry: ``[batch, heads, entries]``."""
    table = inputs.relative_bias
    assert table is not None
    return jnp.broadcast_to(table, (inputs.query.shape[0], *table.shape[1:]))


def gradient_of_shared_table(per_entry: jax.Array, table: jax.Array) -> jax.Array:
    """Sum gradients ``[batch, heads, entries]`` over the batch if all batch entries share the table."""
    return jnp.sum(per_entry, axis=0, keepdims=True) if table.shape[0] == 1 else per_entry


def over_tokens(factors: jax.Array, array: jax.Array) -> jax.Array:
    """Reshape factors ``[batch, heads]`` to the rank of an array ``[batch, *tokens, heads, width]``."""
    return factors.reshape(factors.shape[0], *(1,) * (array.ndim - 3), -1, 1)


def products_of_heads(one: jax.Array, other: jax.Array) -> jax.Array:
    """Multiply two arrays ``[batch, *tokens, heads, width]`` and sum over tokens and width: ``[batch, heads]``."""
    return jnp.sum(one * other, axis=(*range(1, one.ndim - 2), one.ndim - 1))


#: XLA's sums over an outer dimension are fast if this many elements of the inner dimensions are contiguous.
_SIDE_BY_SIDE = 256


def sinks_gradient(sinks: jax.Array, logsumexp: jax.Array, delta: jax.Array) -> jax.Array:
    """Return the gradient of sinks, ``[1 or batch, heads, 1]``.

    A sink's weight is ``exp(sink - logsumexp)``. The gradient is the sum over queries of this weight times ``-delta``,
    because a sink adds only to the softmax denominator.

    Args:
        sinks: ``[1 or batch, heads, 1]``.
        logsumexp: ``[batch, *tokens, heads]``, including the sinks.
        delta: ``[batch, *tokens, heads]``, from :func:`natten_jax.arrays.operands.delta`.
    """
    batch, *tokens, heads = logsumexp.shape
    per_query = sinks.reshape(sinks.shape[0], *(1,) * len(tokens), heads)
    # A query without visible keys and without sinks has a logsumexp of -inf. Its product of weight and delta is set to
    # 0, because delta can be NaN: padding may hold any values. The minimum keeps weights at most 1, although rounding
    # can make a large sink exceed the logsumexp.
    weights = jnp.exp(jnp.minimum(per_query - logsumexp, 0))
    changes = jnp.where(jnp.isneginf(logsumexp), 0, weights * delta)
    # Sum in two steps, because XLA's sums are slow if few elements are contiguous. The barrier keeps XLA from merging
    # the steps.
    count = math.prod(tokens)
    side_by_side = max(n for n in range(1, max(_SIDE_BY_SIDE // heads, 1) + 1) if count % n == 0)
    part_sums = jnp.sum(changes.reshape(batch, count // side_by_side, side_by_side, heads), axis=1)
    # If all batch entries share the sinks, this also sums over the batch.
    part_sums = jax.lax.optimization_barrier(part_sums).reshape(sinks.shape[0], -1, heads)
    return -jnp.sum(part_sums, axis=1)[..., None]


#: Number of columns that encode a key bias (:class:`KeyBiasColumns`). Each column holds one term of the bias, and the
#: bias is the sum of its terms.
_TERMS = 3
#: Smallest magnitude of the kernels' scale. Terms are divided by the kernels' scale, because kernels multiply them by
#: it. If the call's scale has a smaller magnitude, the kernels' scale is ``_SMALLEST_SCALE``, and the query is
#: multiplied by ``scale / _SMALLEST_SCALE`` before the kernels run.
_SMALLEST_SCALE = 2.0**-10
#: Finite biases and sinks are clipped to these fractions of the magnitude of a hidden key's logit. A logsumexp below
#: ``-_UNSEEN`` times that magnitude then identifies the queries without sinks whose keys are all hidden.
_KEY_BIAS_SHARE, _RELATIVE_BIAS_SHARE, _HIDDEN_SHARE = 0.5, 0.1, 0.75


class _Numbers(NamedTuple):
    """Number format of the terms of a key bias.

    Attributes:
        exponent_bits: Bits of a term's exponent.
        fraction_bits: Bits of a term's fraction. Kernels may round float32 to TF32, which has ten fraction bits.
        largest: Largest magnitude of a term.
        hidden: ``max(abs(p), abs(p * scale))``, where ``p`` is the product of a query's columns and the columns of a
            hidden key. Kernels add ``p * scale`` to the logit of the hidden key. ``p`` is finite, because ``-inf``
            times the zeros in the columns of other heads would be NaN. ``None`` for float16: all ``_TERMS`` terms of a
            hidden key then have the magnitude ``largest``.
        exponent: Kernels multiply a term by the query's column and by the scale. The column is chosen such that the
            magnitude of ``column * scale`` is about ``2**exponent``. Float16 needs a larger factor than other types,
            because its terms are limited to a smaller range. Even so, small terms underflow to 0, and a hidden key gets
            a nonzero weight if its logit without the bias is very large.
    """

    exponent_bits: int
    fraction_bits: int
    largest: float = 3.3e38
    hidden: float | None = 2.2e38
    exponent: int = 0


_NUMBERS = {
    "float16": _Numbers(5, 10, largest=60000.0, hidden=None, exponent=4),
    "bfloat16": _Numbers(8, 7),
    "float32": _Numbers(8, 10),
}


def columns_of(problem: Problem) -> int:
    """Return the number of columns: ``_TERMS`` for each query head that shares a key/value head."""
    return _TERMS * (problem.heads // problem.heads_kv)


def with_columns(problem: Problem) -> Problem:
    """Return the problem that the kernels compute: without key bias, and with columns in each head."""
    scale = problem.scale if abs(problem.scale) >= _SMALLEST_SCALE else _SMALLEST_SCALE
    head_dim = problem.head_dim + columns_of(problem)
    return dataclasses.replace(problem, head_dim=head_dim, scale=scale, key_bias=False)


@dataclasses.dataclass(frozen=True)
class KeyBiasColumns:
    """Columns that encode key biases, for kernels that do not add key biases.

    A column is an additional element of the head dimension of queries and keys. The columns of a key hold the terms of
    its biases, for all query heads that share the key. The columns of a query are constant for the query's own head and
    zero for the other heads. The product of query and key then includes the bias. All arrays are
    ``[batch or 1, heads]``.

    Attributes:
        problem: The problem of the call, in the element type of the kernels.
        scale: Factor by which kernels multiply the product of query and key.
        query_factor: Factor by which the query is multiplied before the kernels run, or ``None``.
        column: Value of the query's columns. It is a power of two, so that products are exact.
        bias: Factor by which kernels multiply a term: ``column * scale``.
        hidden: Magnitude of the sum of a hidden key's terms.
    """

    problem: Problem
    scale: jax.Array
    query_factor: jax.Array | None
    column: jax.Array
    bias: jax.Array
    hidden: jax.Array

    @classmethod
    def for_problem(cls, problem: Problem, scale: jax.Array | None) -> KeyBiasColumns:
        """Return the columns for a problem. If ``scale`` is an array, it replaces the problem's scale."""
        if scale is None:
            logit_scale = jnp.full((1, problem.heads), with_columns(problem).scale, problem.element.accumulator)
            query_factor = problem.scale / logit_scale if abs(problem.scale) < _SMALLEST_SCALE else None
        else:
            logit_scale = jnp.where(jnp.abs(scale) >= _SMALLEST_SCALE, scale, _SMALLEST_SCALE)
            query_factor = scale / logit_scale
        numbers = _NUMBERS[problem.dtype]
        power = jnp.clip(numbers.exponent - jnp.round(jnp.log2(jnp.abs(logit_scale))), -10, 14)
        column = jnp.ldexp(jnp.ones_like(logit_scale), power.astype(jnp.int32))
        if numbers.hidden is None:
            hidden = jnp.full_like(column, _TERMS * numbers.largest)
        else:
            hidden = numbers.hidden / (column * jnp.maximum(jnp.abs(logit_scale), 1))
        return cls(problem, logit_scale, query_factor, column, logit_scale * column, hidden)

    @property
    def hidden_logit(self) -> jax.Array:
        """Magnitude of the logit of a hidden key."""
        return jnp.abs(self.hidden * self.bias)

    def append(self, operands: Operands) -> Operands:
        """Return operands whose query and key have columns. The caller pads the head dimension for the kernels."""
        inputs, query = operands.inputs, operands.inputs.query
        assert inputs.key_bias is not None
        if self.query_factor is not None:
            query *= over_tokens(self.query_factor, query).astype(query.dtype)
        columns = jnp.broadcast_to(self._query_columns(), (*query.shape[:-1], columns_of(self.problem)))
        hidden_logit = jnp.min(self.hidden_logit, axis=0)[:, None]
        inputs = inputs._replace(
            query=jnp.concatenate([query, columns.astype(query.dtype)], axis=-1),
            key=jnp.concatenate([inputs.key, self._key_columns(inputs.key_bias, inputs.key)], axis=-1),
            scale=None if inputs.scale is None else self.scale,
            relative_bias=_clipped(inputs.relative_bias, _RELATIVE_BIAS_SHARE * hidden_logit),
            key_bias=None,
            sinks=_clipped(inputs.sinks, _KEY_BIAS_SHARE * hidden_logit),
        )
        return operands._replace(inputs=inputs)

    def result(self, saved: Saved) -> Saved:
        """Set the output to 0 and the logsumexp to ``-inf`` for queries without sinks whose keys are all hidden."""
        has_no_keys = saved.logsumexp < -_HIDDEN_SHARE * over_tokens(self.hidden_logit, saved.out)[..., 0]
        out, logsumexp, remainder = saved
        out, logsumexp = jnp.where(has_no_keys[..., None], 0, out), jnp.where(has_no_keys, -jnp.inf, logsumexp)
        return Saved(out, logsumexp, None if remainder is None else jnp.where(has_no_keys, 0, remainder))

    def saved(self, saved: Saved, operands: Operands) -> Saved:
        """Convert saved results for the backward kernels: replace a logsumexp of ``-inf`` by 0.

        With any finite logsumexp, the weights of hidden keys underflow to 0. The logsumexp of padding does not change,
        because kernels recognize padding by it.
        """
        logsumexp, layouts = saved.logsumexp, operands.layouts
        has_no_keys = jnp.isneginf(logsumexp)
        if layouts is not None:
            has_no_keys &= is_real(layouts, logsumexp.shape[1:-1], for_queries=True)[..., None]
        return saved._replace(logsumexp=jnp.where(has_no_keys, 0, logsumexp))

    def gradients(self, gradients: Gradients, operands: Operands) -> Gradients:
        """Convert gradients of the kernels to gradients of the call's inputs.

        The kernels' gradient of an array ``scale`` includes the contribution of the columns. It is replaced by a
        gradient without this contribution, because biases do not depend on the scale. The gradients of query and key
        may still have columns, which the caller removes.
        """
        inputs, width = operands.inputs, self.problem.head_dim
        assert inputs.key_bias is not None
        first_terms = gradients.key[..., width : width + columns_of(self.problem) : _TERMS].astype(self.bias.dtype)
        bias_gradient = first_terms.reshape(inputs.key_bias.shape) / over_tokens(self.bias, inputs.key_bias)
        gradients = gradients._replace(key_bias=bias_gradient)
        if self.query_factor is None:
            return gradients
        # Set the query's padding to zero: it may hold infinity or NaN, whose products with a gradient of zero are NaN.
        query = without_padding(operands.layouts, inputs).query
        scaled_gradient = gradients.query[..., : query.shape[-1]].astype(self.scale.dtype)
        if gradients.scale is not None:
            products = products_of_heads(scaled_gradient, query.astype(scaled_gradient.dtype))
            gradients = gradients._replace(scale=products / self.scale)
        return gradients._replace(query=(scaled_gradient * over_tokens(self.query_factor, query)).astype(query.dtype))

    def _query_columns(self) -> jax.Array:
        """Return the columns of queries, ``[batch or 1, 1, ..., heads, columns]``."""
        groups = self.problem.heads // self.problem.heads_kv
        identity = np.tile(np.repeat(np.eye(groups), _TERMS, axis=1), (self.problem.heads_kv, 1))
        columns = self.column[..., None] * identity[None].astype(self.column.dtype)
        return columns.reshape(columns.shape[0], *(1,) * self.problem.rank, *columns.shape[1:])

    def _key_columns(self, key_bias: jax.Array, key: jax.Array) -> jax.Array:
        """Return the columns of keys, ``[batch, *keys, heads_kv, columns]``."""
        numbers = _NUMBERS[self.problem.dtype]
        bias = with_hidden_keys(key_bias)
        bias = jnp.where(bias == jnp.inf, jnp.nan, bias)
        hidden, factor = over_tokens(self.hidden, key_bias), over_tokens(self.bias, key_bias)
        rest = jnp.clip(bias / factor, -_KEY_BIAS_SHARE * hidden, _KEY_BIAS_SHARE * hidden)
        rest = jnp.where(jnp.isneginf(bias), -jnp.sign(factor) * hidden, rest)
        terms = []
        for _ in range(_TERMS):
            # Do not convert to the kernels' element type and back instead: XLA may remove such a pair of conversions.
            term = jax.lax.reduce_precision(rest, numbers.exponent_bits, numbers.fraction_bits)
            terms.append(jnp.clip(term, -numbers.largest, numbers.largest))
            rest = rest - terms[-1]
        columns = jnp.concatenate(terms, axis=-1)  # [batch, *keys, heads, terms]
        return columns.reshape(*key.shape[:-1], columns_of(self.problem)).astype(key.dtype)


def _clipped(logits: jax.Array | None, limits: jax.Array) -> jax.Array | None:
    """Clip finite numbers of a relative bias or sinks ``[tables, heads, entries]`` to +-``limits`` ``[heads, 1]``."""
    if logits is None:
        return None
    logits = with_hidden_keys(logits)
    limits = limits[None]
    return jnp.where(jnp.isfinite(logits), jnp.clip(logits, -limits, limits), logits)
