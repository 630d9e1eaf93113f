"""Arrays as words: the same bits there and back, and what travels as such."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import na2d
from natten_jax.arrays.boxes import elements_of, words_of
from natten_jax.cost_model import halos
from tests.support.meshes import mesh_of, put


@pytest.mark.parametrize("width", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_words_have_the_bits_of_their_elements(dtype: str, width: int) -> None:
    bits = np.random.default_rng(width).integers(0, 256, (3, 5, width * jnp.dtype(dtype).itemsize), np.uint8)
    array = jnp.asarray(bits.view(jnp.dtype(dtype)))
    words = words_of(array)
    is_paired = jnp.dtype(dtype).itemsize == 2 and width % 2 == 0
    assert words.shape == ((3, 5, width // 2) if is_paired else array.shape)
    assert words.dtype == (jnp.uint32 if is_paired else array.dtype)
    assert np.asarray(words).tobytes() == np.asarray(array).tobytes()
    assert np.asarray(elements_of(words, array.dtype)).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3), ("float32", 1e-6)])
@pytest.mark.parametrize(("width", "width_v"), [(8, 8), (7, 14)])
def test_slabs_travel_as_words(
    width: int, width_v: int, dtype: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halos, "gains", lambda *_: True)
    halos.overlap_that_pays.cache_clear()
    mesh = mesh_of("Auto", x=4)
    shapes = [(2, 16, 8, 2, each) for each in (width, width, width_v, width_v)]
    arrays = [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]

    @jax.jit
    def gradients(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda q, k, v: na2d(q, k, v, 5, backend="cpu-fna"), query, key, value)
        return out, *pullback(cotangent)

    split = [put(array, mesh, None, "x") for array in arrays]
    program = gradients.lower(*split).compile()
    lines = (program.as_text() or "").splitlines()
    assert any("u32[" in line and "collective-permute" in line for line in lines) == (dtype != "float32")
    expected = gradients(*(array.astype("float32") for array in arrays))
    for one, other in zip(program(*split), expected, strict=True):
        assert abs(np.float32(one) - np.float32(other)).max() < bound * abs(other).max()
    halos.overlap_that_pays.cache_clear()
