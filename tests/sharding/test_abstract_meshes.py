"""Lower and export programs over an ``AbstractMesh`` without devices, and transform ``shard_map`` functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import natten_jax
from natten_jax import na2d
from tests.support.meshes import assert_close, put

Function = Callable[..., Any]
A, E = AxisType.Auto, AxisType.Explicit
GRID, TOKENS = P("x", None, None, "y"), P(None, "x", None, "y")
SHAPE = (8, 8, 6, 4, 8)
FLEX = pytest.param("flex-fna", marks=pytest.mark.slow)
every_backend = pytest.mark.parametrize("backend", ["cpu-fna", FLEX, None])
compare = functools.partial(assert_close, atol=3e-5)


def drawn() -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(SHAPE), "float32") for _ in range(3)]


def operator(backend: str | None, **options: Any) -> Function:
    return functools.partial(na2d, kernel_size=(3, 4), backend=backend, **options)


def with_gradients(function: Function) -> Function:
    def run(*operands: Any) -> Any:
        out, pullback = jax.vjp(function, *operands)
        return out, pullback(jnp.cos(out))

    return run


def mapped(function: Function) -> Function:
    return lambda *operands: jax.vmap(function)(*(jnp.stack([each, 2 * each]) for each in operands))


def meshes(*types: AxisType) -> tuple[AbstractMesh, jax.sharding.Mesh]:
    return AbstractMesh((4, 2), ("x", "y"), axis_types=types), jax.make_mesh((4, 2), ("x", "y"), axis_types=types)


def abstract_arrays(mesh: Any, spec: P) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, spec))] * 3


def manual(function: Function, mesh: Any, spec: P, axes: str, results: Function | None = None) -> Function:
    """Wrap ``results(function)`` in ``shard_map``, or ``function`` itself if ``results`` is ``None``."""
    spec = P(*(axis if axis in tuple(axes) else None for axis in spec))
    out: Any = {None: spec, with_gradients: (spec, (spec,) * 3), mapped: P(None, *spec)}[results]
    inside = function if results is None else results(function)
    return jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=out, axis_names=set(axes))


def export_for(function: Function, mesh: AbstractMesh, spec: P, platform: str) -> export.Exported:
    with jax.sharding.use_abstract_mesh(mesh):
        exporting = export.export(jax.jit(function), platforms=[platform], disabled_checks=natten_jax.EXPORT_CHECKS)
        return exporting(*abstract_arrays(mesh, spec))


@every_backend
def test_lowered_over_an_abstract_mesh(backend: str | None) -> None:
    """Lower each program without devices, compile it for the CPU devices, and compare with a single device."""
    arrays, attend = drawn(), operator(backend)
    expected = {function: jax.jit(function(attend))(*arrays) for function in (with_gradients, mapped)}

    def check(function: Function, spec: P, types: tuple[AxisType, AxisType], results: Function) -> None:
        abstract, mesh = meshes(*types)
        with jax.sharding.use_abstract_mesh(abstract):
            traced = jax.jit(function).trace(*abstract_arrays(abstract, spec))
            if backend != "cpu-fna":  # lowering for GPUs needs no GPU
                traced.lower(lowering_platforms=("cuda",))
            program = traced.lower(lowering_platforms=("cpu",)).compile(device_assignment=tuple(jax.devices()))
        compare(program(*put(arrays, mesh, *spec)), expected[results])

    for types in ((A, A), (E, E), (E, A)):
        check(with_gradients(attend), GRID, types, with_gradients)
        check(with_gradients(attend), TOKENS, types, with_gradients)
        check(mapped(attend), GRID, types, mapped)
    for types, axes in (((A, A), "xy"), ((A, A), "x"), ((E, E), "xy"), ((E, E), "x"), ((A, E), "x"), ((E, A), "x")):
        for results in (with_gradients, mapped):
            check(manual(attend, meshes(*types)[0], GRID, axes, results), GRID, types, results)
    halos = operator(backend, token_axes=("x", None))
    for axes in "xy", "x":
        inside = manual(halos, meshes(A, A)[0], TOKENS, axes, with_gradients)
        check(inside, TOKENS, (A, A), with_gradients)


@every_backend
def test_exported_over_an_abstract_mesh_with_the_gradient(backend: str | None) -> None:
    """Export each program and its gradient without devices, and call both on the CPU devices."""
    arrays, attend = drawn(), operator(backend)
    expected = jax.jit(with_gradients(attend))(*arrays)

    def check(function: Function, spec: P, types: tuple[AxisType, AxisType]) -> None:
        abstract, mesh = meshes(*types)
        if backend != "cpu-fna":
            assert export_for(function, abstract, spec, "cuda").nr_devices == 8
        again = export.deserialize(export_for(function, abstract, spec, "cpu").serialize(vjp_order=1))
        placed = put(arrays, mesh, *spec)
        with jax.set_mesh(mesh):
            compare(jax.jit(again.call)(*placed), expected[0])
            compare(with_gradients(again.call)(*placed), expected)  # JAX does not differentiate exports inside jit

    for spec in GRID, TOKENS:
        check(attend, spec, (E, E))
    automatic, explicit = meshes(A, A)[0], meshes(E, E)[0]
    check(manual(attend, explicit, GRID, "x"), GRID, (E, E))
    check(manual(attend, automatic, GRID, "xy"), GRID, (A, A))
    check(manual(operator(backend, token_axes=("x", None)), automatic, TOKENS, "xy"), TOKENS, (A, A))
    for types, function in (((A, A), attend), ((E, A), attend), ((A, A), manual(attend, automatic, GRID, "x"))):
        if backend == "flex-fna":
            check(function, GRID, types)
            continue
        with pytest.raises(NotImplementedError, match=r"(?s)^(?=.*jax\.shard_map)(?=.*Explicit)"):
            export_for(function, meshes(*types)[0], GRID, "cpu")


def loss(function: Function) -> Function:
    return lambda *operands: jnp.sum(jnp.sin(function(*operands)))


def gradient(function: Function) -> Function:
    return jax.grad(loss(function), (0, 1, 2))


def scanned(function: Function) -> Function:
    def run(query: Any, key: Any, value: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry + function(carry, key, value), None), query, None, length=2)[0]

    return run


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": gradient,
    "vmap of grad": lambda f: mapped(gradient(f)),
    "grad of vmap": lambda f: gradient(mapped(f)),
    "grad of scan of checkpoint": lambda f: gradient(scanned(jax.checkpoint(f))),
    "cond": lambda f: lambda *a: jax.lax.cond(jnp.sum(a[0]) < 1e9, f, lambda query, *_: query, *a),
}
JVP = {"jvp of grad": lambda f: lambda *a: jax.jvp(gradient(f), a, a)[1]}


@pytest.mark.parametrize("backend", ["cpu-fna", FLEX])
def test_transformed_around_shard_map_on_explicit_meshes(backend: str) -> None:
    arrays, attend = drawn(), operator(backend)
    every = JVP if backend == "flex-fna" else TRANSFORMS
    for types, axes, names in (
        *(((E, E), "xy", every), ((E, E), "x", ("grad",))),
        *(((A, E), "x", ("grad", "vmap of grad")), ((E, A), "x", ("grad", "vmap of grad"))),
    ):
        _, mesh = meshes(*types)
        with jax.set_mesh(mesh):
            function = manual(attend, mesh, GRID, axes)
            for name in names:
                transform = (TRANSFORMS | JVP)[name]
                found = jax.jit(transform(function))(*put(arrays, mesh, *GRID))
                assert_close(found, jax.jit(transform(attend))(*map(np.asarray, arrays)), atol=3e-5, note=name)
