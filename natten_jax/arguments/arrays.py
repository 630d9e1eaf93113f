"""Validation of arguments that may be arrays (scales, offsets, extents), and of mesh axes of token dimensions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.static import Ints, array_of, int_tuple, shown
from natten_jax.element_types import ELEMENT_TYPES

#: Type of ``query_origin``. Python ints are static; JAX arrays may be traced.
Origin = Ints
#: Type of ``extents``, ``query_lengths`` and ``kv_lengths``.
Counts = jax.Array | np.ndarray[Any, Any]


def checked_origin(query_origin: Any, batch: int, max_origin: Sequence[int]) -> jax.Array | None:
    """Check the offset of the queries in the layout of the keys; return int32 ``[rank]`` or ``[batch, rank]``.

    Concrete values are checked. Traced values are clamped into range, as :func:`jax.lax.dynamic_slice` does.

    Args:
        query_origin: The argument.
        batch: Batch size.
        max_origin: Largest valid offset in each dimension: the extent of the keys minus the extent of the queries.

    Raises:
        ValueError: The queries do not lie inside the layout of the keys, or the argument has a wrong shape.
        TypeError: A value is not an integer.
    """
    if query_origin is None:
        return None
    rank = len(max_origin)
    given = array_of(query_origin)
    if not isinstance(given, jax.Array) and not (isinstance(given, np.ndarray) and given.ndim == 2):
        if isinstance(given, Sequence) and any(isinstance(each, jax.core.Tracer) for each in given):
            raise TypeError(f"query_origin must be one array if it is traced, got {shown(query_origin)}: use jnp.stack")
        given = np.array(int_tuple("query_origin", given, rank, repeat=rank == 1, minimum=0))
    elif rank == 1 and given.ndim == 0:
        given = given.reshape(1)
    _check_integers("query_origin", given)
    if given.shape not in ((rank,), (batch, rank)):
        raise ValueError(
            f"query_origin has shape {given.shape}, but must have {(rank,)} or {(batch, rank)}: a number per "
            "token dimension, for the whole batch or per batch entry"
        )
    return _in_range(
        given,
        max_origin,
        f"query_origin must lie between 0 and {tuple(max_origin)}, so that the box of queries lies inside of the token "
        "layout of the keys",
    )


def checked_counts(name: str, counts: Any, batch: int, layout: Sequence[int], *, is_length: bool) -> jax.Array | None:
    """Check the number of valid tokens in each dimension; return int32 ``[batch, rank]``.

    The other tokens are padding at the end of the dimension. Concrete values are checked. Traced values are clamped
    into range.

    Args:
        name: Name of the argument, for error messages.
        counts: The argument, ``[batch, rank]``, or ``[batch]`` if ``is_length``.
        batch: Batch size.
        layout: Token extents of the arrays, including padding.
        is_length: True if the argument is the sequence length of each batch entry.

    Raises:
        ValueError: A count is negative or larger than the extent, or the argument has a wrong shape.
        TypeError: A value is not an integer.
    """
    if counts is None:
        return None
    given = array_of(counts)
    if not isinstance(given, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an int32 array, got {shown(counts)}")
    _check_integers(name, given)
    shape = (batch,) if is_length else (batch, len(layout))
    if given.shape != shape:
        raise ValueError(f"{name} has shape {given.shape}, but must have {shape}: how many tokens each entry has")
    rule = f"{name} must lie between 0 and the token layout {tuple(layout)}"
    return _in_range(given.reshape(batch, len(layout)), layout, rule)


def _in_range(given: jax.Array | np.ndarray[Any, Any], limits: Sequence[int], rule: str) -> jax.Array:
    """Convert integers ``[..., rank]`` to int32 in [0, ``limits``]: check concrete values, and clip traced values."""
    known = _known_values(given)
    if known is None:
        return jnp.clip(given, 0, jnp.broadcast_to(jnp.asarray(limits, given.dtype), given.shape)).astype(jnp.int32)
    if ((known < 0) | (known > np.array(limits))).any():
        raise ValueError(f"{rule}, got {shown(known.tolist())}")
    return jnp.asarray(given, jnp.int32)


def _known_values(array: jax.Array | np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the values of an array; ``None`` if it is traced or partly on devices of other processes."""
    if isinstance(array, jax.core.Tracer) or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return None
    return np.asarray(jax.device_get(array))


def _check_integers(name: str, array: Any) -> None:
    if not isinstance(array.dtype, np.dtype) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers (int32), got dtype {array.dtype}")


#: Factor of the logits: a number, a zero-dimensional array, or an array ``[heads]``.
Scale = float | jax.Array | np.ndarray[Any, Any]

_NUMBER = "None or a real number"
_NUMBER_OR_ARRAY = "None, a real number or an array of real numbers, without dimensions or of shape [heads]"

#: Largest valid scale. Its product with log2(e) is finite in float32, even if both factors are rounded up.
LARGEST = float(np.finfo(np.float32).max) * (1 - 2**-22) / math.log2(math.e)


def checked_scale(
    scale: float | None, dtype: str | None = None, *, name: str = "scale", takes_arrays: bool = False
) -> float | None:
    """Return the factor of the logits as a Python float, or ``None`` for the default.

    Args:
        scale: The argument; ``None`` requests the default factor.
        dtype: Element type of the problem, or ``None`` if it is unknown. For all types except float64,
            ``scale * log2(e)`` must be finite in float32, because logits are float32 and kernels compute exponentials
            with base 2.
        name: Name of the argument, for error messages.
        takes_arrays: True if error messages should also list arrays as valid. This function nevertheless rejects
            arrays: the caller must pass them to :func:`per_head` instead (see :func:`number_or_array`).

    Raises:
        ValueError: The scale is not finite, or too large for ``dtype``.
        TypeError: The scale is not a real number.
    """
    if scale is None:
        return None
    number, array = number_or_array(scale)
    is_real = isinstance(number, (numbers.Real, np.number)) and not isinstance(number, (bool, np.complexfloating))
    if array is not None or not is_real:
        raise TypeError(f"{name} must be {_NUMBER_OR_ARRAY if takes_arrays else _NUMBER}, got {shown(scale)}")
    try:
        factor = float(number)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"{name} must be finite as a float64, got {shown(scale)}")
    if dtype not in (None, "float64") and not abs(factor) <= LARGEST:
        raise ValueError(
            f"{name} must be within +-{LARGEST:.6g} for {dtype} arrays, whose logits are float32 "
            f"({name} * log2(e) has to be finite), got {shown(scale)}"
        )
    return factor


def scale_or_default(scale: float | None, head_dim: int, dtype: str) -> float:
    """Return the factor of the logits as a Python float, by default ``head_dim ** -0.5``."""
    factor = checked_scale(scale, dtype, takes_arrays=True)
    return float(head_dim) ** -0.5 if factor is None else factor


def number_or_array(scale: Any) -> tuple[Any, jax.Array | np.ndarray[Any, Any] | None]:
    """Return a scale as a pair of a number and an array, one of which is ``None``.

    :func:`checked_scale` then checks the number, or :func:`per_head` the array. A concrete zero-dimensional array of
    any library is returned as a number; a traced one is returned as an array.
    """
    if scale is None or type(scale) is float:
        return scale, None
    scale = array_of(scale)
    if not isinstance(scale, (jax.Array, np.ndarray)):
        return scale, None
    if scale.ndim == 0 and not isinstance(scale, jax.core.Tracer):
        return scale.item(), None
    return None, scale


def per_head(scale: jax.Array | np.ndarray[Any, Any], batch: Any, heads: int, dtype: str) -> jax.Array:
    """Broadcast factors of the logits to ``[batch, heads]``, in the logits' element type.

    Args:
        scale: The array: zero-dimensional and traced, or of shape ``[heads]``.
        batch: Batch size.
        heads: Query heads.
        dtype: Element type of the problem.

    Raises:
        ValueError: The array has a wrong shape, or :func:`checked_scale` rejects a concrete value.
        TypeError: The array does not hold real numbers.
    """
    if not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(
            f"scale must be {_NUMBER_OR_ARRAY}, got an array of shape {scale.shape} and dtype {scale.dtype}"
        )
    if scale.shape not in ((), (heads,)):
        raise ValueError(
            f"scale has shape {scale.shape}, but an array of scales must be a scalar, or have one scale per query "
            f"head: ({heads},)"
        )
    known = _known_values(scale)
    if known is not None:
        for head, factor in enumerate(known.tolist()):
            checked_scale(factor, dtype, name=f"scale[{head}]")
    factors = jnp.asarray(scale, ELEMENT_TYPES[dtype].accumulator)
    return jnp.broadcast_to(factors, (batch, heads))


#: One entry per token dimension: the mesh axis that shards it, a sequence of axes (slowest-varying first), or ``None``.
TokenAxes = Sequence[str | Sequence[str] | None]


def axis_names(entry: Any) -> tuple[Any, ...]:
    """Convert an entry of ``token_axes`` (one name, several names or ``None``) to a tuple of mesh axes."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else (entry,)


def checked_token_axes(token_axes: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """Check ``token_axes``; return a tuple of mesh axes per token dimension.

    The result is an empty tuple if no dimension has an axis.

    Raises:
        TypeError: The argument is not a sequence, or an axis is not a string.
        ValueError: The argument has a wrong length, an axis is repeated, or an axis is not manual in the current
            ``jax.shard_map``.
    """
    if token_axes is None:
        return ()
    rule = f"token_axes must have {rank} value(s), one per token dimension: a mesh axis, a tuple of them or None"
    if isinstance(token_axes, str) or not isinstance(token_axes, Sequence):
        raise TypeError(f"{rule}; got {shown(token_axes)}")
    if len(token_axes) != rank:
        raise ValueError(f"{rule}; got {shown(token_axes)}")
    axes = tuple(map(axis_names, token_axes))
    names = [name for entry in axes for name in entry]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{rule}; got {shown(token_axes)}")
    if len(set(names)) < len(names):
        raise ValueError(f"token_axes names a mesh axis twice: {shown(token_axes)}")
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"token_axes names {name!r}, which is not a manual mesh axis here: use it inside jax.shard_map only; "
                "elsewhere the sharding of the arrays determines how tokens are split"
            ) from None
    return axes if names else ()
