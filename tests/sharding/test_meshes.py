"""Operators and modules while a device mesh is set, on arrays that are not sharded over it."""

from __future__ import annotations

import functools
import subprocess

import jax
import jax.numpy as jnp
import pytest

from natten_jax.arrays.operands import types_like
from tests.support.families import Family
from tests.support.programs import run_python

PREAMBLE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import natten_jax
from tests.support.problems import QUICK_COMPILATION, Case

family, dtype = sys.argv[1:3]

def quick(function):
    return jax.jit(function, compiler_options=QUICK_COMPILATION)

def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (one, other)), rtol=1e-2, atol=1e-2)

CASES = [
    Case((12,), (5,), stride=(2,), batch=4, heads=2, heads_kv=1, additional=3, fused=True),
    Case((5, 6), (3, 4), is_causal=(True, False), batch=4),
    Case((3, 4, 5), (2, 3, 3), batch=4),
    Case((9,), queries=12, batch=4),
]

if family == "flex":  # slow to compile, and no kernels
    CASES = CASES[::2]

def backend_of(case):
    return f"{family}-{'fna' if case.queries is None else 'fmha'}"

def both(case):
    def run(operands, cotangents):
        outputs, pullback = jax.vjp(case.operator(backend_of(case)), operands)
        return outputs, pullback(cotangents)[0]
    return run
"""

OPERATORS = """
expected = [quick(both(case))(case.operands(dtype, 0), case.cotangents(dtype, 0)) for case in CASES]
outside = [(case.operands(dtype, 0), case.cotangents(dtype, 0)) for case in CASES]

def check(mesh):
    jax.clear_caches()
    with jax.set_mesh(mesh):
        for case, given, results in zip(CASES, outside, expected, strict=True):
            inside = case.operands(dtype, 0), case.cotangents(dtype, 0)
            placed = jax.device_put(inside, NamedSharding(mesh, P()))
            function = quick(both(case))
            for arrays in (given, inside, placed):
                assert_close(function(*arrays), results)
            if case is CASES[0]:
                stacked = jax.tree.map(lambda a: jnp.stack([a, a]), inside)
                assert_close(jax.tree.map(lambda a: a[1], quick(jax.vmap(both(case)))(*stacked)), results)
        outputs, lse = case.operator(backend_of(case))(inside[0])
        assert_close(natten_jax.merge_attentions([outputs, outputs], [lse, lse])[0], results[0][0])
"""

SHARD_MAP = """
def check(mesh):
    with jax.set_mesh(mesh):
        for case in CASES[:1]:
            operands, cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)
            expected = quick(both(case))(operands, cotangents)
            spec = P("d")
            placed = jax.device_put((operands, cotangents), NamedSharding(mesh, spec))

            def local(operands, cotangents):
                outputs, gradients = both(case)(operands, cotangents)
                for array in jax.tree.leaves((outputs, gradients)):
                    assert jax.typeof(array).manual_axis_type.varying == {"d"}, jax.typeof(array)
                return outputs, gradients

            sharded = jax.shard_map(local, in_specs=spec, out_specs=spec)
            assert_close(quick(sharded)(*placed), expected)
"""

MODULES = """
from flax import linen as flax_linen, nnx as flax_nnx
from natten_jax.flax_modules import linen, nnx

def results(inputs):
    kind = {"backend": f"{family}-fna", "kernel_size": 3}
    of_nnx = nnx.NeighborhoodAttention2D(16, num_heads=2, **kind, rngs=flax_nnx.Rngs(0))
    value, gradient = flax_nnx.value_and_grad(lambda module, x: jnp.sum(module(x) ** 2))(of_nnx, inputs)
    of_linen = linen.NeighborhoodAttention2D(num_heads=2, **kind)
    variables = of_linen.init(jax.random.key(0), inputs)
    loss = lambda variables: jnp.sum(of_linen.apply(variables, inputs) ** 2)
    return value, jax.tree.leaves(gradient), jax.value_and_grad(loss)(variables)

expected = results(jnp.ones((2, 5, 6, 16)))

def check(mesh):
    with jax.set_mesh(mesh):
        assert_close(results(jnp.ones((2, 5, 6, 16))), expected)
"""


WITH_EACH_MESH = """
for axis_type in ("Auto", "Explicit"):
    check(jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(getattr(AxisType, axis_type),)))
    print("done with", axis_type, flush=True)
"""


@functools.cache
def finished(program: str, family: str, dtype: str, devices: int) -> subprocess.CompletedProcess[str]:
    """A process that has tried both kinds of axes, or failed."""
    return run_python(PREAMBLE + program + WITH_EACH_MESH, family, dtype, devices=devices)


def run(program: str, family: Family, axis_type: str, devices: int) -> None:
    if family.needs_gpu:
        pytest.skip("the devices of this test are parts of the host")
    found = finished(program, family.name, family.dtype, devices)
    assert f"done with {axis_type}\n" in found.stdout, found.stderr


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_operators_on_unsharded_arrays(family: Family, axis_type: str) -> None:
    run(OPERATORS, family, axis_type, 1)  # on several devices: test_sharding


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_results_vary_over_manual_axes(family: Family, axis_type: str) -> None:
    run(SHARD_MAP, family, axis_type, 4)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_modules_on_unsharded_arrays(family: Family, axis_type: str) -> None:
    pytest.importorskip("flax")
    run(MODULES, family, axis_type, 1)


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 3, 2, 5), (4, 3)])
def test_types_of_results_have_shardings_of_their_own_length(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer releases of JAX refuse a sharding that is longer than the shape; older ones cut it."""
    core = pytest.importorskip("jax._src.core")
    if not hasattr(core, "_make_lengths_same"):
        pytest.skip("this release refuses it itself")

    def refused(sharding: jax.sharding.NamedSharding, ndim: int) -> jax.sharding.NamedSharding:
        raise ValueError(f"Length of sharding.spec ({len(sharding.spec)}) must be equal to aval's ndim ({ndim})")

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        array = jnp.ones((2, 3, 4))
        monkeypatch.setattr(core, "_make_lengths_same", refused)
        (found,) = types_like(array, (shape, "bfloat16"))
    assert (found.shape, found.dtype) == (shape, jnp.bfloat16)
    assert found.sharding.spec == jax.sharding.PartitionSpec(*(None,) * len(shape))
    assert found.sharding.mesh == mesh.abstract_mesh
