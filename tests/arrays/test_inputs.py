"""What may be handed in: empty batches, NumPy's float64, learned scales, symbolic sizes; and what is traced of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.backends.flex.backend import FlexBackend
from tests.support.families import BOUNDS, Family
from tests.support.problems import Case

WINDOW: dict[str, Any] = {"kernel_size": 3}


def draw(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("additional", [False, True])
def test_an_empty_batch(family: Family, additional: bool) -> None:
    query, key, value = (jnp.zeros((0, 12, heads, width), family.dtype) for heads, width in ((4, 8), (2, 8), (2, 16)))
    more = [jnp.zeros((0, 5, 2, width), family.dtype) for width in (8, 16)] if additional else [None, None]

    def operator(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return natten_jax.na1d(
            query, key, value, **WINDOW, backend=family.fna, additional_keys=more[0], additional_values=more[1],
            return_lse=True,
        )  # fmt: skip

    out, pullback = jax.vjp(jax.jit(operator), query, key, value)
    assert [each.shape for each in out] == [(0, 12, 4, 16), (0, 12, 4)]
    assert [each.dtype.name for each in out] == [family.dtype, "float32"]
    assert [each.shape for each in pullback(out)] == [query.shape, key.shape, value.shape]
    assert natten_jax.attention(query, key, value, backend=family.fmha).shape == (0, 12, 4, 16)


def test_a_mapped_axis_of_no_extent(family: Family) -> None:
    array = jnp.zeros((0, 2, 12, 4, 8), family.dtype)

    def operator(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, **WINDOW, backend=family.fna)

    assert jax.vmap(operator)(array).shape == array.shape
    assert jax.vmap(jax.grad(lambda x: operator(x).sum().astype("float32")))(array).shape == array.shape


def test_numpy_float64_is_what_jax_makes_of_it() -> None:
    arrays = [np.random.default_rng(i).standard_normal((1, 12, 2, 8)) for i in range(3)]
    query, key, value = arrays
    found = natten_jax.na1d(query, key, value, **WINDOW)
    assert found.dtype == jnp.float32
    of_jax = [jnp.asarray(array) for array in arrays]
    np.testing.assert_array_equal(found, natten_jax.na1d(of_jax[0], of_jax[1], of_jax[2], **WINDOW))


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_learned_scale(family: Family, is_whole: bool) -> None:
    query, key, value = (draw(i, 1, 12, 2, 8) for i in range(3))
    query, key, value = (each.astype(family.dtype) for each in (query, key, value))

    def found(scale: Any, query: jax.Array) -> jax.Array:
        if is_whole:
            out = natten_jax.attention(query, key, value, scale, backend=family.fmha)
        else:
            out = natten_jax.na1d(query, key, value, 5, scale=scale, backend=family.fna)
        return jnp.sum(out.astype("float32") ** 2)

    def with_number(query: jax.Array) -> jax.Array:
        return found(0.3, query)

    value_found, (of_scale, of_query) = jax.value_and_grad(found, (0, 1))(jnp.float32(0.3), query)
    np.testing.assert_allclose(value_found, with_number(query), rtol=1e-6)
    expected = np.asarray(jax.grad(with_number)(query), "f4")
    off = np.linalg.norm(np.asarray(of_query, "f4") - expected)
    assert off <= BOUNDS[family.dtype] * np.linalg.norm(expected)
    step = 1e-2
    slope = (found(0.3 + step, query) - found(0.3 - step, query)) / (2 * step)
    np.testing.assert_allclose(of_scale, slope, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (jnp.ones(3), ValueError, r"^scale has shape \(3,\), but .* the 2 query heads"),
        (jnp.ones((1,)), ValueError, r"^scale has shape \(1,\), but .* the 2 query heads"),
        (jnp.bool_(True), TypeError, r"^scale must be None, a real number or an array of real numbers"),
        (jnp.ones(2, bool), TypeError, r"^scale must be None, a real number or an array of real numbers"),
    ],
)
def test_an_array_that_is_no_scale(scale: jax.Array, error: type[Exception], message: str) -> None:
    x = draw(0, 1, 12, 2, 8)
    with pytest.raises(error, match=message):
        natten_jax.na1d(x, x, x, 3, scale=scale)


def test_an_exported_program_takes_any_batch(family: Family) -> None:
    case = Case((12,), (3,), heads=2)
    (batch,) = jax.export.symbolic_shape("batch")

    def both(x: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda x: natten_jax.na1d(x, x, x, 3, backend=family.fna).astype("float32").sum()
        )(x)  # fmt: skip

    shape = jax.ShapeDtypeStruct((batch, *case.layout, 2, 8), family.dtype)
    exported = jax.export.export(jax.jit(both), disabled_checks=natten_jax.EXPORT_CHECKS)(shape)
    for size in (1, 3):
        array = draw(size, size, *case.layout, 2, 8, dtype=family.dtype)
        for found, expected in zip(exported.call(array), both(array), strict=True):
            np.testing.assert_allclose(np.asarray(found, "f4"), np.asarray(expected, "f4"), rtol=1e-2, atol=1e-2)


def test_nothing_is_traced_for_absent_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("the portable backend was traced")

    monkeypatch.setattr(FlexBackend, "forward", fail)
    monkeypatch.setattr(FlexBackend, "forward_saving", fail)
    monkeypatch.setattr(FlexBackend, "backward", fail)
    x = draw(0, 1, 7, 9, 2, 8)
    jax.jit(jax.grad(lambda x: natten_jax.na2d(x, x, x, 5).sum()))(x)


def test_an_export_for_another_platform_is_of_that_platform() -> None:
    x = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)
    operator = jax.jit(lambda x: natten_jax.na1d(x, x, x, 3))
    exported = jax.export.export(operator, platforms=["cpu", "tpu"], disabled_checks=natten_jax.EXPORT_CHECKS)(x)
    module = exported.mlir_module()
    assert "flex-fna" in module
    assert "natten_jax_cpu_forward" in module


@pytest.mark.parametrize("order", ["hessian", "grad of grad"])
def test_second_derivatives_of_kernels_name_the_backend_that_has_them(native_family: Family, order: str) -> None:
    x = draw(0, 1, 12, 2, 8, dtype=native_family.dtype)

    def loss(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, 3, backend=native_family.fna).astype("float32").sum()

    second = jax.hessian(loss) if order == "hessian" else jax.grad(lambda x: jax.grad(loss)(x).astype("f4").sum())
    with pytest.raises(NotImplementedError, match='backend="flex-fna"'):
        second(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"torch_compile": True}, "takes torch_compile=False only, got True: jax.jit"),
        ({"backward_use_pt_reduction": True}, "backward_use_xla_reduction"),
        ({"kernal_size": 3}, "unexpected keyword argument 'kernal_size'"),
        ({"q_tile_size": 3}, "unexpected keyword argument 'q_tile_size'"),
    ],
)
def test_arguments_of_natten_are_taken_or_explained(arguments: dict[str, Any], message: str) -> None:
    x = draw(0, 1, 12, 2, 8)
    plain = natten_jax.na1d(x, x, x, 3)
    neutral = natten_jax.na1d(x, x, x, 3, torch_compile=False, backward_use_pt_reduction=False)  # type: ignore[call-overload]
    np.testing.assert_array_equal(plain, neutral)
    with pytest.raises(TypeError, match=message):
        natten_jax.na1d(x, x, x, 3, **arguments)


def test_config_queries_take_nattens_name_of_the_array() -> None:
    array = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)
    assert natten_jax.get_configs_for_flex_fna(input_tensor=array) == natten_jax.get_configs_for_flex_fna(array)
    with pytest.raises(TypeError, match="input_tensor"):
        natten_jax.get_configs_for_flex_fna(array, input_tensor=array)
    with pytest.raises(AttributeError, match="get_configs_for_nobody_fna"):
        natten_jax.get_configs_for_nobody_fna(array)
