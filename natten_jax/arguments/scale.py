"""The factor of the logits: a number, which is a fact of the problem, or an array, which is an operand."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import shown
from natten_jax.element_types import ELEMENT_TYPES

#: A number, or an array of them: without dimensions, or one for each query head.
Scale = float | jax.Array | np.ndarray[Any, Any]

_NUMBER = "None or a real number"
_NUMBER_OR_ARRAY = "None, a real number or an array of real numbers, without dimensions or of shape [heads]"

#: Largest scale: times log2(e) it is finite in float32, with room for both to be rounded.
LARGEST = float(np.finfo(np.float32).max) * (1 - 2**-22) / math.log2(math.e)


def checked_scale(
    scale: float | None, dtype: str | None = None, *, name: str = "scale", takes_arrays: bool = False
) -> float | None:
    """The factor of the logits as a Python float.

    Args:
        scale: The argument; ``None`` stands for the default.
        dtype: Element type of the problem, where it is known. Logits of float64 problems are computed in float64,
            all others in float32, and the kernels' exponentials have base 2: there, ``scale * log2(e)`` is finite.
        name: What the user knows the argument as.
        takes_arrays: Whether it may also be an array, which :func:`number_or_array` has taken out before.

    Raises:
        ValueError: The scale is not finite, or too large for ``dtype``.
        TypeError: It is no real number.
    """
    if scale is None:
        return None
    number, array = number_or_array(scale)
    if array is not None:
        number = array
    if isinstance(number, (bool, np.complexfloating)) or not isinstance(number, (numbers.Real, np.number)):
        raise TypeError(f"{name} must be {_NUMBER_OR_ARRAY if takes_arrays else _NUMBER}, got {shown(scale)}")
    try:
        factor = float(number)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"{name} must be finite, as a float64, too, got {shown(scale)}")
    if dtype not in (None, "float64") and not abs(factor) <= LARGEST:
        raise ValueError(
            f"{name} must be within +-{LARGEST:.6g} for {dtype} arrays, whose logits are float32 "
            f"({name} * log2(e) has to be finite), got {shown(scale)}"
        )
    return factor


def scale_or_default(scale: float | None, head_dim: int, dtype: str) -> float:
    """The factor of the logits; ``None`` is ``head_dim ** -0.5``."""
    factor = checked_scale(scale, dtype, takes_arrays=True)
    return float(head_dim) ** -0.5 if factor is None else factor


def number_or_array(scale: Any) -> tuple[Any, jax.Array | np.ndarray[Any, Any] | None]:
    """A scale as a number, which :func:`checked_scale` checks, or as an array, which :func:`per_head` does.

    An array without dimensions whose value is known is a number, whatever library it is of; one that JAX traces is not.
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
    """Factors of the logits, ``[batch, heads]`` in the element type of these.

    Args:
        scale: Traced by JAX and without dimensions, or ``[heads]``.
        batch: Batch size.
        heads: Query heads.
        dtype: Element type of the problem.

    Raises:
        ValueError: It has another shape, or a value that is known and breaks a rule of :func:`checked_scale`.
        TypeError: It holds no real numbers.
    """
    if not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(
            f"scale must be {_NUMBER_OR_ARRAY}, got an array of shape {scale.shape} and dtype {scale.dtype}"
        )
    if scale.shape not in ((), (heads,)):
        raise ValueError(
            f"scale has shape {scale.shape}, but an array of scales has no dimensions, or one for the "
            f"{heads} query heads: ({heads},)"
        )
    if not isinstance(scale, jax.core.Tracer) and (isinstance(scale, np.ndarray) or scale.is_fully_addressable):
        for head, factor in enumerate(np.asarray(scale).tolist()):
            checked_scale(factor, dtype, name=f"scale[{head}]")
    factors = jnp.asarray(scale, ELEMENT_TYPES[dtype].accumulator)
    return jnp.broadcast_to(factors, (batch, heads))
