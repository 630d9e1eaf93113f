"""Calls whose results take the place of operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from natten_jax.native.module import ResultType, call


@pytest.mark.parametrize("replaces", [None, 0])
def test_what_is_written_in_place_is_no_slice_of_something_else(replaces: int | None) -> None:
    def function(array: jax.Array) -> jax.Array:
        part = array[:1]
        (result,) = call("natten_jax_nothing", [ResultType(part.shape, part.dtype, replaces)], part)
        return array.at[:1].set(result)

    text = jax.jit(function).lower(jnp.zeros((4, 8))).as_text()
    before, after = text.split("stablehlo.custom_call")
    expected = 0 if replaces is None else 1
    assert before.count("optimization_barrier") == after.count("optimization_barrier") == expected
