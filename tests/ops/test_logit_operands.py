"""Scales, relative biases, key biases and sinks: accuracy, derivatives, backends, invalid arrays and element types."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import backends
from natten_jax.backends.select import resolve
from natten_jax.element_types import ELEMENT_TYPES
from natten_jax.plan.devices import default_device
from natten_jax.plan.plan import Request
from natten_jax.problem import problem_of
from tests.support import oracle
from tests.support.families import FAMILIES, Family
from tests.support.problems import (
    OPERATORS,
    QUICK_COMPILATION,
    Case,
    check_gradients_repeat,
    element_types,
    expected_of,
    relative_error,
    value_and_gradients,
)

LARGEST = float(np.finfo(np.float32).max) / np.log2(np.e)
LAYOUT, HEADS, WIDTH = (6, 5), 2, 8
WINDOW = (3, 4)
#: Shape of each operand that affects the logits.
SHAPES = {
    "relative_bias": (HEADS, *(2 * size - 1 for size in WINDOW)),
    "key_bias": (2, *LAYOUT),
    "key_bias of heads": (2, HEADS, *LAYOUT),
    "sinks": (HEADS,),
    "scale": (HEADS,),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def taking(name: str) -> tuple[Family, ...]:
    """Return the families that support a bias and need no GPU."""
    return tuple(family for family in FAMILIES if name in family.capabilities.features and not family.needs_gpu)


BOTH = [pytest.param(family, id=family.name) for family in taking("relative_bias")]


def test_plain_jax_and_host_kernels_add_both() -> None:
    assert {"flex", "cpu"} <= {family.name for family in taking("relative_bias")} & {
        family.name for family in taking("key_bias")
    }


# Scales that are given as an array with a number per head, or without dimensions.


def _arrays(family: Family, heads: int = 3) -> Any:
    width = 8 * family.head_dim_step
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(2, 12, heads, width)), family.dtype) for _ in range(3))


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_steep_logits_are_as_accurate_as_with_a_number(family: Family, dtype: str, operator: str) -> None:
    # This scale is not a power of two. If a 16-bit query were multiplied by it, the product would be rounded. The
    # rounding would cause an error of 0.06 in the output.
    number = 128**-0.5
    plain = Case((48,), (21,), heads=2, heads_kv=2, head_dim=128).fitted(family)
    if operator == "fmha":
        plain = dataclasses.replace(plain, kernel_size=None, queries=40)
    found = []
    with element_types(dtype):
        for case in (plain, dataclasses.replace(plain, scales=(number, number))):
            query, key, *others = case.host_operands(dtype, 0)
            operands = oracle.Tensors(4 * query, 4 * key, *others)
            cotangents = case.host_cotangents(dtype, 0)
            outputs, gradients = value_and_gradients(case.operator(getattr(family, operator)), operands, cotangents)
            reference = dataclasses.replace(case, scale=number)
            expected = expected_of(reference, operands._replace(scale=None), cotangents)
            errors = [relative_error(outputs[0], expected.forward.out, expected.forward_magnitude.out)]
            for name in ("query", "key", "value"):
                parts = gradients, expected.gradients, expected.gradient_magnitude
                errors.append(relative_error(*(getattr(part, name) for part in parts)))
            found.append(errors)
    from_number, from_operand = found
    for one, other in zip(from_number, from_operand, strict=True):
        assert other <= 1.05 * one + 1e-7


@pytest.mark.parametrize("kind", ["jax", "numpy", "python"])
def test_arrays_without_dimensions_whose_value_is_known_are_numbers(family: Family, kind: str) -> None:
    arrays = _arrays(family)
    scale = {"jax": jnp.float32(0.3), "numpy": np.array(np.float32(0.3)), "python": float(np.float32(0.3))}[kind]

    def attend(scale: Any) -> Any:
        return OPERATORS[1](*arrays, 5, scale=scale, backend=family.fna)

    expected = attend(float(np.float32(0.3)))
    np.testing.assert_array_equal(attend(scale), expected)
    # For plain JAX, XLA's constant folding may round differently.
    tolerance = 1e-6 if family.capabilities.is_plain_jax else 0
    np.testing.assert_allclose(jax.jit(lambda: attend(scale))(), expected, atol=tolerance)


def _attention(array: Any, **arguments: Any) -> Any:
    return natten_jax.attention(array, array, array, **arguments)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_a_traced_scale_that_no_number_could_be_gives_nan(native_family: Family, value: float) -> None:
    arrays = _arrays(native_family, heads=2)

    @jax.jit
    def run(scale: jax.Array) -> Any:
        def attend(*operands: jax.Array) -> Any:
            return OPERATORS[1](*operands[:3], 5, scale=operands[3], backend=native_family.fna)

        out, pullback = jax.vjp(attend, *arrays, scale)
        return out, pullback(jnp.ones_like(out))

    out, gradients = run(jnp.array([value, 0.3], "float32"))
    expected, expected_gradients = run(jnp.array([0.3, 0.3], "float32"))
    assert np.isnan(out[:, :, 0]).all()
    np.testing.assert_array_equal(out[:, :, 1], expected[:, :, 1])
    assert np.isnan(gradients[3][0])
    np.testing.assert_allclose(gradients[3][1], expected_gradients[3][1], rtol=1e-5)


@pytest.mark.parametrize("backend", ["cpu-fmha", "flex-fmha"])
@pytest.mark.parametrize("scale", [LARGEST * (1 - 1e-6), -LARGEST * (1 - 1e-6), 1e38])
@pytest.mark.parametrize("is_operand", [False, True])
def test_the_largest_scales_are_used_as_given(backend: str, scale: float, is_operand: bool) -> None:
    # The query is ``tiny`` so that the logits stay finite. Its products with the keys, and the differences of the
    # products, are normal numbers: subnormal numbers might be flushed to 0.
    tiny = 2.0**-125
    query = jnp.array([tiny, 0.0]).reshape(1, 2, 1, 1)
    numbers = np.array([1.0, 1.5, 2.0])
    key = jnp.asarray(numbers, "float32").reshape(1, 3, 1, 1)

    def attend(query: Any, scale: Any) -> Any:
        return natten_jax.attention(query, key, key, scale, backend=backend)

    weights = np.exp(np.outer([float(np.float32(scale)) * tiny, 0.0], numbers))
    expected = weights @ numbers / weights.sum(axis=1)
    if not is_operand:
        np.testing.assert_allclose(attend(query, scale)[0, :, 0, 0], expected, rtol=2e-6)
        return
    found, pullback = jax.vjp(attend, query, jnp.float32([scale]))
    np.testing.assert_allclose(found[0, :, 0, 0], expected, rtol=2e-6)
    assert all(np.isfinite(each).all() for each in pullback(jnp.ones_like(found)))


# Second derivatives, and reproducible gradients.


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_derivatives_of_derivatives(pure_family: Family, operator: str) -> None:
    windows: dict[str, Any] = {"kernel_size": (3,), "dilation": (2,), "relative_bias": True, "additional": 1}
    case = Case((7,), key_bias="heads", hidden=0.3, sinks=True, scales=(0.7, 0.0), heads=2, heads_kv=1, head_dim=3)
    case = dataclasses.replace(case, **(windows if operator == "fna" else {"queries": 6}), fused=operator == "fna")
    with element_types("float64"):
        operands = case.operands("float64", 0)
        direction = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), case.operands("float64", 1))
        d_out, d_lse = case.host_cotangents("float64", 0)
        run = case.operator(getattr(pure_family, operator))

        def objective(operands: oracle.Tensors) -> Any:
            out, lse = run(operands)
            return jnp.sum(jnp.sin(out) * d_out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2 * d_lse)

        def along(operands: oracle.Tensors) -> Any:
            return _dot(jax.grad(objective)(operands), direction)

        def products(operands: oracle.Tensors) -> Any:
            tangents = (jax.jvp(each, (operands,), (direction,))[1] for each in (objective, jax.grad(objective)))
            return *tangents, along(operands), jax.grad(along)(operands)

        gradient = jax.jit(jax.grad(objective), compiler_options=QUICK_COMPILATION)
        slope, found, expected_slope, over = jax.jit(products, compiler_options=QUICK_COMPILATION)(operands)
        step = 1e-5
        moved = [gradient(jax.tree.map(lambda a, d, s=sign: a + s * step * d, operands, direction)) for sign in (1, -1)]
        expected = jax.tree.map(lambda one, other: (one - other) / (2 * step), *moved)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-11)
    for one, other, reversed_ in zip(*map(jax.tree.leaves, (found, expected, over)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(reversed_, one, rtol=1e-9, atol=1e-12)


def _dot(one: Any, other: Any) -> Any:
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("tested", BOTH)
def test_gradients_of_tables_are_reproducible(tested: Family) -> None:
    case = Case(
        (300,), (190,), stride=(7,), relative_bias=True, key_bias="tokens", sinks=True, batch=3, heads=2, heads_kv=1
    )
    check_gradients_repeat(case, tested.fna, ("relative_bias", "key_bias", "sinks"))


# Backends that reject operands.


def test_backends_without_a_bias_give_the_reason_and_are_not_selected() -> None:
    problem = problem_of((8, 8), 3, dtype="float32")
    device = default_device()
    for backend in backends.registered():
        for name in ("relative_bias", "key_bias"):
            asked = dataclasses.replace(problem, relative_bias=name == "relative_bias", key_bias=name == "key_bias")
            reason = backend.rejection(asked, device, "forward")
            if name in backend.capabilities.features:
                assert reason == backend.rejection(problem, device, "forward") or name in str(reason)
            elif backend.rejection(problem, device, "forward") is None:
                assert reason == f"it does not add {name} to logits"
            chosen = resolve(Request(asked), device, "forward").backend.family
            assert name in next(each for each in backends.registered() if each.family == chosen).capabilities.features


def test_host_kernels_refuse_tables_too_large_to_count() -> None:
    host = backends.find("cpu-fna", "fna")
    device = default_device()
    for extent, heads_kv, is_taken in ((2000, 1, True), (2800, 2, True), (2800, 1, False), (3000, 2, False)):
        problem = problem_of((extent, extent), extent, heads=2, heads_kv=heads_kv, dtype="float32")
        reason = host.rejection(dataclasses.replace(problem, relative_bias=True), device, "forward")
        assert (reason is None) == is_taken
        assert is_taken or f"not {2 // heads_kv * (2 * extent - 1) ** 2}" in str(reason)
        assert host.rejection(problem, device, "forward") is None


# Operands with invalid shapes or types.


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_other_shapes_and_types_are_refused(rank: int) -> None:
    layout, window = ((6,), (3,)) if rank < 2 else ((6, 5), (3, 2))
    array = jnp.ones((2, *layout, 4, 8), jnp.bfloat16)
    table = (4, *(2 * size - 1 for size in window))
    tokens = (2, *layout)

    def call(**operands: Any) -> Any:
        return OPERATORS[rank](array, array, array, window, **operands) if rank else _attention(array, **operands)

    shapes = {
        "scale": ((4,), ((1,), (3,), (4, 1), (1, 4), (0,))),
        "sinks": ((4,), ((), (1,), (3,), (1, 4), (4, 1))),
        "key_bias": (tokens, ((), layout, (1, *layout), (2, 1, *layout), (*tokens, 4), (*tokens[:-1], 7))),
        "relative_bias": (
            table,
            ((), table[1:], (2, *table[1:]), (1, *table), (*table[:-1], table[-1] + 1), (4, *layout)),
        ),
    }  # fmt: skip
    if not rank:
        del shapes["relative_bias"]
    for name, (right, wrong) in shapes.items():
        assert call(**{name: np.ones(right)}).dtype == call(**{name: jnp.ones(right, "bfloat16")}).dtype == array.dtype
        for shape in wrong:
            for run in (call, lambda **operands: jax.eval_shape(lambda each: call(**each), operands)):
                with pytest.raises(ValueError, match=rf"^{name} has shape "):
                    run(**{name: jnp.ones(shape)})
        is_scale = name == "scale"
        for dtype in ("bool", "complex64") if is_scale else ("int8", "complex64", "float8_e5m2"):
            rule = "scale must be" if is_scale else rf"{name} has dtype {dtype}, but .* are supported"
            with pytest.raises(TypeError if is_scale else ValueError, match=f"^{rule}"):
                call(**{name: jnp.zeros(right, dtype)})
        with pytest.raises(
            TypeError, match=rf"^{name} must be .*\[" if is_scale else rf"^{name} must be an array, got list"
        ):
            call(**{name: np.zeros(right).tolist()})
    assert jax.eval_shape(lambda: call(key_bias=jnp.zeros((2, 4, *layout)))).shape == array.shape


def test_queries_between_tokens_have_no_offsets() -> None:
    key, query = jnp.ones((1, 6, 2, 8)), jnp.ones((1, 12, 2, 8))
    with pytest.raises(ValueError, match=r"^relative_bias and upsample were both given"):
        natten_jax.na1d(query, key, key, 3, upsample=2, relative_bias=jnp.zeros((2, 5)))


# Element types of the operands.


@pytest.fixture
def _has_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def operand(name: str, dtype: str) -> jax.Array:
    """Return an operand whose elements every dtype represents exactly. In biases and sinks, some elements are -inf."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-8, 8, SHAPES[name]) / 4
    is_hidden = (rng.random(SHAPES[name]) < 0.2) & (name != "scale")
    return jnp.asarray(np.where(is_hidden, -np.inf, numbers), dtype)


def assert_nearly_equal(found: jax.Array, expected: jax.Array, accumulator: str) -> None:
    """Compare with a tolerance of a few rounding errors: XLA may fuse programs and round operands differently."""
    tolerance = 8 * max(float(jnp.finfo(dtype).eps) for dtype in (expected.dtype, accumulator))
    one, other = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())


@pytest.mark.usefixtures("_has_float64")
def test_every_dtype_is_converted_to_the_accumulator(family: Family) -> None:
    lacking = {"relative_bias", "key_bias"} - set(family.capabilities.features)
    names = [name for name in SHAPES if name.split()[0] not in lacking]
    groups = [[name] for name in names]
    if not family.needs_gpu:  # GPU kernels may reject some combinations of operands
        groups = [[name for name in names if name != "key_bias of heads"], ["key_bias of heads"][: "key_bias" in names]]
    for group, query_dtype in itertools.product(filter(None, groups), family.dtypes):
        if family.needs_gpu and group == ["relative_bias"] and ELEMENT_TYPES[query_dtype].bytes != 2:
            continue
        accumulator = ELEMENT_TYPES[query_dtype].accumulator
        query = jax.random.normal(jax.random.key(0), (2, *LAYOUT, HEADS, WIDTH), query_dtype)

        def results(arrays: Any, query: jax.Array = query) -> Any:
            def loss(query: jax.Array, arrays: Any) -> jax.Array:
                out = OPERATORS[2](query, query, query, WINDOW, backend=family.fna, **arrays)
                return jnp.sum(jnp.sin(out.astype("float32")))

            return jax.value_and_grad(loss, argnums=(0, 1))(query, arrays)

        def programs(inputs: Any, results: Any = results) -> Any:
            return [results(arrays) for arrays in inputs]

        inputs = [{name.split()[0]: operand(name, dtype) for name in group} for dtype in (accumulator, *DTYPES)]
        expected, *found = jax.jit(programs, compiler_options=QUICK_COMPILATION)(inputs)
        total, (query_gradient, operand_gradients) = expected
        assert np.isfinite(np.asarray(total))
        assert all(
            each.dtype == accumulator and np.abs(np.asarray(each)).max() > 0 for each in operand_gradients.values()
        )
        for dtype, (other_total, (other_query_gradient, other_operand_gradients)) in zip(DTYPES, found, strict=True):
            assert_nearly_equal(other_total, total, accumulator)
            assert_nearly_equal(other_query_gradient, query_gradient, accumulator)
            for name, other in other_operand_gradients.items():
                assert other.dtype == dtype
                assert_nearly_equal(other, operand_gradients[name].astype(dtype), accumulator)


def test_scales_may_be_integers() -> None:
    query = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    expected = natten_jax.na1d(query, query, query, 3, scale=jnp.float32([1, 2]))
    for scale in (np.array([1, 2]), jnp.array([1, 2])):
        np.testing.assert_array_equal(natten_jax.na1d(query, query, query, 3, scale=scale), expected)


@pytest.mark.usefixtures("_has_float64")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_mask_of_the_documentation(dtype: str) -> None:
    """Accept ``jnp.where(valid, 0.0, -jnp.inf)``, which is float64 if 64-bit types are enabled."""
    query = jax.random.normal(jax.random.key(0), (2, 9, HEADS, WIDTH), dtype)
    bias = jnp.where(jnp.ones((2, 9), bool).at[:, 7:].set(False), 0.0, -jnp.inf)
    table, sinks = jnp.where(jnp.arange(5) > 0, 0.0, -jnp.inf) * jnp.ones((HEADS, 1)), jnp.zeros(HEADS)
    assert bias.dtype == table.dtype == sinks.dtype == jnp.float64
    out = natten_jax.na1d(query, query, query, 3, key_bias=bias, relative_bias=table, sinks=sinks)
    assert out.dtype == dtype
    assert (out[:, 8] == 0).all()
    assert (out[:, :7] != 0).any(axis=-1).all()
    assert natten_jax.attention(query, query, query, key_bias=bias, sinks=sinks).dtype == dtype
    assert natten_jax.neighborhood_weights(query, query, 3, relative_bias=table).dtype == dtype


@pytest.mark.parametrize("library", [np, jnp])
def test_true_keeps_a_key(library: Any) -> None:
    case = Case((9, 7), (3, 5), batch=2, heads=2)
    query, key, value, *_ = case.operands("float32", 0)
    keeps = library.asarray(np.random.default_rng(1).random((2, 9, 7)) < 0.6)
    found = natten_jax.na2d(query, key, value, (3, 5), key_bias=keeps)
    np.testing.assert_array_equal(
        found, natten_jax.na2d(query, key, value, (3, 5), key_bias=jnp.where(keeps, 0.0, -jnp.inf))
    )
    with pytest.raises(ValueError, match=r"sinks has dtype bool.*jnp.where\(sinks"):
        natten_jax.na2d(query, key, value, (3, 5), sinks=jnp.ones(2, bool))


@pytest.mark.usefixtures("_has_float64")
def test_float64_operands_keep_their_digits() -> None:
    query = jnp.zeros((1, 1, 1, WIDTH), "float64")
    small = 1e-12
    for name, array, expected in (
        ("sinks", jnp.array([small]), np.logaddexp(0, small)),
        ("key_bias", jnp.full((1, 1), small), small),
    ):
        lse = OPERATORS[1](query, query, query, 1, **{name: array}, backend="flex-fna", return_lse=True)[1]
        np.testing.assert_allclose(lse.item(), expected, rtol=1e-15)


@pytest.mark.usefixtures("_has_float64")
@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
@pytest.mark.parametrize(("low", "is_hidden"), [(-2e38, False), (-1e300, False), (-1e308, True)])
def test_the_rule_of_float64_biases_is_tested_before_conversion(backend: str, low: float, is_hidden: bool) -> None:
    query = jnp.ones((1, 3, 1, WIDTH), "float32")
    bias = jnp.full((1, 3), low, "float64")
    out, lse = natten_jax.na1d(query, query, query, 3, key_bias=bias, backend=backend, return_lse=True)
    np.testing.assert_array_equal(jnp.isneginf(lse), is_hidden)
    np.testing.assert_allclose(out, 0 if is_hidden else 1, rtol=1e-6)
