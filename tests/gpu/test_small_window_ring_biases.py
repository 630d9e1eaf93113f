"""Small windows with a ring and a relative bias: results, and all gradients, of which those of queries have regions.

Random problems are those of ``python -m tests.fuzz --backend cutlass --direct --feature relative_bias ring``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.cost_model import small_windows
from natten_jax.performance import Pass, TilePair
from natten_jax.simulator import problem_of
from tests.support import oracle

pytestmark = pytest.mark.gpu

OPERATORS: dict[int, Callable[..., Any]] = {2: natten_jax.na2d, 3: natten_jax.na3d}

#: Layout, window, heads and their width; borders on all sides, most ragged ones.
PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any], int, int]] = {
    "13x13": ((37, 33), {"kernel_size": 13}, 8, 64),
    "13x13, narrow": ((34, 41), {"kernel_size": 13}, 8, 32),
    "strides": ((36, 38), {"kernel_size": (13, 12), "stride": (1, 3)}, 8, 64),
    "causal": ((38, 35), {"kernel_size": (13, 13), "is_causal": (False, True)}, 8, 64),
    "clips": ((8, 13, 12), {"kernel_size": (8, 7, 7)}, 6, 32),
    "volume": ((11, 12, 10), {"kernel_size": 5}, 4, 32),
}
DTYPES = [jnp.bfloat16, jnp.float16]
#: Batch entries, which are all alike: what differs between them depends on when it was computed.
COPIES = 40


def window_of(name: str) -> dict[str, Any]:
    layout, window, *_ = PROBLEMS[name]
    every: dict[str, Any] = {"stride": 1, "dilation": 1, "is_causal": False} | window
    return {key: value if isinstance(value, tuple) else (value,) * len(layout) for key, value in every.items()}


def ring_tiles(name: str, dtype: Any, pass_: Pass = "backward") -> TilePair:
    """The fastest tiles with which a pass has a ring: in backward passes, key and value gradients have."""
    layout, _, heads, width = PROBLEMS[name]
    sizes: dict[str, Any] = {"batch": COPIES, "heads": heads, "head_dim": width, "dtype": jnp.dtype(dtype).name}
    problem = dataclasses.replace(problem_of(layout, **window_of(name), **sizes), relative_bias=True)
    for pair, _ in small_windows.ranked("cutlass", problem, pass_, (9, 0)):
        found = small_windows.estimate("cutlass", problem, pass_, pair, (9, 0))
        if found is not None and found.launches[-1].kernel.endswith("with a ring"):
            return pair
    raise AssertionError(f"no tiles of {problem} have a ring")


def drawn(name: str, dtype: Any, gain: float, has_tables_of_entries: bool = False) -> tuple[jax.Array, ...]:
    """Query, key and value of one batch entry, a table, and the cotangent of the output."""
    layout, _, heads, width = PROBLEMS[name]
    shape = (1, *layout, heads, width)
    query, key, value, cotangent = (jax.random.normal(jax.random.key(i), shape, jnp.float32) for i in range(4))
    table = jax.random.normal(jax.random.key(4), (heads, *(2 * k - 1 for k in window_of(name)["kernel_size"])))
    # Some offsets are hidden, but never all of those that a query sees.
    table = table.at[1, 1].set(-jnp.inf)
    halves = [array.astype(dtype) for array in (gain * query, key, value, cotangent)]
    return (*halves[:3], table, halves[3])


@functools.partial(jax.jit, static_argnums=(0, 1))
def results(name: str, pair: TilePair, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Outputs and logsumexp of ``COPIES`` copies of a batch entry's query, key and value, and the table of all."""
    query, key, value = (jnp.repeat(array, COPIES, 0) for array in arrays[:3])
    function: Callable[..., tuple[jax.Array, ...]] = functools.partial(
        OPERATORS[len(PROBLEMS[name][0])],
        **window_of(name),
        relative_bias=arrays[3],
        backend="cutlass-fna",
        q_tile_shape=pair[0],
        kv_tile_shape=pair[1],
        return_lse=True,
    )
    return function(query, key, value)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(name: str, pair: TilePair, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients of ``COPIES`` copies of a batch entry's query, key and value, and the table that all have."""
    *_, cotangent = arrays
    query, key, value, cotangent = (jnp.repeat(array, COPIES, 0) for array in (*arrays[:3], cotangent))
    function = functools.partial(
        OPERATORS[len(PROBLEMS[name][0])],
        **window_of(name),
        backend="cutlass-fna",
        backward_q_tile_shape=pair[0],
        backward_kv_tile_shape=pair[1],
    )
    _, pullback = jax.vjp(lambda *of: function(*of[:3], relative_bias=of[3]), query, key, value, arrays[3])
    found: tuple[jax.Array, ...] = pullback(cotangent)
    return found


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # beside large logits, sums are computed once more
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_with_a_relative_bias(name: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    layout, _, heads, width = PROBLEMS[name]
    arrays = drawn(name, dtype, gain)
    out, logsumexp = results(name, ring_tiles(name, dtype, "forward"), *arrays[:4])
    entries = oracle.relative_entries(layout, **window_of(name))
    mask = oracle.neighborhood_mask(layout, **window_of(name))
    bound = 1.8e-2 if dtype == jnp.bfloat16 else 3e-3
    for head in range(heads):
        own = slice(head, head + 1)
        query, key, value = (np.asarray(arrays[i][..., own, :]) for i in range(3))
        tensors = oracle.Tensors(query, key, value, relative_bias=np.asarray(arrays[3][own]))
        exact = oracle.forward(tensors, mask, width**-0.5, entries)
        of_head, of_rows = np.asarray(out[..., own, :]), np.asarray(logsumexp[..., own])
        for found in (of_head, of_rows):
            np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
        assert np.linalg.norm(of_head[:1].astype(np.float64) - exact.out) <= bound * np.linalg.norm(exact.out)
        assert np.linalg.norm(of_rows[:1].astype(np.float64) - exact.lse) <= 2e-6 * np.linalg.norm(exact.lse)


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # beside large logits, gradients need what float32 leaves out
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_with_a_relative_bias(name: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    layout, _, heads, width = PROBLEMS[name]
    arrays = drawn(name, dtype, gain)
    found = gradients(name, ring_tiles(name, dtype), *arrays)
    entries = oracle.relative_entries(layout, **window_of(name))
    mask = oracle.neighborhood_mask(layout, **window_of(name))
    bound = 1.8e-2 if dtype == jnp.bfloat16 else 3e-3
    if gain > 100:
        # All but a few queries see one key, and have no gradient; those of the few are what rounded outputs leave of
        # differences: float64 with outputs rounded to bfloat16 is up to 3.9e-2 off.
        bound = 7e-2
    for head in (1, heads - 1):
        own = slice(head, head + 1)
        query, key, value, upstream = (np.asarray(arrays[i][..., own, :]) for i in (0, 1, 2, 4))
        tensors = oracle.Tensors(query, key, value, relative_bias=np.asarray(arrays[3][own]))
        of_logsumexp = np.zeros(upstream.shape[:-1])
        exact = oracle.reference(tensors, mask, width**-0.5, upstream, of_logsumexp, entries=entries).gradients
        for gradient, expected in zip(found[:3], exact[:3], strict=True):
            of_head = np.asarray(gradient[..., own, :])
            np.testing.assert_array_equal(of_head, np.broadcast_to(of_head[:1], of_head.shape))
            error = of_head[:1].astype(np.float64) - expected
            assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)
        of_table = COPIES * np.asarray(exact.relative_bias)
        error = np.asarray(found[3][own], np.float64) - of_table
        assert np.linalg.norm(error) <= bound * np.linalg.norm(of_table)


@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
@pytest.mark.parametrize("function", [results, gradients])
def test_a_call_with_a_relative_bias_is_reproducible(function: Callable[..., Any], name: str) -> None:
    arrays = drawn(name, jnp.bfloat16, 1.0)
    pair = ring_tiles(name, jnp.bfloat16, "forward" if function is results else "backward")
    first = function(name, pair, *arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, function(name, pair, *arrays), first)


def test_heads_have_scales_sinks_and_tables_of_their_own() -> None:
    """With tables and scales of batch entries, a call is as many calls of one entry each."""
    name, dtype = "13x13, narrow", jnp.bfloat16
    *arrays, table, cotangent = drawn(name, dtype, 1.0)
    heads, width = PROBLEMS[name][2:]
    batch = 4
    shift = jnp.arange(COPIES * batch, dtype=jnp.float32)
    tables = table + 0.01 * shift[::COPIES, None, None, None]
    scales = width**-0.5 * jnp.linspace(0.5, 1.5, batch * heads).reshape(batch, heads)
    sinks = jnp.linspace(-4.0, 4.0, heads)
    forward_pair, pair = ring_tiles(name, dtype, "forward"), ring_tiles(name, dtype)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, scale: jax.Array) -> jax.Array:
        found = OPERATORS[2](
            *(jnp.repeat(array, COPIES, 0) for array in (query, key, value)),
            **window_of(name),
            scale=scale,
            relative_bias=table,
            sinks=sinks,
            backend="cutlass-fna",
            q_tile_shape=forward_pair[0],
            kv_tile_shape=forward_pair[1],
            backward_q_tile_shape=pair[0],
            backward_kv_tile_shape=pair[1],
        )
        return jnp.sum(found.astype(jnp.float32) * cotangent.astype(jnp.float32))

    differentiate = jax.grad(attend, (0, 1, 2, 3))
    mapped = jax.jit(jax.vmap(differentiate, (None, None, None, 0, 0)))(*arrays, tables, scales)
    for i in range(batch):
        alone = jax.jit(differentiate)(*arrays, tables[i], scales[i])
        for one, other in zip(mapped, alone, strict=True):
            error = np.asarray(one[i], np.float64) - np.asarray(other, np.float64)
            assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(np.asarray(other, np.float64))
