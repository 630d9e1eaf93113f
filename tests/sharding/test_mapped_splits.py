"""``jax.vmap`` and ``jax.lax.map`` where tokens are split over devices: results are those of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from natten_jax import na2d
from tests.support.meshes import assert_close, mesh_of, put

Function = Callable[..., Any]
TILES = "q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape"
#: Keys and values of a mapped axis, batch and tokens: tokens are split.
WHOLE = P(None, None, "x")


def gradients(function: Function, axes: Any) -> Function:
    def both(q: Any, k: Any, v: Any, c: Any) -> Any:
        out, pullback = jax.vjp(jax.vmap(function, in_axes=axes), q, k, v)
        return out, *pullback(c)

    return both


def mapped(function: Function) -> Function:
    return lambda *arrays: jax.lax.map(lambda each: function(*each), arrays, batch_size=2)


def moved(function: Function) -> Function:
    return lambda *arrays: jax.jvp(jax.vmap(function), arrays[:3], arrays[3:])


@pytest.mark.parametrize(
    ("backend", "overlaps"),
    [("cpu-fna", False), ("cpu-fna", True), pytest.param("flex-fna", False, marks=pytest.mark.slow)],
)
def test_mapped_calls_whose_tokens_are_split(
    backend: str, overlaps: bool, set_gains: Callable[[Callable[..., bool]], None]
) -> None:
    """Plain JAX has its halos first."""
    set_gains(lambda *_: overlaps)
    window: dict[str, Any] = {"kernel_size": 3, "backend": backend}
    window |= dict.fromkeys(TILES, (1, 1)) if backend.startswith("cpu") else {}
    attend = functools.partial(na2d, **window)
    split_attend = functools.partial(attend, token_axes=("x", None))
    arrays = [jax.random.normal(key, (3, 2, 16, 4, 2, 8)) for key in jax.random.split(jax.random.key(0), 4)]
    query, key, value, cotangent = arrays
    mesh = mesh_of("Auto", x=4)

    def compare(function: Function, expected: Function, in_specs: Any, out_specs: Any, inputs: Any) -> None:
        split = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        assert_close(jax.jit(split)(*inputs), jax.jit(expected)(*inputs))

    for axes, its_key, of_key in (((0, 0, 0), key, WHOLE), ((0, None, 0), key[0], P(None, "x"))):
        inputs, specs = (query, its_key, value, cotangent), (WHOLE, of_key, WHOLE, WHOLE)
        compare(gradients(split_attend, axes), gradients(attend, axes), specs, (WHOLE, *specs[:3]), inputs)
        part = jax.shard_map(split_attend, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x"))
        assert_close(jax.jit(gradients(part, axes))(*inputs), jax.jit(gradients(attend, axes))(*inputs))
    compare(mapped(split_attend), mapped(attend), (WHOLE,) * 3, WHOLE, arrays[:3])
    if backend.startswith("flex"):
        compare(moved(split_attend), moved(attend), (WHOLE,) * 6, (WHOLE,) * 2, (*arrays, query, key)[:6])

    explicit = mesh_of("Explicit", x=4)
    for function, operands in ((gradients(attend, (0, 0, 0)), arrays), (mapped(attend), arrays[:3])):
        expected = jax.jit(function)(*operands)
        with jax.set_mesh(explicit):
            assert_close(jax.jit(function)(*put(operands, explicit, *WHOLE)), expected)
