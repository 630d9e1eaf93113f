"""8-bit floats: quantization, the scales of a call, and gradients of calls that quantize their arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from natten_jax.arguments.static import Ints, array_of, flag, int_tuple, shown
from natten_jax.arrays.boxes import without_padding
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.ops.canonicalize import ArrayLike, TokenOffsets, UpsampledGrid, as_jax_array
from natten_jax.problem import Problem
from natten_jax.sharding.explicit import replicated, split_like

Granularity = Literal["tensor", "head", "block"]

#: JAX's names of the element types, by the names that users may give: the short name or JAX's name.
NAMES = {name: each.name for each in ELEMENT_TYPES.values() if each.is_float8 for name in (each.short_name, each.name)}
#: Default block shape, by the number of token dimensions: 128 tokens.
BLOCKS = {1: (128,), 2: (8, 16), 3: (2, 8, 8)}


class Quantized(NamedTuple):
    """An array of 8-bit floats, and how to restore the original numbers.

    Attributes:
        array: The 8-bit array, of the same shape as the original; rotated if ``rotate`` was set.
        scale: float32. Factor that restores the elements, in the form of the operators' ``query_scale``, ``key_scale``
            and ``value_scale``.
        mean: float32 ``[batch, heads, head_dim]``. The mean that was subtracted from every token, before the rotation;
            ``None`` without ``subtract_mean``.
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
    """Quantize an array to 8-bit floats.

    The elements that share a scale are divided by it, so that the largest magnitude among them becomes the largest
    number of the element type. The function is plain JAX and works under ``jax.jit`` and ``jax.vmap``. Gradients are
    not defined.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax.fp8 import quantize
        >>> array, scale, mean = quantize(jnp.ones((2, 16, 16, 4, 64)), subtract_mean=True)
        >>> array.dtype.name, scale.shape, mean.shape
        ('float8_e4m3fn', (2, 4), (2, 4, 64))

    Args:
        array: ``[batch, *layout, heads, head_dim]``, of floats.
        dtype: ``"e4m3"`` (3 mantissa bits, numbers up to 448) or ``"e5m2"`` (2 mantissa bits, numbers up to 57,344), or
            JAX's name of either.
        scale: Granularity of the scales: one for the array (``"tensor"``), per batch entry and head (``"head"``), or
            per batch entry, head and block of tokens (``"block"``).
        block_shape: Only with ``scale="block"``. Largest extents of a block, a single int or an int per token
            dimension. All blocks of a dimension except the last have ``ceil(extent / blocks)`` tokens. ``None`` uses
            blocks of at most 128 tokens.
        subtract_mean: Subtract the mean over a head's tokens. Subtracting it from the keys does not change the softmax,
            only the logsumexp; to correct the logsumexp of a query, add ``scale * sum(query * mean)``.
        rotate: Multiply the heads by an orthogonal Hadamard matrix, which spreads outliers of a single feature over all
            features. If both query and key are rotated, their products do not change. ``head_dim`` must be a power of
            two.

    Returns:
        The array, its scale ``[]``, ``[batch, heads]`` or ``[batch, *blocks, heads]``, and the mean. The scale of
        elements that are all zero is 1. Elements that share a scale with an infinite number dequantize to NaN; NaN
        stays NaN.

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
    element_type = float8_name("dtype", dtype)
    if block_shape is None:
        block = BLOCKS.get(rank, (1,) * (rank - 1) + (128,))
    else:
        block = int_tuple("block_shape", block_shape, rank)
    numbers, mean = array.astype(jnp.float32), None
    if flag("subtract_mean", subtract_mean):
        mean = mean_of_tokens(numbers)
        numbers, mean = numbers - mean, mean.reshape(array.shape[0], *array.shape[-2:])
    if flag("rotate", rotate):
        numbers = rotated(numbers)
    if scale == "head":
        (rounded,), factors = quantized_heads([numbers], element_type)
        return Quantized(rounded, factors, mean)
    is_block = scale == "block"
    factors = _factors_of(_largest_of_blocks(numbers, block) if is_block else jnp.max(jnp.abs(numbers)), element_type)
    per_token = factors_per_token(factors, array.shape) if is_block else factors
    return Quantized(_rounded(numbers, per_token, element_type), factors, mean)


def quantized_heads(arrays: Sequence[jax.Array], element_type: str) -> tuple[list[jax.Array], jax.Array]:
    """Quantize arrays that share a scale per batch entry and head; return them and the scales ``[batch, heads]``."""
    sizes = [jnp.max(jnp.abs(each), axis=(*range(1, each.ndim - 2), each.ndim - 1), keepdims=True) for each in arrays]
    batch, *_, heads, _ = arrays[0].shape
    factors = _factors_of(functools.reduce(jnp.maximum, (_with_rank(each, 1) for each in sizes)), element_type)
    rounded = [_rounded(each, _with_rank(factors, each.ndim - 3), element_type) for each in arrays]
    return rounded, factors.reshape(batch, heads)


def mean_of_tokens(array: jax.Array) -> jax.Array:
    """Compute the mean over a head's tokens, ``[batch, 1, ..., heads, head_dim]``."""
    return jnp.mean(array, axis=range(1, array.ndim - 2), keepdims=True)


def _with_rank(array: jax.Array, rank: int) -> jax.Array:
    """Reshape to ``[batch, 1, ..., heads, width]`` with ``rank`` dimensions of extent 1."""
    return array.reshape(array.shape[0], *(1,) * rank, *array.shape[-2:])


def _factors_of(largest: jax.Array, element_type: str) -> jax.Array:
    """Compute scales for elements with these largest magnitudes."""
    most = float(jnp.finfo(element_type).max)
    # Smallest scale whose product with every nonzero 8-bit number is a normal float32 number.
    least = float(np.finfo(np.float32).tiny) / float(jnp.finfo(element_type).smallest_subnormal)
    return jnp.where(largest == 0, 1, jnp.maximum(largest / most, least))


def _rounded(numbers: jax.Array, factors: jax.Array, element_type: str) -> jax.Array:
    most = float(jnp.finfo(element_type).max)
    return jnp.clip(numbers / factors, -most, most).astype(element_type)


def float8_name(name: str, dtype: str) -> str:
    """Return JAX's name of an 8-bit element type.

    Raises:
        ValueError: ``dtype`` is not in :data:`NAMES`.
    """
    if not isinstance(dtype, str) or dtype not in NAMES:
        raise ValueError(f"{name} must be one of {', '.join(NAMES)}, got {shown(dtype)}")
    return NAMES[dtype]


def can_rotate(head_dim: int) -> bool:
    """Return True if ``head_dim`` is a power of two, as :func:`rotated` requires."""
    return head_dim & (head_dim - 1) == 0


def rotated(array: jax.Array) -> jax.Array:
    """Multiply an array ``[..., head_dim]`` by an orthogonal Hadamard matrix, whose elements have equal magnitudes.

    Raises:
        ValueError: ``head_dim`` is not a power of two.
    """
    width = array.shape[-1]
    if not can_rotate(width):
        raise ValueError(f"rotate takes heads whose width is a power of two, got head_dim {width}")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # The elements of the matrix are 1 and -1, so that only the float32 sums round. The product is scaled afterwards.
    product = jnp.matmul(array, matrix, precision=jax.lax.Precision.HIGHEST)
    return product * np.float32(width**-0.5)


def factors_per_token(factors: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Expand scales of blocks, ``[batch, *blocks, heads]``, to tokens, ``[batch, *layout, heads, 1]``.

    Args:
        factors: The scales.
        shape: The shape of the array that was quantized.
    """
    factors = replicated(factors)  # shards and blocks may have different boundaries
    for axis, extent in enumerate(shape[1:-2], start=1):
        token = np.arange(extent) // math.ceil(extent / factors.shape[axis])
        factors = jnp.take(factors, token, axis=axis)
    return factors[..., None]


def _largest_of_blocks(numbers: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Compute the largest magnitude per block, ``[batch, *blocks, heads]``."""
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    for axis, most in enumerate(block, start=1):
        extent = largest.shape[axis]
        blocks = math.ceil(extent / most)
        tokens = math.ceil(extent / blocks)
        padded = [(0, blocks * tokens - extent if i == axis else 0) for i in range(largest.ndim)]
        cut = (*largest.shape[:axis], blocks, tokens, *largest.shape[axis + 1 :])
        largest = jnp.max(jnp.pad(largest, padded).reshape(cut), axis=axis + 1)
    return largest


#: A scale: a number or an array.
Factor = float | ArrayLike

#: Element types of the output of 8-bit arrays, the default one first.
OUTPUT_DTYPES = ("bfloat16", "float16", "float32")


class Float8Arguments(NamedTuple):
    """Arguments of the operators for 8-bit arrays.

    Attributes:
        query_scale: Factors of the query: a number, or ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors of the key: a number, ``[batch, heads_kv]`` or ``[batch, *blocks, heads_kv]``.
        value_scale: Factors of the value, with the shapes of ``key_scale``.
        out_dtype: Element type of the output.
        fp8: Element type to which the call quantizes wider arrays.
    """

    query_scale: Factor | None = None
    key_scale: Factor | None = None
    value_scale: Factor | None = None
    out_dtype: DTypeLike | None = None
    fp8: str | None = None


NOTHING = Float8Arguments()


class _Factors(NamedTuple):
    """Scales of the arrays, ``[batch, heads]`` or per block ``[batch, *blocks, heads_kv]``; ``None`` means 1."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None


def float8_operands(
    problem: Problem, inputs: Inputs, arguments: Float8Arguments, place: TokenOffsets, grid: UpsampledGrid | None = None
) -> tuple[Problem, Inputs, Callable[[Output], Output] | None]:
    """Return the problem and the arrays for the backends, and a function that completes their output.

    The query's scale, and a scale shared by all keys of a head, are multiplied into the scale of the logits. A scale
    shared by all values of a head is multiplied into the output. Scales of blocks are passed to the backends.

    Args:
        problem: The problem.
        inputs: The arrays.
        arguments: The 8-bit arguments of the call.
        place: Positions of the queries, and padding.
        grid: The grid of the queries, if it is finer than the keys' grid and the queries are folded into heads.

    Raises:
        ValueError: A shape, value or element type is wrong, or an argument does not apply to arrays of this type.
        TypeError: A factor is neither a number nor an array.
    """
    dtype = _output_dtype(problem, arguments)
    shift = None
    if arguments.fp8 is not None:
        problem, inputs, factors, shift = _quantized(problem, inputs, arguments, place)
    elif problem.element.is_float8:
        factors = _checked(inputs, arguments, grid)
    else:
        _check_unscaled(arguments, f"{problem.dtype} arrays, but factors are for 8-bit arrays")
        return problem, inputs, None
    heads = inputs.query.shape[-2]
    logit_factors = [_per_query_head(each, heads) for each in factors[:2] if each is not None and each.ndim == 2]
    if logit_factors:
        logit_factors.append(jnp.float32(problem.scale) if inputs.scale is None else replicated(inputs.scale))
        inputs = inputs._replace(scale=functools.reduce(operator.mul, logit_factors))
        problem = dataclasses.replace(problem, scale=1.0)
    key_factors = {
        name: factors_per_token(each, inputs.key.shape)
        for name, each in (("key_scale", factors.key), ("value_scale", factors.value))
        if each is not None and each.ndim > 2
    }
    if key_factors and inputs.additional_keys is not None:
        raise ValueError(
            f"{' and '.join(key_factors)} of blocks and additional_keys were both given: additional tokens are not in "
            "a block, so give factors per head, which apply to them too"
        )
    if factors.value is not None and factors.value.ndim == 2:
        inputs = inputs._replace(out_scale=_per_query_head(factors.value, heads))
    problem = dataclasses.replace(
        problem, out_dtype=None if dtype == problem.element.output else dtype, block_scales=bool(key_factors)
    )

    def finished(output: Output) -> Output:
        logsumexp = output.logsumexp if shift is None else output.logsumexp + shift
        return Output(output.out.astype(dtype), logsumexp)

    return problem, inputs._replace(**key_factors), finished


def _quantized(
    problem: Problem, inputs: Inputs, arguments: Float8Arguments, place: TokenOffsets
) -> tuple[Problem, Inputs, _Factors, jax.Array]:
    """Return the problem of quantized arrays, these arrays, their scales, and the correction of the logsumexp.

    The mean of the keys is subtracted, which shifts all logits of a query by the same number, because logits are linear
    in the products. Query and key are rotated if ``head_dim`` is a power of two.

    Raises:
        ValueError: The arrays have 8 bits already, or a dtype that is not supported, or scales were given.
    """
    dtype = float8_name("fp8", str(arguments.fp8))
    if problem.dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"fp8={arguments.fp8!r} takes {', '.join(OUTPUT_DTYPES)} arrays, but query has dtype {problem.dtype}"
        )
    _check_unscaled(arguments, f"fp8={arguments.fp8!r}, which finds the factors itself")
    inputs = without_padding(place.layouts, inputs)

    def wide(array: jax.Array | None) -> list[jax.Array]:
        return [] if array is None else [array.astype(jnp.float32)]

    turned = rotated if can_rotate(problem.head_dim) else lambda array: array
    (query,), keys = wide(inputs.query), wide(inputs.key) + wide(inputs.additional_keys)
    mean = mean_of_tokens(keys[0])
    batch, width = mean.shape[0], mean.shape[-1]
    centred = [turned(each - mean.reshape(batch, *(1,) * (each.ndim - 3), -1, width)) for each in keys]
    (small_query,), query_factor = quantized_heads([turned(query)], dtype)
    (key, *additional_keys), key_factor = quantized_heads(centred, dtype)
    (value, *additional_values), value_factor = quantized_heads(
        wide(inputs.value) + wide(inputs.additional_values), dtype
    )
    scale = jnp.float32(problem.scale) if inputs.scale is None else _per_query(replicated(inputs.scale), query)[..., 0]
    per_head = _per_query_head(mean.reshape(batch, -1, width), query.shape[-2])
    products = jnp.sum(query * _per_query(per_head, query), axis=-1)
    arrays = inputs._replace(query=small_query, key=key, value=value)
    if additional_keys:
        arrays = arrays._replace(additional_keys=additional_keys[0], additional_values=additional_values[0])
    quantised = dataclasses.replace(problem, dtype=dtype)
    return quantised, arrays, _Factors(query_factor, key_factor, value_factor), scale * products


def _checked(inputs: Inputs, arguments: Float8Arguments, grid: UpsampledGrid | None) -> _Factors:
    batch, *_, heads, _ = inputs.query.shape
    heads //= 1 if grid is None else grid.queries
    _, *layout, heads_kv, _ = inputs.key.shape
    kv_shapes = {"[batch, heads_kv]": (batch, heads_kv)}
    return _Factors(
        _factors("query_scale", arguments.query_scale, {"[batch, heads]": (batch, heads), **kv_shapes}),
        _factors("key_scale", arguments.key_scale, kv_shapes, layout),
        _factors("value_scale", arguments.value_scale, kv_shapes, layout),
    )


def _factors(
    name: str, argument: Any, shapes: Mapping[str, tuple[int, ...]], layout: Sequence[int] = ()
) -> jax.Array | None:
    """Check scales, and return them in one of ``shapes`` or per block; expand a number to the last of ``shapes``."""
    argument = array_of(argument)
    if argument is None:
        return None
    expected = tuple(shapes.values())
    if isinstance(argument, numbers.Real) and not isinstance(argument, bool):
        if not 0 < float(argument) < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {shown(argument)}")
        return jnp.full(expected[-1], float(argument), jnp.float32)
    factors = as_jax_array(name, argument)  # type: ignore[arg-type]
    if factors.dtype != jnp.float32:
        raise ValueError(f"{name} has dtype {factors.dtype.name}, but float32 is expected")
    if factors.shape == ():
        return jnp.broadcast_to(replicated(factors), expected[-1])
    if factors.shape in expected:
        return replicated(factors)
    batch, heads_kv = expected[-1]
    is_of_blocks = (
        layout and factors.ndim == len(layout) + 2 and (*factors.shape[:1], factors.shape[-1]) == (batch, heads_kv)
    )
    if not is_of_blocks:
        words = ["no dimensions", *(f"{word} {shape}" for word, shape in shapes.items())]
        words += [f"[batch, *blocks, heads_kv] with {len(layout)} dimension(s) of blocks"] * bool(layout)
        raise ValueError(f"{name} has shape {factors.shape}, but {' or '.join(words)} is expected")
    for i, (blocks, extent) in enumerate(zip(factors.shape[1:-1], layout, strict=True)):
        tokens = math.ceil(extent / max(blocks, 1))
        if blocks < 1 or math.ceil(extent / tokens) != blocks:
            raise ValueError(
                f"{name} has shape {factors.shape}, but {extent} tokens of dimension {i} cannot be {blocks} blocks: of "
                f"{tokens} tokens each, the last one fewer, there are {math.ceil(extent / tokens)}"
            )
    return replicated(factors)


def _per_query_head(factors: jax.Array, heads: int) -> jax.Array:
    """Repeat ``[batch, heads_kv, ...]`` to a scale per query head. Query heads that share a key head get its scale."""
    return jnp.repeat(replicated(factors), heads // factors.shape[1], axis=1)


def _per_query(per_head: jax.Array, array: jax.Array) -> jax.Array:
    """Reshape ``[batch, heads]`` or ``[batch, heads, head_dim]`` to broadcast with an array in the query's layout."""
    width = per_head.shape[-1] if per_head.ndim == 3 else 1
    return split_like(per_head.reshape(array.shape[0], *(1,) * (array.ndim - 3), -1, width), array)


def _output_dtype(problem: Problem, arguments: Float8Arguments) -> str:
    if arguments.out_dtype is None:
        return problem.output_dtype
    try:
        name = jnp.dtype(arguments.out_dtype).name
    except TypeError:
        name = shown(arguments.out_dtype)
    allowed = OUTPUT_DTYPES if problem.element.is_float8 else (problem.dtype,)
    if name not in allowed:
        raise ValueError(f"out_dtype must be {' or '.join(allowed)} for {problem.dtype} arrays, got {name}")
    return name


def _check_unscaled(arguments: Float8Arguments, why: str) -> None:
    for name, argument in list(arguments._asdict().items())[:3]:
        if argument is not None:
            raise ValueError(f"{name} was given with {why}")


Call = Callable[[Any, Float8Arguments], Any]


def straight_through(call: Call, operands: Any, arguments: Float8Arguments, return_lse: bool) -> Any:
    """Run a call that quantizes its arrays, with the gradients of the call without quantization (straight-through).

    Args:
        call: Function that returns the output and the logsumexp for operands and 8-bit arguments.
        operands: A tree of arrays and other leaves.
        arguments: The 8-bit arguments of the forward pass; the backward pass differentiates a call without them.
        return_lse: Return the logsumexp with the output.
    """
    leaves, structure = jax.tree.flatten(operands)
    leaves = [array_of(leaf) for leaf in leaves]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}

    def run(arrays: dict[int, Any], arguments: Float8Arguments) -> Any:
        every = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return call(jax.tree.unflatten(structure, every), arguments)

    @jax.custom_vjp
    def quantizing(arrays: dict[int, Any]) -> Any:
        return run(arrays, arguments)

    def forward(arrays: dict[int, Any]) -> Any:
        return run(arrays, arguments), arrays

    def backward(arrays: dict[int, Any], cotangents: Any) -> Any:
        floats = {i: array for i, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        outputs, transpose = jax.vjp(lambda floats: run({**arrays, **floats}, NOTHING), floats)
        # Explicit mesh axes may shard the outputs of the unquantized call differently.
        (gradients,) = transpose(jax.tree.map(split_like, cotangents, outputs))
        return ({i: gradients.get(i) for i in arrays},)

    quantizing.defvjp(forward, backward)
    output = quantizing(arrays)
    return output if return_lse else output[0]
