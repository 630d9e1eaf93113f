"""Modules with relative biases, key biases, sinks or 8-bit arrays, and exported programs of modules."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx
from natten_jax.flax_modules import linen
from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn
from natten_jax.flax_modules.nnx import NeighborhoodAttention2D

import natten_jax
from natten_jax import na2d
from tests.support import oracle
from tests.support.flax_layers import (
    FEATURES,
    HEADS,
    LAYOUTS,
    LINEN,
    NNX,
    RANKS,
    WINDOWS,
    inputs_of,
    nnx_module,
    params_of,
)

# Modules with a relative bias: its parameter, its gradient, and unsupported options.


@pytest.mark.parametrize("rank", RANKS)
def test_the_parameter_is_drawn_as_published_models_draw_it(rank: int) -> None:
    sizes = np.broadcast_to(WINDOWS[rank]["kernel_size"], rank)
    module = nnx_module(rank, relative_bias=True, param_dtype="bfloat16")
    params = LINEN[rank](num_heads=HEADS, relative_bias=True, **WINDOWS[rank]).init(jax.random.key(0), inputs_of(rank))
    for table in (module.rpb.get_value(), params["params"]["rpb"]):
        assert table.shape == (HEADS, *(2 * sizes - 1))
        assert 0.01 < float(jnp.std(table.astype(jnp.float32))) < 0.03
    assert module.rpb.get_value().dtype == jnp.bfloat16
    assert nnx_module(rank).rpb is None


def test_other_parameters_are_drawn_as_without() -> None:
    one, other = nnx_module(2), nnx_module(2, relative_bias=True)
    np.testing.assert_array_equal(one.out.kernel.get_value(), other.out.kernel.get_value())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bias_is_learned(dtype: str) -> None:
    module, inputs = nnx_module(2, relative_bias=True, dtype=dtype), inputs_of(2)

    def loss(module: Any) -> jax.Array:
        return jnp.sum(jnp.sin(module(inputs).astype(jnp.float32)))

    gradient = nnx.grad(loss)(module)["rpb"].get_value()
    assert gradient.shape == module.rpb.shape and gradient.dtype == jnp.float32
    assert float(jnp.abs(gradient).max()) > 1e-4
    before = module(inputs)
    module.rpb[...] = module.rpb.get_value() + 3 * jax.random.normal(jax.random.key(1), module.rpb.shape)
    assert float(jnp.abs(module(inputs) - before).max()) > 1e-3


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_windows_of_small_layouts_are_clamped(flavor: str) -> None:
    """A window that is clamped to the layout gives the same output as a window of the layout's size.

    The second module's bias table is the center of the first module's table.
    """
    inputs, table = inputs_of(2)[:, :4, :3], jax.random.normal(jax.random.key(1), (HEADS, 9, 13))
    large: Any = {"kernel_size": (5, 7), "stride": 1, "dilation": 1, "relative_bias": True}
    small = {**large, "kernel_size": (4, 3)}

    def output(table: jax.Array, **settings: Any) -> jax.Array:
        module = nnx_module(2, **settings)
        module.rpb[...] = table
        if flavor == "nnx":
            return module(inputs)
        twin = LINEN[2](num_heads=HEADS, **{**WINDOWS[2], **settings})
        return twin.apply({"params": params_of(module)}, inputs)

    found = output(table, clamp_window=True, **large)
    np.testing.assert_allclose(found, output(table[:, 1:8, 4:9], **small), rtol=1e-5, atol=1e-6)


# Modules with key biases and sinks.


SINKS = np.linspace(-1.0, 2.0, HEADS)


def reference(params: Any, inputs: Any, key_bias: np.ndarray) -> np.ndarray:
    """Compute attention among all tokens in float64."""
    params, inputs = jax.tree.map(lambda array: np.asarray(array, np.float64), (params, inputs))
    query, key, value = (
        np.einsum("b...f,fhd->b...hd", inputs, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    tokens = int(np.prod(inputs.shape[1:-1]))
    operands = oracle.Tensors(query, key, value, key_bias=key_bias, sinks=SINKS)
    attended = oracle.forward(operands, np.ones((tokens, tokens), bool), (FEATURES // HEADS) ** -0.5).out
    return np.einsum("b...hd,hdf->b...f", attended, params["out"]["kernel"]) + params["out"]["bias"]


def attend(flavor: str, rank: int, inputs: jax.Array, **arguments: Any) -> tuple[Any, jax.Array]:
    """Run a module that has sinks and windows of the layout's size. Return its parameters and its output."""
    settings: Any = {"num_heads": HEADS, "kernel_size": LAYOUTS[rank], "sinks": True}
    if flavor == "nnx":
        module = NNX[rank](FEATURES, rngs=nnx.Rngs(0), **settings)
        assert not np.any(module.sinks.get_value())
        module.sinks[...] = jnp.asarray(SINKS, jnp.float32)
        return params_of(module), module(inputs, **arguments)
    linen = LINEN[rank](**settings)
    params = linen.init(jax.random.key(0), inputs)["params"]
    assert not np.any(params["sinks"])
    params = {**params, "sinks": jnp.asarray(SINKS, jnp.float32)}
    return params, linen.apply({"params": params}, inputs, **arguments)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("per_head", [False, True])
def test_results(flavor: str, rank: int, per_head: bool) -> None:
    inputs = inputs_of(rank)
    shape = (len(inputs), *([HEADS] if per_head else []), *LAYOUTS[rank])
    key_bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    params, found = attend(flavor, rank, inputs, key_bias=jnp.asarray(key_bias))
    expected = reference(params, inputs, key_bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flavor", ["nnx", "linen"])
def test_biases_of_keys_have_the_batch_dimensions_of_inputs(flavor: str) -> None:
    inputs = inputs_of(2)
    key_bias = jax.random.normal(jax.random.key(1), inputs.shape[:-1])
    _, expected = attend(flavor, 2, inputs, key_bias=key_bias)
    _, found = attend(flavor, 2, inputs[:, None], key_bias=key_bias[:, None])
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5, atol=1e-6)
    _, found = attend(flavor, 2, inputs[0], key_bias=key_bias[0])
    np.testing.assert_allclose(found, expected[0], rtol=1e-5, atol=1e-6)


def test_sinks_are_learned() -> None:
    module = NNX[2](FEATURES, num_heads=HEADS, kernel_size=3, sinks=True, param_dtype="bfloat16", rngs=nnx.Rngs(0))
    assert module.sinks.get_value().dtype == jnp.bfloat16
    gradient = nnx.grad(lambda module: jnp.sum(module(inputs_of(2)) ** 2))(module)["sinks"].get_value()
    assert gradient.shape == (HEADS,) and np.all(np.asarray(gradient, np.float32) != 0)
    assert NNX[2](FEATURES, num_heads=HEADS, kernel_size=3, rngs=nnx.Rngs(0)).sinks is None


# Modules that quantize queries, keys and values.


INPUTS = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 8, 32)), jnp.bfloat16)

SETTINGS: Any = {"num_heads": 2, "kernel_size": 3, "dtype": jnp.bfloat16}


def test_nnx() -> None:
    small, wide = (NeighborhoodAttention2D(32, fp8=fp8, rngs=nnx.Rngs(0), **SETTINGS) for fp8 in ("e4m3", None))
    out = na2d(small.query(INPUTS), small.key(INPUTS), small.value(INPUTS), 3, fp8="e4m3")
    assert jnp.array_equal(small(INPUTS), small.out(out))
    assert not jnp.array_equal(small(INPUTS), wide(INPUTS))

    def loss(module: NeighborhoodAttention2D) -> jax.Array:
        return module(INPUTS).astype(jnp.float32).sum()

    for name in ("query", "key", "value"):
        gradients, expected = (getattr(nnx.grad(loss)(module), name).kernel[...] for module in (small, wide))
        np.testing.assert_array_equal(np.asarray(gradients, np.float32), np.asarray(expected, np.float32))


def test_linen() -> None:
    small, wide = (linen.NeighborhoodAttention2D(fp8=fp8, **SETTINGS) for fp8 in ("e4m3", None))
    parameters = wide.init(jax.random.key(0), INPUTS)
    out, expected = (np.asarray(each.apply(parameters, INPUTS), np.float32) for each in (small, wide))
    assert 1e-4 < np.linalg.norm(out - expected) / np.linalg.norm(expected) < 0.1


def test_attention_fn() -> None:
    query = INPUTS.reshape(1, 6, 8, 2, 16)
    found = neighborhood_attention_fn(kernel_size=3, fp8="e4m3")(query, query, query)
    assert jnp.array_equal(found, na2d(query, query, query, 3, fp8="e4m3"))


# Flax models as exported programs, with their parameters as arguments.


@pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="jax.export serialises with flatbuffers")
def test_the_state_of_an_nnx_model_is_an_argument_of_its_program() -> None:
    """The model is a sequence of two layers, so its state has integer keys. The state is passed as a list of arrays."""
    (batch,) = jax.export.symbolic_shape("batch")
    images = jax.random.normal(jax.random.key(0), (2, 6, 5, 8))

    def model(seed: int) -> Any:
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(*(NeighborhoodAttention2D(8, num_heads=2, kernel_size=3, rngs=rngs) for _ in range(2)))

    def stored(function: Any, parameters: Any) -> bytes:
        export = jax.export.export(jax.jit(function), disabled_checks=natten_jax.EXPORT_CHECKS)
        inputs = jax.ShapeDtypeStruct((batch, *images.shape[1:]), images.dtype)
        return bytes(export(parameters, inputs).serialize())

    graph, state = nnx.split(model(0))
    leaves, structure = jax.tree.flatten(state)
    program = stored(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x), leaves)
    for seed in (0, 1):
        found = jax.export.deserialize(bytearray(program)).call(jax.tree.leaves(nnx.state(model(seed))), images)
        np.testing.assert_allclose(found, model(seed)(images), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="Cannot serialize PyTreeDef containing an unregistered type"):
        stored(lambda state, x: nnx.merge(graph, state)(x), state)  # docs/export.md says that this fails
