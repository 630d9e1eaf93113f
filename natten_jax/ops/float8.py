"""Quantization to 8-bit floats, scale factors of 8-bit arrays, and gradients of calls that quantize their arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from natten_jax.arguments.names import check_types
from natten_jax.arguments.static import Ints, array_of, flag, int_tuple, shown
from natten_jax.arrays.boxes import without_padding
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.ops.canonicalize import ArrayLike, TokenOffsets, UpsampledGrid, as_jax_array
from natten_jax.problem import Problem
from natten_jax.sharding.explicit import replicated, split_like

Granularity = Literal["tensor", "head", "block"]

#: JAX's name of each 8-bit element type. The keys are the names that users can pass: the short name and JAX's name.
NAMES = {name: each.name for each in ELEMENT_TYPES.values() if each.is_float8 for name in (each.short_name, each.name)}
#: Default block shape for each number of token dimensions. Every default block has 128 tokens.
BLOCKS = {1: (128,), 2: (8, 16), 3: (2, 8, 8)}


class Quantized(NamedTuple):
    """An array of 8-bit floats, with the scale and the mean that approximately restore the original array.

    Attributes:
        array: 8-bit array with the shape of the original array. If ``rotate`` was set, the tokens are rotated.
        scale: float32. ``array`` multiplied by these factors approximates the array before its conversion to 8 bits.
            Pass them to the operators as ``query_scale``, ``key_scale`` or ``value_scale``. Factors per block are not
            allowed as ``query_scale``.
        mean: float32 ``[batch, heads, head_dim]``. The mean over the tokens, which was subtracted from every token
            before the rotation. ``None`` if ``subtract_mean`` was not set.
    """

    array: jax.Array
    scale: jax.Array
    mean: jax.Array | None = None


@check_types
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

    All elements that share a scale are divided by this scale. The scale is chosen so that the largest magnitude of
    these elements becomes the largest number of the 8-bit type. The function is plain JAX and works under ``jax.jit``
    and ``jax.vmap``. Gradients are not defined.

    Example:
        >>> import jax.numpy as jnp
        >>> from natten_jax.fp8 import quantize
        >>> array, scale, mean = quantize(jnp.ones((2, 16, 16, 4, 64)), subtract_mean=True)
        >>> array.dtype.name, scale.shape, mean.shape
        ('float8_e4m3fn', (2, 4), (2, 4, 64))

    Args:
        array: ``[batch, *layout, heads, head_dim]``, of floats.
        dtype: The 8-bit type: ``"e4m3"`` (3 mantissa bits, numbers up to 448), ``"e5m2"`` (2 mantissa bits, numbers up
            to 57,344), or JAX's name of one of the two types.
        scale: Granularity: one scale for the whole array (``"tensor"``), one per batch entry and head (``"head"``), or
            one per batch entry, head and block of tokens (``"block"``).
        block_shape: Only with ``scale="block"``. Largest extents of a block: a single int, or an int per token
            dimension. A dimension is divided into as few blocks as possible. If it has ``blocks`` blocks, all of them
            except the last one have ``ceil(extent / blocks)`` tokens. ``None`` uses blocks of at most 128 tokens.
        subtract_mean: Subtract from every token the mean over all tokens of the head. For keys, this changes the
            logsumexp, but not the softmax. To correct the logsumexp of a query, add ``sum(query * mean)``, multiplied
            by the operator's ``scale``.
        rotate: Multiply every token of a head by an orthogonal Hadamard matrix. The matrix spreads an outlier in one
            feature over all features. If query and key are both rotated, their dot products do not change.
            ``head_dim`` must be a power of two.

    Returns:
        The array, its scale ``[]``, ``[batch, heads]`` or ``[batch, *blocks, heads]``, and the mean. If all elements
        that share a scale are zero, the scale is 1. If an element is infinite or NaN, all elements that share its scale
        dequantize to NaN.

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
    """Quantize arrays with common scales, one per batch entry and head. Return the arrays and the scales."""
    sizes = [jnp.max(jnp.abs(each), axis=(*range(1, each.ndim - 2), each.ndim - 1), keepdims=True) for each in arrays]
    batch, *_, heads, _ = arrays[0].shape
    factors = _factors_of(functools.reduce(jnp.maximum, (_with_rank(each, 1) for each in sizes)), element_type)
    rounded = [_rounded(each, _with_rank(factors, each.ndim - 3), element_type) for each in arrays]
    return rounded, factors.reshape(batch, heads)


def mean_of_tokens(array: jax.Array) -> jax.Array:
    """Compute the mean over the tokens of each head, as ``[batch, 1, ..., heads, head_dim]``."""
    return jnp.mean(array, axis=range(1, array.ndim - 2), keepdims=True)


def _with_rank(array: jax.Array, rank: int) -> jax.Array:
    """Reshape an array to ``[batch, 1, ..., heads, width]`` with ``rank`` dimensions of extent 1."""
    return array.reshape(array.shape[0], *(1,) * rank, *array.shape[-2:])


def _factors_of(largest: jax.Array, element_type: str) -> jax.Array:
    """Compute scales from the largest magnitude of the elements that share a scale."""
    largest_number = float(jnp.finfo(element_type).max)
    # Smallest scale whose product with every nonzero 8-bit number is a normal float32 number.
    smallest_scale = float(np.finfo(np.float32).tiny) / float(jnp.finfo(element_type).smallest_subnormal)
    return jnp.where(largest == 0, 1, jnp.maximum(largest / largest_number, smallest_scale))


def _rounded(numbers: jax.Array, factors: jax.Array, element_type: str) -> jax.Array:
    largest_number = float(jnp.finfo(element_type).max)
    return jnp.clip(numbers / factors, -largest_number, largest_number).astype(element_type)


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
    # The elements of this matrix are 1 and -1. Products with them are exact; only the float32 sums are rounded. The
    # factor that makes the matrix orthogonal is applied afterwards.
    product = jnp.matmul(array, matrix, precision=jax.lax.Precision.HIGHEST)
    return product * np.float32(width**-0.5)


def factors_per_token(factors: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Expand scales per block, ``[batch, *blocks, heads]``, to scales per token, ``[batch, *layout, heads, 1]``.

    Args:
        factors: The scales per block.
        shape: The shape of the array that was quantized.
    """
    factors = replicated(factors)  # block boundaries can differ from shard boundaries
    for axis, extent in enumerate(shape[1:-2], start=1):
        token = np.arange(extent) // math.ceil(extent / factors.shape[axis])
        factors = jnp.take(factors, token, axis=axis)
    return factors[..., None]


def _largest_of_blocks(numbers: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Compute the largest magnitude per block, ``[batch, *blocks, heads]``."""
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    for axis, largest_number in enumerate(block, start=1):
        extent = largest.shape[axis]
        blocks = math.ceil(extent / largest_number)
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
    """The operators' arguments for 8-bit arrays.

    Attributes:
        query_scale: Factors that the query is multiplied by: a number, or an array with the shape ``[]``,
            ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors that the key is multiplied by: a number, or an array with the shape ``[]``,
            ``[batch, heads_kv]`` or ``[batch, *blocks, heads_kv]``.
        value_scale: Factors that the value is multiplied by, with the shapes of ``key_scale``.
        out_dtype: Element type of the output.
        fp8: 8-bit type to which the call quantizes 16-bit or 32-bit queries, keys and values.
    """

    query_scale: Factor | None = None
    key_scale: Factor | None = None
    value_scale: Factor | None = None
    out_dtype: DTypeLike | None = None
    fp8: str | None = None


NOTHING = Float8Arguments()


class _Factors(NamedTuple):
    """Scales of query, key and value, per head or per block of tokens. ``None`` means a scale of 1."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None


def float8_operands(
    problem: Problem, inputs: Inputs, options: Float8Arguments, offsets: TokenOffsets, grid: UpsampledGrid | None = None
) -> tuple[Problem, Inputs, Callable[[Output], Output] | None]:
    """Return the problem and the arrays for the backends, and a function that must be applied to a backend's output.

    The function is ``None`` if the arrays are not 8-bit and the call does not quantize them.

    Per-head scales of queries and keys are multiplied into the factor of the logits. Per-head scales of values are
    multiplied into the output. Per-block scales are passed to the backends.

    Args:
        problem: The problem.
        inputs: The arrays.
        options: The 8-bit arguments of the call.
        offsets: Offsets of the queries, and extents without padding.
        grid: The query grid if ``upsample`` was given. The queries are then already folded into heads. Otherwise
            ``None``.

    Raises:
        ValueError: A shape, value or element type is wrong, or an argument does not apply to arrays of this type.
        TypeError: A factor is neither a number nor an array.
    """
    dtype = _output_dtype(problem, options)
    shift = None
    if options.fp8 is not None:
        problem, inputs, factors, shift = _quantized(problem, inputs, options, offsets)
    elif problem.element.is_float8:
        factors = _checked(inputs, options, grid)
    else:
        _check_unscaled(options, f"{problem.dtype} arrays, but factors are for 8-bit arrays")
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
            f"{' and '.join(key_factors)} per block and additional_keys were both given: additional tokens are not in "
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
    problem: Problem, inputs: Inputs, options: Float8Arguments, offsets: TokenOffsets
) -> tuple[Problem, Inputs, _Factors, jax.Array]:
    """Quantize the arrays of a call.

    The mean over all keys of a head is subtracted from each key. This shifts all logits of a query by the same number,
    which changes the logsumexp but not the softmax. Query and key are rotated if ``head_dim`` is a power of two.

    Returns:
        The problem with the 8-bit type, the quantized arrays, their scales, and the number to add to the logsumexp of
        each query.

    Raises:
        ValueError: The arrays are already 8-bit, their dtype is not supported, or the caller passed scales.
    """
    dtype = float8_name("fp8", str(options.fp8))
    if problem.dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"fp8={options.fp8!r} takes {', '.join(OUTPUT_DTYPES)} arrays, but query has dtype {problem.dtype}"
        )
    _check_unscaled(options, f"fp8={options.fp8!r}, which computes the factors")
    inputs = without_padding(offsets.layouts, inputs)

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
    """Check the scales of an array, and return them as a float32 array.

    The result has one of the shapes in ``shapes``, or has one scale per block of ``layout``. A number is broadcast to
    the last shape in ``shapes``.
    """
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
                f"{name} has shape {factors.shape}, but the {extent} tokens of dimension {i} cannot form {blocks} "
                f"blocks: with {tokens} tokens per block there are {math.ceil(extent / tokens)}"
            )
    return replicated(factors)


def _per_query_head(factors: jax.Array, heads: int) -> jax.Array:
    """Repeat scales ``[batch, heads_kv, ...]``: each query head gets the scale of the key head that it uses."""
    return jnp.repeat(replicated(factors), heads // factors.shape[1], axis=1)


def _per_query(per_head: jax.Array, array: jax.Array) -> jax.Array:
    """Reshape ``[batch, heads]`` or ``[batch, heads, head_dim]`` so that it broadcasts with an array of queries."""
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
    """Run a call that quantizes its arrays, with straight-through gradients.

    The forward pass runs the call with quantization. The backward pass differentiates the call without quantization.

    Args:
        call: Function of ``(operands, arguments)`` that returns the output and the logsumexp.
        operands: A pytree of arrays and other objects.
        arguments: The 8-bit arguments of the forward pass. The backward pass omits all of them.
        return_lse: Return the output and the logsumexp, instead of only the output.
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
        # With explicit mesh axes, these unquantized outputs and the cotangents can have different shardings.
        (gradients,) = transpose(jax.tree.map(split_like, cotangents, outputs))
        return ({i: gradients.get(i) for i in arrays},)

    quantizing.defvjp(forward, backward)
    output = quantizing(arrays)
    return output if return_lse else output[0]
