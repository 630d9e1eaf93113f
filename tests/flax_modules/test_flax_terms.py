"""Modules with terms of logits and 8-bit arrays, and their exported programs."""

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
from natten_jax.windows import fitted
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

# Modules with a relative bias: its parameter, its gradient, and what they cannot have.


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


#: Layouts that the windows of :data:`WINDOWS` do not fit.
SMALL_LAYOUTS = {1: (7,), 2: (4, 3), 3: (2, 5, 2)}


@pytest.mark.parametrize("rank", RANKS)
def test_windows_of_small_layouts_are_clamped(rank: int) -> None:
    """Clamped windows give the results of windows that fit, with the middle of the table."""
    settings: dict[str, Any] = {**WINDOWS[rank], "relative_bias": True}
    layout, asked = SMALL_LAYOUTS[rank], np.broadcast_to(WINDOWS[rank]["kernel_size"], rank)
    sizes = fitted(WINDOWS[rank]["kernel_size"], layout, WINDOWS[rank].get("dilation", 1))
    assert sizes != tuple(asked)
    strides = tuple(map(min, np.broadcast_to(WINDOWS[rank]["stride"], rank).tolist(), sizes))
    inputs = jax.random.normal(jax.random.key(0), (2, *layout, FEATURES))
    middle = (slice(None), *(slice(k - n, k + n - 1) for k, n in zip(asked, sizes, strict=True)))

    def results(function: Any, tree: Any) -> Any:
        return jax.value_and_grad(lambda tree: jnp.sum(jnp.sin(function(tree))))(tree)

    linen = LINEN[rank](num_heads=HEADS, clamp_window=True, **settings)
    variables = linen.init(jax.random.key(0), inputs)
    table = jax.random.normal(jax.random.key(1), variables["params"]["rpb"].shape)
    variables["params"]["rpb"] = table
    found, gradients = results(lambda tree: linen.apply(tree, inputs), variables)
    fitting = LINEN[rank](num_heads=HEADS, **{**settings, "kernel_size": sizes, "stride": strides})
    cropped = {"params": variables["params"] | {"rpb": table[middle]}}
    expected, expected_gradients = results(lambda tree: fitting.apply(tree, inputs), cropped)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    gradient = np.asarray(gradients["params"]["rpb"])
    np.testing.assert_allclose(gradient[middle], expected_gradients["params"]["rpb"], atol=1e-5)
    assert gradient[middle].any()
    assert np.count_nonzero(gradient) == np.count_nonzero(gradient[middle])

    module = nnx_module(rank, clamp_window=True, relative_bias=True)
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, variables["params"])
    found, gradients = results(lambda state: nnx.merge(graph, state)(inputs), state)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients["rpb"].get_value(), gradient, atol=1e-5)


# Modules with biases of keys and with sinks.


SINKS = np.linspace(-1.0, 2.0, HEADS)


def reference(params: Any, inputs: Any, key_bias: np.ndarray, sinks: np.ndarray) -> np.ndarray:
    """Attention of all tokens to each other in float64."""
    params = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
    tokens = np.asarray(inputs, np.float64).reshape(len(inputs), -1, FEATURES)

    def project(name: str) -> np.ndarray:
        return np.einsum("btf,fhd->bthd", tokens, params[name]["kernel"]) + params[name]["bias"]

    query, key, value = map(project, ("query", "key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    weights = np.exp(logits + key_bias.reshape(len(inputs), -1, 1, tokens.shape[1]))
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None, None]
    attended = np.einsum("bhqk,bkhd->bqhd", weights, value)
    out = np.einsum("bqhd,hdf->bqf", attended, params["out"]["kernel"]) + params["out"]["bias"]
    return out.reshape(inputs.shape)


def attend(flavor: str, rank: int, inputs: jax.Array, **arguments: Any) -> tuple[Any, jax.Array]:
    """Parameters and output of a module whose windows are the whole layout, with sinks."""
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
    expected = reference(params, inputs, key_bias.astype(np.float64), SINKS)
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


# Modules that quantise queries, keys and values.


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


# Models of Flax's as exported programs, with their parameters as arguments.


IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 5, 8)), "float32")


needs_flatbuffers = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None, reason="jax.export serialises with flatbuffers"
)


def stored(function: Any, parameters: Any) -> bytes:
    """A function of parameters and inputs of any batch size as JAX stores it."""
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((batch, *IMAGES.shape[1:]), IMAGES.dtype)
    export = jax.export.export(jax.jit(function), disabled_checks=natten_jax.EXPORT_CHECKS)
    return bytes(export(parameters, inputs).serialize())


def run(program: bytes, parameters: Any) -> Any:
    """Result of a stored program."""
    return jax.export.deserialize(bytearray(program)).call(parameters, IMAGES)


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


@needs_flatbuffers
def test_the_state_of_an_nnx_model_is_an_argument_of_its_program() -> None:
    graph, state = nnx.split(Blocks(0))
    leaves, structure = jax.tree.flatten(state)
    program = stored(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(x), leaves)
    for seed in (0, 1):
        other = Blocks(seed)
        found = run(program, jax.tree.leaves(nnx.state(other)))
        np.testing.assert_allclose(found, other(IMAGES), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="Cannot serialize PyTreeDef containing an unregistered type"):
        stored(lambda state, x: nnx.merge(graph, state)(x), state)  # or else the page need not say so


@needs_flatbuffers
def test_the_parameters_of_a_linen_model_are_an_argument_of_its_program() -> None:
    model = linen.NeighborhoodAttention2D(num_heads=2, kernel_size=3)
    first, second = (model.init(jax.random.key(seed), IMAGES) for seed in (0, 1))
    program = stored(model.apply, first)
    for parameters in (first, second):
        np.testing.assert_allclose(run(program, parameters), model.apply(parameters, IMAGES), rtol=1e-6, atol=1e-6)
