"""Values and gradients of every operand on meshes of several devices equal the results on one device."""

from __future__ import annotations

import pytest

from tests.support.programs import output_of, run_python

_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.support.operand_calls import CALLS
from tests.support.problems import QUICK_COMPILATION

kind, family, *names = AxisType[sys.argv[1]], *sys.argv[2:]
mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(kind,) * 3)
SPLITS = {"b": "x", "h": "y"}, {"h": "x", "t": "z"}

def placed(operand, array, split):
    axes, used = [], set()
    for letter, extent in zip(operand.axes, array.shape, strict=True):
        axis = split.get(letter)
        axis = None if axis in used or extent % 2 else axis
        used.add(axis)
        axes.append(axis)
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))

for name in names:
    call = CALLS[name]
    arrays = {each: jnp.asarray(array) for each, array in call.arrays("float32").items()}
    function = jax.jit(call.value_and_gradients(family), compiler_options=QUICK_COMPILATION)
    expected = jax.tree.leaves(function(arrays))
    with jax.set_mesh(mesh):
        for split in SPLITS:
            found = function({each: placed(call.operands[each], array, split) for each, array in arrays.items()})
            for one, other in zip(jax.tree.leaves(found), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)
print("right")
"""
_OF_PLAIN_JAX = "weights", "weights, wrap", "mixed values", "merged"
_OF_BACKENDS = (
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


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize(("backends", "names"), [("flex", _OF_PLAIN_JAX), ("cpu", _OF_BACKENDS)])
def test_split_operands(kind: str, backends: str, names: tuple[str, ...]) -> None:
    printed = output_of(run_python(_PROGRAM, kind, backends, *names, devices=8))
    assert printed.splitlines()[-1] == "right"


_NESTED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from natten_jax import neighborhood_apply, neighborhood_weights

mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
query = jax.random.normal(jax.random.key(0), (4, 9, 2, 8))
table = jax.random.normal(jax.random.key(1), (2, 5))

def weights(query, table):
    return neighborhood_weights(query, 2 * query, 3, relative_bias=table)

def applied(query, table):
    return neighborhood_apply(query[..., :3], query, 3)

def gradients(function):
    return jax.grad(lambda *arrays: jnp.sum(jnp.cos(function(*arrays))), (0, 1))

for function in weights, applied:
    expected = gradients(function)(query, table)
    with jax.set_mesh(mesh):
        split = jax.shard_map(function, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
        placed = [jax.device_put(query, NamedSharding(mesh, P("x", None, "y")))]
        placed.append(jax.device_put(table, NamedSharding(mesh, P("y"))))
        found = jax.jit(gradients(split))(*placed)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
print("right")
"""


def test_gradients_of_weights_inside_shard_map_over_some_axes() -> None:
    assert output_of(run_python(_NESTED, devices=4)).splitlines()[-1] == "right"


_SHARDED_MAPS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.support.operand_calls import CALLS, total
from tests.support.problems import QUICK_COMPILATION

family, *names = sys.argv[1:]
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
split = {"b": "x", "h": "y"}

def spec(operand, *axes):
    return P(*(split[letter] if split.get(letter) in axes else None for letter in operand.axes))

def compare(found, expected, note):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=note)

for name in names:
    call = CALLS[name]
    arrays = {each: jnp.asarray(array) for each, array in call.arrays("float32").items()}
    function = call.value_and_gradients(family)
    expected = jax.jit(function, compiler_options=QUICK_COMPILATION)(arrays)
    twice = jax.tree.map(lambda array: np.stack([array, array]), expected)
    with jax.set_mesh(mesh):
        def placed(each, array, *axes):
            return jax.device_put(array, NamedSharding(mesh, spec(call.operands[each], *axes)))

        whole = {each: placed(each, array, "y") for each, array in arrays.items()}
        stacked = {
            each: jax.device_put(np.stack([array, array]), NamedSharding(mesh, P("x", *spec(call.operands[each], "y"))))
            for each, array in arrays.items()
        }
        for mapped in [*([each] for each in arrays), list(arrays)]:  # the mesh splits the mapped axis
            run = jax.vmap(function, ({each: 0 if each in mapped else None for each in arrays},))
            given = {each: (stacked if each in mapped else whole)[each] for each in arrays}
            compare(jax.jit(run, compiler_options=QUICK_COMPILATION)(given), twice, f"{name} {mapped}")

        def local(arrays):
            value, gradients = function(arrays)
            return jax.lax.psum(value, "x"), gradients

        in_specs = {each: spec(operand, "x") for each, operand in call.operands.items()}
        floats = {each: in_specs[each] for each in expected[1]}
        inside = jax.shard_map(local, in_specs=(in_specs,), out_specs=(P(), floats), axis_names={"x"})
        results = jax.eval_shape(call.run(family), arrays)
        out_specs = jax.tree.map(lambda _: P("x"), results)
        run = jax.shard_map(call.run(family), in_specs=(in_specs,), out_specs=out_specs, axis_names={"x"})

        def outside(arrays):
            both = {each: jnp.stack([array, array]) for each, array in arrays.items()}
            loss = jax.value_and_grad(lambda floats: total(jax.vmap(run)(both | floats)) / 2)
            value, gradients = loss({each: both[each] for each in floats})
            return value, jax.tree.map(lambda gradient: gradient.sum(0), gradients)

        given = {each: placed(each, array, "x", "y") for each, array in arrays.items()}
        for run_sharded in inside, outside:
            compare(jax.jit(run_sharded, compiler_options=QUICK_COMPILATION)(given), expected, f"{name} {run_sharded}")
print("right")
"""


def test_vmap_and_shard_map_on_explicit_meshes() -> None:
    """Mapped axes that the mesh splits, gradients inside ``shard_map``, and ``vmap`` of ``shard_map``."""
    names = "origin", "extents", "attention, lengths", "additional, every term"
    assert output_of(run_python(_SHARDED_MAPS, "cpu", *names, devices=4)).splitlines()[-1] == "right"
