"""Measure the errors of 8-bit and of bfloat16 attention against float64 attention.

Errors are measured for several distributions of the arrays and several numbers of keys per query. The errors of the
output are the relative root mean square error and the cosine similarity. If a method returns the logsumexp, the error
of the logsumexp is the largest absolute difference. The float64 reference uses the arrays before any rounding.

Without ``--kernels``, run the program on a CPU. CPU backends compute with the exact values of the 8-bit numbers and do
not round weights. The method with "weights in e4m3" in its name emulates 8-bit tensor cores in NumPy. It divides the
weights of a query by the largest of these weights, multiplies them by 448 and rounds them to e4m3.

With ``--kernels``, a GPU runs other methods instead: the Hopper kernels, and cuDNN's kernel with one scale factor per
array.

Example:
    python bench/run.py fp8_accuracy --json bench/results/cpu/fp8_accuracy.json
    python bench/run.py fp8_accuracy --kernels --json bench/results/h200/fp8_accuracy.json
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lib import command, cudnn_fp8
from lib.record import save

from natten_jax import attention
from natten_jax.fp8 import Quantized, quantize

KEYS = 128, 512, 2048, 8192, 32768
KEYS_OF_KERNELS = *KEYS, 131_072
QUERIES, HEADS, WIDTH = 64, 2, 128

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, Array, Array]


class Found(NamedTuple):
    """Result of a method: the output and, if available, the logsumexp."""

    out: Any
    logsumexp: Any = None


def _normal(rng: np.random.Generator, keys: int) -> Arrays:
    shapes = [(1, tokens, HEADS, WIDTH) for tokens in (QUERIES, keys, keys)]
    query, key, value = (rng.standard_normal(shape) for shape in shapes)
    return query, key, value


def _outliers(rng: np.random.Generator, keys: int) -> Arrays:
    query, key, value = (
        array + 10 * rng.standard_normal(array.shape) * (rng.random(array.shape) < 0.001)
        for array in _normal(rng, keys)
    )
    return query, key, value


def _channels(rng: np.random.Generator, keys: int) -> Arrays:
    query, key, value = _normal(rng, keys)
    key[..., ::32] *= 30
    return query, key, value


def _far(rng: np.random.Generator, keys: int) -> Arrays:
    query, key, value = _normal(rng, keys)
    return query, key + 8 * rng.standard_normal(WIDTH), value


def _peaked(rng: np.random.Generator, keys: int) -> Arrays:
    query, key, value = _normal(rng, keys)
    return query * 0.5 + 1.5 * key[:, rng.integers(keys, size=QUERIES)], key, value


DATA: Mapping[str, Callable[[np.random.Generator, int], Arrays]] = {
    "normal": _normal,
    "outliers": _outliers,
    "channels": _channels,
    "far keys": _far,
    "peaked rows": _peaked,
}


def _exact(query: Array, key: Array, value: Array) -> Found:
    weights, largest = _weights(query, key)
    sums = weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", weights / sums, value, optimize=True)
    return Found(out, (largest + np.log(sums))[..., 0].swapaxes(1, 2))


def _weights(query: Array, key: Array) -> tuple[Array, Array]:
    """Return the unnormalised weights, exp(logit - largest logit of the query), and the largest logits."""
    logits = np.einsum("bqhd,bkhd->bhqk", query, key, optimize=True) * WIDTH**-0.5
    largest = logits.max(-1, keepdims=True)
    return np.exp(logits - largest), largest


def _wide(array: Array) -> jax.Array:
    return jnp.asarray(array, jnp.bfloat16)


def _wide_call(arrays: Arrays, **arguments: Any) -> Found:
    return Found(*_attend(*map(_wide, arrays), **arguments))


@functools.partial(jax.jit, static_argnames=("fp8", "backend"))
def _attend(query: jax.Array, key: jax.Array, value: jax.Array, **arguments: Any) -> tuple[jax.Array, jax.Array]:
    return attention(query, key, value, return_lse=True, **arguments)


def _by_hand(arrays: Arrays, scale: Any, backend: str | None = None) -> Found:
    return Found(*_attend_quantised(*map(_wide, arrays), scale=scale, backend=backend))


@functools.partial(jax.jit, static_argnames=("scale", "backend"))
def _attend_quantised(*arrays: jax.Array, scale: Any, backend: str | None) -> tuple[jax.Array, jax.Array]:
    query_scale = "head" if scale == "block" else scale  # queries have no scale factors per block
    query, key, value = (
        quantize(array, scale=each) for array, each in zip(arrays, (query_scale, scale, scale), strict=True)
    )
    factors: dict[str, Any] = {"query_scale": query.scale, "key_scale": key.scale, "value_scale": value.scale}
    return attention(query.array, key.array, value.array, **factors, backend=backend, return_lse=True)


def _by_cudnn(arrays: Arrays) -> Found:
    """Run cuDNN with one scale factor per array.

    The weights are at most 1 and are multiplied by 256. The output is multiplied by the factor that scales the largest
    entry of the exact output to 448.
    """
    factor = 448 / np.abs(_exact(*arrays).out).max()
    return Found(np.asarray(_attend_by_cudnn(*map(_wide, arrays), factor), np.float64) / factor)


@jax.jit
def _attend_by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array, factor: Any) -> jax.Array:
    q, k, v = (quantize(array, scale="tensor") for array in (query, key, value))
    return cudnn_fp8.attention(
        q.array,
        k.array,
        v.array,
        descale=(q.scale, k.scale, v.scale),
        weight_scale=256.0,
        out_scale=factor,
    )


def _with_small_weights(arrays: Arrays) -> Found:
    """Emulate ``fp8="e4m3"`` with weights rounded to e4m3."""

    def numbers(small: Quantized) -> Array:
        return np.asarray(small.array, np.float64) * np.asarray(small.scale, np.float64)[:, None, :, None]

    query = numbers(quantize(_wide(arrays[0]), rotate=True))
    key = numbers(quantize(_wide(arrays[1]), rotate=True, subtract_mean=True))
    value = numbers(quantize(_wide(arrays[2])))
    weights, _ = _weights(query, key)
    small = (448 * weights).astype(jnp.float8_e4m3fn).astype(np.float64) / 448
    mixed = np.einsum("bhqk,bkhd->bqhd", small, value)
    out = mixed / weights.sum(-1).swapaxes(1, 2)[..., None]
    return Found(out.astype(jnp.bfloat16))


WAYS: Mapping[str, Callable[[Arrays], Found]] = {
    "bfloat16": _wide_call,
    "e4m3, a factor for each tensor": lambda arrays: _by_hand(arrays, "tensor"),
    "e4m3, for each head": lambda arrays: _by_hand(arrays, "head"),
    "e4m3, for each block of keys": lambda arrays: _by_hand(arrays, "block"),
    'fp8="e4m3"': lambda arrays: _wide_call(arrays, fp8="e4m3"),
    'fp8="e5m2"': lambda arrays: _wide_call(arrays, fp8="e5m2"),
    'fp8="e4m3", weights in e4m3': _with_small_weights,
}
#: Methods that need a GPU, for ``--kernels``.
WAYS_OF_KERNELS: Mapping[str, Callable[[Arrays], Found]] = {
    "bfloat16": lambda arrays: _wide_call(arrays, backend="hopper-fmha"),
    "e4m3, a factor for each tensor": lambda arrays: _by_hand(arrays, "tensor", "hopper-fmha"),
    "e4m3, for each head": lambda arrays: _by_hand(arrays, "head", "hopper-fmha"),
    'fp8="e4m3"': lambda arrays: _wide_call(arrays, fp8="e4m3", backend="hopper-fmha"),
    "cuDNN, a factor for each tensor": _by_cudnn,
}


def _errors(found: Found, expected: Found) -> dict[str, float]:
    out, size = np.asarray(found.out, np.float64), np.linalg.norm(expected.out)
    errors = {
        "relative_rmse": float(np.linalg.norm(out - expected.out) / size),
        "cosine": float((out * expected.out).sum() / (np.linalg.norm(out) * size)),
    }
    if found.logsumexp is not None:
        difference = np.asarray(found.logsumexp, np.float64) - expected.logsumexp
        errors["logsumexp"] = float(np.abs(difference).max())
    return errors


def main() -> None:
    """Measure the errors of each method, print them and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--kernels", action="store_true", help="measure the kernels of a Hopper GPU instead")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    options = parser.parse_args()
    ways, sizes = (WAYS_OF_KERNELS, KEYS_OF_KERNELS) if options.kernels else (WAYS, KEYS)
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for name in options.data:
        draw = DATA[name]
        results[name] = {way: {} for way in ways}
        for keys in sizes:
            arrays = draw(np.random.default_rng([keys, 1]), keys)
            expected = _exact(*arrays)
            for way, attend in ways.items():
                results[name][way][str(keys)] = _errors(attend(arrays), expected)
            print(name, keys, {way: round(each[str(keys)]["relative_rmse"], 4) for way, each in results[name].items()})
            save({"queries": QUERIES, "heads": HEADS, "head_dim": WIDTH, "errors": results}, options.json)


if __name__ == "__main__":
    command.run(main)
