"""Small windows with a ring and biases of keys: results and all gradients.

Random problems are those of ``python -m tests.fuzz --backend cutlass --direct --feature key_bias ring``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax.cost_model import small_windows
from natten_jax.performance import Pass, TilePair
from natten_jax.simulator import problem_of
from tests.support import oracle

from .test_small_window_ring_biases import COPIES, OPERATORS, PROBLEMS, window_of

pytestmark = pytest.mark.gpu

DTYPES = [jnp.bfloat16, jnp.float16]


class Biased(NamedTuple):
    """Operands of one batch entry, and the cotangents of its output and logsumexp."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    key_bias: jax.Array
    cotangent: jax.Array
    lse_cotangent: jax.Array


def ring_tiles(name: str, dtype: Any, pass_: Pass) -> TilePair:
    """The fastest tiles with which all kernels of a pass have a ring."""
    layout, _, heads, width = PROBLEMS[name]
    sizes: dict[str, Any] = {"batch": COPIES, "heads": heads, "head_dim": width, "dtype": jnp.dtype(dtype).name}
    problem = dataclasses.replace(problem_of(layout, **window_of(name), **sizes), key_bias=True)
    for pair, _ in small_windows.ranked("cutlass", problem, pass_, (9, 0)):
        found = small_windows.estimate("cutlass", problem, pass_, pair, (9, 0))
        if found is not None and all("with a ring" in launch.kernel for launch in found.launches):
            return pair
    raise AssertionError(f"no tiles of {problem} have rings")


def drawn(name: str, dtype: Any, gain: float, kind: str) -> Biased:
    """A third of the keys is hidden, and all that some queries see; no gradient comes from the latter's logsumexp."""
    layout, _, heads, width = PROBLEMS[name]
    shape = (1, *layout, heads, width)
    query, key, value, cotangent = (jax.random.normal(jax.random.key(i), shape, jnp.float32) for i in range(4))
    bias = 2 * jax.random.normal(jax.random.key(4), (1, *((heads,) if kind == "heads" else ()), *layout))
    bias = jnp.where(jax.random.bernoulli(jax.random.key(5), 1 / 3, bias.shape), -jnp.inf, bias)
    corner = tuple(slice(0, k + 2) for k in window_of(name)["kernel_size"])
    bias = bias.at[(..., *corner)].set(-jnp.inf)
    of_logsumexp = jax.random.normal(jax.random.key(6), shape[:-1])
    of_logsumexp = of_logsumexp.at[(0, *corner)].set(0.0)
    query, key, value, cotangent = (array.astype(dtype) for array in (gain * query, key, value, cotangent))
    return Biased(query, key, value, bias, cotangent, of_logsumexp)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def results(
    name: str, tiles: TilePair, backward_tiles: TilePair, arrays: Biased
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and logsumexp, and gradients, of ``COPIES`` copies of a batch entry."""
    query, key, value, bias, *cotangents = (jnp.repeat(array, COPIES, 0) for array in arrays)
    function = functools.partial(
        OPERATORS[len(PROBLEMS[name][0])],
        **window_of(name),
        backend="cutlass-fna",
        q_tile_shape=tiles[0],
        kv_tile_shape=tiles[1],
        backward_q_tile_shape=backward_tiles[0],
        backward_kv_tile_shape=backward_tiles[1],
        return_lse=True,
    )
    found, pullback = jax.vjp(lambda *of: function(*of[:3], key_bias=of[3]), query, key, value, bias)
    return tuple(found), pullback(tuple(cotangents))


def tiles_of(name: str, dtype: Any) -> tuple[TilePair, TilePair]:
    return ring_tiles(name, dtype, "forward"), ring_tiles(name, dtype, "backward")


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # beside large logits, gradients need what float32 leaves out
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tokens", "heads"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_biases_of_keys(name: str, kind: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    layout, _, heads, width = PROBLEMS[name]
    arrays = drawn(name, dtype, gain, kind)
    (out, logsumexp), found = results(name, *tiles_of(name, dtype), arrays)
    mask = oracle.neighborhood_mask(layout, **window_of(name))
    bound = 1.8e-2 if dtype == jnp.bfloat16 else 3e-3
    if gain > 100:
        bound = 7e-2  # see test_gradients_with_a_relative_bias
    of_all = np.zeros((1, *layout))
    for head in range(heads) if kind == "tokens" else (1, heads - 1):
        own = slice(head, head + 1)
        query, key, value, upstream = (np.asarray(arrays[i][..., own, :]) for i in (0, 1, 2, 4))
        bias = np.asarray(arrays.key_bias[:, own] if kind == "heads" else arrays.key_bias)
        tensors = oracle.Tensors(query, key, value, key_bias=bias)
        of_lse = np.asarray(arrays.lse_cotangent[..., own])
        exact = oracle.reference(tensors, mask, width**-0.5, upstream, of_lse)
        of_all += np.asarray(exact.gradients.key_bias).reshape(of_all.shape)
        pairs = [
            (out[..., own, :], exact.forward.out),
            *zip((each[..., own, :] for each in found[:3]), exact.gradients[:3], strict=True),
        ]
        if kind == "heads":
            pairs.append((found[3][:, own], exact.gradients.key_bias))
        for of_head, expected in pairs:
            values = np.asarray(of_head)
            np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))
            error = values[:1].astype(np.float64) - expected
            assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)
        of_rows = np.asarray(logsumexp[:1, ..., own], np.float64)
        is_seen = np.isfinite(exact.forward.lse)
        assert 0 < is_seen.sum() < is_seen.size
        np.testing.assert_array_equal(of_rows[~is_seen], exact.forward.lse[~is_seen])
        error = of_rows[is_seen] - exact.forward.lse[is_seen]
        assert np.linalg.norm(error) <= 2e-6 * np.linalg.norm(exact.forward.lse[is_seen])
    if kind == "tokens":
        error = np.asarray(found[3][:1], np.float64) - of_all
        assert np.linalg.norm(error) <= bound * np.linalg.norm(of_all)


@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_biases_of_keys_are_reproducible(name: str) -> None:
    arrays, tiles = drawn(name, jnp.bfloat16, 1.0, "heads"), tiles_of(name, jnp.bfloat16)
    first = results(name, *tiles, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, results(name, *tiles, arrays), first)


def test_what_hides_nothing_changes_nothing() -> None:
    """Biases of zero give the bits of a call without any."""
    name = "13x13"
    arrays = drawn(name, jnp.bfloat16, 1.0, "tokens")
    arrays = arrays._replace(key_bias=jnp.zeros_like(arrays.key_bias))
    tiles = tiles_of(name, jnp.bfloat16)
    (out, logsumexp), _ = results(name, *tiles, arrays)
    plain = OPERATORS[2](
        *(jnp.repeat(array, COPIES, 0) for array in arrays[:3]),
        **window_of(name),
        backend="cutlass-fna",
        q_tile_shape=tiles[0][0],
        kv_tile_shape=tiles[0][1],
        return_lse=True,
    )
    jax.tree.map(np.testing.assert_array_equal, (out, logsumexp), tuple(plain))
