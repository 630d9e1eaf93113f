"""The kernels for small windows with a ring: what they compute where they are chosen, and what is promised of bits.

Random problems are those of ``python -m tests.fuzz --backend cutlass --direct --feature ring``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.cost_model import small_windows
from natten_jax.performance import TilePair
from natten_jax.problem import Problem
from natten_jax.simulator import problem_of
from tests.support import oracle

pytestmark = pytest.mark.gpu

OPERATORS = {1: natten_jax.na1d, 2: natten_jax.na2d, 3: natten_jax.na3d}
DEFAULTS: dict[str, Any] = {"stride": 1, "dilation": 1, "is_causal": False}

#: Layout, window, heads of queries and of keys, their width; each has borders on all sides, most ragged ones.
PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any], int, int, int]] = {
    "13x13": ((61, 75), {"kernel_size": 13}, 8, 8, 64),
    "13x13, narrow": ((62, 77), {"kernel_size": 13}, 8, 8, 32),
    "strides": ((64, 50), {"kernel_size": (13, 12), "stride": (1, 3)}, 8, 8, 64),
    "causal": ((90, 77), {"kernel_size": (13, 13), "is_causal": (False, True)}, 8, 8, 64),
    "grouped heads": ((48, 64), {"kernel_size": (12, 11)}, 16, 4, 32),
    "clips": ((8, 28, 31), {"kernel_size": (8, 7, 7)}, 6, 6, 32),
    "volume": ((17, 18, 21), {"kernel_size": 5}, 4, 4, 32),
    "causal volume": ((12, 21, 18), {"kernel_size": (5, 5, 4), "is_causal": (True, False, False)}, 4, 2, 64),
    "causal clips": ((15, 7, 11), {"kernel_size": (7, 3, 8), "is_causal": (True, False, False)}, 6, 3, 64),
}
DTYPES = [jnp.bfloat16, jnp.float16]


def problem_named(name: str, batch: int, dtype: Any) -> Problem:
    layout, window, heads, heads_kv, width = PROBLEMS[name]
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "head_dim": width}
    return problem_of(layout, **(DEFAULTS | window), dtype=jnp.dtype(dtype).name, **sizes)


def ring_tiles(problem: Problem) -> TilePair:
    """The fastest tiles that have a ring."""
    for pair, _ in small_windows.ranked("cutlass", problem, "forward", (9, 0)):
        found = small_windows.estimate("cutlass", problem, "forward", pair, (9, 0))
        if found is not None and found.launches[0].kernel == "forward with a ring":
            return pair
    raise AssertionError(f"no tiles of {problem} have a ring")


def drawn(name: str, batch: int, dtype: Any, gain: float = 1.0) -> list[jax.Array]:
    layout, _, heads, heads_kv, width = PROBLEMS[name]
    shapes = [(batch, *layout, n, width) for n in (heads, heads_kv, heads_kv)]
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.float32) for i, shape in enumerate(shapes)]
    return [(array * factor).astype(dtype) for array, factor in zip(arrays, (gain, 1.0, 1.0), strict=True)]


def attend(name: str, arrays: list[jax.Array], **terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp; ``terms`` are operands of the operator beside the arrays."""
    layout, window, *_ = PROBLEMS[name]
    q_tile, kv_tile = ring_tiles(problem_named(name, arrays[0].shape[0], arrays[0].dtype))
    function = functools.partial(
        OPERATORS[len(layout)],
        **window,
        backend="cutlass-fna",
        q_tile_shape=q_tile,
        kv_tile_shape=kv_tile,
        return_lse=True,
    )
    found: tuple[jax.Array, jax.Array] = jax.jit(function)(*arrays, **terms)
    return found


def mask_of(name: str) -> np.ndarray:
    layout, window, *_ = PROBLEMS[name]
    per_dimension = {
        argument: value if isinstance(value, tuple) else (value,) * len(layout)
        for argument, value in (DEFAULTS | window).items()
    }
    return oracle.neighborhood_mask(layout, **per_dimension)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 40.0])  # the larger logits are computed once more, relative to the largest
@pytest.mark.parametrize("name", PROBLEMS)
def test_rings_are_exact_to_rounding(name: str, gain: float, dtype: Any) -> None:
    _, _, heads, heads_kv, width = PROBLEMS[name]
    arrays = drawn(name, 8, dtype, gain)
    out, logsumexp = attend(name, arrays)
    mask = mask_of(name)
    # Results of one batch entry and two heads are compared: no other one takes part in theirs.
    entry, group = 5, heads // heads_kv
    query, key, value = (np.asarray(array[entry : entry + 1]) for array in arrays)
    for head in (0, heads - 1):
        own, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        operands = oracle.Tensors(query[..., own, :], key[..., shared, :], value[..., shared, :])
        exact = oracle.forward(operands, mask, width**-0.5)
        bound = 6e-3 if dtype == jnp.bfloat16 else 1e-3
        found = np.asarray(out[entry : entry + 1, ..., own, :], np.float64)
        assert np.linalg.norm(found - exact.out) <= bound * np.linalg.norm(exact.out)
        of_rows = np.asarray(logsumexp[entry : entry + 1, ..., own], np.float64)
        assert np.linalg.norm(of_rows - exact.lse) <= 2e-6 * np.linalg.norm(exact.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 40.0])
@pytest.mark.parametrize("name", ["13x13", "clips"])
def test_heads_have_scales_and_sinks_of_their_own(name: str, gain: float, dtype: Any) -> None:
    _, _, heads, _, width = PROBLEMS[name]
    arrays = drawn(name, 8, dtype, gain)
    scales = width**-0.5 * jnp.linspace(0.5, 1.5, heads)
    # Some weigh more than all keys, others next to nothing.
    sinks = jnp.linspace(-20.0, 20.0, heads) * gain
    out, logsumexp = attend(name, arrays, scale=scales, sinks=sinks)
    mask = mask_of(name)
    for head in (0, heads // 2, heads - 1):
        own = slice(head, head + 1)
        query, key, value = (np.asarray(array[3:4, ..., own, :]) for array in arrays)
        operands = oracle.Tensors(query, key, value, sinks=np.asarray(sinks[own]))
        exact = oracle.forward(operands, mask, float(scales[head]))
        bound = 6e-3 if dtype == jnp.bfloat16 else 1e-3
        found = np.asarray(out[3:4, ..., own, :], np.float64)
        # Beside a sink that weighs more, float16 outputs are too small to have all digits.
        assert np.linalg.norm(found - exact.out) <= bound * np.linalg.norm(exact.out) + 1e-6 * np.sqrt(found.size)
        of_rows = np.asarray(logsumexp[3:4, ..., own], np.float64)
        assert np.linalg.norm(of_rows - exact.lse) <= 2e-6 * np.linalg.norm(exact.lse)


def gradient_tiles(problem: Problem) -> list[TilePair]:
    """The fastest tiles of the backward pass for each set of kernels, one at least of which has a ring."""
    found: dict[tuple[str, ...], TilePair] = {}
    for pair, _ in small_windows.ranked("cutlass", problem, "backward", (9, 0)):
        estimate = small_windows.estimate("cutlass", problem, "backward", pair, (9, 0))
        if estimate is not None:
            found.setdefault(tuple(launch.kernel for launch in estimate.launches), pair)
    with_rings = [pair for kernels, pair in found.items() if any("ring" in kernel for kernel in kernels)]
    assert with_rings
    return with_rings


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(name: str, pair: TilePair, cotangent: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    layout, window, *_ = PROBLEMS[name]
    function = functools.partial(
        OPERATORS[len(layout)],
        **window,
        backend="cutlass-fna",
        backward_q_tile_shape=pair[0],
        backward_kv_tile_shape=pair[1],
    )
    _, pullback = jax.vjp(function, *arrays)
    found: tuple[jax.Array, ...] = pullback(cotangent)
    return found


def cotangent_of(query: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(9), query.shape, jnp.float32).astype(query.dtype)


#: Those that are estimated to take a ring backwards.
BACKWARD = [name for name in PROBLEMS if name != "causal clips"]


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # beside large logits, gradients need what float32 leaves out
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_exact_to_rounding(name: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    _, _, heads, heads_kv, width = PROBLEMS[name]
    arrays = drawn(name, 8, dtype, gain)
    cotangent = cotangent_of(arrays[0])
    # Gradients of one batch entry are compared, and in it of one head of keys with the query heads that share it.
    entry, group = slice(2, 3), heads // heads_kv
    of_keys = (entry, ..., slice(1, 2), slice(None))
    of_queries = (entry, ..., slice(group, 2 * group), slice(None))
    own_of = of_queries, of_keys, of_keys
    operands = oracle.Tensors(*(np.asarray(array[own]) for array, own in zip(arrays, own_of, strict=True)))
    upstream = np.asarray(cotangent[of_queries])
    exact = oracle.reference(operands, mask_of(name), width**-0.5, upstream, np.zeros(upstream.shape[:-1]))
    bound = 6e-3 if dtype == jnp.bfloat16 else 1e-3
    for pair in gradient_tiles(problem_named(name, 8, dtype)):
        found = gradients(name, pair, cotangent, *arrays)
        for gradient, own, expected in zip(found, own_of, exact.gradients[:3], strict=True):
            error = np.asarray(gradient[own], np.float64) - expected
            # Gradients of queries and keys are differences of what large logits leave of the softmax.
            assert np.linalg.norm(error) <= 3 * bound * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_gradients_are_reproducible(name: str) -> None:
    arrays = drawn(name, 8, jnp.bfloat16)
    cotangent = cotangent_of(arrays[0])
    for pair in gradient_tiles(problem_named(name, 8, jnp.bfloat16)):
        first = gradients(name, pair, cotangent, *arrays)
        for _ in range(20):
            jax.tree.map(np.testing.assert_array_equal, gradients(name, pair, cotangent, *arrays), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume", "causal clips"])
def test_rings_are_reproducible(name: str, dtype: Any) -> None:
    arrays = drawn(name, 8, dtype)
    first = attend(name, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, attend(name, arrays), first)


def test_rings_of_batch_entries_do_not_depend_on_others() -> None:
    arrays = drawn("13x13", 8, jnp.bfloat16)
    every = attend("13x13", arrays)
    some = attend("13x13", [array[3:7] for array in arrays])
    jax.tree.map(lambda found, of_all: np.testing.assert_array_equal(found, of_all[3:7]), some, every)


def test_a_number_that_is_not_finite_stays_in_its_entry_and_head() -> None:
    arrays = drawn("13x13", 8, jnp.bfloat16)
    first = attend("13x13", arrays)
    spoiled = [arrays[0], *(array.at[2, ..., 3, :].set(jnp.nan) for array in arrays[1:])]
    for clean, found in zip(first, attend("13x13", spoiled), strict=True):
        is_hit = np.zeros(clean.shape, bool)
        is_hit[2, :, :, 3] = True
        assert not np.isfinite(np.asarray(found, np.float32)[is_hit]).any()
        np.testing.assert_array_equal(np.asarray(found)[~is_hit], np.asarray(clean)[~is_hit])


@pytest.mark.parametrize(("width", "tile"), [(32, (1, 4, 2)), (64, (1, 2, 4)), (64, (1, 4, 2))])
def test_entries_that_are_alike_have_the_same_gradients(width: int, tile: tuple[int, ...]) -> None:
    """Steps that all see the whole layout along the strip wait for their tiles alone, which come early then."""
    window: dict[str, Any] = {"kernel_size": (4, 5, 8), "is_causal": (False, True, False)}
    keys = jax.random.split(jax.random.key(7), 4)
    arrays = [
        jnp.repeat(jax.random.normal(key, (1, 4, 10, 8, heads, width), jnp.bfloat16), 77, axis=0)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    ]
    function = functools.partial(
        natten_jax.na3d,
        **window,
        backend="cutlass-fna",
        backward_q_tile_shape=tile,
        backward_kv_tile_shape=(1, 8, 2),
    )
    differentiate = jax.jit(lambda query, key, value, cotangent: jax.vjp(function, query, key, value)[1](cotangent))
    for _ in range(20):
        for gradient in differentiate(*arrays):
            np.testing.assert_array_equal(gradient, jnp.broadcast_to(gradient[:1], gradient.shape))
