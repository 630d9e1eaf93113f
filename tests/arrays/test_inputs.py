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
from tests.support.families import Family

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


def test_config_queries_take_nattens_name_of_the_array() -> None:
    array = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)
    assert natten_jax.get_configs_for_flex_fna(input_tensor=array) == natten_jax.get_configs_for_flex_fna(array)
    with pytest.raises(TypeError, match="input_tensor"):
        natten_jax.get_configs_for_flex_fna(array, input_tensor=array)
    with pytest.raises(AttributeError, match="get_configs_for_nobody_fna"):
        natten_jax.get_configs_for_nobody_fna(array)
