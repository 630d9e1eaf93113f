"""The drop-in ``attention_fn`` for Flax's own attention."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen as flax_linen
from flax import nnx as flax_nnx
from natten_jax.flax_modules.attention_fn import neighborhood_attention_fn

import natten_jax
from tests.support.flax_layers import FEATURES, HEADS, LAYOUTS, LINEN, RANKS, WINDOWS, inputs_of, nnx_module, shapes_of


class TestAttentionFn:
    @pytest.mark.parametrize("rank", RANKS)
    @pytest.mark.parametrize("settings", [{}, {"num_kv_heads": 2}])
    def test_nnx_module_with_it_is_neighborhood_attention(self, rank, settings):
        if not inspect.signature(flax_nnx.MultiHeadAttention.__init__).parameters.keys() >= settings.keys():
            pytest.skip("this release of Flax has no num_kv_heads")
        ours = nnx_module(rank, **settings)
        attention_fn = neighborhood_attention_fn(**WINDOWS[rank])
        theirs = flax_nnx.MultiHeadAttention(
            HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=flax_nnx.Rngs(1), **settings
        )
        flax_nnx.update(theirs, flax_nnx.state(ours))
        run = flax_nnx.jit(lambda module, inputs: module(inputs))
        np.testing.assert_array_equal(run(theirs, inputs_of(rank)), run(ours, inputs_of(rank)))

    @pytest.mark.parametrize("rank", RANKS)
    @pytest.mark.parametrize("name", ["MultiHeadDotProductAttention", "MultiHeadAttention"])
    def test_linen_module_with_it_is_neighborhood_attention(self, rank, name):
        ours = LINEN[rank](num_heads=HEADS, **WINDOWS[rank])
        theirs = getattr(flax_linen, name)(HEADS, attention_fn=neighborhood_attention_fn(**WINDOWS[rank]))
        inputs = inputs_of(rank)
        variables = ours.init(jax.random.key(0), inputs)
        assert shapes_of(theirs.init(jax.random.key(0), inputs)) == shapes_of(variables)
        np.testing.assert_array_equal(jax.jit(theirs.apply)(variables, inputs), jax.jit(ours.apply)(variables, inputs))

    @pytest.mark.parametrize("flavour", ["nnx", "linen"])
    def test_window_of_the_whole_sequence_is_flax_attention(self, flavour):
        # Flax passes an unscaled query. This test fails if the query is scaled twice or not at all.
        inputs, attention_fn = inputs_of(1), neighborhood_attention_fn(LAYOUTS[1])
        if flavour == "nnx":
            plain, ours = (
                flax_nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=flax_nnx.Rngs(0), **settings)
                for settings in ({}, {"attention_fn": attention_fn})
            )
            results = plain(inputs), ours(inputs)
        else:
            plain_linen, ours_linen = (
                flax_linen.MultiHeadAttention(HEADS, **settings) for settings in ({}, {"attention_fn": attention_fn})
            )
            variables = plain_linen.init(jax.random.key(0), inputs)
            results = plain_linen.apply(variables, inputs), ours_linen.apply(variables, inputs)
        np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)

    def test_functions_of_equal_arguments_are_equal(self):
        settings = {"kernel_size": [3, 3], "attention_kwargs": {"backend": "flex-fmha"}}
        one, other = neighborhood_attention_fn(**settings), neighborhood_attention_fn(**settings)
        assert one == other
        assert hash(one) == hash(other)
        assert one != neighborhood_attention_fn([3, 4])

    def test_dtype(self):
        query = jnp.zeros((1, 8, 2, 8))
        attend = neighborhood_attention_fn(3)
        assert attend(query, query, query, dtype=jnp.bfloat16).dtype == jnp.bfloat16
        assert attend(query.astype("bfloat16"), query, query).dtype == jnp.float32

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"mask": np.ones((1, 1, 8, 8), bool)}, r"mask must be None, got an array of shape \(1, 1, 8, 8\)"),
            ({"bias": np.ones((1, 1, 8, 8))}, "bias must be None"),
            ({"module": object()}, "module must be None, got object: attention weights are never formed"),
            ({"dropout_rate": 0.1}, "dropout_rate must be 0 unless deterministic, got 0.1"),
            ({"is_causal": True}, "give is_causal to neighborhood_attention_fn"),
            ({"input_positions": np.arange(8)}, "input_positions must be None"),
            ({"qk_attn_weights_einsum": np.einsum}, "qk_attn_weights_einsum must be None"),
        ],
    )
    def test_arguments_that_cannot_be_honoured(self, settings, message):
        query = jnp.zeros((1, 8, 2, 8))
        with pytest.raises(ValueError, match=message):
            neighborhood_attention_fn(3)(query, query, query, **settings)

    def test_arguments_without_effect(self):
        query = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
        attend = neighborhood_attention_fn(3, is_causal=True)
        expected = attend(query, query, query)
        settings = {"is_causal": True, "dropout_rate": 0.5, "deterministic": True, "precision": "highest"}
        np.testing.assert_array_equal(attend(query, query, query, **settings), expected)
        np.testing.assert_array_equal(expected, natten_jax.na1d(query, query, query, 3, is_causal=True))

    @pytest.mark.parametrize(
        ("kernel_size", "shape"), [(3, (8, 2, 8)), (3, (1, 4, 4, 4, 4, 2, 8)), ((3, 3), (1, 8, 2, 8))]
    )
    def test_queries_of_another_rank(self, kernel_size, shape):
        query = jnp.zeros(shape)
        with pytest.raises(ValueError, match=r"query has shape .* this attention_fn takes"):
            neighborhood_attention_fn(kernel_size)(query, query, query)

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"kernel_size": 0}, ValueError, "kernel_size must be at least 1"),
            ({"kernel_size": (3, 3), "stride": (1, 1, 1)}, ValueError, "stride must have 2 value"),
            ({"kernel_size": 3, "stride": 5}, ValueError, "stride .* exceeds kernel_size"),
            ({"kernel_size": 3, "backend": "none"}, ValueError, "backend='none' is unknown"),
            ({"kernel_size": 3, "tile": 3}, TypeError, "tile"),
        ],
    )
    def test_window_is_checked_at_construction(self, settings, error, message):
        with pytest.raises(error, match=message):
            neighborhood_attention_fn(**settings)
