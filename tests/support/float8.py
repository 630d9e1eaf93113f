"""Random scale factors of 8-bit arrays, and a float64 reference that multiplies arrays by these factors."""

from __future__ import annotations

import math

import numpy as np

from tests.support import oracle
from tests.support.problems import Case

#: Operator arguments for the scale factors of query, key and value.
NAMES = ("query_scale", "key_scale", "value_scale")
#: Kinds of scale factors. Factors of ``HEAD_KINDS`` also apply to additional tokens. Factors of ``BLOCK_KINDS`` do not.
HEAD_KINDS, BLOCK_KINDS = ("tensor", "head", "shared head"), ("block", "block of keys", "block of values")


def factors_for(kind: str, case: Case, seed: int) -> dict[str, np.ndarray]:
    """Draw distinct scale factors for query, key and value. A factor for a whole array is a scalar."""
    rng = np.random.default_rng([seed, 8])

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 2, shape).astype(np.float32)

    blocks = [math.ceil(extent / math.ceil(extent / 3)) for extent in case.layout]
    kv_shape = (case.batch, case.heads_kv)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (), ()),
        "head": ((case.batch, case.heads), kv_shape, kv_shape),
        "shared head": (kv_shape, (), kv_shape),
        "block": ((case.batch, case.heads), *((case.batch, *blocks, case.heads_kv),) * 2),
        "block of keys": ((), (case.batch, *blocks, case.heads_kv), kv_shape),
        "block of values": ((), (), (case.batch, *blocks, case.heads_kv)),
    }
    return {name: draw(*shape) for name, shape in zip(NAMES, shapes[kind], strict=True)}


def times_factors(array: np.ndarray, factors: np.ndarray, heads: int) -> np.ndarray:
    """Return an array ``[batch, *tokens, heads, width]`` multiplied by its factors, in float64.

    ``factors`` is a scalar, or has the shape ``[batch, heads]`` or ``[batch, *blocks, heads]``. If heads of the array
    share factors, ``heads`` is smaller in ``factors``.
    """
    factors = factors.astype(np.float64)
    if factors.ndim:
        factors = factors.repeat(heads // factors.shape[-1], axis=-1)
    if factors.ndim == 2:
        factors = factors.reshape(len(factors), *(1,) * (array.ndim - 3), heads)
    elif factors.ndim > 2:
        for axis, extent in enumerate(array.shape[1:-2], 1):
            factors = factors.repeat(math.ceil(extent / factors.shape[axis]), axis).take(range(extent), axis)
    return array.astype(np.float64) * factors[..., None]


def scaled(case: Case, operands: oracle.Tensors, factors: dict[str, np.ndarray]) -> oracle.Tensors:
    """Return the operands in float64, each multiplied by its factors."""
    scale_names = {"query": "query_scale", "key": "key_scale", "value": "value_scale"}
    scale_names |= {"additional_keys": "key_scale", "additional_values": "value_scale"}
    wide = {
        name: times_factors(array, factors[scale_names[name]], case.heads if name == "query" else case.heads_kv)
        for name, array in operands._asdict().items()
        if name in scale_names and array is not None
    }
    return operands._replace(**wide)
