"""Models of Flax's as exported programs, with their parameters as arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax

pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
pytest.importorskip("flax")

from flax import nnx
from natten_jax.flax_modules import linen
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D

INPUTS = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 5, 8)), "float32")


def stored(function: Any, parameters: Any) -> bytes:
    """A function of parameters and inputs of any batch size as JAX stores it."""
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((batch, *INPUTS.shape[1:]), INPUTS.dtype)
    export = jax.export.export(jax.jit(function), disabled_checks=natten_jax.EXPORT_CHECKS)
    return bytes(export(parameters, inputs).serialize())


def run(program: bytes, parameters: Any) -> Any:
    """What a stored program computes."""
    return jax.export.deserialize(bytearray(program)).call(parameters, INPUTS)


class Blocks(nnx.Module):
    """Two layers in a list, whose state has numbers for keys."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([NeighborhoodAttention2D(8, num_heads=2, kernel_size=3, rngs=rngs) for _ in range(2)])

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Both, one after the other."""
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return inputs


def test_the_state_of_an_nnx_model_is_an_argument_of_its_program() -> None:
    graph, state = nnx.split(Blocks(0))
    leaves, structure = jax.tree.flatten(state)
    program = stored(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x), leaves)
    for seed in (0, 1):
        other = Blocks(seed)
        found = run(program, jax.tree.leaves(nnx.state(other)))
        np.testing.assert_allclose(found, other(INPUTS), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="Cannot serialize PyTreeDef containing an unregistered type"):
        stored(lambda state, x: nnx.merge(graph, state)(x), state)  # or else the page need not say so


def test_the_parameters_of_a_linen_model_are_an_argument_of_its_program() -> None:
    model = linen.NeighborhoodAttention2D(num_heads=2, kernel_size=3)
    first, second = (model.init(jax.random.key(seed), INPUTS) for seed in (0, 1))
    program = stored(model.apply, first)
    for parameters in (first, second):
        np.testing.assert_allclose(run(program, parameters), model.apply(parameters, INPUTS), rtol=1e-6, atol=1e-6)
