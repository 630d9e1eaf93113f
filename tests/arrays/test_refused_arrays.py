"""Arrays that the operators cannot take: other byte orders, and extents that are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support.problems import OPERATORS

SHAPE = (1, 8, 2, 8)
NAMES = ("query", "key", "value", "additional_keys", "additional_values")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wrong", NAMES)
def test_an_array_in_another_byte_order_names_itself_and_the_remedy(wrong: str, dtype: str) -> None:
    """JAX refuses such an array, too, but says nothing of the reason."""
    jax_dtype = jax.dtypes.canonicalize_dtype(dtype)
    swapped = np.ones(SHAPE, np.dtype(dtype).newbyteorder("S"))
    arrays: dict[str, Any] = {name: np.ones(SHAPE, jax_dtype) for name in NAMES} | {wrong: swapped}
    calls: list[Callable[[], Any]] = [lambda: natten_jax.na1d(**arrays, kernel_size=3)]
    if not wrong.startswith("additional"):
        calls.append(lambda: natten_jax.attention(*(arrays[name] for name in NAMES[:3])))
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"{wrong} has dtype '{swapped.dtype.str}', whose bytes are in another order")
        assert f"{wrong}.astype('{dtype}')" in message
    arrays[wrong] = swapped.astype(dtype)  # what the message says
    assert natten_jax.na1d(**arrays, kernel_size=3).dtype == jax_dtype


def test_other_functions_say_the_same() -> None:
    swapped: Any = np.ones(SHAPE, ">f4")
    native: Any = np.ones(SHAPE, "<f4")
    for name, call in {
        r"outputs\[1\]": lambda: natten_jax.merge_attentions([native, swapped], [native[..., 0]] * 2),
        r"lse_tensors\[0\]": lambda: natten_jax.merge_attentions([native] * 2, [swapped[..., 0], native[..., 0]]),
        "query": lambda: natten_jax.get_configs_for_cpu_fna(swapped),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} has dtype '>f4', whose bytes are in another order"):
            call()


def exported(function: Callable[..., Any], *shapes: str) -> Any:
    scope = jax.export.SymbolicScope()
    types = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(each, scope=scope), "float32") for each in shapes]
    return jax.export.export(jax.jit(function), disabled_checks=natten_jax.EXPORT_CHECKS)(*types)


@pytest.mark.parametrize("backend", [None, "flex-fna"])
@pytest.mark.parametrize(
    ("rank", "shapes", "message"),
    [
        (1, ("b,n,2,8",) * 3, "query has shape (b, n, 2, 8), in which a token extent (dimension 1) is the symbolic n"),
        (2, ("1,4,w,2,8",) * 3, "(1, 4, w, 2, 8), in which a token extent (dimension 2) is the symbolic w"),
        (3, ("1,4,4,2*k,2,8",) * 3, "in which a token extent (dimension 3) is the symbolic 2*k"),
        (1, ("1,8,h,8",) * 3, "query has shape (1, 8, h, 8), in which heads (dimension 2) is the symbolic h"),
        (1, ("1,8,4,8", "1,8,h,8", "1,8,h,8"), "key has shape (1, 8, h, 8), in which heads (dimension 2)"),
        (1, ("1,8,2,d",) * 3, "query has shape (1, 8, 2, d), in which head_dim (dimension 3) is the symbolic d"),
        (1, ("b,8,2,8", "b,8,2,8", "b,8,2,d"), "value has shape (b, 8, 2, d), in which head_dim (dimension 3)"),
        (
            1,
            ("b,8,2,8",) * 3 + ("b,n,2,8",) * 2,
            "additional_keys has shape (b, n, 2, 8), in which the number of tokens (dimension 1) is the symbolic n",
        ),
    ],
)  # fmt: skip
def test_only_the_batch_may_be_symbolic(rank: int, shapes: tuple[str, ...], message: str, backend: str | None) -> None:
    def run(*arrays: jax.Array) -> Any:
        given = dict(zip(NAMES, arrays, strict=False))
        return OPERATORS[rank](**given, kernel_size=3, backend=backend)

    with pytest.raises(ValueError, match="only the batch may be symbolic") as caught:
        exported(run, *shapes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (("1,n,2,8", "1,n,2,8", "1,n,2,8"), "query"),
        (("1,8,2,8", "1,n,2,8", "1,n,2,8"), "key"),
        (("1,8,2,8", "1,8,2,8", "1,n,2,8"), "value"),
    ],
)  # fmt: skip
def test_attention_names_the_sequence_that_is_symbolic(shapes: tuple[str, ...], name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} has shape .*dimension 1.* symbolic n: only the batch may be symbolic"
    ):
        exported(natten_jax.attention, *shapes)


def test_batches_that_may_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="key has batch size c, but query has b: they must be equal"):
        exported(natten_jax.attention, "b,8,2,8", "c,8,2,8", "c,8,2,8")


def test_a_symbolic_batch_is_taken() -> None:
    program = exported(lambda q, k, v: natten_jax.na1d(q, k, v, kernel_size=3), *("b,8,2,8",) * 3)
    array = jnp.ones((3, 8, 2, 8))
    assert program.call(array, array, array).shape == array.shape
