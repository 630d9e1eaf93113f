"""Operators and modules on unsharded arrays while a device mesh is set, and operators inside ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import natten_jax
from tests.support import meshes
from tests.support.families import Family
from tests.support.meshes import mesh_of, put
from tests.support.problems import Case, both_passes, quick

CASES = [
    Case((12,), (5,), stride=(2,), batch=4, heads=2, heads_kv=1, additional=3, fused=True),
    Case((5, 6), (3, 4), is_causal=(True, False), batch=4),
    Case((3, 4, 5), (2, 3, 3), batch=4),
    Case((9,), queries=12, batch=4),
]
on_each_mesh = pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])


def assert_close(found: Any, expected: Any) -> None:
    found, expected = jax.tree.map(lambda array: np.asarray(array, np.float32), (found, expected))
    meshes.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def operator_of(case: Case, family: Family) -> Callable[..., Any]:
    return case.operator(family.fna if case.queries is None else family.fmha)


def both(case: Case, family: Family) -> Callable[..., Any]:
    return both_passes(operator_of(case, family))


@on_each_mesh
def test_operators_on_unsharded_arrays(family: Family, axis_type: str) -> None:
    """Test meshes of one device. Meshes of several devices are tested in test_sharding."""
    mesh, dtype = mesh_of(axis_type, d=1), family.dtype
    cases = CASES if family.target else CASES[::2]  # plain JAX is slow to compile
    given = [(case.operands(dtype, 0), case.cotangents(dtype, 0)) for case in cases]
    expected = [quick(both(case, family))(*arrays) for case, arrays in zip(cases, given, strict=True)]
    jax.clear_caches()
    with jax.set_mesh(mesh):
        for case, outside, results in zip(cases, given, expected, strict=True):
            inside = case.operands(dtype, 0), case.cotangents(dtype, 0)
            function = quick(both(case, family))
            for arrays in (outside, inside, put(inside, mesh)):
                assert_close(function(*arrays), results)
        case, (operands, cotangents), results = cases[0], given[0], expected[0]
        stacked = jax.tree.map(lambda array: jnp.stack([array, array]), (operands, cotangents))
        mapped = quick(jax.vmap(both(case, family)))(*stacked)
        assert_close(jax.tree.map(lambda array: array[1], mapped), results)
        outputs, lse = operator_of(case, family)(operands)
        assert_close(natten_jax.merge_attentions([outputs, outputs], [lse, lse])[0], results[0][0])


@on_each_mesh
def test_results_vary_over_manual_axes(family: Family, axis_type: str) -> None:
    mesh, case = mesh_of(axis_type, d=4 if jax.device_count() >= 4 else 1), CASES[0]
    arrays = case.operands(family.dtype, 0), case.cotangents(family.dtype, 0)

    def local(operands: Any, cotangents: Any) -> Any:
        results = both(case, family)(operands, cotangents)
        for array in jax.tree.leaves(results):
            assert jax.typeof(array).manual_axis_type.varying == {"d"}, jax.typeof(array)
        return results

    with jax.set_mesh(mesh):
        expected = quick(both(case, family))(*arrays)
        sharded = jax.shard_map(local, in_specs=P("d"), out_specs=P("d"))
        assert_close(quick(sharded)(*put(arrays, mesh, "d")), expected)


@on_each_mesh
def test_modules_on_unsharded_arrays(family: Family, axis_type: str) -> None:
    flax_nnx = pytest.importorskip("flax.nnx")
    from natten_jax.flax_modules import linen, nnx

    def results() -> Any:
        inputs = jnp.ones((2, 5, 6, 16), family.dtype)
        options: dict[str, Any] = {"num_heads": 2, "kernel_size": 3, "dtype": family.dtype, "backend": family.fna}
        nnx_module = nnx.NeighborhoodAttention2D(16, rngs=flax_nnx.Rngs(0), **options)
        value, gradient = flax_nnx.value_and_grad(lambda module, x: jnp.sum(module(x) ** 2))(nnx_module, inputs)
        linen_module = linen.NeighborhoodAttention2D(**options)
        variables = linen_module.init(jax.random.key(0), inputs)
        loss = jax.value_and_grad(lambda variables: jnp.sum(linen_module.apply(variables, inputs) ** 2))
        return value, jax.tree.leaves(gradient), loss(variables)

    expected = results()
    with jax.set_mesh(mesh_of(axis_type, d=1)):
        assert_close(results(), expected)
