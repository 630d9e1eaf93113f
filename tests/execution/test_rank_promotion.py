"""Everything works where ``jax.numpy_rank_promotion("raise")`` forbids arrays of different ranks to meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support.families import Family
from tests.support.problems import Case

PLAIN = Case((5, 6), (3, 4), stride=(2, 1), dilation=(1, 1), heads=2, heads_kv=1, batch=2)
CASES = {
    "1d": Case((9,), (3,), dilation=(2,), is_causal=(True,), heads=2),
    "2d": PLAIN,
    "3d": Case((3, 4, 5), (2, 3, 3), stride=(1, 2, 1), heads=2),
    "fused": dataclasses.replace(PLAIN, additional=3, fused=True),
    "merged": dataclasses.replace(PLAIN, additional=3),
    "whole": dataclasses.replace(PLAIN, kernel_size=None, additional=3, stride=None),
    "attention": Case((9,), queries=7, heads=4, heads_kv=2),
    "scales": dataclasses.replace(PLAIN, additional=3, fused=True, scales=(0.3, -0.4)),
    "scale": dataclasses.replace(PLAIN, scales=(0.3,)),
}


@pytest.fixture(autouse=True)
def _promotion_raises() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield


def scalar(results: Any) -> jax.Array:
    return sum((jnp.sum(jnp.sin(each.astype("float32"))) for each in jax.tree.leaves(results)), jnp.zeros(()))


@pytest.mark.parametrize("name", CASES)
def test_operators_and_gradients(family: Family, name: str) -> None:
    case = CASES[name].fitted(family)
    backend = family.fmha if case.queries is not None else family.fna
    operands = case.operands(family.dtype, 0)
    function = case.operator(backend)
    gradients = jax.eval_shape(jax.grad(lambda operands: scalar(function(operands))), operands)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, operands)


@pytest.mark.parametrize("name", ["2d", "fused", "merged", "attention"])
def test_vmap(family: Family, name: str) -> None:
    case = CASES[name].fitted(family)
    operands = case.operands(family.dtype, 0)
    function = case.operator(family.fmha if case.queries is not None else family.fna)
    stacked = jax.tree.map(lambda array: jnp.stack([array, array]), operands)
    gradients = jax.eval_shape(jax.vmap(jax.grad(lambda operands: scalar(function(operands)))), stacked)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, stacked)
    # One operand that all share.
    axes = operands._replace(**{name: None if each is None else 0 for name, each in operands._asdict().items()})
    shared = jax.vmap(function, in_axes=(axes._replace(key=None),))
    out, _ = jax.eval_shape(shared, stacked._replace(key=operands.key))
    assert out.shape == (2, *operands.query.shape)


def test_performance_arguments(native_family: Family) -> None:
    case = CASES["fused"].fitted(native_family)
    operands = case.operands(native_family.dtype, 0)
    for settings in ({"backward_use_xla_reduction": True}, {"backward_deterministic": True}):
        function = case.operator(native_family.fna, **settings)
        jax.eval_shape(jax.grad(lambda operands, function=function: scalar(function(operands))), operands)


def test_forward_mode_and_second_derivatives(pure_family: Family) -> None:
    case = CASES["fused"].fitted(pure_family)
    operands = case.operands(pure_family.dtype, 0)
    function = case.operator(pure_family.fna)
    gradient = jax.grad(lambda operands: scalar(function(operands)))
    for derived in (function, gradient):
        primals, tangents = jax.eval_shape(lambda o, f=derived: jax.jvp(f, (o,), (o,)), operands)
        assert jax.tree.map(jnp.shape, primals) == jax.tree.map(jnp.shape, tangents)


def test_merge_attentions() -> None:
    outputs, lses = [jnp.ones((2, 5, 3, 8)), jnp.zeros((2, 5, 3, 8))], [jnp.zeros((2, 5, 3))] * 2
    out, lse = natten_jax.merge_attentions(outputs, lses)
    np.testing.assert_allclose(out, np.full((2, 5, 3, 8), 0.5))
    np.testing.assert_allclose(lse, np.full((2, 5, 3), np.log(2)), rtol=1e-6)
    gradients = jax.grad(lambda *parts: scalar(natten_jax.merge_attentions(*parts)), argnums=(0, 1))(outputs, lses)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, (outputs, lses))
    stacked = jax.tree.map(lambda array: jnp.stack([array] * 4), (outputs, lses))
    out, _ = jax.vmap(natten_jax.merge_attentions)(*stacked)
    assert out.shape == (4, 2, 5, 3, 8)


@pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2}, {"proj_drop": 0.5, "deterministic": False}])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_flax_modules(rank: int, settings: dict[str, Any]) -> None:
    layers = pytest.importorskip("tests.support.flax_layers")
    from flax import nnx

    inputs = layers.inputs_of(rank)
    gradients = jax.eval_shape(
        lambda: nnx.grad(lambda module: scalar(module(inputs)))(layers.nnx_module(rank, **settings))
    )
    assert jax.tree.leaves(gradients)
    module = layers.LINEN[rank](num_heads=layers.HEADS, **layers.WINDOWS[rank], **settings)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda: module.init(keys, inputs))
    gradients = jax.eval_shape(
        jax.grad(lambda variables: scalar(module.apply(variables, inputs, rngs=keys))), variables
    )
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, variables)


def test_flax_attention_function() -> None:
    layers = pytest.importorskip("tests.support.flax_layers")
    from flax import nnx
    from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

    attention_fn = neighborhood_attention_fn(**layers.WINDOWS[2])
    module = nnx.MultiHeadAttention(
        layers.HEADS, layers.FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    assert jax.tree.leaves(nnx.grad(lambda module: scalar(module(layers.inputs_of(2))))(module))
