"""Private JAX APIs behave as this package expects, and only one module of the package uses them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from natten_jax.sharding import _jax_internals
from natten_jax.sharding.auto import device_tiles, sharding_like
from tests.support.meshes import mesh_of

ROOT = Path(__file__).parents[2]


def asked_while_lowering(question: Any) -> tuple[Primitive, list[Any]]:
    """Return an identity primitive and a list. Each lowering of the primitive appends ``question(ctx)`` to the list."""
    primitive, answers = Primitive("asks"), []
    primitive.def_abstract_eval(lambda x: x)

    def lower(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
        answers.append(question(ctx))
        return [x]

    mlir.register_lowering(primitive, lower)
    return primitive, answers


def test_platforms_and_exports_are_available_during_lowering() -> None:
    primitive, answers = asked_while_lowering(
        lambda ctx: (sorted(_jax_internals.platforms_of(ctx)), _jax_internals.is_exported(ctx))
    )
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    jax.jit(primitive.bind).lower(x)
    jax.export.export(jax.jit(lambda x: primitive.bind(x) + 1), platforms=["tpu", "cuda"])(x)
    assert answers[0] == (["cpu"], False) and answers[-1] == (["cuda", "tpu"], True)


def test_the_primitive_of_checkpoint_name_is_known() -> None:
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "a name"))(1.0).eqns
    assert equation.primitive is _jax_internals.CHECKPOINT_NAME


def test_devices_are_numbered_by_their_place_along_manual_axes() -> None:
    primitive, answers = asked_while_lowering(lambda ctx: np.asarray(_jax_internals.device_numbers(ctx)).tolist())
    mesh = mesh_of("Auto", a=2, b=2)
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    jax.jit(primitive.bind).lower(x)
    jax.jit(lambda x: primitive.bind(x) + 1, in_shardings=NamedSharding(mesh, P("a", "b"))).lower(x)
    for manual in "a", "b":
        inside = jax.shard_map(
            primitive.bind, mesh=mesh, axis_names={manual}, in_specs=P(manual), out_specs=P(manual), check_vma=False
        )
        jax.jit(inside).lower(x)
    assert answers == [[[0]], [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]


@pytest.mark.usefixtures("without_stored_programs")
def test_the_partitioners_callback_and_its_shardings_under_another_name() -> None:
    asked = []

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        (argument,) = arguments
        hlo = _jax_internals.hlo_sharding_of(argument.sharding, 2)
        tiles = device_tiles(hlo, 2, 4)
        asked.append((list(_jax_internals.devices_of(argument.sharding)), tiles.reshape(2, 2).tolist()))
        again = _jax_internals.sharding_of(sharding_like(hlo, tiles), argument.sharding)
        assert type(again) is type(argument.sharding)
        return AbstractMesh((4,), ("d",)), lambda x: x + 1, again, (again,)

    add = custom_partitioning(lambda x: x)
    add.def_partition(partition=partition, sharding_rule="i j -> i j", decode_shardings=False)
    primitive = Primitive("named")
    primitive.def_abstract_eval(lambda x: x)

    def lower(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
        results = mlir.lower_fun(add, multiple_results=False)(_jax_internals.with_numbered_devices(ctx, 4), x)
        (result,) = jax.tree.leaves(results)
        _jax_internals.name_partitioner_callback(result.owner, "a name of ours")
        return results

    mlir.register_lowering(primitive, lower)
    mesh = mesh_of("Auto", a=2, b=2)
    x = jax.device_put(jnp.zeros((4, 4)), NamedSharding(mesh, P("a", "b")))
    lowered = jax.jit(primitive.bind).lower(x)
    assert "a name of ours" in lowered.as_text()
    assert lowered.compile()(x).sum() == 16
    assert asked == [([0, 1, 2, 3], [[0, 1], [2, 3]])]


@pytest.mark.parametrize("ndim", [1, 3])
def test_an_array_that_is_not_split_has_an_hlo_sharding(ndim: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    hlo = _jax_internals.hlo_sharding_of(sharding, ndim)
    np.testing.assert_array_equal(device_tiles(hlo, ndim, 1), np.zeros((1,) * (ndim + 2)))
    assert list(_jax_internals.devices_of(sharding)) == jax.devices()[:1]


def test_no_other_module_uses_undocumented_jax() -> None:
    attributes = "_sharding_callbacks", "_device_assignment", "_to_xla_hlo_sharding", "axis_context", "for_export"
    found = []
    for path in [*(ROOT / "natten_jax").rglob("*.py"), *(ROOT / "flax_modules").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            uses = any(name.startswith(("jax._src", "jaxlib.")) for name in modules)
            if uses or (isinstance(node, ast.Attribute) and node.attr in attributes):
                found.append(path.name)
    assert set(found) == {"_jax_internals.py"}
