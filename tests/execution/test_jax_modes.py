"""Operators in JAX's debugging and promotion modes, without compilation, and under ``jax.vmap`` over each operand."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.rotary import apply_rotary, rotary_angles
from tests.execution.test_transforms import assert_close, objective
from tests.support.families import Family
from tests.support.operand_calls import CALLS, Arrays, OperandCall, failures_in, failures_of, total
from tests.support.problems import Case, quick

# Every operand in JAX's debugging and promotion modes: both passes of each backend, and modules.


def _all(*modes: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for mode in modes:
        stack.enter_context(mode)
    return stack


#: Modes that JAX applies while it traces and lowers. Each value contains a function that enters the modes, the dtype of
#: tokens, and the dtype of scales, biases and sinks.
TRACED: Mapping[str, tuple[Callable[[], contextlib.ExitStack], str, str]] = {
    "strict": (lambda: _all(*_strict()), "bfloat16", "float32"),
    "strict, 64 bits": (lambda: _all(*_strict(), jax.enable_x64(True)), "float32", "float64"),
}


def _strict() -> tuple[Any, Any]:
    return jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")


def _executing() -> contextlib.ExitStack:
    """Enter modes that JAX applies while a program runs.

    Transfers to the host remain allowed, because the checks for NaN and infinity copy results to the host.
    """
    guards = jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_device("disallow")
    return _all(jax.debug_nans(True), jax.debug_infs(True), jax.debug_key_reuse(True), *guards)


@pytest.mark.parametrize("mode", TRACED)
def test_every_operand_is_traced(family: Family, mode: str) -> None:
    """Trace each call with its gradients. In 64-bit mode, also trace it under vmap.

    For backends in plain JAX, the 64-bit mode also tests forward-mode derivatives.
    """
    modes, dtype, terms_dtype = TRACED[mode]
    dtype = dtype if dtype in family.dtypes else family.dtype

    def lower(call: OperandCall) -> None:
        arrays = jax.tree.map(jnp.asarray, call.arrays(dtype, terms_dtype))
        function = call.value_and_gradients(family.name)
        _, gradients = jax.jit(function).lower(arrays).out_info
        for name, gradient in gradients.items():
            assert (gradient.shape, gradient.dtype) == (arrays[name].shape, arrays[name].dtype), name
        if mode == "strict":
            return
        stacked = jax.tree.map(lambda array: jnp.stack([array, array]), arrays)
        jax.eval_shape(jax.vmap(function), stacked)
        _, first, *_ = arrays
        axes = {**dict.fromkeys(arrays, 0), first: None}
        jax.eval_shape(jax.vmap(function, (axes,)), {**stacked, first: arrays[first]})
        if family.capabilities.is_plain_jax and call.is_differentiable and "fp8" not in call.options:
            floats = {name: arrays[name] for name in gradients}
            for derived in (call.loss(family.name), function):
                derived_of_floats = lambda floats, f=derived: f({**arrays, **floats})  # noqa: E731
                jax.eval_shape(lambda t, f=derived_of_floats: jax.jvp(f, (t,), (t,)), floats)

    with modes():
        assert not failures_of(family, lower)
        if family.target is not None:
            calls = (
                OperandCall("na2d", CALLS["na2d"].operands, {"kernel_size": (3, 4), name: True})
                for name in ("backward_use_xla_reduction", "backward_deterministic")
            )
            assert not failures_in(dict(enumerate(calls)), lower)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", TRACED)
def test_rotations_are_traced(mode: str) -> None:
    modes, dtype, _ = TRACED[mode]
    tokens, angles = jnp.ones((2, 3, 4, 2, 8), dtype), rotary_angles((3, 4), head_dim=8)
    with modes():
        for interleaved in (True, False):
            rotate = functools.partial(apply_rotary, interleaved=interleaved)
            jax.eval_shape(jax.grad(lambda tokens, f=rotate: total(f(tokens, angles))), tokens)


@pytest.mark.slow
def test_no_tracer_leaks(family: Family) -> None:
    def trace(call: OperandCall) -> None:
        arrays = jax.tree.map(jnp.asarray, call.arrays(family.dtype))
        jax.eval_shape(call.value_and_gradients(family.name), arrays)

    # ``jax.checking_leaks`` runs the garbage collector after every trace. Only a few calls with many operands are
    # therefore tested.
    with jax.checking_leaks():
        assert not failures_of(family, trace, ("extents, every term", "attention, lengths", "weights"))


@pytest.mark.slow
def test_every_operand_is_run(family: Family) -> None:
    def run(call: OperandCall) -> None:
        arrays = jax.tree.map(jax.device_put, call.arrays(family.dtype))
        function = quick(call.value_and_gradients(family.name))
        with _executing():
            _, gradients = jax.block_until_ready(function(arrays))
        for name, gradient in gradients.items():
            assert np.isfinite(np.asarray(gradient, np.float32)).all(), name

    assert not failures_of(family, run)


#: Arguments of a module's constructor, and arguments of its call.
MODULES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "relative bias": ({"num_kv_heads": 2, "normalize_qk": True, "relative_bias": True}, {}),
    "clamped": ({"relative_bias": True, "clamp_window": True, "kernel_size": 9, "dilation": 1}, {}),
    "dropout of outputs": ({"proj_drop": 0.5, "deterministic": False}, {}),
    "dropout of weights": ({"attn_drop": 0.5, "relative_bias": True, "deterministic": False, "edges": "cut"}, {}),
    "extents": ({"relative_bias": True, "qk_scale": 0.3}, {"extents": ((6, 8), (4, 5))}),
    "fp8": ({"fp8": "e4m3", "relative_bias": True}, {}),
}


def _module_call(kind: str, settings: Mapping[str, Any], given: Mapping[str, Any], dtype: str) -> tuple[Any, Any]:
    """Return a function that computes the loss of a module, and the function's arguments: parameters, inputs, ..."""
    from flax import nnx

    from tests.support import flax_layers as layers

    inputs = layers.inputs_of(2, dtype)
    windows: dict[str, Any] = {**layers.WINDOWS[2], "is_causal": False, **settings, "dtype": dtype}
    windows["stride"] = 1
    given = {name: jnp.asarray(each, jnp.int32) for name, each in given.items()}
    keys = {"dropout": jax.random.key(1)}
    if kind == "nnx":
        module = layers.NNX[2](layers.FEATURES, num_heads=layers.HEADS, rngs=nnx.Rngs(0), **windows)
        parts: Any = nnx.split(module, nnx.Param, ...)
        graph, params, rest = parts

        def loss_of_nnx(params: Any, inputs: Any, rest: Any, keys: Any, given: Any) -> jax.Array:
            return total(nnx.merge(graph, params, rest)(inputs, rngs=nnx.Rngs(**keys), **given))

        return loss_of_nnx, (params, inputs, rest, keys, given)
    linen = layers.LINEN[2](num_heads=layers.HEADS, **windows)
    variables = linen.init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, inputs, **given)

    def loss_of_linen(variables: Any, inputs: Any, keys: Any, given: Any) -> jax.Array:
        return total(linen.apply(variables, inputs, rngs=keys, **given))

    return loss_of_linen, (variables, inputs, keys, given)


@pytest.mark.filterwarnings("ignore::natten_jax.flax_modules.attention_fn.AttentionDropoutWarning")
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("mode", [*TRACED, "run"])
def test_modules(kind: str, mode: str) -> None:
    pytest.importorskip("flax")
    modes, dtype, _ = (_executing, "float32", "") if mode == "run" else TRACED[mode]

    def run(case: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
        with jax.numpy_dtype_promotion("standard"):  # Flax's initializers mix dtypes
            loss, arguments = _module_call(kind, *case, dtype)
        function = quick(jax.value_and_grad(loss, argnums=(0, 1)))
        with modes():
            if mode == "run":
                jax.block_until_ready(function(*arguments))
            else:
                function.lower(*arguments)

    assert not failures_in(MODULES, run)


# ``jax.vmap`` over every operand, with gradients, compared with unmapped calls.


#: Calls that are tested in plain JAX. XLA would take too long to compile all calls.
_PLAIN_JAX_CASES = "origins of entries, every term", "extents", "weights", "weights, wrap", "mixed values", "merged"


def _changed(array: np.ndarray) -> np.ndarray:
    """Return an operand with other numbers: floats are scaled, lengths and origins are reduced by one."""
    return np.maximum(array - 1, 0) if array.dtype == np.int32 else np.asarray(-0.5 * array, array.dtype)


@pytest.mark.slow
def test_vmap_over_every_operand(family: Family) -> None:
    """Map over each operand separately, along a new last axis. Then map over all operands, along a new first axis."""

    def check(call: OperandCall) -> None:
        arrays = call.arrays(family.dtype)
        others = {name: _changed(array) for name, array in arrays.items()}
        function = call.value_and_gradients(family.name)
        axes = {name: {**dict.fromkeys(arrays), name: array.ndim} for name, array in arrays.items()}
        axes["all"] = dict.fromkeys(arrays, 0)
        stacked = {
            name: {
                each: array if (place := axis[each]) is None else np.stack([array, others[each]], place)
                for each, array in arrays.items()
            }
            for name, axis in axes.items()
        }

        def mapped(operands: dict[str, Arrays]) -> dict[str, object]:
            return {name: jax.vmap(function, (axes[name],))(each) for name, each in operands.items()}

        found = quick(mapped)(stacked)
        alone = quick(function)
        tolerance = 2e-2 if family.dtype == "bfloat16" else 2e-4
        for name, axis in axes.items():
            second = {each: array if axis[each] is None else others[each] for each, array in arrays.items()}
            expected = jax.tree.map(lambda *results: np.stack(results), alone(arrays), alone(second))
            for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
                one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance / 10, err_msg=name)

    assert not failures_of(family, check, _PLAIN_JAX_CASES if family.capabilities.is_plain_jax else ())


# The operators without compilation, and with JAX's NaN checks.


CASES = {
    "windows": Case((6, 5), (3, 4), stride=(2, 1), is_causal=(False, True), heads=2, head_dim=8),
    "additional tokens": Case((9,), (3,), additional=2, fused=True, head_dim=8),
    "in two parts": Case((9,), (3,), additional=2, fused=False, head_dim=8),
    "whole layout": Case((6,), (6,), head_dim=8),
}


@pytest.mark.parametrize("name", CASES)
def test_without_compilation(family: Family, name: str) -> None:
    case = CASES[name]
    operands = case.operands(family.dtype, 0)
    function = jax.value_and_grad(objective(case, family.fna))
    expected = function(operands)
    with jax.disable_jit():
        assert_close(function(operands), expected)
        mapped = jax.vmap(function)(jax.tree.map(lambda array: jnp.stack([array, array]), operands))
    assert_close(jax.tree.map(lambda array: array[1], mapped), expected)


def test_derivatives_of_plain_jax_without_compilation(pure_family: Family) -> None:
    case = Case((7,), (3,), head_dim=4)
    operands = case.operands("float32", 0)
    function = objective(case, pure_family.fna)

    def all_derivatives() -> Any:
        tangent = jax.jvp(function, (operands,), (operands,))[1]
        return tangent, jax.jvp(jax.grad(function), (operands,), (operands,))[1]

    expected = all_derivatives()
    with jax.disable_jit():
        assert_close(all_derivatives(), expected)


compiled_or_not = pytest.mark.parametrize("transform", [jax.jit, lambda function: function], ids=["jit", "eager"])


@compiled_or_not
def test_values_that_are_no_numbers_are_found(family: Family, transform: Callable[[Any], Any]) -> None:
    case = CASES["windows"]
    operands = case.operands(family.dtype, 0)
    spoiled = operands._replace(value=operands.value.at[0, 0, 0, 0, 0].set(jnp.nan))
    with jax.debug_nans(True):
        function = transform(case.operator(family.fna))
        assert np.isfinite(np.asarray(function(operands)[0], np.float32)).all()
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(function(spoiled))
        gradient = transform(jax.grad(objective(case, family.fna)))
        gradient(operands)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(gradient(spoiled))


@compiled_or_not
def test_infinite_values_are_found(family: Family, transform: Callable[[Any], Any]) -> None:
    case = CASES["windows"]
    operands = case.operands(family.dtype, 0)
    # All logits and weights are finite. Only one element of ``value`` is infinite.
    spoiled = operands._replace(value=operands.value.at[0, 0, 0, 0, 0].set(jnp.inf))
    function = transform(case.operator(family.fna))
    # Kernels with TF32 products split a float32 number into two parts. The lower part of infinity is inf - inf = NaN.
    becomes_nan = not jnp.isinf(function(spoiled)[0]).any()
    assert not becomes_nan or (family.name, family.dtype) == ("cutlass", "float32")
    with jax.debug_nans(becomes_nan), jax.debug_infs(not becomes_nan):
        function = transform(case.operator(family.fna))
        jax.block_until_ready(function(operands))
        with pytest.raises(FloatingPointError, match="nan" if becomes_nan else "inf"):
            jax.block_until_ready(function(spoiled))
