"""The factor of the logits: a static number, or a JAX scalar that is folded into the query."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.static_arguments import shown

#: A number, or a floating-point JAX array without dimensions, traced or not.
Scale = float | jax.Array

_NUMBER = "None or a real Python number"
_NUMBER_OR_ARRAY = "None, a real Python number or a floating-point JAX array of no dimension"

#: Of logits in float32, times log2(e) with room for both to be rounded.
_LARGEST = float(np.finfo(np.float32).max) * (1 - 2**-22) / math.log2(math.e)


def checked_scale(
    scale: float | None, dtype: str | None = None, *, name: str = "scale", takes_arrays: bool = False
) -> float | None:
    """The factor of the logits as a Python float.

    Args:
        scale: The argument; ``None`` stands for the default.
        dtype: Element type of the problem, where it is known. Logits of float64 problems are computed in float64,
            all others in float32, and the kernels' exponentials have base 2: there, ``scale * log2(e)`` is finite.
        name: What the user knows the argument as.
        takes_arrays: Whether it may also be a JAX array, which :func:`fold` has taken out before.

    Raises:
        ValueError: The scale is not finite, or too large for ``dtype``.
        TypeError: It is no real number.
    """
    if scale is None:
        return None
    if isinstance(scale, (bool, np.complexfloating)) or not isinstance(scale, (numbers.Real, np.number)):
        raise TypeError(f"{name} must be {_NUMBER_OR_ARRAY if takes_arrays else _NUMBER}, got {shown(scale)}")
    try:
        factor = float(scale)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"{name} must be finite, as a float64, too, got {shown(scale)}")
    if dtype not in (None, "float64") and not abs(factor) <= _LARGEST:
        raise ValueError(
            f"{name} must be within +-{_LARGEST:.6g} for {dtype} arrays, whose logits are float32 "
            f"({name} * log2(e) has to be finite), got {shown(scale)}"
        )
    return factor


def scale_or_default(scale: float | None, head_dim: int, dtype: str) -> float:
    """The factor of the logits; ``None`` is ``head_dim ** -0.5``."""
    factor = checked_scale(scale, dtype, takes_arrays=True)
    return float(head_dim) ** -0.5 if factor is None else factor


def fold(scale: Any, query: jax.Array) -> tuple[float | None, jax.Array]:
    """A static factor, and the query that it goes with.

    A JAX scalar is multiplied into the query, in float32 at least, and the product rounded to the query's type:
    derivatives with respect to the scale are JAX's own. A number is left to the kernels, which costs nothing.

    Raises:
        TypeError: ``scale`` is a JAX array of some dimension, or holds no floating-point number.
    """
    if not isinstance(scale, jax.Array):
        return scale, query
    if scale.ndim > 0 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(
            f"scale must be {_NUMBER_OR_ARRAY}, got an array of shape {scale.shape} and dtype {scale.dtype}"
        )
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return 1.0, (query.astype(wide) * scale.astype(wide)).astype(query.dtype)
