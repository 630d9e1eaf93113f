"""Every operand on meshes of several devices: values and gradients are those of one device."""

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
