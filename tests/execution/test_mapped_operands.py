"""``jax.vmap`` over every operand, with gradients, compared with unmapped calls."""

from __future__ import annotations

import jax
import numpy as np

from tests.support.families import Family
from tests.support.operand_calls import Arrays, OperandCall, failures_of
from tests.support.problems import QUICK_COMPILATION

#: Calls of plain JAX under test, because XLA takes long to compile all of them.
_OF_PLAIN_JAX = "origins of entries, every term", "extents", "weights", "weights, wrap", "mixed values", "merged"


def _changed(array: np.ndarray) -> np.ndarray:
    """Scale floats, and reduce lengths and origins by one."""
    return np.maximum(array - 1, 0) if array.dtype == np.int32 else np.asarray(-0.5 * array, array.dtype)


def test_vmap_over_every_operand(family: Family) -> None:
    """Map each operand by its last axis, then all operands together."""

    def check(call: OperandCall) -> None:
        arrays = call.arrays(family.dtype)
        others = {name: _changed(array) for name, array in arrays.items()}
        function = call.value_and_gradients(family.name)
        axes = {name: {**dict.fromkeys(arrays), name: array.ndim} for name, array in arrays.items()}
        axes["all"] = dict.fromkeys(arrays, 0)
        stacked = {
            name: {
                each: array if (place := axis[each]) is None else np.stack([array, others[each]], place)
                for each, array in arrays.items()
            }
            for name, axis in axes.items()
        }

        def mapped(operands: dict[str, Arrays]) -> dict[str, object]:
            return {name: jax.vmap(function, (axes[name],))(each) for name, each in operands.items()}

        found = jax.jit(mapped, compiler_options=QUICK_COMPILATION)(stacked)
        alone = jax.jit(function, compiler_options=QUICK_COMPILATION)
        tolerance = 2e-2 if family.dtype == "bfloat16" else 2e-4
        for name, axis in axes.items():
            second = {each: array if axis[each] is None else others[each] for each, array in arrays.items()}
            expected = jax.tree.map(lambda *results: np.stack(results), alone(arrays), alone(second))
            for one, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
                one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
                np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance / 10, err_msg=name)

    assert not failures_of(family, check, _OF_PLAIN_JAX if family.backend.is_differentiable else ())
