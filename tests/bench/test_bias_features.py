"""A relative bias by features is the one that operators take."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from natten_jax import na1d, na2d
from natten_jax.problem import problem_of

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from lib.bias_features import by_features


@pytest.mark.parametrize(
    ("operator", "layout", "window"),
    [
        (na2d, (9, 12), {"kernel_size": (3, 5)}),
        (na2d, (14, 13), {"kernel_size": (3, 4), "dilation": (4, 2)}),
        (na1d, (20,), {"kernel_size": 6, "is_causal": True}),
    ],
)
def test_features_add_a_relative_bias(operator: Any, layout: tuple[int, ...], window: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    query, key, value, cotangent = rng.standard_normal((4, 2, *layout, 3, 8)).astype(np.float32)
    problem = problem_of(layout, **window)
    table = rng.standard_normal((3, *problem.bias_shape)).astype(np.float32)

    def own(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array) -> jax.Array:
        return operator(query, key, value, **window, relative_bias=table, backend="cpu-fna")

    def plain(*arrays: jax.Array, scale: float) -> jax.Array:
        return operator(*arrays, **window, scale=scale, backend="cpu-fna")

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(function, *arrays)
        return out, *pullback(cotangent)

    found, expected = (with_gradients(each, query, key, value, table) for each in (by_features(plain, problem), own))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    assert not np.allclose(expected[0], plain(query, key, value, scale=8**-0.5), atol=1e-2)
