"""Sinks: a logit of each query head that the softmax's denominator has and no key stands behind.

Passes have them in the softmax. Behind outputs that are merged, and where JAX differentiates plain JAX, they are a step
of their own: a softmax with one more logit is the one without, times the share that the keys have of the new total,
which follows from the logsumexp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from natten_jax.arrays.added_logits import in_accumulator, with_hidden_keys
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.execution import passes
from natten_jax.ops.arrays import ArrayLike, as_logit_term
from natten_jax.ops.boxes import FinerGrid
from natten_jax.plan.request import Request
from natten_jax.sharding.explicit import split_like_heads


def checked_sinks(sinks: ArrayLike, inputs: Inputs, grid: FinerGrid | None = None) -> jax.Array:
    """The sinks as a JAX array: of each head of the inputs, which a finer grid's queries may have become.

    Raises:
        ValueError: They are not ``[heads]``, or not floating point numbers.
        TypeError: They are no array.
    """
    query = inputs.query
    sinks = as_logit_term("sinks", sinks)
    expected = (query.shape[-2] // (1 if grid is None else grid.queries),)
    if sinks.shape != expected:
        raise ValueError(f"sinks has shape {sinks.shape}, but there is one for each query head: {expected}")
    return sinks if grid is None else grid.scales(jnp.asarray(sinks)[None])[0]


def in_pass(request: Request, inputs: Inputs, sinks: jax.Array | None) -> tuple[Inputs, jax.Array | None]:
    """The inputs of a call's only request with its sinks; and what is left for :func:`with_sinks`.

    That is all of them where devices share tokens and exchange them, or where outputs are scaled afterwards.
    """
    if sinks is None or request.token_axes or request.problem.element.is_float8:
        return inputs, sinks
    if passes.plain_backend(request) is not None:
        return inputs, sinks
    accumulator = ELEMENT_TYPES[request.problem.dtype].accumulator
    return inputs._replace(sinks=in_accumulator(sinks, accumulator)[None, :, None]), None


def with_sinks(output: Output, sinks: jax.Array | None) -> Output:
    """Output and logsumexp of a softmax that has the sinks in its denominator; ``None`` where there are none."""
    return output if sinks is None else _with_sinks(output, split_like_heads(sinks, output.logsumexp))


@jax.jit
def _with_sinks(output: Output, sinks: jax.Array) -> Any:
    accumulator = ELEMENT_TYPES[output.out.dtype.name].accumulator
    sinks = with_hidden_keys(in_accumulator(sinks, accumulator))
    sinks = jnp.where(sinks == jnp.inf, sinks - jnp.inf, sinks)  # as exp(inf - inf), the weight of the sink
    sinks = jnp.expand_dims(sinks, range(output.logsumexp.ndim - 1))
    # A query that sees no key has a logsumexp of -inf, whose derivatives would be no numbers.
    is_empty = jnp.isneginf(output.logsumexp)
    keys = jnp.where(is_empty, 0, output.logsumexp)
    # As small as the sink's share may be, the derivative has all its digits.
    share = jnp.where(is_empty, 0, jnp.exp(-jax.nn.softplus(sinks - keys)))
    logsumexp = jnp.where(is_empty, sinks, jnp.logaddexp(keys, sinks))
    return Output((output.out.astype(accumulator) * share[..., None]).astype(output.out.dtype), logsumexp)
