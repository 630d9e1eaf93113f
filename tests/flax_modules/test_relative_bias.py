"""Modules with a relative bias: its parameter, its gradient, and what they cannot have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from natten_jax.windows import fitted
from tests.support.flax_layers import FEATURES, HEADS, LINEN, NNX, RANKS, WINDOWS, inputs_of, nnx_module


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


def test_what_cannot_be() -> None:
    for make in (
        lambda **given: NNX[1](FEATURES, num_heads=2, rngs=nnx.Rngs(0), **given),
        lambda **given: LINEN[1](num_heads=2, **given),
    ):
        with pytest.raises(ValueError, match=r"relative_bias=True with kernel_size \(-1,\)"):
            make(kernel_size=-1, relative_bias=True)
        with pytest.raises(TypeError, match="relative_bias must be"):
            make(kernel_size=3, relative_bias=2)
