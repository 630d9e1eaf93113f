"""Loops of the ``flex`` backend, which are none where there is one round: XLA compiles that in half the time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

_State = TypeVar("_State")
_Carry = TypeVar("_Carry")
_Inputs = TypeVar("_Inputs")
_Outputs = TypeVar("_Outputs")


def repeated(
    rounds: int,
    visit: Callable[[jax.Array, _State], _State],
    state: _State,
    is_needed: Callable[[jax.Array], jax.Array] | None = None,
) -> _State:
    """``visit`` with the numbers of so many rounds, one after the other: of those that are needed, or of all."""

    def visit_if_needed(number: jax.Array, state: _State) -> _State:
        if is_needed is None:
            return visit(number, state)
        needed = is_needed(number)
        visited: _State = lax.cond(needed, functools.partial(visit, number), lambda same: same, state)
        return visited

    if rounds == 1:
        return visit_if_needed(jnp.zeros((), jnp.int32), state)
    result: _State = lax.fori_loop(0, rounds, visit_if_needed, state)
    return result


def swept(
    step: Callable[[_Carry, _Inputs], tuple[_Carry, _Outputs]], carry: _Carry, inputs: _Inputs
) -> tuple[_Carry, _Outputs]:
    """``lax.scan`` over the first dimension of all ``inputs``, of which derivatives of a step are computed anew."""
    step = jax.checkpoint(step)
    if len(jax.tree.leaves(inputs)[0]) > 1:
        result: tuple[_Carry, _Outputs] = lax.scan(step, carry, inputs)
        return result
    only: _Inputs = jax.tree.map(lambda array: lax.squeeze(array, (0,)), inputs)
    carry, outputs = step(carry, only)
    stacked: _Outputs = jax.tree.map(lambda array: lax.expand_dims(array, (0,)), outputs)
    return carry, stacked
