"""Attention over parts of the keys, merged by ``merge_attentions``, and invalid arguments of this function."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.arguments.test_static_arguments import refused
from tests.support import oracle
from tests.support.families import Family
from tests.support.problems import BOUNDS, Case, errors, value_and_gradients

# Merged results compared with attention over all keys.


#: Error bounds by element type. Outputs of 16 bits are rounded twice, before and after the merge, and so are their
#: cotangents.
MERGED = {dtype: bound if dtype == "float32" else 2 * bound for dtype, bound in BOUNDS.items()}


def check_merge(lengths: list[int], backend: str | None, dtype: str) -> None:
    """Merge the attention over parts of the keys, and compare outputs and gradients with attention over all keys."""
    case = Case((sum(lengths),), queries=11, batch=2, heads=4, heads_kv=2, head_dim=16, head_dim_v=24)
    edges = np.cumsum([0, *lengths])

    def merged(operands: oracle.Tensors) -> tuple[Any, Any]:
        results = [
            natten_jax.attention(operands.query, key, value, backend=backend, return_lse=True)
            for key, value in zip(
                jnp.split(operands.key, edges[1:-1], axis=1),
                jnp.split(operands.value, edges[1:-1], axis=1),
                strict=True,
            )
        ]
        return natten_jax.merge_attentions(*zip(*results, strict=True))

    found = value_and_gradients(merged, case.operands(dtype, 0), case.cotangents(dtype, 0))
    worst = errors(case, *found, seed=0)
    assert max(worst.values()) <= MERGED[dtype], worst


def test_merge_of_two_parts_is_attention_over_both(family: Family) -> None:
    check_merge([7, 12], family.fmha, family.dtype)


@pytest.mark.parametrize("parts", [3, 5, 8])
def test_merge_of_many_parts_is_attention_over_all(parts: int) -> None:
    check_merge([7, 1, 12, 4, 30, 2, 9, 5][:parts], None, "float32")


def test_merge_ignores_empty_parts() -> None:
    out = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 3, 1, 4)), jnp.float32)
    empty = jnp.full((2, 3, 1), -jnp.inf)
    lse = jnp.zeros((2, 3, 1))
    merged, merged_lse = natten_jax.merge_attentions(list(out), [empty, lse, empty])
    np.testing.assert_array_equal(merged, out[1])
    np.testing.assert_array_equal(merged_lse, lse)


def test_merge_of_empty_parts_is_empty_and_has_no_nan_in_its_gradient() -> None:
    def total(outputs: Any, lses: Any) -> jax.Array:
        merged, lse = natten_jax.merge_attentions(outputs, lses)
        return merged.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    outputs = [jnp.ones((1, 2, 1, 3))] * 2
    lses = [jnp.asarray([[[-jnp.inf], [0.0]]]), jnp.asarray([[[-jnp.inf], [-jnp.inf]]])]
    merged, lse = natten_jax.merge_attentions(outputs, lses)
    np.testing.assert_array_equal(merged[0, :, 0, 0], [0, 1])
    np.testing.assert_array_equal(lse[0, :, 0], [-np.inf, 0])
    for gradient in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(outputs, lses)):
        assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.parametrize("highest", [-2000.0, 2000.0])
def test_merge_does_not_overflow(highest: float) -> None:
    outputs = [jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))]
    merged, lse = natten_jax.merge_attentions(outputs, [jnp.full((1, 1, 1), highest)] * 2)
    np.testing.assert_allclose(merged, 0.5)
    np.testing.assert_allclose(lse, highest + math.log(2), rtol=1e-6)


# Invalid arguments of ``merge_attentions``. Messages contain the name of the argument and the index of the part.


OUT, LSE = jnp.ones((2, 8, 4, 16)), jnp.zeros((2, 8, 4))

STRUCT = jax.ShapeDtypeStruct(OUT.shape, OUT.dtype)

WRONG = {
    # Not a list: a stacked array, or a set.
    "one-output": (jnp.stack([OUT, OUT]), [LSE, LSE], TypeError, ("outputs must be a sequence", "(2, 2, 8, 4, 16)")),
    "one-lse": ([OUT, OUT], jnp.stack([LSE, LSE]), TypeError, ("lse_tensors must be a sequence", "(2, 2, 8, 4)")),
    "set": ([OUT, OUT], {1, 2}, TypeError, ("lse_tensors must be a sequence", "set")),
    # Parts that are not arrays.
    "floats": ([1.0, 2.0], [LSE, LSE], TypeError, ("outputs[0]", "array", "float")),
    "second-none": ([OUT, None], [LSE, LSE], TypeError, ("outputs[1]", "array", "NoneType")),
    "lse-int": ([OUT, OUT], [LSE, 3], TypeError, ("lse_tensors[1]", "array", "int")),
    "struct": ([STRUCT, STRUCT], [LSE, LSE], TypeError, ("outputs[0]", "array", "ShapeDtypeStruct")),
    # Arrays of unsupported types.
    "int-array": ([OUT, OUT.astype(int)], [LSE, LSE], ValueError, ("outputs[1]", "int32", "float16", "bfloat16")),
    "lse-int-array": ([OUT, OUT], [LSE, LSE.astype("int8")], ValueError, ("lse_tensors[1]", "int8", "float32")),
    # Arrays whose shapes do not match, and wrong numbers of parts.
    "output-shape": ([OUT, OUT[:1]], [LSE, LSE[:1]], ValueError, ("outputs[1]", "(1, 8, 4, 16)", "(2, 8, 4, 16)")),
    "lse-shape": ([OUT, OUT], [LSE[:1], LSE], ValueError, ("lse_tensors[0]", "(1, 8, 4)", "(2, 8, 4)")),
    "lse-of-output": ([OUT, OUT], [OUT, OUT], ValueError, ("lse_tensors[0]", "(2, 8, 4, 16)", "(2, 8, 4)")),
    "count": ([OUT] * 2, [LSE], ValueError, ("lse_tensors", "1 part", "2")),
    "none-of-them": ([], [], ValueError, ("outputs", "0 part", "at least two")),
}


@pytest.mark.parametrize(("outputs", "lse_tensors", "error", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(outputs: Any, lse_tensors: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    refused(error, parts, lambda: natten_jax.merge_attentions(outputs, lse_tensors))


@pytest.mark.parametrize(
    "hold", [tuple, list, iter, lambda parts: (part for part in parts), lambda p: map(np.asarray, p)]
)
def test_parts_may_come_from_any_iterable(hold: Any) -> None:
    expected = natten_jax.merge_attentions([OUT, 2 * OUT], [LSE, LSE])
    found = natten_jax.merge_attentions(hold([OUT, 2 * OUT]), hold([LSE, LSE]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_parts_of_different_element_types_merge_in_float32() -> None:
    out, lse = natten_jax.merge_attentions([OUT.astype("bfloat16"), 3 * OUT], [LSE, LSE])
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, 2 * OUT)


def test_errors_are_raised_while_tracing() -> None:
    with pytest.raises(ValueError, match=r"outputs\[1\] has dtype int32"):
        jax.eval_shape(lambda out, lse: natten_jax.merge_attentions([out, out.astype(int)], [lse] * 2), STRUCT, LSE)
