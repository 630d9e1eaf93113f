"""Factors of 8-bit arrays, and what they make of these, written out."""

from __future__ import annotations

import math

import numpy as np

from tests.support import oracle
from tests.support.problems import Case

#: The arguments of the operators.
NAMES = ("query_scale", "key_scale", "value_scale")
#: What factors belong to, of additional tokens, too; and what else they may.
OF_HEADS, OF_BLOCKS = ("tensor", "head", "shared head"), ("block", "block of keys", "block of values")


def factors_for(kind: str, case: Case, seed: int) -> dict[str, np.ndarray]:
    """Factors of query, key and value, all of which differ; of an array that has one for everything, no dimensions."""
    rng = np.random.default_rng([seed, 8])

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 2, shape).astype(np.float32)

    blocks = [math.ceil(extent / math.ceil(extent / 3)) for extent in case.layout]
    of_heads = (case.batch, case.heads_kv)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (), ()),
        "head": ((case.batch, case.heads), of_heads, of_heads),
        "shared head": (of_heads, (), of_heads),
        "block": ((case.batch, case.heads), *((case.batch, *blocks, case.heads_kv),) * 2),
        "block of keys": ((), (case.batch, *blocks, case.heads_kv), of_heads),
        "block of values": ((), (), (case.batch, *blocks, case.heads_kv)),
    }
    return {name: draw(*shape) for name, shape in zip(NAMES, shapes[kind], strict=True)}


def times_factors(array: np.ndarray, factors: np.ndarray, heads: int) -> np.ndarray:
    """An array in float64 with the size that its factors give it, written out token by token for blocks."""
    array, factors = array.astype(np.float64), factors.astype(np.float64)
    if factors.ndim == 0:
        return array * factors
    result = array.copy()
    per_head = heads // factors.shape[-1]
    for index in np.ndindex(array.shape[:-1]):
        batch, *tokens, head = index
        blocks = [
            token // math.ceil(extent / count)
            for token, extent, count in zip(tokens, array.shape[1:-2], factors.shape[1:-1], strict=False)
        ] * (factors.ndim > 2)
        result[index] *= factors[(batch, *blocks, head // per_head)]
    return result


def scaled(case: Case, operands: oracle.Tensors, factors: dict[str, np.ndarray]) -> oracle.Tensors:
    """The operands in float64, each with the sizes that its factors give it."""
    query, key, value = (
        times_factors(array, factors[f"{name}_scale"], heads)
        for name, array, heads in (
            ("query", operands.query, case.heads),
            ("key", operands.key, case.heads_kv),
            ("value", operands.value, case.heads_kv),
        )
    )
    found = operands._replace(query=query, key=key, value=value)
    if operands.additional_keys is None or operands.additional_values is None:
        return found
    return found._replace(
        additional_keys=times_factors(operands.additional_keys, factors["key_scale"], case.heads_kv),
        additional_values=times_factors(operands.additional_values, factors["value_scale"], case.heads_kv),
    )
