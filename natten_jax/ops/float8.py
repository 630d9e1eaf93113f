"""8-bit arrays in a call: what their factors are to logits and output, and the arrays that a call quantises itself."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import shown
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.arrays.padding import without_padding
from natten_jax.ops.arrays import ArrayLike, as_jax_array
from natten_jax.ops.boxes import FinerGrid, Placement
from natten_jax.ops.quantization import (
    can_rotate,
    float8_name,
    mean_of_tokens,
    of_tokens,
    quantized_heads,
    rotated,
)
from natten_jax.problem import Problem
from natten_jax.sharding.explicit import replicated, split_like

#: A number, or an array of them.
Factor = float | ArrayLike

#: Element types of the output of 8-bit arrays, the default one first.
OUTPUT_DTYPES = ("bfloat16", "float16", "float32")


class Float8Arguments(NamedTuple):
    """The arguments of the operators that are about 8-bit arrays.

    Attributes:
        query_scale: Factors of the query: a number, or ``[batch, heads]`` or ``[batch, heads_kv]``.
        key_scale: Factors of the key: a number, ``[batch, heads_kv]`` or ``[batch, *blocks, heads_kv]``.
        value_scale: Factors of the value, likewise.
        out_dtype: Element type of the output.
        fp8: What wider arrays are quantised to.
    """

    query_scale: Factor | None = None
    key_scale: Factor | None = None
    value_scale: Factor | None = None
    out_dtype: DTypeLike | None = None
    fp8: str | None = None

    @property
    def are_given(self) -> bool:
        """Whether there is any."""
        return any(each is not None for each in self)


NOTHING = Float8Arguments()


class Rounding(NamedTuple):
    """What is left to do with output and logsumexp.

    Attributes:
        dtype: Element type of the output.
        of_logsumexp: What is added to the logsumexp, ``[batch, *layout, heads]``; ``None`` where that is nothing.
    """

    dtype: str
    of_logsumexp: jax.Array | None = None

    def of(self, output: Output) -> Output:
        """The call's output and logsumexp."""
        out, logsumexp = output
        if self.of_logsumexp is not None:
            logsumexp = logsumexp + self.of_logsumexp
        return Output(out.astype(self.dtype), logsumexp)


class _Factors(NamedTuple):
    """Factors of the arrays: ``[batch, heads]``, or of blocks, ``[batch, *blocks, heads_kv]``; ``None`` where 1."""

    query: jax.Array | None
    key: jax.Array | None
    value: jax.Array | None


def in_8_bits(
    problem: Problem, inputs: Inputs, arguments: Float8Arguments, place: Placement, grid: FinerGrid | None = None
) -> tuple[Problem, Inputs, Rounding | None]:
    """The problem and the arrays that backends get, and what is left to do with the output.

    Factors that the keys of a head share are factors of its logits, and those of values are factors of its output;
    others go with keys and values.

    Args:
        problem: What is computed.
        inputs: The arrays.
        arguments: The arguments.
        place: Where tokens lie.
        grid: That of the queries, where it is finer than the keys' and queries have become heads.

    Raises:
        ValueError: A shape, value or element type is wrong, or an argument is none for these arrays.
        TypeError: A factor is neither a number nor an array.
    """
    dtype = _output_dtype(problem, arguments)
    shift = None
    if arguments.fp8 is not None:
        problem, inputs, factors, shift = _quantized(problem, inputs, arguments, place)
    elif problem.element.is_float8:
        factors = _checked(inputs, arguments, grid)
    else:
        _check_unscaled(arguments, f"{problem.dtype} arrays, but factors are for those of 8 bits")
        return problem, inputs, None
    heads = inputs.query.shape[-2]
    of_logits = [_of_query_heads(each, heads) for each in factors[:2] if each is not None and each.ndim == 2]
    if of_logits:
        of_logits.append(jnp.float32(problem.scale) if inputs.scale is None else replicated(inputs.scale))
        inputs = inputs._replace(scale=functools.reduce(operator.mul, of_logits))
        problem = dataclasses.replace(problem, scale=1.0)
    of_keys = {
        name: of_tokens(each, inputs.key.shape)
        for name, each in (("key_scale", factors.key), ("value_scale", factors.value))
        if each is not None and each.ndim > 2
    }
    if of_keys and inputs.additional_keys is not None:
        raise ValueError(
            f"{' and '.join(of_keys)} of blocks and additional_keys were both given: additional tokens are in no "
            "block, so give factors of heads, which they share"
        )
    if factors.value is not None and factors.value.ndim == 2:
        inputs = inputs._replace(out_scale=_of_query_heads(factors.value, heads))
    problem = dataclasses.replace(
        problem, out_dtype=None if dtype == problem.element.output else dtype, block_scales=bool(of_keys)
    )
    return problem, inputs._replace(**of_keys), Rounding(dtype, shift)


def _quantized(
    problem: Problem, inputs: Inputs, arguments: Float8Arguments, place: Placement
) -> tuple[Problem, Inputs, _Factors, jax.Array]:
    """The problem of quantised arrays, these, their factors, and what the logsumexp lacks.

    Keys are without their mean, which adds the same to all logits of a query. Query and key are rotated where heads
    allow it.

    Raises:
        ValueError: Arrays are not wider, or have factors.
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
    (small_query,), of_query = quantized_heads([turned(query)], dtype)
    (key, *additional_keys), of_key = quantized_heads(centred, dtype)
    (value, *additional_values), of_value = quantized_heads(wide(inputs.value) + wide(inputs.additional_values), dtype)
    scale = jnp.float32(problem.scale) if inputs.scale is None else _per_query(replicated(inputs.scale), query)[..., 0]
    of_heads = _of_query_heads(mean.reshape(batch, -1, width), query.shape[-2])
    products = jnp.sum(query * _per_query(of_heads, query), axis=-1)
    arrays = inputs._replace(
        query=small_query,
        key=key,
        value=value,
        additional_keys=additional_keys[0] if additional_keys else None,
        additional_values=additional_values[0] if additional_values else None,
    )
    quantised = dataclasses.replace(problem, dtype=dtype)
    return quantised, arrays, _Factors(of_query, of_key, of_value), scale * products


def _checked(inputs: Inputs, arguments: Float8Arguments, grid: FinerGrid | None) -> _Factors:
    batch, *_, heads, _ = inputs.query.shape
    heads //= 1 if grid is None else grid.queries
    _, *layout, heads_kv, _ = inputs.key.shape
    of_kv = {"[batch, heads_kv]": (batch, heads_kv)}
    return _Factors(
        _factors("query_scale", arguments.query_scale, {"[batch, heads]": (batch, heads), **of_kv}),
        _factors("key_scale", arguments.key_scale, of_kv, layout),
        _factors("value_scale", arguments.value_scale, of_kv, layout),
    )


def _factors(
    name: str, argument: Any, shapes: Mapping[str, tuple[int, ...]], layout: Sequence[int] = ()
) -> jax.Array | None:
    """The factors in one of these shapes, of which a single one takes the last, or of blocks of the layout."""
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


def _of_query_heads(factors: jax.Array, heads: int) -> jax.Array:
    """``[batch, heads_kv, ...]`` for each query head: those that share a head of keys have its factor."""
    return jnp.repeat(replicated(factors), heads // factors.shape[1], axis=1)


def _per_query(of_heads: jax.Array, array: jax.Array) -> jax.Array:
    """``[batch, heads]``, or ``[batch, heads, head_dim]``, to be multiplied with an array of the query's layout."""
    width = of_heads.shape[-1] if of_heads.ndim == 3 else 1
    return split_like(of_heads.reshape(array.shape[0], *(1,) * (array.ndim - 3), -1, width), array)


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
