"""Calls that quantise their arrays, with the gradients of the call that does not: rounding counts as the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arguments.stand_ins import array_of
from natten_jax.arguments.static import flag
from natten_jax.ops.float8 import NOTHING, Float8Arguments
from natten_jax.sharding.explicit import split_like

Call = Callable[[Any, Float8Arguments], Any]


def straight_through(call: Call, operands: Any, arguments: Float8Arguments, return_lse: bool) -> Any:
    """Output of a call that quantises its arrays; with the logsumexp, if that is asked for.

    Args:
        call: Computes both from operands and arguments.
        operands: A tree of arrays and of what is none.
        arguments: The arguments of the call; of the one whose gradients are taken there are none.
        return_lse: The operators' argument.
    """
    return_lse = flag("return_lse", return_lse)
    leaves, structure = jax.tree.flatten(operands)
    leaves = [array_of(leaf) for leaf in leaves]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}

    def run(arrays: dict[int, Any], arguments: Float8Arguments) -> Any:
        every = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return call(jax.tree.unflatten(structure, every), arguments)

    @jax.custom_vjp
    def quantizing(arrays: dict[int, Any]) -> Any:
        return run(arrays, arguments)

    def forward(arrays: dict[int, Any]) -> Any:
        return run(arrays, arguments), arrays

    def backward(arrays: dict[int, Any], cotangents: Any) -> Any:
        floats = {i: array for i, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        outputs, transpose = jax.vjp(lambda floats: run({**arrays, **floats}, NOTHING), floats)
        # Without 8-bit arrays, explicit mesh axes may split the outputs in another way.
        (gradients,) = transpose(jax.tree.map(split_like, cotangents, outputs))
        return ({i: gradients.get(i) for i in arrays},)

    quantizing.defvjp(forward, backward)
    output = quantizing(arrays)
    return output if return_lse else output[0]
