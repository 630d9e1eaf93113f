"""Gradients that are bitwise equal from run to run, where a call asks for that."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support.compilation import as_users_do
from tests.support.families import Family

RUNS = 20


@pytest.mark.parametrize(
    ("layout", "windows", "additional_kv"),
    [
        ((700,), {"kernel_size": (700,)}, 0),
        ((700,), {"kernel_size": (150,), "stride": (5,), "dilation": (3,)}, 150),
        ((20, 26), {"kernel_size": (7, 6), "dilation": (2, 1), "is_causal": (False, True)}, 0),
        ((8, 10, 12), {"kernel_size": (4, 3, 5), "stride": (2, 1, 1)}, 40),
    ],
)
def test_gradients_are_equal_in_every_run(
    family: Family, layout: tuple[int, ...], windows: dict[str, Any], additional_kv: int
) -> None:
    operator = getattr(natten_jax, f"na{len(layout)}d")
    names = ["query", "key", "value"] + ["additional_keys", "additional_values"] * (additional_kv > 0)
    width = 64 if family.needs_gpu else 16  # on the host all of a run's time goes into products
    shapes = [(2, *layout, 4, width), *[(2, *layout, 2, width)] * 2, *[(2, additional_kv, 2, width)] * 2]
    keys = jax.random.split(jax.random.key(3), len(names) + 1)
    operands = [
        jax.random.normal(key, shape, jnp.float32).astype(family.dtype)
        for key, shape in zip(keys, shapes[: len(names)], strict=False)
    ]
    cotangent = jax.random.normal(keys[-1], shapes[0], jnp.float32).astype(family.dtype)

    @functools.partial(jax.jit, compiler_options=as_users_do())
    def gradients(operands: list[jax.Array]) -> Any:
        def run(*each: jax.Array) -> jax.Array:
            arrays = dict(zip(names, each, strict=True))
            return operator(**arrays, **windows, backend=family.fna, backward_deterministic=True)

        return jax.vjp(run, *operands)[1](cotangent)

    first = jax.tree.map(np.asarray, gradients(operands))
    for _ in range(RUNS - 1):
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, gradients(operands)))
