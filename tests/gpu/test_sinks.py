"""Gradients of sinks on NVIDIA GPUs, however kernels for small windows come by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import na2d
from tests.support.families import Family, family_named
from tests.support.problems import Case, Trial, check_all, check_gradient_repeats

pytestmark = pytest.mark.gpu

_HALVES = ("bfloat16", "float16")
CASES = {
    # The kernel of key and value gradients adds up what tiles of queries wrote.
    "regions": Case((40, 56), (7, 7), heads=3, heads_kv=3, head_dim=32, batch=2),
    "regions that are not full": Case((37, 19), (5, 5), heads=2, heads_kv=2, head_dim=64, batch=3),
    "dilation groups of unlike lengths": Case((33, 50), (7, 5), dilation=(4, 3), heads=2, heads_kv=2, head_dim=32),
    "chunks": Case((20, 24), (5, 7), heads=6, heads_kv=2, head_dim=24, batch=2),
    "wide heads": Case((24, 20), (5, 5), heads=2, heads_kv=2, head_dim=128),
    "more heads than regions": Case((4, 4), (3, 3), heads=48, heads_kv=16, head_dim=32),
    "many entries": Case((20, 9), (5, 5), heads=5, heads_kv=5, head_dim=32, batch=70),
    "additional tokens": Case((19, 22), (5, 5), heads=4, heads_kv=2, head_dim=32, additional=9, fused=True),
    "a relative bias": Case((24, 31), (7, 7), heads=2, heads_kv=2, head_dim=32, relative_bias=True),
    "biases of keys": Case((24, 31), (7, 7), heads=2, heads_kv=2, head_dim=32, key_bias="tokens", hidden=0.4),
    "nothing is seen": Case((18, 17), (3, 3), heads=2, heads_kv=2, head_dim=32, key_bias="heads", hidden=0.9),
    "wraps": Case((18, 26), (5, 5), edges=("wrap", "wrap"), heads=2, heads_kv=2, head_dim=32),
    # A kernel of its own does.
    "whole layout": Case((7, 7), (7, 7), heads=8, heads_kv=8, head_dim=32, batch=8),
    "many whole layouts": Case((7, 7), (7, 7), heads=16, heads_kv=16, head_dim=32, batch=67),
    "whole groups": Case((14, 21), (7, 7), dilation=(2, 3), heads=4, heads_kv=4, head_dim=32),
    "groups that are not full": Case((15, 19), (7, 5), dilation=(2, 3), heads=3, heads_kv=3, head_dim=64, batch=5),
    "whole layout with a relative bias": Case((7, 7), (7, 7), heads=4, heads_kv=4, head_dim=32, relative_bias=True),
    "whole layout with biases of keys": Case((7, 6), (7, 5), heads=4, heads_kv=4, head_dim=32, key_bias="tokens"),
    # Kernels of their own do all.
    "layouts": Case((19, 22), (5, 5), heads=2, heads_kv=2, head_dim=32, batch=2, extents=((19, 13), (7, 22))),
    "ring": Case((30, 40), (13, 13), heads=2, heads_kv=2, head_dim=64, batch=2),
    "scales": Case((19, 17), (5, 3), heads=4, heads_kv=2, head_dim=32, scales=(0.3, -0.5, 0.0, 8e-4)),
}


def _with_sinks(case: Case) -> Case:
    return dataclasses.replace(case, sinks=True)


def cutlass() -> Family:
    """The portable kernels."""
    return family_named("cutlass")


@pytest.mark.parametrize("dtype", _HALVES)
def test_gradients_of_sinks(dtype: str) -> None:
    check_all(
        [Trial(_with_sinks(case), dtype, seed) for case in CASES.values() for seed in (0, 1)], cutlass(), slack=1.5
    )


def test_gradients_of_sinks_are_reproducible() -> None:
    for name in ("regions", "many entries", "many whole layouts", "groups that are not full", "layouts", "ring"):
        check_gradient_repeats(_with_sinks(CASES[name]), "cutlass-fna", "sinks")


@pytest.mark.parametrize("layout", [(7, 7), (28, 30)], ids=["whole", "regions"])
def test_sinks_of_each_entry_of_a_mapped_call(layout: tuple[int, int]) -> None:
    """Batch entries of the kernels then have sinks of their own."""
    query = jax.random.normal(jax.random.key(0), (3, 2, *layout, 4, 32), jnp.bfloat16)
    sinks = jax.random.normal(jax.random.key(1), (3, 4))

    def gradient(query: Any, sinks: Any) -> Any:
        def loss(sinks: Any) -> Any:
            out = na2d(query, query, query, 7, sinks=sinks, backend="cutlass-fna")
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss)(sinks)

    together = np.asarray(jax.jit(jax.vmap(gradient))(query, sinks))
    alone = np.stack([np.asarray(jax.jit(gradient)(*each)) for each in zip(query, sinks, strict=True)])
    np.testing.assert_allclose(together, alone, rtol=2e-3, atol=1e-3)  # outputs may be rounded elsewhere


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("dtype", _HALVES)
def test_scales_and_sinks_of_more_items_than_a_warp_has_lanes(dtype: str, head_dim: int) -> None:
    """A CTA then goes over more heads and batch entries than it holds the scales and sinks of at a time."""
    batch, heads = 4096, 12
    query = jax.random.normal(jax.random.key(0), (batch, 7, 7, heads, head_dim), jnp.dtype(dtype))
    scale = jnp.linspace(0.05, 0.4, heads)
    sinks = jnp.linspace(-3.0, 6.0, heads)

    out = na2d(query, query, query, 7, scale=scale, sinks=sinks, backend="cutlass-fna")
    for first in range(0, batch, 512):
        tokens = query[first : first + 8].reshape(8, 49, heads, head_dim).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits = jnp.einsum("bqhd,bkhd->bhqk", tokens, tokens) * scale[:, None, None]
            of_sinks = jnp.broadcast_to(sinks[:, None, None], (8, heads, 49, 1))
            weights = jax.nn.softmax(jnp.concatenate([logits, of_sinks], -1), -1)[..., :-1]
            expected = jnp.einsum("bhqk,bkhd->bqhd", weights, tokens)
        found = out[first : first + 8].reshape(expected.shape).astype(jnp.float32)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-2, atol=2e-2)
