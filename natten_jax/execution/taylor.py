"""Taylor-mode derivatives: rules of ``jax.experimental.jet`` for the primitives of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.extend.core import Primitive

from natten_jax.arrays.avals import vary_alike

_Array = Any
#: For each result the array, followed by its derivatives of order 1, 2, ...
_Derivatives = list[list[jax.Array]]

_RULES: dict[Primitive, Callable[..., Any]] = jet.jet_rules


def use_nested_jvp(primitive: Primitive) -> None:
    """Register a rule that computes the coefficients of a primitive with several results by nested ``jax.jvp``.

    Each order takes twice the time of the order below it.
    """

    def compute_coefficients(
        primals: Sequence[_Array], series: Sequence[Sequence[_Array]], **parameters: Any
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        def evaluate(time: jax.Array) -> _Derivatives:
            arguments = [_evaluate_polynomial(time, *each) for each in zip(primals, series, strict=True)]
            return [[result] for result in primitive.bind(*arguments, **parameters)]

        function: Callable[[jax.Array], _Derivatives] = evaluate
        for _ in series[0]:
            function = _with_next_derivative(function)
        results = function(jnp.zeros((), jnp.float32))
        coefficients = [_divide_by_factorials(derivatives) for derivatives in results]
        return [first for first, *_ in coefficients], [rest for _, *rest in coefficients]

    _RULES[primitive] = compute_coefficients


def use_linearity(primitive: Primitive) -> None:
    """Register a rule for a primitive that is linear in all of its arguments, unless it has a rule."""
    if primitive not in _RULES:
        jet.deflinear(primitive)


def use_refusal(primitive: Primitive, refuse: Callable[..., Any]) -> None:
    """Register a rule that calls ``refuse``, which raises."""
    _RULES[primitive] = refuse


def _evaluate_polynomial(time: jax.Array, first: _Array, rest: Sequence[_Array]) -> _Array:
    """Return ``first + rest[0] * time + rest[1] * time**2 + ...``; integers are constant."""
    if not jnp.issubdtype(jnp.result_type(first), jnp.inexact):
        return first
    first, *rest = vary_alike([jnp.asarray(first), *map(jnp.asarray, rest)])
    total = jnp.zeros_like(first)
    for term in rest[::-1]:
        total = (total + term) * time.astype(first.dtype)
    return first + total


def _with_next_derivative(function: Callable[[jax.Array], _Derivatives]) -> Callable[[jax.Array], _Derivatives]:
    """Append to each list that ``function`` returns the derivative of its last array."""

    def extended(time: jax.Array) -> _Derivatives:
        values, changes = jax.jvp(function, (time,), (jnp.ones_like(time),))
        return [[*value, change[-1]] for value, change in zip(values, changes, strict=True)]

    return extended


def _divide_by_factorials(derivatives: Sequence[jax.Array]) -> list[jax.Array]:
    """Convert derivatives of order 0, 1, 2, ... to Taylor coefficients."""
    factorial = 1.0
    coefficients = []
    for order, derivative in enumerate(derivatives):
        factorial *= max(order, 1)
        coefficients.append(derivative / jnp.asarray(factorial, derivative.dtype))
    return coefficients
