"""Arrays with heads in front, and tokens without their layout: what can be told from others is said."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support.problems import OPERATORS

QUESTION = r"\. Do heads come first in these arrays\? They come after the tokens: jnp\.moveaxis\(array, 1, -2\)$"


def heads_first(heads: int, *tokens: int) -> jax.Array:
    return jnp.ones((2, heads, *tokens, 8))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("additional", [0, 3])
def test_windows_over_heads(rank: int, heads_kv: int, additional: int) -> None:
    layout = (16, 12, 10)[:rank]
    arrays = {"query": heads_first(4, *layout)}
    arrays |= dict.fromkeys(("key", "value"), heads_first(heads_kv, *layout))
    if additional:
        arrays |= dict.fromkeys(("additional_keys", "additional_values"), heads_first(heads_kv, additional))
    operator: Any = OPERATORS[rank]
    with pytest.raises(ValueError, match=QUESTION):
        operator(**arrays, kernel_size=7)
    moved = {name: jnp.moveaxis(array, 1, -2) for name, array in arrays.items()}  # what the message says
    assert operator(**moved, kernel_size=7).shape == (2, *layout, 4, 8)


def test_attention_to_other_tokens() -> None:
    query, key = heads_first(4, 64), heads_first(4, 96)
    with pytest.raises(ValueError, match=QUESTION):
        natten_jax.attention(query, key, key)
    assert natten_jax.attention(*(jnp.moveaxis(each, 1, -2) for each in (query, key, key))).shape == (2, 64, 4, 8)


@pytest.mark.parametrize(
    ("shapes", "more"),
    [
        ([(2, 16, 4, 8)] * 3, {"kernel_size": 17}),  # the window is too large in either reading
        ([(2, 64, 6, 8), (2, 64, 4, 8), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 64, 4, 8), (2, 63, 4, 8), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 64, 4, 8), (2, 64, 4, 16), (2, 64, 4, 8)], {"kernel_size": 3}),
        ([(2, 4, 64)] * 3, {"kernel_size": 3}),
        ([(2, 16, 4, 8)] * 3, {"kernel_size": 3, "stride": 4}),
        ([(2, 4, 64, 8)] * 3, {"kernel_size": 7, "backend": "none"}),
    ],
)
def test_other_mistakes_are_not_taken_for_it(shapes: list[tuple[int, ...]], more: dict[str, Any]) -> None:
    operator: Any = natten_jax.na1d
    with pytest.raises(ValueError, match=r".") as caught:
        operator(*map(jnp.ones, shapes), **more)
    asks = "Do heads come first" in str(caught.value)
    assert asks == (shapes[0] == (2, 4, 64, 8))  # the last, which is one more mistake


def test_grouped_heads_of_attention_are_not_taken_for_it() -> None:
    query, key = jnp.ones((2, 64, 6, 8)), jnp.ones((2, 64, 4, 8))
    with pytest.raises(ValueError, match=r"\(heads_kv\)$"):
        natten_jax.attention(query, key, key)


def test_what_is_valid_is_taken() -> None:
    """Few tokens of many heads."""
    array = jnp.ones((2, 4, 64, 8))
    assert natten_jax.na1d(array, array, array, 3).shape == array.shape


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
    assert not re.search("flattened", str(caught.value))  # it has a batch
    assert apply(batched).shape == batched
    assert apply(batched[1:]).shape == batched[1:]


def test_inputs_that_are_no_array() -> None:
    flax_layers = pytest.importorskip("tests.support.flax_layers")
    with pytest.raises(TypeError, match="inputs must be an array, got list"):
        flax_layers.nnx_module(1)([[1.0]])
