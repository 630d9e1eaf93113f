"""``jax.vmap`` and ``jax.lax.map`` where tokens are split over devices: results are those of one device."""

from __future__ import annotations

import json

import pytest

from tests.support.programs import output_of, run_python

PROGRAM = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from natten_jax import na2d
from natten_jax.cost_model import halos

backend, overlaps = sys.argv[1], sys.argv[2] == "True"
halos.gains = lambda *_: overlaps
tile = dict.fromkeys(("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"), (1, 1))
window = {"kernel_size": 3, "backend": backend, **(tile if backend.startswith("cpu") else {})}
attend = functools.partial(na2d, **window)
split_attend = functools.partial(na2d, **window, token_axes=("x", None))
keys = jax.random.split(jax.random.key(0), 4)
arrays = [jax.random.normal(key, (3, 2, 16, 4, 2, 8)) for key in keys]  # a mapped axis, batch, tokens, heads, head_dim
query, key, value, cotangent = arrays
shared_key = key[0]

def gradients(function, axes):
    def both(q, k, v, c):
        out, pullback = jax.vjp(jax.vmap(function, in_axes=axes), q, k, v)
        return out, *pullback(c)
    return both

def error(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

found = {}
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
whole = P(None, None, "x")
for name, axes, inputs in (
    ("all mapped", (0, 0, 0), (query, key, value, cotangent)),
    ("key shared", (0, None, 0), (query, shared_key, value, cotangent)),
):
    specs = tuple(P(None, "x") if each is shared_key else whole for each in inputs)
    results = (whole, *specs[:3])
    expected = jax.jit(gradients(attend, axes))(*inputs)
    inside = jax.shard_map(gradients(split_attend, axes), mesh=mesh, in_specs=specs, out_specs=results)
    found[f"vmap inside, {name}"] = error(jax.jit(inside)(*inputs), expected)
    part = jax.shard_map(split_attend, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x"))
    found[f"vmap around, {name}"] = error(jax.jit(gradients(part, axes))(*inputs), expected)

mapped = lambda function: lambda q, k, v: jax.lax.map(lambda each: function(*each), (q, k, v), batch_size=2)
expected = jax.jit(mapped(attend))(query, key, value)
inside = jax.shard_map(mapped(split_attend), mesh=mesh, in_specs=(whole,) * 3, out_specs=whole)
found["lax.map"] = error(jax.jit(inside)(query, key, value), expected)

explicit = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    placed = [jax.device_put(each, NamedSharding(explicit, whole)) for each in (query, key, value, cotangent)]
    expected = jax.jit(gradients(attend, (0, 0, 0)))(query, key, value, cotangent)
    found["split by types"] = error(jax.jit(gradients(attend, (0, 0, 0)))(*placed), expected)
    mapped_by_types = jax.jit(mapped(attend))(*placed[:3])
    found["lax.map, split by types"] = error(mapped_by_types, jax.jit(mapped(attend))(query, key, value))

if backend.startswith("flex"):
    tangents = (cotangent, query, key)
    moved = lambda function: lambda q, k, v, *t: jax.jvp(jax.vmap(function), (q, k, v), t)
    expected = jax.jit(moved(attend))(query, key, value, *tangents)
    inside = jax.shard_map(moved(split_attend), mesh=mesh, in_specs=(whole,) * 6, out_specs=(whole,) * 2)
    found["forward mode"] = error(jax.jit(inside)(query, key, value, *tangents), expected)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("backend", "overlaps"), [("cpu-fna", False), ("cpu-fna", True), ("flex-fna", False)])
def test_mapped_calls_whose_tokens_are_split(backend: str, overlaps: bool) -> None:
    """Plain JAX has its halos first."""
    errors = json.loads(output_of(run_python(PROGRAM, backend, str(overlaps), devices=4)))
    assert len(errors) == 7 + backend.startswith("flex")
    assert all(error < 2e-5 for error in errors.values()), errors
