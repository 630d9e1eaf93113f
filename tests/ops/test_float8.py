"""8-bit arrays: scale factors, outputs, calls that quantize, and quantization."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import natten_jax
import natten_jax.fp8
from natten_jax.backends.select import resolve
from natten_jax.fp8 import quantize
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support.families import BOUNDS, FAMILIES, Family
from tests.support.float8 import factors_for, scaled
from tests.support.machine import Machine
from tests.support.meshes import mesh_of, put
from tests.support.problems import Case, both_passes, errors_of, expected_of

# Calls with 8-bit queries, keys and values: scale factors and outputs. Calls that quantize their arrays.


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

HOPPER = Device("cuda", (9, 0), is_present=False)

# The types are Any, because the overloads do not cover calls whose arguments are in a dictionary.
na2d: Any = natten_jax.na2d

attention: Any = natten_jax.attention

#: Mark that runs a test for each family that converts 8-bit arrays to a larger type and needs no GPU.
TAKING = pytest.mark.parametrize(
    "tested",
    [
        pytest.param(family, id=family.name)
        for family in FAMILIES
        if family.capabilities.converts_float8_to is not None and not family.needs_gpu
    ],
)

CASES = {
    "1-D causal": Case((37,), (9,), dilation=(2,), is_causal=(True,), heads=4, heads_kv=2, head_dim=24, batch=2),
    "2-D": Case((9, 13), (4, 5), stride=(2, 1), heads=4, heads_kv=2, head_dim=32, head_dim_v=16, batch=2),
    "2-D around": Case((8, 10), (3, 5), edges=("wrap", "cut"), heads=2, head_dim=16, batch=2),
    "3-D": Case((3, 5, 6), (2, 3, 3), heads=3, heads_kv=1, head_dim=16, batch=1),
    "whole layout": Case((6, 7), heads=2, head_dim=16, batch=2),
    "additional": Case((6, 9), (3, 4), heads=4, heads_kv=2, head_dim=16, batch=2, additional=5, fused=True),
    "merged": Case((6, 9), (3, 4), heads=4, heads_kv=2, head_dim=16, batch=2, additional=5),
    "padded": Case((6, 9), (3, 4), heads=2, head_dim=16, batch=2, extents=((4, 9), (6, 5)), sinks=True),
    "finer queries": Case((6, 9), (3, 4), heads=4, heads_kv=2, head_dim=16, batch=2, upsample=(2, 1)),
    "attention": Case((23,), queries=17, is_causal=(True,), heads=4, heads_kv=2, head_dim=16, batch=2),
}


def assert_close(one: Any, other: Any, rtol: float = 0, atol: float = 0) -> None:
    np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=rtol, atol=atol)


def bound_of(out_dtype: str, merged: bool = False) -> dict[str, float]:
    """Return error bounds of output and logsumexp.

    The compute types represent 8-bit numbers exactly, so the output has one large rounding error, which comes from its
    conversion to ``out_dtype``. With ``merged``, the output is a weighted sum of outputs that were also converted to
    ``out_dtype``. The weights add up to one, so these conversions together add at most one rounding error.
    """
    rounding = float(jnp.finfo(out_dtype).eps) / 2
    return {"out": BOUNDS["float32"] + rounding * (2 if merged else 1), "lse": BOUNDS["float32"]}


def check(
    case: Case, family: Family, dtype: str, kind: str | None, out_dtype: str | None = None, seed: int = 0
) -> None:
    """Compare the results of a call with the oracle, which decodes the 8-bit numbers and computes in float64."""
    case = case.with_edges_of(family)
    operands = case.host_operands(dtype, seed)
    factors = {} if kind is None else factors_for(kind, case, seed)
    arguments: dict[str, Any] = {**factors, **({} if out_dtype is None else {"out_dtype": out_dtype})}
    operator = case.operator(family.fna if case.queries is None else family.fmha, **arguments)
    outputs = jax.jit(operator)(jax.tree.map(jnp.asarray, operands))
    assert outputs[0].dtype.name == (out_dtype or "bfloat16")
    assert outputs[1].dtype == jnp.float32
    wide = jax.tree.map(lambda array: array.astype(np.float64), operands) if not factors else None
    reference = expected_of(
        case, scaled(case, operands, factors) if wide is None else wide, case.host_cotangents("float32", seed)
    )
    found = errors_of(reference, outputs, None)
    bounds = bound_of(outputs[0].dtype.name, merged=(case.additional > 0 and not case.fused) or case.sinks)
    assert all(found[name] <= bounds[name] for name in bounds), (found, bounds)


@TAKING
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("float8", FLOAT8)
def test_results_equal_attention_over_the_dequantized_arrays(name: str, float8: str, tested: Family) -> None:
    check(CASES[name], tested, float8, "head")


@TAKING
@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float16", "float32"])
def test_output_has_the_requested_type_and_is_rounded_once(out_dtype: str | None, tested: Family) -> None:
    for kind in (None, "head"):
        check(CASES["2-D"], tested, FLOAT8[0], kind, out_dtype)


@TAKING
@pytest.mark.parametrize("kind", ["tensor", "shared head", "block", "block of keys", "block of values"])
@pytest.mark.parametrize("name", ["1-D causal", "2-D", "3-D", "whole layout", "padded", "attention"])
def test_factors(kind: str, name: str, tested: Family) -> None:
    check(CASES[name], tested, FLOAT8[0], kind, "float32")


def operands(*, dtype: str = "float8_e4m3fn", layout: tuple[int, ...] = (8, 12), heads_kv: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(3)
    shapes = [(2, *layout, heads, 16) for heads in (4, heads_kv, heads_kv)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("name", ["query", "key", "value", "key_scale", "value_scale", "scale"])
@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
def test_gradients_raise_a_one_line_error(name: str, backend: str) -> None:
    arrays = dict(zip(("query", "key", "value"), operands(), strict=True))
    arrays |= {each: jnp.ones((2, 2)) for each in ("key_scale", "value_scale")} | {"scale": jnp.ones(4)}

    def loss(array: jax.Array) -> jax.Array:
        return na2d(**{**arrays, name: array}, kernel_size=3, backend=backend).astype(jnp.float32).sum()

    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda array: jax.jvp(loss, (array,), (array,))):
        with pytest.raises(NotImplementedError, match="8-bit arrays have no gradients: give the operators wider"):
            differentiate(arrays[name])


@pytest.mark.parametrize(
    ("family_name", "dtype"), [("hopper", "float8_e5m2"), ("cutlass", "float8_e4m3fn"), ("tpu", "float8_e4m3fn")]
)
def test_backends_without_8_bit_support_give_the_reason(family_name: str, dtype: str, machine: Machine) -> None:
    machine.has(Device("tpu") if family_name == "tpu" else HOPPER)
    with pytest.raises(ValueError, match=rf"it supports .*bfloat16.*, not {dtype}\. Backends that can: .*flex-fna"):
        na2d(*operands(dtype=dtype), kernel_size=3, backend=f"{family_name}-fna")


def test_gpus_run_plain_jax_by_default(machine: Machine) -> None:
    machine.has(HOPPER)
    tokens = jax.ShapeDtypeStruct((1, 256, 256, 24, 128), "float8_e4m3fn")
    gpu = {"kernel_size": 80, "compute_capability": "9.0"}
    problem = problem_of((256, 256), 80, heads=24, head_dim=128, dtype="float8_e4m3fn")
    by_default, by_name = (
        resolve(Request(problem, Performance(), name), HOPPER, "forward").backend for name in (None, "hopper-fna")
    )
    assert (str(by_default), str(by_name)) == ("flex-fna", "hopper-fna")
    assert natten_jax.get_configs_for_cutlass_hopper_fna(tokens, **gpu)
    assert natten_jax.get_bwd_configs_for_cutlass_hopper_fna(tokens, **gpu) == []
    assert natten_jax.get_configs_for_cutlass_fna(tokens, **gpu) == []
    assert natten_jax.get_configs_for_flex_fna(tokens, **gpu)
    assert natten_jax.get_bwd_configs_for_flex_fna(tokens, **gpu) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_scales": True}, "take factors per head, not per block"),
        ({"key_bias": True}, "8-bit arrays do not support a key_bias"),
        ({"out_dtype": "float32"}, "have outputs of float16 or bfloat16, not float32"),
    ],
)
def test_unsupported_features_of_8_bit_hopper_kernels(change: dict[str, Any], reason: str, machine: Machine) -> None:
    machine.has(HOPPER)
    problem = dataclasses.replace(problem_of((64,), 9, head_dim=64, dtype="float8_e4m3fn"), **change)
    with pytest.raises(ValueError, match=reason):
        resolve(Request(problem, Performance(), "hopper-fna"), HOPPER, "forward")


def test_hopper_kernels_have_heads_of_whole_multiples_of_16_bytes(machine: Machine) -> None:
    machine.has(HOPPER)
    for dtype, width in (("float8_e4m3fn", 48), ("bfloat16", 40)):
        problem = problem_of((64,), 9, head_dim=40, dtype=dtype)
        assert resolve(Request(problem, Performance(), "hopper-fna"), HOPPER, "forward").problem.head_dim == width


#: Element type of the arrays, invalid arguments, and a part of the error message.
REFUSED = [
    (
        "float8_e4m3fn",
        {"query_scale": jnp.ones((2, 3))},
        "query_scale has shape (2, 3), but no dimensions or [batch, heads] (2, 4) or [batch, heads_kv] (2, 2) is",
    ),
    ("float8_e4m3fn", {"key_scale": jnp.ones((2, 4))}, "key_scale has shape (2, 4), but no dimensions or [batch"),
    (
        "float8_e4m3fn",
        {"value_scale": jnp.ones((2, 5, 12, 2))},
        "8 tokens of dimension 0 cannot form 5 blocks: with 2 tokens per block there are 4",
    ),
    ("float8_e4m3fn", {"key_scale": jnp.ones((2, 0, 3, 2))}, "8 tokens of dimension 0 cannot form 0 blocks"),
    ("float8_e4m3fn", {"key_scale": jnp.ones((), jnp.bfloat16)}, "key_scale has dtype bfloat16, but float32 is"),
    ("float8_e4m3fn", {"value_scale": 0}, "value_scale must be positive and finite, got 0"),
    ("float8_e4m3fn", {"out_dtype": "float64"}, "out_dtype must be bfloat16 or float16 or float32 for float8_e4m3fn"),
    ("float8_e4m3fn", {"out_dtype": "thick"}, "out_dtype must be bfloat16 or float16 or float32"),
    ("float8_e4m3fn", {"fp8": "e4m3"}, "takes bfloat16, float16, float32 arrays, but query has dtype float8_e4m3fn"),
    ("bfloat16", {"query_scale": 1.0}, "query_scale was given with bfloat16 arrays, but factors are for 8-bit"),
    ("bfloat16", {"key_scale": jnp.ones((2, 2))}, "key_scale was given with bfloat16 arrays, but factors are"),
    ("bfloat16", {"out_dtype": "float32"}, "out_dtype must be bfloat16 for bfloat16 arrays, got float32"),
    ("bfloat16", {"fp8": "e3m4"}, "fp8 must be one of e4m3, float8_e4m3fn, e5m2, float8_e5m2, got 'e3m4'"),
    ("bfloat16", {"fp8": "e4m3", "value_scale": 1.0}, "value_scale was given with fp8='e4m3', which computes"),
]


@pytest.mark.parametrize(("dtype", "arguments", "message"), REFUSED)
def test_refused_arguments(dtype: str, arguments: dict[str, Any], message: str) -> None:
    arrays = operands(dtype=dtype)
    with pytest.raises(ValueError, match=re.escape(message)):
        na2d(*arrays, kernel_size=3, **arguments)
    if dtype == "bfloat16":
        with pytest.raises(ValueError, match=re.escape(message)):
            attention(*(array[:, :, 0] for array in arrays), **arguments)


def test_factors_of_blocks_and_additional_tokens_are_refused() -> None:
    more = jnp.ones((2, 3, 2, 16), "float8_e4m3fn")
    with pytest.raises(ValueError, match="key_scale per block and additional_keys were both given"):
        na2d(*operands(), 3, key_scale=jnp.ones((2, 4, 3, 2)), additional_keys=more, additional_values=more)


def test_out_dtype_may_repeat_the_dtype_of_wider_arrays() -> None:
    arrays = operands(dtype="bfloat16")
    assert jnp.array_equal(na2d(*arrays, 3, out_dtype=jnp.bfloat16), na2d(*arrays, 3))


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
def test_a_call_that_quantises_is_that_of_quantised_arrays(backend: str, wide: str) -> None:
    query, key, value = operands(dtype=wide)
    small = [quantize(query, rotate=True), quantize(key, subtract_mean=True, rotate=True), quantize(value)]
    factors = zip(("query_scale", "key_scale", "value_scale"), (each.scale for each in small), strict=True)
    arguments = {"kernel_size": 5, "return_lse": True, "backend": backend}
    expected, lse = na2d(*(each.array for each in small), out_dtype=wide, **dict(factors), **arguments)
    out, found_lse = na2d(query, key, value, fp8="e4m3", **arguments)
    assert out.dtype == wide
    assert_close(out, expected, rtol=2**-7, atol=2**-10)
    mean = jnp.repeat(jnp.asarray(small[1].mean), 2, axis=1)
    shift = jnp.einsum("bxyhd,bhd->bxyh", query.astype(jnp.float32), mean) / 4
    np.testing.assert_allclose(found_lse, lse + shift, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_quantizing_call_equal_the_plain_gradients(name: str) -> None:
    case = CASES[name]
    operands, cotangents = case.operands("bfloat16", 5), case.cotangents("bfloat16", 5)

    @jax.jit
    def run(operands: Any, cotangents: Any) -> list[tuple[Any, Any]]:
        return [both_passes(case.operator(**more))(operands, cotangents) for more in ({"fp8": "e4m3"}, {})]

    (outputs, gradients), (wide, wide_gradients) = run(operands, cotangents)
    for found, expected in zip(*map(jax.tree.leaves, (gradients, wide_gradients)), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    out, expected_out = (np.asarray(each[0], np.float32) for each in (outputs, wide))
    # With three mantissa bits, the relative error of an element is at most 1/16, and typically 1/40.
    assert 1e-4 < np.linalg.norm(out - expected_out) / np.linalg.norm(expected_out) < 0.06
    # For standard normal numbers and head dimensions of at least 16, quantization changes logits by a few hundredths.
    finite = np.isfinite(wide[1])
    assert (np.isfinite(outputs[1]) == finite).all()
    assert np.abs(np.asarray(outputs[1])[finite] - np.asarray(wide[1])[finite]).max() < 0.3


def test_a_large_mean_of_the_keys_loses_no_precision() -> None:
    query, key, value = operands(dtype="float32")
    arguments: dict[str, Any] = {"kernel_size": 5, "return_lse": True, "fp8": "e4m3"}
    out, lse = na2d(query, key, value, **arguments)
    far_out, far_lse = na2d(query, key + 64, value, **arguments)
    np.testing.assert_allclose(far_out, out, atol=2e-3)
    np.testing.assert_allclose(far_lse, lse + 64 * query.sum(-1) / 4, rtol=1e-5, atol=2e-3)


def test_a_non_finite_entry_does_not_affect_other_entries() -> None:
    query, key, value = operands(dtype="bfloat16")
    spoiled = key.at[0, 1, 1, 0, 0].set(jnp.inf)
    out = na2d(query, key, value, 3, fp8="e4m3")
    found = na2d(query, spoiled, value, 3, fp8="e4m3")
    assert not np.isfinite(np.asarray(found[0, 1, 1, :2], np.float32)).any()
    assert_close(found[1], out[1])
    assert_close(found[0, :, :, 2:], out[0, :, :, 2:])


def test_mapped_calls() -> None:
    def with_factors(*arrays: jax.Array) -> jax.Array:
        small = [quantize(array) for array in arrays]
        factors = zip(("query_scale", "key_scale", "value_scale"), (each.scale for each in small), strict=True)
        return na2d(*(each.array for each in small), 3, **dict(factors))

    arrays = [jnp.stack([array, array * 2]) for array in operands(dtype="bfloat16")]
    for function in (with_factors, lambda *arrays: na2d(*arrays, 3, fp8="e4m3")):
        expected = jnp.stack([function(*(array[i] for array in arrays)) for i in range(2)])
        assert_close(jax.jit(jax.vmap(jax.jit(function)))(*arrays), expected, rtol=2**-7, atol=1e-3)


def test_gradient_of_a_mapped_call_with_different_origins() -> None:
    query, key, value = (array[:, None] for array in operands(dtype="bfloat16"))
    origins = jnp.array([[0, 1], [4, 2]])

    def loss(query: jax.Array, fp8: str | None) -> jax.Array:
        def call(query: jax.Array, key: jax.Array, value: jax.Array, origin: jax.Array) -> jax.Array:
            return na2d(query, key, value, 3, query_origin=origin, fp8=fp8)

        return jax.vmap(call)(query[:, :, :4, :6], key, value, origins).astype(jnp.float32).sum()

    found, expected = (np.asarray(jax.grad(loss)(query, fp8), np.float32) for fp8 in ("e4m3", None))
    np.testing.assert_array_equal(found, expected)


def by_hand(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    """Quantize the arrays, keys and values by block, and call ``na2d`` with their scale factors."""
    arrays, factors = quantized_in_blocks(query, key, value)
    return na2d(*arrays, (5, 7), **factors, out_dtype="float32")


def quantized_in_blocks(*arrays: jax.Array) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    small = [quantize(arrays[0]), *(quantize(each, scale="block", block_shape=(3, 4)) for each in arrays[1:])]
    names = ("query_scale", "key_scale", "value_scale")
    return [each.array for each in small], dict(zip(names, (each.scale for each in small), strict=True))


def switched(*arrays: jax.Array) -> jax.Array:
    found: jax.Array = na2d(*arrays, (5, 7), fp8="e4m3").astype(jnp.float32)
    return found


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_equal_one_device(kind: str) -> None:
    arrays, mesh = operands(dtype="bfloat16", layout=(12, 16)), mesh_of(kind, a=2, b=2)
    for function, bound in ((by_hand, 1e-5), (switched, 2**-7)):
        expected = function(*arrays)
        for axes in (("a", None, None, "b"), (None, "a", "b")):
            with jax.set_mesh(mesh):
                split = put(arrays, mesh, *axes)
                found = jax.jit(function)(*split)
                if function is switched:
                    jax.jit(jax.grad(lambda *arrays: switched(*arrays).sum(), (0, 1, 2)))(*split)
            assert_close(found, expected, rtol=bound, atol=bound)


def test_blocks_of_tokens_that_devices_share() -> None:
    arrays, mesh = operands(dtype="bfloat16", layout=(12, 16)), mesh_of("Auto", a=2, b=2)
    small, factors = quantized_in_blocks(*arrays)
    tokens, whole = P(None, "a", "b"), P()

    def local(arrays: list[jax.Array], factors: dict[str, jax.Array]) -> Any:
        return na2d(*arrays, (5, 7), token_axes=("a", "b"), out_dtype="float32", **factors)

    specs = [tokens] * 3, {"query_scale": whole, "key_scale": tokens, "value_scale": tokens}
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens))(small, factors)
    assert_close(found, by_hand(*arrays), rtol=1e-5, atol=1e-5)

    def quantizing(*arrays: jax.Array) -> Any:
        return na2d(*arrays, (5, 7), token_axes=("a", "b"), fp8="e4m3")

    with pytest.raises(ValueError, match="fp8 and token_axes were both given"):
        jax.jit(jax.shard_map(quantizing, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens))(*arrays)


# The function ``quantize``: its arrays and scale factors.


SHAPE = (2, 9, 7, 3, 16)


def drawn(dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def sizes(array: jax.Array) -> np.ndarray:
    return np.abs(np.asarray(array, np.float64))


@pytest.mark.parametrize(("dtype", "bits", "most"), [("e4m3", 3, 448.0), ("float8_e5m2", 2, 57344.0)])
@pytest.mark.parametrize("scale", ["tensor", "head", "block"])
def test_elements_are_off_by_half_of_their_last_bit(dtype: str, bits: int, most: float, scale: Any) -> None:
    array = drawn()
    small, factors, mean = quantize(array, dtype, scale=scale, block_shape=3 if scale == "block" else None)
    assert mean is None and factors.dtype == jnp.float32
    wide = np.asarray(factors, np.float64)
    if scale == "head":
        wide = wide[:, None, None, :, None]
    elif scale == "block":
        wide = wide.repeat(3, axis=1).repeat(3, axis=2)[:, :9, :7, :, None]
    found, expected = np.asarray(small, np.float64) * wide, np.asarray(array, np.float64)
    # The exponent of an element determines the value of its least significant bit. Subnormal numbers have the exponent
    # of the smallest normal number.
    exponent = np.maximum(np.floor(np.log2(np.abs(expected / wide))), np.log2(float(jnp.finfo(small.dtype).tiny)))
    assert (np.abs(found - expected) <= wide * 2.0 ** (exponent - bits - 1) * (1 + 1e-5)).all()
    axes = {"tensor": None, "head": (1, 2, 4), "block": None}[scale]
    if scale != "block":
        assert (sizes(small).max(axis=axes) == most).all()


def test_blocks_are_as_equal_as_can_be() -> None:
    array = jnp.ones(SHAPE).at[:, 6:].set(4)
    small, factors, _ = quantize(array, scale="block", block_shape=(4, 7))
    assert factors.shape == (2, 3, 1, 3)  # nine tokens are divided into three blocks of three tokens
    np.testing.assert_allclose(factors * 448, np.broadcast_to(np.array([1, 1, 4])[None, :, None, None], (2, 3, 1, 3)))
    assert (sizes(small) == 448).all()
    assert quantize(drawn(shape=(1, 300, 1, 8)), scale="block").scale.shape == (1, 3, 1)
    assert quantize(drawn(shape=(1, 4, 16, 16, 1, 8)), scale="block").scale.shape == (1, 2, 2, 2, 1)


def test_mean_and_rotation_leave_differences_of_logits() -> None:
    query, key = drawn(), drawn(shape=SHAPE) * 0.5 + 3
    turned, turned_key = quantize(query, rotate=True), quantize(key, rotate=True, subtract_mean=True)
    assert turned_key.mean is not None
    np.testing.assert_allclose(turned_key.mean, key.mean((1, 2)), rtol=1e-5)

    def wide(each: natten_jax.fp8.Quantized) -> jax.Array:
        return each.array.astype(jnp.float32) * each.scale[:, None, None, :, None]

    products = jnp.einsum("bxyhd,buvhd->bhxyuv", wide(turned), wide(turned_key))
    expected = jnp.einsum("bxyhd,buvhd->bhxyuv", query, key - key.mean((1, 2), keepdims=True))
    assert np.linalg.norm(products - expected) < 0.06 * np.linalg.norm(expected)


def test_rotation_spreads_an_outlier_over_features() -> None:
    array = jnp.zeros(SHAPE).at[..., 5].set(8)
    small, factors, _ = quantize(array, rotate=True)
    np.testing.assert_allclose(sizes(small), 448)
    np.testing.assert_allclose(factors * 448, 2)  # rotation divides the outlier, 8, by the square root of 16 features


def test_zeros_and_tiny_numbers() -> None:
    small, factors, _ = quantize(jnp.zeros(SHAPE))
    assert (factors == 1).all() and (sizes(small) == 0).all()
    small, factors, _ = quantize(jnp.full(SHAPE, 1e-38))
    assert np.isfinite(factors).all() and (factors > 0).all()
    smallest = factors * jnp.asarray(jnp.finfo(small.dtype).smallest_subnormal, jnp.float32)
    assert (smallest >= np.finfo(np.float32).tiny).all()


def test_non_finite_numbers_affect_only_elements_with_the_same_factor() -> None:
    for number in (jnp.inf, jnp.nan):
        small, factors, _ = quantize(drawn().at[0, 0, 0, 1, 0].set(number))
        wide = np.asarray(small.astype(jnp.float32) * factors[:, None, None, :, None])
        is_spoiled = ~np.isfinite(wide).all(axis=(1, 2, 4))
        assert is_spoiled.tolist() == [[False, True, False], [False, False, False]]
        if number == jnp.inf:
            assert not np.isfinite(wide[0, :, :, 1]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_transformations_of_quantisation(dtype: str) -> None:
    array = drawn(dtype)
    for arguments in ({}, {"scale": "tensor"}, {"scale": "block"}, {"subtract_mean": True, "rotate": True}):

        def run(array: jax.Array, arguments: Any = arguments) -> Any:
            return quantize(array, **arguments)

        expected = run(array)
        for found in (jax.jit(run)(array), jax.tree.map(lambda each: each[0], jax.vmap(run)(array[None]))):
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of e4m3, float8_e4m3fn, e5m2, float8_e5m2, got 'int8'"),
        ({"scale": "row"}, "scale must be one of 'tensor', 'head', 'block', got 'row'"),
        ({"block_shape": 4}, "block_shape=4 is for scale=\"block\", but scale is 'head'"),
        ({"scale": "block", "block_shape": (4, 4, 4)}, "block_shape"),
        ({"scale": "block", "block_shape": 0}, "block_shape must be at least 1 in every dimension, got 0"),
        ({"rotate": True, "array": drawn(shape=(1, 4, 1, 24))}, "a power of two, got head_dim 24"),
        ({"array": drawn(shape=(4, 1, 24))}, "array has shape (4, 1, 24) and dtype float32, but floats [batch,"),
        ({"array": jnp.ones(SHAPE, jnp.int8)}, "and dtype int8, but floats"),
    ],
)
def test_refused_arguments_of_quantisation(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(**{"array": drawn(), **arguments})


def test_arguments_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="rotate must be"):
        quantize(drawn(), rotate=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="array must be an array"):
        quantize([1.0])  # type: ignore[arg-type]
