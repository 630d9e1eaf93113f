"""The profiler's baseline from tokamax, which tests do not install: a stand-in for the package."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.profiler import baselines

SHAPE = (2, 4, 3, 6, 8)


def install(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    """Let ``import tokamax`` find a module with this attention."""
    module = types.ModuleType("tokamax")
    module.__dict__["dot_product_attention"] = attend
    monkeypatch.setitem(sys.modules, "tokamax", module)


def test_pallas_is_the_attention_of_tokamax_over_flat_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, implementation: str) -> jax.Array:
        called.append(implementation)
        return jax.nn.dot_product_attention(query, key, value)

    install(monkeypatch, attend)
    query = jax.random.normal(jax.random.key(0), SHAPE)
    key, value = (jax.random.normal(jax.random.key(seed), (*SHAPE[:3], 2, SHAPE[4])) for seed in (1, 2))
    found = baselines.attend("pallas", query, key, value)
    assert called == ["mosaic"]
    np.testing.assert_allclose(found, baselines.attend("xla", query, key, value), atol=1e-6)


def test_pallas_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=r"needs the package tokamax, on Python 3\.12 or later"):
        baselines.attend("pallas", x, x, x)


def test_pallas_says_what_tokamax_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arrays: jax.Array, implementation: str) -> jax.Array:
        raise NotImplementedError("only NVIDIA GPUs of compute capability 9.0")

    install(monkeypatch, attend)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=r"tokamax has no Pallas kernel .*: only NVIDIA GPUs"):
        baselines.attend("pallas", x, x, x)
