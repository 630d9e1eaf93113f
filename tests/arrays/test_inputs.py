"""Arrays that the operators accept or reject.

Tests cover empty batches, symbolic extents, other byte orders, wrong orders of dimensions, and array-like objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.backends.flex.backend import FlexBackend
from natten_jax.rotary import apply_rotary, rotary_angles
from tests.support.families import Family
from tests.support.problems import OPERATORS

WINDOW: dict[str, Any] = {"kernel_size": 3}


def draw(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("additional", [False, True])
def test_an_empty_batch(family: Family, additional: bool) -> None:
    query, key, value = (jnp.zeros((0, 12, heads, width), family.dtype) for heads, width in ((4, 8), (2, 8), (2, 16)))
    more = [jnp.zeros((0, 5, 2, width), family.dtype) for width in (8, 16)] if additional else [None, None]

    def operator(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return natten_jax.na1d(
            query, key, value, **WINDOW, backend=family.fna, additional_keys=more[0], additional_values=more[1],
            return_lse=True,
        )  # fmt: skip

    out, pullback = jax.vjp(jax.jit(operator), query, key, value)
    assert [each.shape for each in out] == [(0, 12, 4, 16), (0, 12, 4)]
    assert [each.dtype.name for each in out] == [family.dtype, "float32"]
    assert [each.shape for each in pullback(out)] == [query.shape, key.shape, value.shape]
    assert natten_jax.attention(query, key, value, backend=family.fmha).shape == (0, 12, 4, 16)


def test_a_mapped_axis_of_no_extent(family: Family) -> None:
    array = jnp.zeros((0, 2, 12, 4, 8), family.dtype)

    def operator(x: jax.Array) -> jax.Array:
        return natten_jax.na1d(x, x, x, **WINDOW, backend=family.fna)

    assert jax.vmap(operator)(array).shape == array.shape
    assert jax.vmap(jax.grad(lambda x: operator(x).sum().astype("float32")))(array).shape == array.shape


def test_nothing_is_traced_for_absent_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("the portable backend was traced")

    monkeypatch.setattr(FlexBackend, "forward", fail)
    monkeypatch.setattr(FlexBackend, "forward_differentiable", fail)
    monkeypatch.setattr(FlexBackend, "backward", fail)
    x = draw(0, 1, 7, 9, 2, 8)
    jax.jit(jax.grad(lambda x: natten_jax.na2d(x, x, x, 5).sum()))(x)


def test_config_queries_take_nattens_name_of_the_array() -> None:
    array = jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32)
    assert natten_jax.get_configs_for_flex_fna(input_tensor=array) == natten_jax.get_configs_for_flex_fna(array)
    with pytest.raises(TypeError, match="input_tensor"):
        natten_jax.get_configs_for_flex_fna(array, input_tensor=array)
    with pytest.raises(AttributeError, match="get_configs_for_nobody_fna"):
        natten_jax.get_configs_for_nobody_fna(array)


# Arrays that the operators reject: other byte orders, symbolic extents, and wrong orders of dimensions.


SHAPE = (1, 8, 2, 8)

NAMES = ("query", "key", "value", "additional_keys", "additional_values")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wrong", NAMES)
def test_an_array_in_another_byte_order_names_itself_and_the_remedy(wrong: str, dtype: str) -> None:
    """JAX also rejects such an array, but its error does not name the byte order."""
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
        assert message.startswith(f"{wrong} has dtype '{swapped.dtype.str}', whose byte order is not this machine's")
        assert f"{wrong}.astype('{dtype}')" in message
    arrays[wrong] = swapped.astype(dtype)  # as the message suggests
    assert natten_jax.na1d(**arrays, kernel_size=3).dtype == jax_dtype


def test_other_functions_raise_the_same_error() -> None:
    swapped: Any = np.ones(SHAPE, ">f4")
    native: Any = np.ones(SHAPE, "<f4")
    for name, call in {
        r"outputs\[1\]": lambda: natten_jax.merge_attentions([native, swapped], [native[..., 0]] * 2),
        r"lse_tensors\[0\]": lambda: natten_jax.merge_attentions([native] * 2, [swapped[..., 0], native[..., 0]]),
        "query": lambda: natten_jax.get_configs_for_cpu_fna(swapped),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} has dtype '>f4', whose byte order is not this machine's"):
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
    ("shapes", "message"),
    [
        (("1,n,2,8",) * 3, "^query has shape .*dimension 1.* symbolic n: only the batch may be symbolic"),
        (("1,8,2,8", "1,n,2,8", "1,n,2,8"), "^key has shape .*dimension 1.* symbolic n: only the batch"),
        (("1,8,2,8", "1,8,2,8", "1,n,2,8"), "^value has shape .*dimension 1.* symbolic n: only the batch"),
        (("b,8,2,8", "c,8,2,8", "c,8,2,8"), "^key has batch size c, but query has b: they must be equal"),
    ],
)
def test_attention_names_the_symbolic_dimension(shapes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exported(natten_jax.attention, *shapes)


QUESTION = r"\. Do heads come first in these arrays\? They come after the tokens: jnp\.moveaxis\(array, 1, -2\)$"


def heads_first(heads: int, *tokens: int) -> jax.Array:
    return jnp.ones((2, heads, *tokens, 8))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("additional", [0, 3])
def test_windows_over_heads(rank: int, additional: int) -> None:
    layout = (16, 12, 10)[:rank]
    arrays = {"query": heads_first(4, *layout), **dict.fromkeys(("key", "value"), heads_first(2, *layout))}
    if additional:
        arrays |= dict.fromkeys(("additional_keys", "additional_values"), heads_first(2, additional))
    operator: Any = OPERATORS[rank]
    with pytest.raises(ValueError, match=QUESTION):
        operator(**arrays, kernel_size=7)
    moved = {name: jnp.moveaxis(array, 1, -2) for name, array in arrays.items()}  # as the message suggests
    assert operator(**moved, kernel_size=7).shape == (2, *layout, 4, 8)


def test_heads_first_of_attention() -> None:
    query, key = heads_first(4, 64), heads_first(4, 96)
    with pytest.raises(ValueError, match=QUESTION):
        natten_jax.attention(query, key, key)
    with pytest.raises(ValueError, match=r"\(heads_kv\)$"):  # without the question about heads
        natten_jax.attention(jnp.ones((2, 64, 6, 8)), *[jnp.ones((2, 64, 4, 8))] * 2)


@pytest.mark.parametrize(
    ("shapes", "more"),
    [
        ([(2, 16, 4, 8)] * 3, {"kernel_size": 17}),  # exceeds the tokens, also if heads come first
        ([(2, 64, 6, 8), (2, 64, 4, 8), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 64, 4, 8), (2, 63, 4, 8), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 64, 4, 8), (2, 64, 4, 16), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 4, 64)] * 3, {"kernel_size": 3}),
        ([(2, 16, 4, 8)] * 3, {"kernel_size": 3, "stride": 4}),
        ([(2, 4, 64, 8)] * 3, {"kernel_size": 7, "backend": "none"}),
    ],
)
def test_other_errors_are_not_reported_as_symbolic(shapes: list[tuple[int, ...]], more: dict[str, Any]) -> None:
    operator: Any = natten_jax.na1d
    with pytest.raises(ValueError, match=r".") as caught:
        operator(*map(jnp.ones, shapes), **more)
    asks = "Do heads come first" in str(caught.value)
    assert asks == (shapes[0] == (2, 4, 64, 8))  # in the last case, heads do come first


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("rank", "shape"), [(2, (2, 30, 16)), (3, (2, 4, 30, 16)), (3, (2, 30, 16)), (2, (30, 16))], ids=str
)
def test_flattened_tokens_need_their_layout(rank: int, shape: tuple[int, ...], flavour: str) -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")

    def applied(inputs: jax.Array) -> Any:
        if flavour == "nnx":
            return flax_layers.nnx_module(rank, kernel_size=3, stride=1, dilation=1)(inputs)
        module = flax_layers.LINEN[rank](num_heads=2, kernel_size=3)
        return module.init_with_output(jax.random.key(0), inputs)[0]

    def apply(shape: tuple[int, ...]) -> Any:
        return jax.jit(applied)(np.zeros(shape, np.float32))

    with pytest.raises(ValueError, match=rf"\[batch, tokens, features\] need their layout of {rank} dimensions back"):
        apply(shape)
    batched = (2, *(4,) * rank, 16)
    with pytest.raises(ValueError, match="exceeds the token layout") as caught:
        apply((*batched[:-2], 2, 16))
    assert not re.search("flattened", str(caught.value))  # this input is not flattened
    assert apply(batched).shape == batched
    assert apply(batched[1:]).shape == batched[1:]


def test_inputs_of_modules_that_are_no_array() -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    with pytest.raises(TypeError, match="inputs must be an array, got list"):
        flax_layers.nnx_module(1)([[1.0]])


# Objects with a method ``__jax_array__`` are accepted as any array argument.


class Wrapped:
    """An object that JAX can convert to an array. It lacks the attributes of arrays, such as ``shape``."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __jax_array__(self) -> Any:
        return self._array


TOKENS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 2, 8)), "float32")


@pytest.mark.parametrize(
    "call",
    [
        lambda w: natten_jax.na1d(w(TOKENS), w(TOKENS), w(TOKENS), 3),
        lambda w: natten_jax.na2d(*(w(TOKENS.reshape(2, 2, 3, 2, 8)) for _ in range(3)), 2),  # type: ignore[call-overload]
        lambda w: natten_jax.na3d(*(w(TOKENS.reshape(2, 1, 2, 3, 2, 8)) for _ in range(3)), 1),  # type: ignore[call-overload]
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, additional_keys=w(TOKENS), additional_values=w(TOKENS)),
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, scale=w(jnp.float32(0.3))),
        lambda w: natten_jax.na1d(TOKENS, TOKENS, TOKENS, 3, scale=w(jnp.array([0.3, -0.4]))),
        lambda w: natten_jax.attention(w(TOKENS), w(TOKENS), w(TOKENS), w(jnp.float32(0.3))),
        lambda w: natten_jax.merge_attentions([w(TOKENS), w(2 * TOKENS)], [w(TOKENS[..., 0]), w(TOKENS[..., 1])]),
        lambda w: apply_rotary(w(TOKENS), w(rotary_angles((6,), head_dim=8))),
        lambda w: jax.grad(lambda query: jnp.sum(natten_jax.na1d(w(query), TOKENS, TOKENS, 3) ** 2))(TOKENS),
    ],
)
def test_functions(call: Callable[[Callable[[Any], Any]], Any]) -> None:
    expected = call(lambda array: array)
    for found in (call(Wrapped), jax.jit(lambda: call(Wrapped))()):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_inputs_of_modules() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from natten_jax.flax_modules import linen as linen_modules
    from natten_jax.flax_modules import nnx as nnx_modules
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    inputs = jnp.ones((1, 8, 16))
    module = nnx_modules.NeighborhoodAttention1D(16, num_heads=2, kernel_size=3, rngs=nnx.Rngs(0))
    linen = linen_modules.NeighborhoodAttention1D(num_heads=2, kernel_size=3)
    parameters = linen.init(jax.random.key(0), inputs)
    attend = neighborhood_attention_fn(3)
    for wrap in (nnx.Param, Wrapped):
        np.testing.assert_array_equal(module(wrap(inputs)), module(inputs))
        np.testing.assert_array_equal(linen.apply(parameters, wrap(inputs)), linen.apply(parameters, inputs))
        np.testing.assert_array_equal(attend(*map(wrap, [TOKENS] * 3)), attend(TOKENS, TOKENS, TOKENS))
