"""Derivatives that kernels reject, and higher derivatives of operators in plain JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import natten_jax
from tests.support import oracle
from tests.support.families import BOUNDS, Family
from tests.support.problems import Case

Function = Callable[[jax.Array], Any]

#: Derivatives of a function ``f`` at ``x`` that kernels reject.
REFUSED: dict[str, Callable[[Any, jax.Array], Any]] = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "vmap of jvp": lambda f, x: jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,)))(x[None], x[None]),
    "jvp of scan": lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1], (x,), (x,)),
    "jvp of a loop": lambda f, x: jax.jvp(
        lambda x: jax.lax.fori_loop(0, 2, lambda _, x: (x + f(x)).astype(x.dtype), x), (x,), (x,)
    ),
    "jvp of cond": lambda f, x: jax.jvp(lambda x: jax.lax.cond(True, f, f, x), (x,), (x,)),
    "jvp of checkpoint": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jet": lambda f, x: jet.jet(f, (x,), ([x, x],)),
    "jet of grad": lambda f, x: jet.jet(jax.grad(f), (x,), ([x, x],)),
    "vmap of grad of grad": lambda f, x: jax.vmap(jax.grad(lambda x: jax.grad(f)(x).sum()))(x[None]),
}

#: First derivatives in reverse mode, which kernels support.
TAKEN: dict[str, Callable[[Any, jax.Array], Any]] = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jacrev": lambda f, x: jax.jacrev(f)(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x),
    "vmap of a transpose": lambda f, x: jax.vmap(jax.vjp(f, x)[1])(jnp.ones((1,)))[0][0],
    "grad of vmap of scan": lambda f, x: jax.grad(
        lambda x: jax.vmap(lambda x: jax.lax.scan(lambda c, x: (c, f(x)), 0, x[None])[1])(x[None]).sum()
    )(x),
    "vmap of grad of scan": lambda f, x: jax.vmap(
        jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x[None])[0])
    )(x[None])[0],
    "grad of checkpoint of vmap": lambda f, x: jax.grad(lambda x: jax.checkpoint(jax.vmap(f))(x[None]).sum())(x),
    "grad of cond": lambda f, x: jax.grad(lambda x: jax.lax.cond(True, f, lambda x: x.sum(dtype="f4"), x))(x),
}


#: A problem for neighborhood attention, and a problem for attention.
CASES = {"fna": Case((9,), (3,), additional=2, fused=True), "fmha": Case((9,), queries=9)}


def query_function(case: Case, backend: str, operands: oracle.Tensors) -> Function:
    """Return a function that maps a query to the sum of all output elements, with the other operands fixed."""
    return lambda query: case.operator(backend)(operands._replace(query=query))[0].astype("float32").sum()


@pytest.mark.parametrize("operator", CASES)
@pytest.mark.parametrize("name", REFUSED)
def test_kernels_reject_other_derivatives_and_name_a_backend_with_them(
    native_family: Family, name: str, operator: str
) -> None:
    case = CASES[operator]
    operands = case.operands(native_family.dtype, 0)
    message = (
        r'^native kernels have first derivatives in reverse mode only.*backend="flex-fna", or "flex-fmha" for attention'
    )
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        REFUSED[name](query_function(case, getattr(native_family, operator), operands), operands.query)


@pytest.mark.parametrize("name", TAKEN)
def test_first_derivatives_in_reverse_mode_work(native_family: Family, name: str) -> None:
    case = CASES["fna"]
    operands = case.operands(native_family.dtype, 0)
    found = np.asarray(TAKEN[name](query_function(case, native_family.fna, operands), operands.query), "float64")
    expected = np.asarray(jax.grad(query_function(case, "flex-fna", operands))(operands.query), "float64")
    assert np.linalg.norm(found - expected) <= 2 * BOUNDS[native_family.dtype] * np.linalg.norm(expected)


# Derivatives of plain JAX beyond the first: forward mode, mixed modes, and ``jax.experimental.jet``.


ORDER = 3

MASK = oracle.neighborhood_mask((9,), kernel_size=(3,), stride=(1,), dilation=(1,), is_causal=(False,))


def attend(query: jax.Array, **options: Any) -> jax.Array:
    """Run the operator on a query ``[1, 9, 2, 4]``, and on keys and values that are computed from the query."""
    return natten_jax.na1d(query, 2 * query, jnp.sin(query), 3, backend="flex-fna", **options)


def attend_densely(
    query: jax.Array, biases: jax.Array | float = 0.0, scale: jax.Array | float = 0.5, mask: Any = MASK
) -> jax.Array:
    """Compute the output of :func:`attend` in a few lines of JAX, without this package."""
    logits = jnp.einsum("bihd,bjhd->bhij", query, 2 * query) * scale + biases
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, jnp.sin(query))


#: Pairs of functions of one array that compute equal results. The second function does not use this package.
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "operator": (attend, attend_densely),
    "attention": (
        lambda x: natten_jax.attention(x, 2 * x, jnp.sin(x), backend="flex-fmha"),
        functools.partial(attend_densely, mask=True),
    ),
    "jit": (jax.jit(attend), attend_densely),
    "key_bias": (lambda x: attend(x, key_bias=x[..., 0, 0]), lambda x: attend_densely(x, x[:, None, None, :, 0, 0])),
    "scale": (lambda x: attend(x, scale=x[0, 0, 0, 0]), lambda x: attend_densely(x, scale=x[0, 0, 0, 0])),
    "vmap": (
        lambda x: jax.vmap(lambda head: attend(head[:, :, None]), in_axes=2, out_axes=2)(x)[:, :, :, 0],
        attend_densely,
    ),
    "gradient": (
        jax.grad(lambda x: jnp.sum(jnp.sin(attend(x)))),
        jax.grad(lambda x: jnp.sum(jnp.sin(attend_densely(x)))),
    ),
}


def derivatives_along(function: Function, first: jax.Array, terms: list[jax.Array]) -> list[jax.Array]:
    """Compute the value and the derivatives of a function along a curve, by nested calls of ``jax.jvp``.

    The curve starts at ``first``. The derivatives of the curve at its start are ``terms``.
    """

    def along(time: jax.Array) -> list[jax.Array]:
        return [function(first + time * terms[0] + time**2 / 2 * terms[1] + time**3 / 6 * terms[2])]

    for _ in terms:

        def extended(time: jax.Array, inner: Any = along) -> list[jax.Array]:
            values, changes = jax.jvp(inner, (time,), (jnp.ones_like(time),))
            return [*values, changes[-1]]

        along = extended
    return along(jnp.zeros(()))


def draw(seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((1, 9, 2, 4))) for _ in range(ORDER + 1)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jet(name: str) -> None:
    function, reference = FUNCTIONS[name]
    with jax.enable_x64(True):
        first, *terms = draw(0)
        value, coefficients = jet.jet(function, (first,), (terms,))
        expected = derivatives_along(reference, first, terms)
        for found, other in zip((value, *coefficients), expected, strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-9, atol=1e-9)


#: Derivatives of a scalar function ``f`` at ``x`` in the direction ``t``, by different combinations of modes.
COMBINATIONS: dict[str, Callable[[Function, jax.Array, jax.Array], Any]] = {
    "linearize": lambda f, x, t: jax.linearize(f, x)[1](t),
    "hessian": lambda f, x, t: jnp.einsum("abcdefgh,efgh->abcd", jax.hessian(f)(x), t),
    "jvp of vjp": lambda f, x, t: jax.jvp(lambda x: jax.vjp(f, x)[1](jnp.ones(()))[0], (x,), (t,))[1],
    "vjp of jvp": lambda f, x, t: jax.grad(lambda x: jax.jvp(f, (x,), (t,))[1])(x),
    "linearize of grad": lambda f, x, t: jax.linearize(jax.grad(f), x)[1](t),
    "grad of grad": lambda f, x, t: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), t))(x),
    "third": lambda f, x, t: jax.grad(lambda x: jnp.vdot(jax.jvp(jax.grad(f), (x,), (t,))[1], t))(x),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_of_modes(name: str) -> None:
    derive = COMBINATIONS[name]
    with jax.enable_x64(True):
        first, direction, *_ = draw(2)
        found = derive(lambda x: jnp.sum(jnp.sin(attend(x))), first, direction)
        expected = derive(lambda x: jnp.sum(jnp.sin(attend_densely(x))), first, direction)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
