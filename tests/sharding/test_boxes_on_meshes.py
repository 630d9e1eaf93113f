"""Boxes, padded layouts and finer grids over device meshes that split batch, heads or tokens."""

from __future__ import annotations

import pytest

from tests.support.programs import output_of, run_python

_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from natten_jax import na2d

backend, *names = sys.argv[1:]
rng = np.random.default_rng(0)
query, key = (jnp.asarray(rng.standard_normal((4, 8, 10, heads, 8)), "float32") for heads in (4, 2))
EXTENTS = jnp.array([[8, 10], [3, 4], [5, 10], [1, 7]], jnp.int32)
ORIGINS = jnp.array([[0, 1], [3, 4], [2, 2], [1, 0]], jnp.int32)


def padded(query, key, place):
    return na2d(query, key, key, 3, extents=place, backend=backend)


def padded_beside_others(query, key, place):
    more = key[:, 0, :3]
    return na2d(query, key, key, 3, extents=place, additional_keys=more, additional_values=more, backend=backend)


def box(query, key, place):
    return na2d(query[:, :4, :5], key, key, 3, query_origin=place, backend=backend)


def finer(query, key, _):
    key = key[:, ::2, ::2]
    return na2d(query, key, key, 3, upsample=2, backend=backend)


CALLS = {
    "padded": (padded, EXTENTS), "others": (padded_beside_others, EXTENTS), "box": (box, ORIGINS),
    "one-box": (box, ORIGINS[1]), "finer": (finer, ORIGINS),
}
for name in names:
    call, place = CALLS[name]
    def loss(query, key, place):
        out = call(query, key, place)
        return jnp.sum(jnp.sin(out)), out

    both = jax.grad(loss, (0, 1), has_aux=True)
    expected = jax.jit(both)(query, key, place)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
        for spec in (P("d"), P(None, None, None, "d"), *[P(None, "d")] * (name == "finer")):
            with jax.set_mesh(mesh):
                arrays = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (query, key)]
                is_split = spec == P("d") and place.ndim == 2
                places = jax.device_put(place, NamedSharding(mesh, P("d") if is_split else P()))
                found = jax.jit(both)(*arrays, places)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                note = f"{name} {kind} {spec}"
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=2e-5, err_msg=note)
print("equal")
"""


@pytest.mark.parametrize(
    ("backend", "calls"),
    [("cpu-fna", ["padded", "others", "box", "one-box", "finer"]), ("flex-fna", ["padded"])],
    ids=["cpu", "flex"],
)
def test_meshes_split_batch_and_heads(backend: str, calls: list[str]) -> None:
    result = run_python(_PROGRAM, backend, *calls, devices=2)
    assert output_of(result).strip().endswith("equal")
