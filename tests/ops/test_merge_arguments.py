"""Wrong arguments of ``merge_attentions``: messages name the argument and the part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax

OUT, LSE = jnp.ones((2, 8, 4, 16)), jnp.zeros((2, 8, 4))
STRUCT = jax.ShapeDtypeStruct(OUT.shape, OUT.dtype)
WRONG = {
    # One thing in place of a list.
    "one-output": (jnp.stack([OUT, OUT]), [LSE, LSE], TypeError, ("outputs must be a sequence", "(2, 2, 8, 4, 16)")),
    "one-lse": ([OUT, OUT], jnp.stack([LSE, LSE]), TypeError, ("lse_tensors must be a sequence", "(2, 2, 8, 4)")),
    "numpy-output": (np.ones((2, 8, 4, 16)), [LSE, LSE], TypeError, ("outputs must be a sequence", "array")),
    "none": (None, [LSE, LSE], TypeError, ("outputs must be a sequence", "None")),
    "no-lse": ([OUT, OUT], None, TypeError, ("lse_tensors must be a sequence", "None")),
    "int": (3, [LSE, LSE], TypeError, ("outputs must be a sequence", "3")),
    "text": ("ab", [LSE, LSE], TypeError, ("outputs must be a sequence", "'ab'")),
    "bytes": (b"ab", [LSE, LSE], TypeError, ("outputs must be a sequence", "b'ab'")),
    "mapping": ({0: OUT, 1: OUT}, [LSE, LSE], TypeError, ("outputs must be a sequence", "dict")),
    "set": ([OUT, OUT], {1, 2}, TypeError, ("lse_tensors must be a sequence", "set")),
    "type": ([OUT, OUT], list, TypeError, ("lse_tensors must be a sequence", "type")),
    # Parts that are no arrays.
    "floats": ([1.0, 2.0], [LSE, LSE], TypeError, ("outputs[0]", "array", "float")),
    "second-none": ([OUT, None], [LSE, LSE], TypeError, ("outputs[1]", "array", "NoneType")),
    "lse-int": ([OUT, OUT], [LSE, 3], TypeError, ("lse_tensors[1]", "array", "int")),
    "long": (range(10**15), [LSE, LSE], TypeError, ("outputs[0]", "array", "int")),
    "nested": ([OUT, [OUT]], [LSE, LSE], TypeError, ("outputs[1]", "array", "list")),
    "pairs": ([(OUT, LSE), (OUT, LSE)], [LSE, LSE], TypeError, ("outputs[0]", "array", "tuple")),
    "struct": ([STRUCT, STRUCT], [LSE, LSE], TypeError, ("outputs[0]", "array", "ShapeDtypeStruct")),
    "key": ([OUT, jax.random.key(0)], [LSE, LSE], TypeError, ("outputs[1]", "array")),
    # Arrays of other types.
    "int-array": ([OUT, OUT.astype(int)], [LSE, LSE], ValueError, ("outputs[1]", "int32", "float16", "bfloat16")),
    "bool-array": ([OUT > 0, OUT], [LSE, LSE], ValueError, ("outputs[0]", "bool", "float32")),
    "complex": ([OUT, OUT.astype(complex)], [LSE, LSE], ValueError, ("outputs[1]", "complex64")),
    "lse-int-array": ([OUT, OUT], [LSE, LSE.astype("int8")], ValueError, ("lse_tensors[1]", "int8", "float32")),
    "objects": ([OUT, np.ones(OUT.shape, object)], [LSE, LSE], ValueError, ("outputs[1]", "object")),
    "strings": ([OUT, OUT], [np.full(LSE.shape, "a"), LSE], ValueError, ("lse_tensors[0]", "str")),
    # Arrays of other shapes.
    "output-shape": ([OUT, OUT[:1]], [LSE, LSE[:1]], ValueError, ("outputs[1]", "(1, 8, 4, 16)", "(2, 8, 4, 16)")),
    "lse-shape": ([OUT, OUT], [LSE[:1], LSE], ValueError, ("lse_tensors[0]", "(1, 8, 4)", "(2, 8, 4)")),
    "lse-of-output": ([OUT, OUT], [OUT, OUT], ValueError, ("lse_tensors[0]", "(2, 8, 4, 16)", "(2, 8, 4)")),
    "scalars": ([OUT.sum()] * 2, [LSE.sum()] * 2, ValueError, ("outputs[0]", "()", "[..., heads, head_dim_v]")),
    "vectors": (
        [OUT[0, 0, 0]] * 2,
        [LSE[0, 0, 0]] * 2,
        ValueError,
        ("outputs[0]", "(16,)", "[..., heads, head_dim_v]"),
    ),
    "count": ([OUT] * 2, [LSE], ValueError, ("lse_tensors", "1 part", "2")),
    "none-of-them": ([], [], ValueError, ("outputs", "0 part", "at least two")),
}


@pytest.mark.parametrize(("outputs", "lse_tensors", "error", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(outputs: Any, lse_tensors: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        natten_jax.merge_attentions(outputs, lse_tensors)
    assert type(caught.value) is error
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 400


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
