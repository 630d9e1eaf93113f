"""Arrays of 8-bit floats, and the factors that give them their sizes back."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.static import Ints, flag, int_tuple, shown
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.ops.arrays import ArrayLike, as_jax_array
from natten_jax.sharding.explicit import replicated

Granularity = Literal["tensor", "head", "block"]

#: What users call the element types: the short name, or that of JAX.
NAMES = {name: each.name for each in ELEMENT_TYPES.values() if each.is_float8 for name in (each.short_name, each.name)}
#: Tokens of a block, by the number of token dimensions: 128, or about as many.
BLOCKS = {1: (128,), 2: (8, 16), 3: (2, 8, 8)}


class Quantized(NamedTuple):
    """An array in 8 bits.

    Attributes:
        array: An array of the same shape, rotated if that was asked for.
        scale: float32: what elements are to be multiplied with, as ``query_scale``, ``key_scale`` and ``value_scale``
            of the operators take it.
        mean: float32 ``[batch, heads, head_dim]``: what was subtracted from every token, as it was before the rotation;
            ``None`` where that is nothing.
    """

    array: jax.Array
    scale: jax.Array
    mean: jax.Array | None = None


def quantize(
    array: ArrayLike,
    dtype: str = "e4m3",
    *,
    scale: Granularity = "head",
    block_shape: Ints | None = None,
    subtract_mean: bool = False,
    rotate: bool = False,
) -> Quantized:
    """Round an array to 8 bits.

    The largest number of those that share a factor becomes the largest number of the element type. Plain JAX: works
    under ``jax.jit`` and ``jax.vmap``; it has no gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax.fp8 import quantize
        >>> array, scale, mean = quantize(jnp.ones((2, 16, 16, 4, 64)), subtract_mean=True)
        >>> array.dtype.name, scale.shape, mean.shape
        ('float8_e4m3fn', (2, 4), (2, 4, 64))

    Args:
        array: ``[batch, *layout, heads, head_dim]``, of floats.
        dtype: ``"e4m3"``, three bits behind the leading one and numbers up to 448, or ``"e5m2"``, two, up to 57,344; or
            JAX's name of it.
        scale: What shares a factor: ``"tensor"``, everything; ``"head"``, the tokens of a head of a batch entry;
            ``"block"``, those of a block of its tokens.
        block_shape: With ``scale="block"``: the most tokens of a block, for each token dimension or one for all. Blocks
            of a dimension are as equal as can be: all but the last have ``ceil(extent / blocks)`` tokens. ``None`` has
            128 in all.
        subtract_mean: Whether the mean over a head's tokens is subtracted. Of keys that changes no softmax, and only
            the logsumexp: by ``scale * sum(query * mean)`` of a query, which is to be added to it.
        rotate: Whether heads are multiplied with an orthogonal matrix of Hadamard's, which spreads what single features
            have over all. Where query and key are, their products are the same. ``head_dim`` is a power of two.

    Returns:
        The array, its scale ``[]``, ``[batch, heads]`` or ``[batch, *blocks, heads]``, and the mean. Scales of what is
        zero everywhere are 1. Nothing that shares its factor with an infinite number is a number; NaN stays NaN.

    Raises:
        ValueError: A value, shape or element type breaks a rule above.
        TypeError: An argument is of the wrong type.
    """
    array = as_jax_array("array", array)
    if array.ndim < 4 or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"array has shape {array.shape} and dtype {array.dtype.name}, but floats "
            "[batch, *layout, heads, head_dim] are expected"
        )
    if not isinstance(scale, str) or scale not in get_args(Granularity):
        raise ValueError(f"scale must be one of {', '.join(get_args(Granularity))}, got {shown(scale)}")
    if block_shape is not None and scale != "block":
        raise ValueError(f'block_shape={shown(block_shape)} is for scale="block", but scale is {scale!r}')
    rank = array.ndim - 3
    block = _block_of(block_shape, rank) if scale == "block" else None
    element_type = float8_name("dtype", dtype)
    numbers, mean = array.astype(jnp.float32), None
    if flag("subtract_mean", subtract_mean):
        mean = mean_of_tokens(numbers)
        numbers, mean = numbers - mean, mean.reshape(array.shape[0], *array.shape[-2:])
    if flag("rotate", rotate):
        numbers = rotated(numbers)
    if block is not None:
        factors = _factors_of(_largest_of_blocks(numbers, block), element_type)
        return Quantized(_rounded(numbers, of_tokens(factors, array.shape), element_type), factors, mean)
    if scale == "tensor":
        factors = _factors_of(jnp.max(jnp.abs(numbers)), element_type)
        return Quantized(_rounded(numbers, factors, element_type), factors, mean)
    (rounded,), factors = quantized_heads([numbers], element_type)
    return Quantized(rounded, factors, mean)


def quantized_heads(arrays: Sequence[jax.Array], element_type: str) -> tuple[list[jax.Array], jax.Array]:
    """Arrays in 8 bits whose tokens have one factor for each batch entry and head, and these, ``[batch, heads]``."""
    sizes = [jnp.max(jnp.abs(each), axis=(*range(1, each.ndim - 2), each.ndim - 1), keepdims=True) for each in arrays]
    batch, *_, heads, _ = arrays[0].shape
    factors = _factors_of(functools.reduce(jnp.maximum, (_of_rank(each, 1) for each in sizes)), element_type)
    rounded = [_rounded(each, _of_rank(factors, each.ndim - 3), element_type) for each in arrays]
    return rounded, factors.reshape(batch, heads)


def mean_of_tokens(array: jax.Array) -> jax.Array:
    """The mean over a head's tokens, ``[batch, 1, ..., heads, head_dim]``."""
    return jnp.mean(array, axis=range(1, array.ndim - 2), keepdims=True)


def _of_rank(array: jax.Array, rank: int) -> jax.Array:
    """``[batch, 1, ..., heads, width]`` with so many dimensions in the middle."""
    return array.reshape(array.shape[0], *(1,) * rank, *array.shape[-2:])


def _factors_of(largest: jax.Array, element_type: str) -> jax.Array:
    """Factors for numbers up to these."""
    most = float(jnp.finfo(element_type).max)
    # No product of a factor and a number of the type is denormal in float32, or zero.
    least = float(np.finfo(np.float32).tiny) / float(jnp.finfo(element_type).smallest_subnormal)
    return jnp.where(largest == 0, 1, jnp.maximum(largest / most, least))


def _rounded(numbers: jax.Array, factors: jax.Array, element_type: str) -> jax.Array:
    most = float(jnp.finfo(element_type).max)
    return jnp.clip(numbers / factors, -most, most).astype(element_type)


def float8_name(name: str, dtype: str) -> str:
    """JAX's name of an 8-bit element type.

    Raises:
        ValueError: There is none that users know by this name.
    """
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise ValueError(f"{name} must be one of {', '.join(NAMES)}, got {shown(dtype)}")
    return NAMES[dtype]


def can_rotate(head_dim: int) -> bool:
    """Whether there is a matrix of Hadamard's for heads of this width."""
    return head_dim & (head_dim - 1) == 0


def rotated(array: jax.Array) -> jax.Array:
    """The array ``[..., head_dim]`` times an orthogonal matrix whose elements have all the same size.

    Raises:
        ValueError: ``head_dim`` is no power of two.
    """
    width = array.shape[-1]
    if not can_rotate(width):
        raise ValueError(f"rotate takes heads whose width is a power of two, got head_dim {width}")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # Ones, so that the product is a sum: scaled afterwards, it is as exact as sums in float32 are.
    product = jnp.matmul(array, matrix, precision=jax.lax.Precision.HIGHEST)
    return product * np.float32(width**-0.5)


def of_tokens(factors: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Factors of blocks, ``[batch, *blocks, heads]``, as those of tokens ``[batch, *layout, heads, 1]``.

    Args:
        factors: The factors.
        shape: The shape of the array that they are of.
    """
    factors = replicated(factors)  # blocks need not be those of devices
    for axis, extent in enumerate(shape[1:-2], start=1):
        token = np.arange(extent) // math.ceil(extent / factors.shape[axis])
        factors = jnp.take(factors, token, axis=axis)
    return factors[..., None]


def _block_of(block_shape: Ints | None, rank: int) -> tuple[int, ...]:
    if block_shape is None:
        return BLOCKS.get(rank, (1,) * (rank - 1) + (128,))
    return int_tuple("block_shape", block_shape, rank)


def _largest_of_blocks(numbers: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """The largest size of a number, ``[batch, *blocks, heads]``."""
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    for axis, most in enumerate(block, start=1):
        extent = largest.shape[axis]
        blocks = math.ceil(extent / most)
        tokens = math.ceil(extent / blocks)
        padded = [(0, blocks * tokens - extent if i == axis else 0) for i in range(largest.ndim)]
        cut = (*largest.shape[:axis], blocks, tokens, *largest.shape[axis + 1 :])
        largest = jnp.max(jnp.pad(largest, padded).reshape(cut), axis=axis + 1)
    return largest
