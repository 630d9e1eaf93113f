"""Where a box of queries begins, and how much of a layout is real: numbers, or int32 arrays that may be traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import Ints, offset_tuple, shown

#: What the operators take as ``query_origin``: Python's ints are known, and an array of JAX's is read when it runs.
Origin = Ints
#: What they take as ``extents`` and lengths.
Counts = jax.Array | np.ndarray[Any, Any]


def checked_origin(query_origin: Any, batch: int, room: Sequence[int]) -> jax.Array | None:
    """Where a box of queries begins in the layout: int32, ``[rank]`` or ``[batch, rank]``.

    What is known is checked; what JAX's arrays hold is moved into range, as :func:`jax.lax.dynamic_slice` does.

    Args:
        query_origin: The argument.
        batch: Batch size.
        room: By how much the layout is larger than the box, in each dimension.

    Raises:
        ValueError: The box does not lie inside of the layout, or the argument has another shape.
        TypeError: It holds something else than integers.
    """
    if query_origin is None:
        return None
    rank = len(room)
    given = array_of(query_origin)
    if not isinstance(given, jax.Array) and not (isinstance(given, np.ndarray) and given.ndim == 2):
        if isinstance(given, Sequence) and any(isinstance(each, jax.core.Tracer) for each in given):
            raise TypeError(
                f"query_origin must be one array where it is traced, got {shown(query_origin)}: jnp.stack it"
            )
        return jnp.asarray(_in_room(np.array(offset_tuple("query_origin", given, rank)), room), jnp.int32)
    shapes = (rank,), (batch, rank)
    if rank == 1 and given.ndim == 0:
        given = given.reshape(1)
    _check_integers("query_origin", given)
    if given.shape not in shapes:
        raise ValueError(
            f"query_origin has shape {given.shape}, but must have {shapes[0]} or {shapes[1]}: a number for each token "
            "dimension, or that for each entry of the batch"
        )
    if isinstance(given, np.ndarray):
        return jnp.asarray(_in_room(given, room), jnp.int32)
    return _clipped(given, room)


def checked_counts(name: str, counts: Any, batch: int, layout: Sequence[int], *, is_length: bool) -> jax.Array | None:
    """How many tokens are real in each dimension, from the first one on: int32 ``[batch, rank]``.

    What is known is checked; what JAX's arrays hold is moved into range.

    Args:
        name: The name of the argument.
        counts: The argument, ``[batch, rank]``; or ``[batch]`` where ``is_length``.
        batch: Batch size.
        layout: The layout of the arrays.
        is_length: Whether it speaks of a sequence.

    Raises:
        ValueError: A number is negative or larger than the layout, or the argument has another shape.
        TypeError: It holds something else than integers.
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
    given = given.reshape(batch, len(layout))
    if isinstance(given, np.ndarray):
        if ((given < 0) | (given > np.array(layout))).any():
            raise ValueError(f"{name} must lie between 0 and the token layout {tuple(layout)}, got {shown(counts)}")
        return jnp.asarray(given, jnp.int32)
    return _clipped(given, layout)


def _clipped(numbers: jax.Array, most: Sequence[int]) -> jax.Array:
    """The numbers ``[..., rank]``, moved into the range from 0 to ``most``, as int32."""
    bounds = jnp.broadcast_to(jnp.asarray(most, numbers.dtype), numbers.shape)
    return jnp.clip(numbers, 0, bounds).astype(jnp.int32)


def _check_integers(name: str, array: Any) -> None:
    if not isinstance(array.dtype, np.dtype) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers (int32), got dtype {array.dtype}")


def _in_room(origin: np.ndarray[Any, Any], room: Sequence[int]) -> np.ndarray[Any, Any]:
    if ((origin < 0) | (origin > np.array(room))).any():
        raise ValueError(
            f"query_origin must lie between 0 and {tuple(room)}, so that the box of queries lies inside of the token "
            f"layout of the keys, got {shown(origin.tolist())}"
        )
    return origin
