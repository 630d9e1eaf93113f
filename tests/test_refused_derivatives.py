"""Derivatives that native kernels do not have are refused with the name of the backend that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from families import Family
from problems import Case

REFUSED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_names_what_has_them(native_family: Family, name: str) -> None:
    case = Case((9,), (3,), additional=2, fused=True)
    operands = case.operands(native_family.dtype, 0)
    function = case.operator(native_family.fna)

    def of_query(query: jax.Array) -> jax.Array:
        return jnp.sum(function(operands._replace(query=query))[0].astype("float32"))

    with pytest.raises(NotImplementedError, match='backend="flex-fna", or for attention "flex-fmha"'):
        REFUSED[name](of_query, operands.query)
