"""Merge attention outputs that were computed over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.names import NEUTRAL_MERGE_ARGUMENTS, reject_unknown_kwargs, without_neutral
from natten_jax.arguments.static import array_of, shown
from natten_jax.element_types import ELEMENT_TYPES, WIDE_DTYPES
from natten_jax.ops.canonicalize import check_array


@reject_unknown_kwargs(natten_arguments=NEUTRAL_MERGE_ARGUMENTS)
def merge_attentions(
    outputs: Sequence[jax.Array], lse_tensors: Sequence[jax.Array], **natten_arguments: bool
) -> tuple[jax.Array, jax.Array]:
    """Merge the outputs of attention over disjoint sets of keys into the output of attention over all keys.

    Plain JAX. The gradients, including those through the logsumexp, equal the gradients of attention over the
    concatenated keys.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax import attention, merge_attentions
        >>> query, key = jnp.ones((2, 16, 4, 8)), jnp.ones((2, 24, 4, 8))
        >>> halves = key[:, :10], key[:, 10:]
        >>> parts = [attention(query, each, each, return_lse=True) for each in halves]
        >>> out, logsumexp = merge_attentions(*zip(*parts))
        >>> bool(jnp.allclose(out, attention(query, key, key)))
        True

    Args:
        outputs: Sequence of two or more outputs ``[..., heads, head_dim_v]``, which have equal shapes. One output per
            set of keys.
        lse_tensors: Sequence of the logsumexps ``[..., heads]``, one per output.
        **natten_arguments: NATTEN's ``torch_compile`` and ``use_autograd_fix=True``. They have no effect: every merge
            is compiled, and its gradient is correct.

    Returns:
        The merged output in the first output's dtype, and its logsumexp. If all logsumexps of a query are ``-inf``,
        because the query attends to no key of any set, its output is 0 and its logsumexp is ``-inf``.

    Raises:
        ValueError: There are fewer than two outputs, the shapes do not match, or an element type is not a supported
            float.
        TypeError: An argument is not a sequence of arrays.
    """
    without_neutral("merge_attentions", natten_arguments, NEUTRAL_MERGE_ARGUMENTS)
    outputs, lse_tensors = _parts("outputs", outputs), _parts("lse_tensors", lse_tensors)
    if len(outputs) < 2:
        raise ValueError(f"outputs has {len(outputs)} part(s): merge_attentions takes at least two")
    if len(outputs) != len(lse_tensors):
        raise ValueError(f"lse_tensors has {len(lse_tensors)} part(s), but outputs has {len(outputs)}")
    for i, (out, lse) in enumerate(zip(outputs, lse_tensors, strict=True)):
        if out.ndim < 2:
            raise ValueError(f"outputs[{i}] has shape {out.shape}, but [..., heads, head_dim_v] is expected")
        if out.shape != outputs[0].shape:
            raise ValueError(f"outputs[{i}] has shape {out.shape}, but outputs[0] has {outputs[0].shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(
                f"lse_tensors[{i}] has shape {lse.shape}, but outputs[{i}] has {out.shape}: "
                f"{out.shape[:-1]} is expected"
            )
    out, logsumexp = _merge(tuple(outputs), tuple(lse_tensors))
    return out, logsumexp


def _parts(name: str, argument: Iterable[jax.Array]) -> list[jax.Array]:
    """Check ``outputs`` or ``lse_tensors`` and return the arrays in a list."""
    argument = array_of(argument)
    is_one = isinstance(argument, (jax.Array, np.ndarray, str, bytes, bytearray, memoryview))
    if is_one or isinstance(argument, (Mapping, Set)) or not isinstance(argument, Iterable):
        raise TypeError(f"{name} must be a sequence of arrays, one per part, got {_kind(argument)}")
    parts = []
    for i, part in enumerate(argument):
        part = array_of(part)
        if isinstance(part, jax.ShapeDtypeStruct):
            raise TypeError(f"{name}[{i}] must be an array, got {type(part).__name__}")
        check_array(f"{name}[{i}]", part)
        if part.dtype.name not in WIDE_DTYPES:
            raise ValueError(f"{name}[{i}] has dtype {part.dtype.name}; supported are {', '.join(WIDE_DTYPES)}")
        parts.append(part)
    return parts


def _kind(argument: Any) -> str:
    shape = getattr(argument, "shape", None)
    if shape is not None:
        return f"one array of shape {shape}"
    return f"the {type(argument).__name__} {shown(argument)}"


@jax.jit
def _merge(outputs: tuple[jax.Array, ...], lse_tensors: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    accumulator = ELEMENT_TYPES[outputs[0].dtype.name].accumulator
    # Do not use jnp.stack: if a mesh shards the axis that jax.vmap maps, jnp.stack fails for a mix of mapped and
    # unmapped arrays.
    lses = jnp.concatenate([lse.astype(accumulator)[None] for lse in lse_tensors])
    highest = jax.lax.stop_gradient(jnp.max(lses, axis=0))
    highest = jnp.where(jnp.isneginf(highest), 0.0, highest)
    weights = jnp.exp(lses - highest[None])
    total = jnp.sum(weights, axis=0)
    is_empty = total == 0
    total = jnp.where(is_empty, 1.0, total)
    weights = weights / total[None]
    merged = sum(weight[..., None] * out.astype(accumulator) for weight, out in zip(weights, outputs, strict=True))
    logsumexp = jnp.where(is_empty, -jnp.inf, highest + jnp.log(total))
    return jnp.asarray(merged).astype(outputs[0].dtype), logsumexp
