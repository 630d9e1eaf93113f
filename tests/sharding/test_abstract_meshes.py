"""Programs over an ``AbstractMesh``, lowered and exported without devices; and transformations around ``shard_map``."""

from __future__ import annotations

import pytest

from tests.support.programs import output_of, run_python

PREAMBLE = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
import natten_jax
from natten_jax import attention, na2d

A, E = AxisType.Auto, AxisType.Explicit
checks = natten_jax.EXPORT_CHECKS
backend = None if sys.argv[1] == "default" else sys.argv[1]
generator = np.random.default_rng(0)
arrays = [jnp.asarray(generator.standard_normal((8, 8, 6, 4, 8)), "float32") for _ in range(3)]
grid, tokens = P("x", None, None, "y"), P(None, "x", None, "y")

def attend(query, key, value, **options):
    return na2d(query, key, value, kernel_size=(3, 4), backend=backend, **options)

def with_gradients(function):
    def run(*operands):
        out, pullback = jax.vjp(function, *operands)
        return out, pullback(jnp.cos(out))
    return run

def mapped(function):
    return lambda *operands: jax.vmap(function)(*(jnp.stack([each, 2 * each]) for each in operands))

def close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=3e-5)

def meshes(*types):
    return AbstractMesh((4, 2), ("x", "y"), axis_types=types), jax.make_mesh((4, 2), ("x", "y"), axis_types=types)

def stand_ins(mesh, spec):
    return [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec)) for each in arrays]

def placed(mesh, spec):
    return [jax.device_put(each, NamedSharding(mesh, spec)) for each in arrays]

def manual(function, mesh, spec, axes, results):
    spec = P(*(axis if axis in tuple(axes) else None for axis in spec))
    out = {"out": spec, "gradients": (spec, (spec,) * 3), "mapped": P(None, *spec)}[results]
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, axis_names=set(axes))

def lower(function, operands, mesh):
    # Lower for absent GPUs too, unless the backend has no kernels for them.
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*operands)
        if backend != "cpu-fna":
            traced.lower(lowering_platforms=("cuda",))
        return traced.lower(lowering_platforms=("cpu",)).compile(device_assignment=tuple(jax.devices()))

def export_for(function, operands, mesh, platform):
    with jax.sharding.use_abstract_mesh(mesh):
        return export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*operands)

def refused(run):
    try:
        run()
    except NotImplementedError as error:
        assert "jax.shard_map" in str(error) and "Explicit" in str(error), error
    else:
        raise AssertionError("exported")
"""

#: Each program is lowered without devices, compiled for the host's, and compared with one device's.
LOWERED = """
expected = {"gradients": jax.jit(with_gradients(attend))(*arrays), "mapped": jax.jit(mapped(attend))(*arrays)}
for types in ((A, A), (E, E), (E, A)):
    abstract, mesh = meshes(*types)
    for spec in grid, tokens:
        operands = stand_ins(abstract, spec)
        for name, function in (("gradients", with_gradients(attend)), ("mapped", mapped(attend))):
            if name == "mapped" and spec is tokens:
                continue
            program = lower(function, operands, abstract)
            close(program(*placed(mesh, spec)), expected[name])
for types, axes in (((A, A), "xy"), ((A, A), "x"), ((E, E), "xy"), ((E, E), "x"), ((A, E), "x"), ((E, A), "x")):
    abstract, mesh = meshes(*types)
    operands = stand_ins(abstract, grid)
    for name, function in (("gradients", with_gradients(attend)), ("mapped", mapped(attend))):
        inside = manual(function, abstract, grid, axes, name)
        program = lower(inside, operands, abstract)
        close(program(*placed(mesh, grid)), expected[name])
abstract, mesh = meshes(A, A)
for axes in "xy", "x":
    halos = functools.partial(attend, token_axes=("x", None))
    inside = manual(with_gradients(halos), abstract, tokens, axes, "gradients")
    operands = stand_ins(abstract, tokens)
    program = lower(inside, operands, abstract)
    close(program(*placed(mesh, tokens)), expected["gradients"])
print("done")
"""

#: Each program is exported without devices, with its gradient, and called on the host's devices.
EXPORTED = """
expected = jax.jit(with_gradients(attend))(*arrays)

def check(function, spec, abstract, mesh):
    operands = stand_ins(abstract, spec)
    if backend != "cpu-fna":
        assert export_for(function, operands, abstract, "cuda").nr_devices == 8
    again = export.deserialize(export_for(function, operands, abstract, "cpu").serialize(vjp_order=1))
    with jax.set_mesh(mesh):
        close(jax.jit(again.call)(*placed(mesh, spec)), expected[0])
        close(with_gradients(again.call)(*placed(mesh, spec)), expected)  # JAX has no gradient of it inside jax.jit

kernels = backend != "flex-fna"
abstract, mesh = meshes(E, E)
for spec in grid, tokens:
    check(attend, spec, abstract, mesh)
check(manual(attend, abstract, grid, "x", "out"), grid, abstract, mesh)
abstract, mesh = meshes(A, A)
check(manual(attend, abstract, grid, "xy", "out"), grid, abstract, mesh)
halos = functools.partial(attend, token_axes=("x", None))
check(manual(halos, abstract, tokens, "xy", "out"), tokens, abstract, mesh)
for types, function in (((A, A), attend), ((E, A), attend), ((A, A), manual(attend, abstract, grid, "x", "out"))):
    abstract, mesh = meshes(*types)
    if kernels:
        refused(lambda: export_for(function, stand_ins(abstract, grid), abstract, "cpu"))
    else:
        check(function, grid, abstract, mesh)
print("done")
"""

TRANSFORMED = """
def loss(function):
    return lambda *operands: jnp.sum(jnp.sin(function(*operands)))

def scanned(function):
    def run(query, key, value):
        return jax.lax.scan(lambda carry, _: (carry + function(carry, key, value), None), query, None, length=2)[0]
    return run

every = 0, 1, 2
transforms = {
    "grad": lambda f: jax.grad(loss(f), every),
    "grad of jit": lambda f: jax.grad(loss(jax.jit(f)), every),
    "grad of vmap": lambda f: jax.grad(loss(mapped(f)), every),
    "vmap of grad": lambda f: mapped(jax.grad(loss(f), every)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), every),
    "scan": scanned,
    "grad of scan": lambda f: jax.grad(loss(scanned(f)), every),
    "grad of scan of checkpoint": lambda f: jax.grad(loss(scanned(jax.checkpoint(f))), every),
    "cond": lambda f: lambda *a: jax.lax.cond(jnp.sum(a[0]) < 1e9, f, lambda query, *_: query, *a),
    "jvp of grad": lambda f: lambda *a: jax.jvp(jax.grad(loss(f), every), a, a)[1],
}
few = "grad", "grad of scan", "vmap of grad"
for types, axes in (((E, E), "xy"), ((E, E), "x"), ((A, E), "x"), ((E, A), "x")):
    _, mesh = meshes(*types)
    with jax.set_mesh(mesh):
        function = manual(attend, mesh, grid, axes, "out")
        for name, transform in transforms.items():
            if name == "jvp of grad" and backend != "flex-fna" or (name not in few and types != (E, E)):
                continue
            if backend == "flex-fna" and name not in (*few, "jvp of grad"):
                continue
            found = jax.jit(transform(function))(*placed(mesh, grid))
            close(found, jax.jit(transform(attend))(*map(np.asarray, arrays)))
print("done")
"""

BACKENDS = ["cpu-fna", "flex-fna", "default"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_lowered_over_an_abstract_mesh(backend: str) -> None:
    assert output_of(run_python(PREAMBLE + LOWERED, backend, devices=8)).endswith("done\n")


@pytest.mark.parametrize("backend", BACKENDS)
def test_exported_over_an_abstract_mesh_with_the_gradient(backend: str) -> None:
    assert output_of(run_python(PREAMBLE + EXPORTED, backend, devices=8)).endswith("done\n")


@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
def test_transformed_around_shard_map_on_explicit_meshes(backend: str) -> None:
    assert output_of(run_python(PREAMBLE + TRANSFORMED, backend, devices=8)).endswith("done\n")
