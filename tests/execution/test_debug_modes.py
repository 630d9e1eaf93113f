"""The operators where JAX compiles nothing, or looks for values that are not numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.execution.test_transforms import assert_close, objective
from tests.support.families import Family
from tests.support.problems import Case

CASES = {
    "windows": Case((6, 5), (3, 4), stride=(2, 1), is_causal=(False, True), heads=2, head_dim=8),
    "additional tokens": Case((9,), (3,), additional=2, fused=True, head_dim=8),
    "in two parts": Case((9,), (3,), additional=2, fused=False, head_dim=8),
    "whole layout": Case((6,), (6,), head_dim=8),
}


@pytest.mark.parametrize("name", CASES)
def test_without_compilation(family: Family, name: str) -> None:
    case = CASES[name]
    operands = case.operands(family.dtype, 0)
    function = jax.value_and_grad(objective(case, family.fna))
    expected = function(operands)
    with jax.disable_jit():
        assert_close(function(operands), expected)
        mapped = jax.vmap(function)(jax.tree.map(lambda array: jnp.stack([array, array]), operands))
    assert_close(jax.tree.map(lambda array: array[1], mapped), expected)


def test_attention_and_derivatives_of_plain_jax_without_compilation(pure_family: Family) -> None:
    case = Case((7,), (3,), head_dim=4)
    operands = case.operands("float32", 0)
    function = objective(case, pure_family.fna)

    def all_derivatives() -> Any:
        tangent = jax.jvp(function, (operands,), (operands,))[1]
        return tangent, jax.jvp(jax.grad(function), (operands,), (operands,))[1]

    query = operands.query
    attend: Callable[[], Any] = lambda: natten_jax.attention(query, query, query, backend=pure_family.fmha)  # noqa: E731
    expected = all_derivatives(), attend()
    with jax.disable_jit():
        assert_close((all_derivatives(), attend()), expected)


@pytest.fixture(params=["disable_jit", "jit", "neither"])
def mode(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """A transformation of the function that is run."""
    if request.param == "disable_jit":
        with jax.disable_jit():
            yield lambda function: function
    else:
        yield jax.jit if request.param == "jit" else lambda function: function


def test_values_that_are_no_numbers_are_found(family: Family, mode: Callable[[Any], Any]) -> None:
    case = CASES["windows"]
    operands = case.operands(family.dtype, 0)
    spoiled = operands._replace(value=operands.value.at[0, 0, 0, 0, 0].set(jnp.nan))
    with jax.debug_nans(True):
        function = mode(case.operator(family.fna))
        assert np.isfinite(np.asarray(function(operands)[0], np.float32)).all()
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(function(spoiled))
        gradient = mode(jax.grad(objective(case, family.fna)))
        gradient(operands)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(gradient(spoiled))


def test_infinite_values_are_found(family: Family, mode: Callable[[Any], Any]) -> None:
    case = CASES["windows"]
    operands = case.operands(family.dtype, 0)
    # Every logit is finite, and so are the weights.
    spoiled = operands._replace(value=operands.value.at[0, 0, 0, 0, 0].set(jnp.inf))
    function = mode(case.operator(family.fna))
    # Products of float32 on TF32 matrix units take infinity for NaN: its lower part is inf - inf.
    becomes_nan = not jnp.isinf(function(spoiled)[0]).any()
    assert not becomes_nan or (family.name, family.dtype) == ("cutlass", "float32")
    with jax.debug_nans(becomes_nan), jax.debug_infs(not becomes_nan):
        function = mode(case.operator(family.fna))
        jax.block_until_ready(function(operands))
        with pytest.raises(FloatingPointError, match="nan" if becomes_nan else "inf"):
            jax.block_until_ready(function(spoiled))
