"""On meshes of several devices, values and gradients for every operand equal the results on a single device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.meshes import assert_close, mesh_of, put
from tests.support.operand_calls import CALLS
from tests.support.problems import quick

SPLITS: tuple[dict[str, str], ...] = ({"b": "x", "h": "y"}, {"h": "x", "t": "z"})
_PLAIN_JAX_CASES = "weights", "weights, wrap", "mixed values", "merged"
_BACKEND_CASES = (
    "relative bias of clamped windows",
    "extents, every term",
    "origins of entries, every term",
    "additional, every term",
    "upsample",
    "upsample, key bias of heads",
    "attention, lengths",
    "fp8, extents",
    "attention, fp8",
)


def axes_of(operand: Any, array: jax.Array, split: dict[str, str]) -> list[str | None]:
    """Return the mesh axis of each dimension of an operand. Odd extents are not sharded, and no axis occurs twice."""
    axes: list[str | None] = []
    for letter, extent in zip(operand.axes, array.shape, strict=True):
        axis = split.get(letter)
        axes.append(None if axis in axes or extent % 2 else axis)
    return axes


def arrays_of(call: Any) -> dict[str, jax.Array]:
    return {each: jnp.asarray(array) for each, array in call.arrays("float32").items()}


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("flex", name) for name in (*_PLAIN_JAX_CASES, "additional, every term")),
        *(("cpu", name) for name in _BACKEND_CASES),
    ],
)
def test_split_operands(kind: str, backend: str, name: str) -> None:
    mesh, call = mesh_of(kind, x=2, y=2, z=2), CALLS[name]
    arrays, function = arrays_of(call), quick(call.value_and_gradients(backend))
    expected = function(arrays)
    with jax.set_mesh(mesh):
        for split in SPLITS:
            placed = {
                each: put(array, mesh, *axes_of(call.operands[each], array, split)) for each, array in arrays.items()
            }
            compiled = function.lower(placed).compile()
            assert_close(compiled(placed), expected, rtol=2e-4, note=str(split))
            if kind == "Auto" and "t" not in split:
                assert " all-gather(" not in (compiled.as_text() or ""), split


@pytest.mark.parametrize(
    "name",
    [
        "origin",
        "extents",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention, lengths", "additional, every term")),
    ],
)
def test_vmap_and_shard_map_on_explicit_meshes(name: str) -> None:
    """Test mapped axes that are sharded over the mesh, and gradients inside ``shard_map``."""
    mesh, call = mesh_of("Explicit", x=2, y=2), CALLS[name]
    split = {"b": "x", "h": "y"}

    def spec(each: str, *axes: str) -> P:
        return P(*(split[letter] if split.get(letter) in axes else None for letter in call.operands[each].axes))

    arrays, function = arrays_of(call), call.value_and_gradients("cpu")
    expected = quick(function)(arrays)
    twice = jax.tree.map(lambda array: np.stack([array, array]), expected)
    with jax.set_mesh(mesh):
        whole = {each: put(array, mesh, *spec(each, "y")) for each, array in arrays.items()}
        stacked = {each: put(np.stack([array, array]), mesh, "x", *spec(each, "y")) for each, array in arrays.items()}
        for mapped in [*([each] for each in arrays), list(arrays)]:  # the axis that vmap maps is sharded over x
            run = jax.vmap(function, ({each: 0 if each in mapped else None for each in arrays},))
            given = {each: (stacked if each in mapped else whole)[each] for each in arrays}
            assert_close(quick(run)(given), twice, rtol=2e-4, note=str(mapped))

        def local(arrays: Any) -> Any:
            value, gradients = function(arrays)
            return jax.lax.psum(value, "x"), gradients

        in_specs = {each: spec(each, "x") for each in arrays}
        floats = {each: in_specs[each] for each in expected[1]}
        inside = jax.shard_map(local, in_specs=(in_specs,), out_specs=(P(), floats), axis_names={"x"})
        given = {each: put(array, mesh, *spec(each, "x", "y")) for each, array in arrays.items()}
        assert_close(quick(inside)(given), expected, rtol=2e-4, note="gradients inside shard_map")
