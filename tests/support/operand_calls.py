"""Small calls that cover all array operands of all public functions, for tests of JAX transformations and meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import natten_jax
from tests.support.families import Family

BATCH, HEADS, HEADS_KV, WIDTH = 2, 4, 2, 8
LAYOUT, WINDOW = (4, 6), (3, 4)
TOKENS, TOKENS_KV = 6, 8
Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array argument.

    Attributes:
        shape: Shape of the array.
        axes: A letter per dimension: ``b`` for the batch, ``t`` for tokens, ``h`` for heads, ``-`` for others.
        integers: Values of an integer array. ``None`` for floating-point arrays, whose values are random.
    """

    shape: tuple[int, ...]
    axes: str
    integers: tuple[Any, ...] | None = None

    def array(self, dtype: str, seed: int) -> np.ndarray:
        """Return the integers or, if there are none, random normal values."""
        if self.integers is not None:
            return np.array(self.integers, np.int32).reshape(self.shape)
        return np.random.default_rng(seed).standard_normal(self.shape).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class OperandCall:
    """A call of a public function.

    Attributes:
        function: Name of the function.
        operands: The array arguments by name.
        options: The other arguments.
        is_differentiable: True if the call has gradients.
    """

    function: str
    operands: Mapping[str, Operand]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_differentiable: bool = True

    @property
    def is_plain(self) -> bool:
        """True if the function has no ``backend`` argument and always runs in plain JAX."""
        return self.function in ("neighborhood_weights", "neighborhood_apply", "merge_attentions")

    def arrays(self, dtype: str, terms_dtype: str = "float32") -> dict[str, np.ndarray]:
        """Return the operands as arrays.

        Scales, biases, sinks and logsumexps have the element type ``terms_dtype``. Other floating-point arrays have
        ``dtype``.
        """
        return {
            name: operand.array(terms_dtype if name in _TERMS else dtype, seed)
            for seed, (name, operand) in enumerate(self.operands.items())
        }

    def run(self, family: str) -> Callable[[Arrays], tuple[jax.Array, ...]]:
        """Return a function that takes the arrays and makes the call with a backend of the family."""
        operator = getattr(natten_jax, self.function)
        options = dict(self.options)
        if not self.is_plain:
            options["backend"] = f"{family}-{'fmha' if self.function == 'attention' else 'fna'}"
            options["return_lse"] = True

        def call(arrays: Arrays) -> tuple[jax.Array, ...]:
            if self.function == "merge_attentions":
                return tuple(operator([arrays["one"], arrays["other"]], [arrays["one_lse"], arrays["other_lse"]]))
            results = operator(**arrays, **options)
            return tuple(results) if isinstance(results, tuple) else (results,)

        return call

    def loss(self, family: str) -> Callable[[Arrays], jax.Array]:
        """Return a function that takes the arrays, makes the call, and reduces all finite results to a scalar."""
        run = self.run(family)
        return lambda arrays: total(run(arrays))

    def value_and_gradients(self, family: str) -> Callable[[Arrays], Any]:
        """Return a function that computes the loss and, if it is differentiable, its gradients for float operands."""
        loss = self.loss(family)

        def both(arrays: Arrays) -> Any:
            floats = {name: each for name, each in arrays.items() if jnp.issubdtype(each.dtype, jnp.floating)}
            others = {name: each for name, each in arrays.items() if name not in floats}
            if not self.is_differentiable:
                return loss(arrays), {}
            return jax.value_and_grad(lambda floats: loss({**floats, **others}))(floats)

        return both


def total(results: Any) -> jax.Array:
    """Return the sum of the sines of all finite results, in float32."""
    sums = []
    for each in jax.tree.leaves(results):
        each = each.astype("float32")
        sums.append(jnp.sum(jnp.sin(jnp.where(jnp.isfinite(each), each, jnp.float32(0)))))
    return sum(sums[1:], sums[0])


_TERMS = ("scale", "relative_bias", "key_bias", "sinks", "one_lse", "other_lse")


def _windows(queries: tuple[int, ...] = LAYOUT, keys: tuple[int, ...] = LAYOUT, **more: Operand) -> dict[str, Operand]:
    tokens = "t" * len(keys)
    return {
        "query": Operand((BATCH, *queries, HEADS, WIDTH), f"b{tokens}h-"),
        "key": Operand((BATCH, *keys, HEADS_KV, WIDTH), f"b{tokens}h-"),
        "value": Operand((BATCH, *keys, HEADS_KV, WIDTH), f"b{tokens}h-"),
        **more,
    }


_TABLE = Operand((HEADS, 5, 7), "h--")
_KEY_BIAS = Operand((BATCH, *LAYOUT), "btt")
_KEY_BIAS_OF_HEADS = Operand((BATCH, HEADS, *LAYOUT), "bhtt")
_SINKS = Operand((HEADS,), "h")
_SCALES = Operand((HEADS,), "h")
_SCALE = Operand((), "")
_TERMS_OF_HEADS = {"relative_bias": _TABLE, "key_bias": _KEY_BIAS_OF_HEADS, "sinks": _SINKS, "scale": _SCALES}
_EXTENTS = Operand((BATCH, 2), "b-", ((4, 6), (2, 5)))
_ORIGIN = Operand((2,), "-", (1, 2))
_ORIGINS = Operand((BATCH, 2), "b-", ((1, 2), (0, 0)))
_ADDITIONAL = dict.fromkeys(("additional_keys", "additional_values"), Operand((BATCH, 3, HEADS_KV, WIDTH), "b-h-"))
_BOX = (3, 4)
_FUSED: dict[str, Any] = {"try_fuse_additional_kv": True}
_MERGED: dict[str, Any] = {"try_fuse_additional_kv": False}
_CAUSAL: dict[str, Any] = {"is_causal": True}


def _na2d(queries: tuple[int, ...] = LAYOUT, options: Mapping[str, Any] = {}, /, **more: Operand) -> OperandCall:
    return OperandCall("na2d", _windows(queries, LAYOUT, **more), {"kernel_size": WINDOW, **options})


def _attention(options: Mapping[str, Any] = {}, /, **more: Operand) -> OperandCall:
    return OperandCall("attention", _windows((TOKENS,), (TOKENS_KV,), **more), options)


def _weights(options: Mapping[str, Any], /, **more: Operand) -> OperandCall:
    operands = {name: each for name, each in _windows(LAYOUT, LAYOUT, **more).items() if name != "value"}
    return OperandCall("neighborhood_weights", operands, {"kernel_size": WINDOW, **options})


def _lengths(*values: int) -> Operand:
    return Operand((BATCH,), "b", values)


_OUT, _LSE = Operand((BATCH, *LAYOUT, HEADS, WIDTH), "btth-"), Operand((BATCH, *LAYOUT, HEADS), "btth")
CALLS: Mapping[str, OperandCall] = {
    "na1d": OperandCall(
        "na1d", _windows((9,), (9,)), {"kernel_size": 3, "stride": 2, "dilation": 2, "is_causal": True}
    ),
    "na2d": _na2d(LAYOUT, {"stride": (1, 2)}),
    "na3d": OperandCall("na3d", _windows((2, 3, 4), (2, 3, 4)), {"kernel_size": (2, 3, 2)}),
    "whole layout": _na2d(LAYOUT, {"kernel_size": -1}),
    "cut": _na2d(LAYOUT, {"edges": "cut"}),
    "wrap": _na2d(LAYOUT, {"edges": "wrap"}),
    "relative bias": _na2d(relative_bias=_TABLE),
    "relative bias of clamped windows": _na2d(
        LAYOUT,
        {"kernel_size": (7, 4), "dilation": (2, 1), "clamp_window": True},
        relative_bias=Operand((HEADS, 13, 7), "h--"),
    ),
    "relative bias, wrap": _na2d(LAYOUT, {"edges": "wrap"}, relative_bias=_TABLE),
    "key bias": _na2d(key_bias=_KEY_BIAS),
    "key bias of heads": _na2d(key_bias=_KEY_BIAS_OF_HEADS),
    "sinks": _na2d(sinks=_SINKS),
    "scale": _na2d(scale=_SCALE),
    "scales of heads": _na2d(scale=_SCALES),
    "extents": _na2d(extents=_EXTENTS),
    "origin": _na2d(_BOX, query_origin=_ORIGIN),
    "origins of entries": _na2d(_BOX, query_origin=_ORIGINS),
    "upsample": _na2d((8, 6), {"upsample": (2, 1)}, sinks=_SINKS),
    "upsample, key bias of heads": _na2d((8, 6), {"upsample": (2, 1)}, key_bias=_KEY_BIAS_OF_HEADS, scale=_SCALES),
    "additional, fused": _na2d(LAYOUT, _FUSED, **_ADDITIONAL),
    "additional, merged": _na2d(LAYOUT, _MERGED, **_ADDITIONAL),
    "additional, every term": _na2d(LAYOUT, _MERGED, **_ADDITIONAL, **_TERMS_OF_HEADS | {"key_bias": _KEY_BIAS}),
    "extents, every term": _na2d(LAYOUT, _FUSED, **_ADDITIONAL, extents=_EXTENTS, **_TERMS_OF_HEADS),
    "origins of entries, every term": _na2d(_BOX, query_origin=_ORIGINS, **_TERMS_OF_HEADS),
    "fp8": _na2d(LAYOUT, {"fp8": "e4m3"}, relative_bias=_TABLE, sinks=_SINKS),
    "fp8, extents": _na2d(LAYOUT, {"fp8": "e5m2"}, key_bias=_KEY_BIAS, extents=_EXTENTS),
    "attention": _attention(_CAUSAL),
    "attention, origin": _attention(_CAUSAL, query_origin=Operand((1,), "-", (2,))),
    "attention, lengths": _attention(
        query_lengths=_lengths(6, 4), kv_lengths=_lengths(8, 5), sinks=_SINKS, scale=_SCALES
    ),
    "attention, lengths of keys": _attention(kv_lengths=_lengths(3, 8)),
    "attention, lengths and origins": _attention(
        _CAUSAL, query_origin=Operand((BATCH, 1), "b-", ((2,), (0,))), query_lengths=_lengths(3, 6)
    ),
    "attention, key bias": _attention(key_bias=Operand((BATCH, TOKENS_KV), "bt"), sinks=_SINKS),
    "attention, key bias of heads": _attention(key_bias=Operand((BATCH, HEADS, TOKENS_KV), "bht"), scale=_SCALE),
    "attention, fp8": _attention({"fp8": "e4m3"}, sinks=_SINKS),
    "weights": _weights({"stride": (2, 1)}, relative_bias=_TABLE, scale=_SCALES),
    "weights, wrap": _weights({"edges": ("wrap", "cut")}, scale=_SCALE),
    "mixed values": OperandCall(
        "neighborhood_apply",
        {"weights": Operand((BATCH, *LAYOUT, HEADS, 12), "btth-"), "value": _windows()["value"]},
        {"kernel_size": WINDOW, "is_causal": (True, False)},
    ),
    "merged": OperandCall("merge_attentions", {"one": _OUT, "other": _OUT, "one_lse": _LSE, "other_lse": _LSE}),
}


def cases_of(family: Family) -> Mapping[str, OperandCall]:
    """Return the calls to test with a family. Functions without an argument ``backend`` run only with flex."""
    return {
        name: call
        for name, call in CALLS.items()
        if ("relative_bias" not in call.operands or call.is_plain or "relative_bias" in family.capabilities.features)
        and (not call.is_plain or family.name == "flex")
    }


def failures_in(cases: Mapping[str, Any], run: Callable[[Any], None]) -> list[str]:
    """Run each case and return the error messages."""
    failures = []
    for name, case in cases.items():
        try:
            run(case)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return failures


def failures_of(family: Family, run: Callable[[OperandCall], None], names: Sequence[str] = ()) -> list[str]:
    """Run the named calls with a family, or all its calls if ``names`` is empty, and return their failures.

    GPU kernels do not support all combinations of operands. A call that they reject is not a failure.
    """
    assert set(names) <= CALLS.keys()
    cases = cases_of(family)
    failures = failures_in({name: cases[name] for name in names or cases if name in cases}, run)
    refused = [failure for failure in failures if family.needs_gpu and "Backends that can:" in failure]
    assert len(refused) < len(cases)
    return [failure for failure in failures if failure not in refused]
