"""Derivatives that kernels refuse, and higher derivatives of plain JAX."""

from __future__ import annotations

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

# Derivatives that native kernels do not have are refused with the name of the backend that has them.


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

#: Programs with reverse-mode gradients of scalars.
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


# Derivatives of plain JAX beyond the first: forward mode, mixed modes, and ``jax.experimental.jet``.


ORDER = 3

MASK = oracle.neighborhood_mask((9,), kernel_size=(3,), stride=(1,), dilation=(1,), is_causal=(False,))

Function = Callable[[jax.Array], Any]


def attend(query: jax.Array, **options: Any) -> jax.Array:
    """The operator, whose operands are all functions of one array ``[1, 9, 2, 4]``."""
    return natten_jax.na1d(query, 2 * query, jnp.sin(query), 3, backend="flex-fna", **options)


def attend_densely(query: jax.Array, biases: jax.Array | float = 0.0, scale: jax.Array | float = 0.5) -> jax.Array:
    """The operator in a few lines of JAX, without this package's code."""
    logits = jnp.einsum("bihd,bjhd->bhij", query, 2 * query) * scale + biases
    weights = jax.nn.softmax(jnp.where(MASK, logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, jnp.sin(query))


def attend_to_all_densely(query: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", query, 2 * query) * 0.5, axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, jnp.sin(query))


def key_bias_of(query: jax.Array) -> jax.Array:
    return query[..., 0, 0]


#: A function of the array, and the same function of it without this package.
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "operator": (attend, attend_densely),
    "attention": (
        lambda x: natten_jax.attention(x, 2 * x, jnp.sin(x), backend="flex-fmha"),
        attend_to_all_densely,
    ),
    "jit": (jax.jit(attend), attend_densely),
    "key_bias": (
        lambda x: attend(x, key_bias=key_bias_of(x)),
        lambda x: attend_densely(x, key_bias_of(x)[:, None, None]),
    ),
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
    """The function and its derivatives along the curve with these derivatives, by nested ``jax.jvp``."""

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


#: Derivatives of a scalar function along an array.
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


def test_inside_a_custom_jvp_and_a_custom_vjp() -> None:
    @jax.custom_jvp
    def with_jvp(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(x)))

    @with_jvp.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda x: jnp.sum(jnp.sin(attend(x))), primals, tangents)

    @jax.custom_vjp
    def with_vjp(x: jax.Array) -> jax.Array:
        return with_jvp(x)

    with_vjp.defvjp(lambda x: (with_jvp(x), x), lambda x, cotangent: (cotangent * jax.grad(with_jvp)(x),))

    def reference(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend_densely(x)))

    with jax.enable_x64(True):
        first, direction, *_ = draw(3)
        for function in with_jvp, with_vjp:
            np.testing.assert_allclose(jax.grad(function)(first), jax.grad(reference)(first), rtol=1e-9, atol=1e-9)
        found = jax.jvp(jax.grad(with_jvp), (first,), (direction,))[1]
        expected = jax.jvp(jax.grad(reference), (first,), (direction,))[1]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", ["fna", "fmha"])
def test_jet_of_kernels_is_refused(native_family: Family, operator: str) -> None:
    x = jnp.ones((1, 9, 2, 8), native_family.dtype)

    def function(x: jax.Array) -> jax.Array:
        if operator == "fmha":
            return natten_jax.attention(x, x, x, backend=native_family.fmha)
        return natten_jax.na1d(x, x, x, 3, backend=native_family.fna)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: function(x).astype("float32").sum())(x)

    for each in function, jax.jit(function), gradient:
        with pytest.raises(NotImplementedError, match=r"^native kernels have first derivatives in reverse mode only"):
            jet.jet(each, (x,), ([x, x],))
