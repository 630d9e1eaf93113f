"""Derivatives that native kernels do not have are refused with the name of the backend that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support.families import BOUNDS, Family
from tests.support.problems import Case

REFUSED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jit of jacfwd": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,)))(x[None], x[None]),
    "vmap of jvp, tangents alone": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,)))(x[None]),
    "vmap of jvp of jit": lambda f, x: jax.vmap(lambda x: jax.jvp(jax.jit(f), (x,), (x,)))(x[None]),
    "vmap of linearize": lambda f, x: jax.vmap(jax.linearize(f, x)[1])(x[None]),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "jvp in scan": lambda f, x: jax.lax.scan(lambda c, x: (c, jax.jvp(f, (x,), (x,))), 0, x[None]),
    "jvp of scan": lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1], (x,), (x,)),
    "jvp of a loop": lambda f, x: jax.jvp(
        lambda x: jax.lax.fori_loop(0, 2, lambda _, x: (x + f(x)).astype(x.dtype), x), (x,), (x,)
    ),
    "jvp of cond": lambda f, x: jax.jvp(lambda x: jax.lax.cond(True, f, f, x), (x,), (x,)),
    "jvp of checkpoint": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jvp in map": lambda f, x: jax.lax.map(lambda x: jax.jvp(f, (x,), (x,)), x[None], batch_size=1),
    "jacrev of jacrev": lambda f, x: jax.jacrev(jax.jacrev(f))(x),
    "jacfwd of jacrev": lambda f, x: jax.jacfwd(jax.jacrev(f))(x),
    "jacrev of jacfwd": lambda f, x: jax.jacrev(jax.jacfwd(f))(x),
    "jacfwd of vmap": lambda f, x: jax.jacfwd(jax.vmap(f))(x[None]),
    "vmap of jacfwd": lambda f, x: jax.vmap(jax.jacfwd(f))(x[None]),
    "vmap of grad of grad": lambda f, x: jax.vmap(jax.grad(lambda x: jax.grad(f)(x).sum()))(x[None]),
}

#: Programs whose gradient is one of reverse mode, of a scalar.
TAKEN: dict[str, Callable[[Any, jax.Array], Any]] = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(f))(x[None])[0],
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x),
    "grad of vmap of jit": lambda f, x: jax.grad(lambda x: jax.jit(jax.vmap(jax.jit(f)))(x[None]).sum())(x),
    "vmap of a transpose": lambda f, x: jax.vmap(jax.vjp(f, x)[1])(jnp.ones((1,)))[0][0],
    "vmap of grad of checkpoint": lambda f, x: jax.vmap(jax.grad(jax.checkpoint(f)))(x[None])[0],
    "grad of vmap of scan": lambda f, x: jax.grad(
        lambda x: jax.vmap(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1])(x[None]).sum()
    )(x),
    "vmap of grad of scan": lambda f, x: jax.vmap(
        jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x[None])[0])
    )(x[None])[0],
    "grad of checkpoint of vmap": lambda f, x: jax.grad(lambda x: jax.checkpoint(jax.vmap(f))(x[None]).sum())(x),
    "grad of cond": lambda f, x: jax.grad(lambda x: jax.lax.cond(True, f, lambda x: x.sum(dtype="f4"), x))(x),
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


@pytest.mark.parametrize("name", TAKEN)
def test_first_derivatives_in_reverse_mode_are_taken(native_family: Family, name: str) -> None:
    case = Case((9,), (3,), additional=2, fused=True)
    operands = case.operands(native_family.dtype, 0)

    def gradient(backend: str, take: Callable[[Any, jax.Array], Any]) -> np.ndarray[Any, Any]:
        def of_query(query: jax.Array) -> jax.Array:
            return jnp.sum(case.operator(backend)(operands._replace(query=query))[0].astype("float32"))

        return np.asarray(take(of_query, operands.query), "float64")

    found, expected = gradient(native_family.fna, TAKEN[name]), gradient("flex-fna", TAKEN["grad"])
    assert np.linalg.norm(found - expected) <= 2 * BOUNDS[native_family.dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize("differentiate", [jax.jacfwd, jax.hessian, lambda f: jax.vmap(jax.jacfwd(f))])
def test_attention_is_refused_alike(native_family: Family, differentiate: Callable[..., Any]) -> None:
    query = jnp.ones((1, 9, 2, 8), native_family.dtype)

    def of_query(query: jax.Array) -> jax.Array:
        return natten_jax.attention(query, query, query, backend=native_family.fmha).astype("float32").sum()

    with pytest.raises(NotImplementedError, match=r"^native kernels have first derivatives in reverse mode only"):
        differentiate(of_query)(query[None] if "lambda" in differentiate.__name__ else query)
