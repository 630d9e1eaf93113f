"""Boxes, padded layouts and finer grids over device meshes that split batch, heads or tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import na2d
from tests.support.meshes import assert_close, mesh_of, put

EXTENTS = np.array([[8, 10], [3, 4], [5, 10], [1, 7]], "int32")
ORIGINS = np.array([[0, 1], [3, 4], [2, 2], [1, 0]], "int32")


def padded(query: Any, key: Any, place: Any, backend: str) -> Any:
    return na2d(query, key, key, 3, extents=place, backend=backend)


def padded_beside_others(query: Any, key: Any, place: Any, backend: str) -> Any:
    more = key[:, 0, :3]
    return na2d(query, key, key, 3, extents=place, additional_keys=more, additional_values=more, backend=backend)


def box(query: Any, key: Any, place: Any, backend: str) -> Any:
    return na2d(query[:, :4, :5], key, key, 3, query_origin=place, backend=backend)


def finer(query: Any, key: Any, _: Any, backend: str) -> Any:
    key = key[:, ::2, ::2]
    return na2d(query, key, key, 3, upsample=2, backend=backend)


CALLS = [
    pytest.param(call, place, backend, id=f"{name}-{backend}")
    for backend, name, call, place in (
        ("cpu-fna", "padded", padded, EXTENTS),
        ("cpu-fna", "others", padded_beside_others, EXTENTS),
        ("cpu-fna", "box", box, ORIGINS),
        ("cpu-fna", "one-box", box, ORIGINS[1]),
        ("cpu-fna", "finer", finer, ORIGINS),
        ("flex-fna", "padded", padded, EXTENTS),
    )
]


@pytest.mark.parametrize(("call", "place", "backend"), CALLS)
def test_meshes_split_batch_and_heads(call: Callable[..., Any], place: np.ndarray, backend: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((4, 8, 10, heads, 8)), "float32") for heads in (4, 2)]

    def loss(query: Any, key: Any, place: Any) -> Any:
        out = call(query, key, place, backend)
        return jnp.sum(jnp.sin(out)), out

    both = jax.grad(loss, (0, 1), has_aux=True)
    expected = jax.jit(both)(*arrays, place)
    for kind in ("Auto", "Explicit"):
        mesh = mesh_of(kind, d=2)
        for axes in (("d",), (None, None, None, "d"), *[(None, "d")] * (call is finer)):
            with jax.set_mesh(mesh):
                places = put(place, mesh, *(axes if axes == ("d",) and place.ndim == 2 else ()))
                found = jax.jit(both)(*put(arrays, mesh, *axes), places)
            assert_close(found, expected, note=f"{kind} {axes}")
