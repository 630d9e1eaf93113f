"""Kernels for small windows with a ring, without and with relative biases and biases of keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.cost_model import small_windows
from natten_jax.performance import Pass, TilePair, tile_names
from natten_jax.problem import Problem
from natten_jax.simulator import problem_of
from tests.support import oracle
from tests.support.problems import OPERATORS

# Small windows with a ring and a bias: results and all gradients.
#
# For random problems run ``python -m tests.fuzz --backend cutlass --direct --feature relative_bias ring``, or
# ``key_bias ring``.


pytestmark = pytest.mark.gpu


#: Layout, window, heads and their width; borders on all sides, most ragged ones.
PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any], int, int]] = {
    "13x13": ((37, 33), {"kernel_size": 13}, 8, 64),
    "13x13, narrow": ((34, 41), {"kernel_size": 13}, 8, 32),
    "strides": ((36, 38), {"kernel_size": (13, 12), "stride": (1, 3)}, 8, 64),
    "causal": ((38, 35), {"kernel_size": (13, 13), "is_causal": (False, True)}, 8, 64),
    "clips": ((8, 13, 12), {"kernel_size": (8, 7, 7)}, 6, 32),
    "volume": ((11, 12, 10), {"kernel_size": 5}, 4, 32),
}

DEFAULTS: dict[str, Any] = {"stride": 1, "dilation": 1, "is_causal": False}

DTYPES = [jnp.bfloat16, jnp.float16]

#: Tables of relative biases, and biases of keys.
KINDS = ["table", "tokens", "heads"]

#: Batch entries, which are all alike: what differs between them depends on when it was computed.
COPIES = 40


def windows_of(layout: tuple[int, ...], window: dict[str, Any]) -> dict[str, Any]:
    """Every window argument, per dimension."""
    every: dict[str, Any] = DEFAULTS | window
    return {key: value if isinstance(value, tuple) else (value,) * len(layout) for key, value in every.items()}


def window_of(name: str) -> dict[str, Any]:
    return windows_of(*PROBLEMS[name][:2])


def first_tiles(problem: Problem, pass_: Pass, is_wanted: Callable[[list[str]], bool]) -> TilePair:
    """The fastest tiles of a pass with wanted kernels."""
    for pair, _ in small_windows.ranked("cutlass", problem, pass_, (9, 0)):
        found = small_windows.estimate("cutlass", problem, pass_, pair, (9, 0))
        if found is not None and is_wanted([launch.kernel for launch in found.launches]):
            return pair
    raise AssertionError(f"no tiles of {problem} have a ring")


def tiles_of_pass(pass_: Pass, pair: TilePair) -> dict[str, Any]:
    return dict(zip(tile_names(pass_), pair, strict=True))


def problem_of_copies(name: str, dtype: Any) -> Problem:
    layout, _, heads, width = PROBLEMS[name]
    sizes: dict[str, Any] = {"batch": COPIES, "heads": heads, "head_dim": width, "dtype": jnp.dtype(dtype).name}
    return problem_of(layout, **window_of(name), **sizes)


def tiles_of(name: str, dtype: Any, kind: str) -> tuple[TilePair, TilePair]:
    """The fastest tiles of both passes with rings, except in query gradients beside tables."""
    is_table = kind == "table"
    problem = dataclasses.replace(problem_of_copies(name, dtype), relative_bias=is_table, key_bias=not is_table)

    def has_rings(kernels: list[str]) -> bool:
        return all("with a ring" in kernel for kernel in (kernels[-1:] if is_table else kernels))

    return first_tiles(problem, "forward", has_rings), first_tiles(problem, "backward", has_rings)


class Biased(NamedTuple):
    """Operands of one batch entry, and the cotangents of its output and logsumexp."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array
    cotangent: jax.Array
    lse_cotangent: jax.Array


def drawn(name: str, dtype: Any, gain: float, kind: str) -> Biased:
    """Draw a batch entry with one kind of bias.

    A table hides some offsets, but never every key of a query. A bias of keys hides a third of them, and every key of
    some queries, whose logsumexp has no cotangent.
    """
    layout, _, heads, width = PROBLEMS[name]
    kernel_size = window_of(name)["kernel_size"]
    shape = (1, *layout, heads, width)
    query, key, value, cotangent = (jax.random.normal(jax.random.key(i), shape, jnp.float32) for i in range(4))
    of_logsumexp = jax.random.normal(jax.random.key(6), shape[:-1])
    if kind == "table":
        bias = jax.random.normal(jax.random.key(4), (heads, *(2 * k - 1 for k in kernel_size)))
        bias = bias.at[1, 1].set(-jnp.inf)
    else:
        bias = 2 * jax.random.normal(jax.random.key(4), (1, *((heads,) if kind == "heads" else ()), *layout))
        bias = jnp.where(jax.random.bernoulli(jax.random.key(5), 1 / 3, bias.shape), -jnp.inf, bias)
        corner = tuple(slice(0, k + 2) for k in kernel_size)
        bias = bias.at[(..., *corner)].set(-jnp.inf)
        of_logsumexp = of_logsumexp.at[(0, *corner)].set(0.0)
    query, key, value, cotangent = (array.astype(dtype) for array in (gain * query, key, value, cotangent))
    return Biased(query, key, value, bias, cotangent, of_logsumexp)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def both_passes(
    name: str, kind: str, tiles: tuple[TilePair, TilePair], arrays: Biased
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Outputs and logsumexp, and gradients, of ``COPIES`` copies of a batch entry, and the table that all have."""
    query, key, value, bias, *cotangents = (jnp.repeat(array, COPIES, 0) for array in arrays)
    operand, bias = ("relative_bias", arrays.bias) if kind == "table" else ("key_bias", bias)
    function = functools.partial(
        OPERATORS[len(PROBLEMS[name][0])],
        **window_of(name),
        backend="cutlass-fna",
        **tiles_of_pass("forward", tiles[0]),
        **tiles_of_pass("backward", tiles[1]),
        return_lse=True,
    )
    found, pullback = jax.vjp(lambda *of: function(*of[:3], **{operand: of[3]}), query, key, value, bias)
    return tuple(found), pullback(tuple(cotangents))


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # large logits need more digits than float32 has
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_biases(name: str, kind: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    layout, _, heads, width = PROBLEMS[name]
    arrays = drawn(name, dtype, gain, kind)
    (out, logsumexp), (*found, of_bias) = both_passes(name, kind, tiles_of(name, dtype, kind), arrays)
    entries = oracle.relative_entries(layout, **window_of(name)) if kind == "table" else None
    mask = oracle.neighborhood_mask(layout, **window_of(name))
    of_out = of_gradients = 1.8e-2 if dtype == jnp.bfloat16 else 3e-3
    if gain > 100:
        # All but a few queries see one key, and have no gradient; those of the few are what rounded outputs leave of
        # differences: float64 with outputs rounded to bfloat16 is up to 3.9e-2 off.
        of_gradients = 7e-2
        of_out = of_out if kind == "table" else of_gradients
    of_all = np.zeros((1, *layout))

    def assert_close(values: np.ndarray, expected: np.ndarray, bound: float) -> None:
        error = values.astype(np.float64) - expected
        assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)

    for head in range(heads):
        own = slice(head, head + 1)
        query, key, value, upstream = (np.asarray(arrays[i][..., own, :]) for i in (0, 1, 2, 4))
        bias = np.asarray({"table": arrays.bias[own], "heads": arrays.bias[:, own], "tokens": arrays.bias}[kind])
        biases = {"relative_bias" if kind == "table" else "key_bias": bias}
        of_lse = np.asarray(arrays.lse_cotangent[..., own])
        exact = oracle.reference(
            oracle.Tensors(query, key, value, **biases), mask, width**-0.5, upstream, of_lse, entries=entries
        )
        compared = [(out[..., own, :], exact.forward.out, of_out)]
        compared += [
            (each[..., own, :], expected, of_gradients)
            for each, expected in zip(found, exact.gradients[:3], strict=True)
        ]
        if kind == "heads":
            compared.append((of_bias[:, own], np.asarray(exact.gradients.key_bias), of_gradients))
        elif kind == "table":
            assert_close(np.asarray(of_bias[own]), COPIES * np.asarray(exact.gradients.relative_bias), of_gradients)
        else:
            of_all += np.asarray(exact.gradients.key_bias).reshape(of_all.shape)
        of_rows = np.asarray(logsumexp[..., own])
        for values in (of_rows, *(np.asarray(each) for each, _, _ in compared)):
            np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))
        for each, expected, bound in compared:
            assert_close(np.asarray(each[:1]), expected, bound)
        is_seen = np.isfinite(exact.forward.lse)
        assert is_seen.all() if kind == "table" else 0 < is_seen.sum() < is_seen.size
        np.testing.assert_array_equal(of_rows[:1][~is_seen], exact.forward.lse[~is_seen])
        assert_close(of_rows[:1][is_seen], exact.forward.lse[is_seen], 2e-6)
    if kind == "tokens":
        assert_close(np.asarray(of_bias[:1]), of_all, of_gradients)


@pytest.mark.parametrize("kind", ["table", "heads"])
@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_a_call_with_a_bias_is_reproducible(name: str, kind: str) -> None:
    arrays, tiles = drawn(name, jnp.bfloat16, 1.0, kind), tiles_of(name, jnp.bfloat16, kind)
    first = both_passes(name, kind, tiles, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, both_passes(name, kind, tiles, arrays), first)


def test_heads_have_scales_sinks_and_tables_of_their_own() -> None:
    """With tables and scales of batch entries, a call is as many calls of one entry each."""
    name, dtype = "13x13, narrow", jnp.bfloat16
    *arrays, table, cotangent, _ = drawn(name, dtype, 1.0, "table")
    heads, width = PROBLEMS[name][2:]
    batch = 4
    shift = jnp.arange(COPIES * batch, dtype=jnp.float32)
    tables = table + 0.01 * shift[::COPIES, None, None, None]
    scales = width**-0.5 * jnp.linspace(0.5, 1.5, batch * heads).reshape(batch, heads)
    sinks = jnp.linspace(-4.0, 4.0, heads)
    forward_pair, pair = tiles_of(name, dtype, "table")

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, scale: jax.Array) -> jax.Array:
        found = OPERATORS[2](
            *(jnp.repeat(array, COPIES, 0) for array in (query, key, value)),
            **window_of(name),
            scale=scale,
            relative_bias=table,
            sinks=sinks,
            backend="cutlass-fna",
            **tiles_of_pass("forward", forward_pair),
            **tiles_of_pass("backward", pair),
        )
        return jnp.sum(found.astype(jnp.float32) * cotangent.astype(jnp.float32))

    differentiate = jax.grad(attend, (0, 1, 2, 3))
    mapped = jax.jit(jax.vmap(differentiate, (None, None, None, 0, 0)))(*arrays, tables, scales)
    for i in range(batch):
        alone = jax.jit(differentiate)(*arrays, tables[i], scales[i])
        for one, other in zip(mapped, alone, strict=True):
            error = np.asarray(one[i], np.float64) - np.asarray(other, np.float64)
            assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(np.asarray(other, np.float64))


def test_what_hides_nothing_changes_nothing() -> None:
    """Biases of zero give the bits of a call without any."""
    name = "13x13"
    arrays = drawn(name, jnp.bfloat16, 1.0, "tokens")
    arrays = arrays._replace(bias=jnp.zeros_like(arrays.bias))
    tiles = tiles_of(name, jnp.bfloat16, "tokens")
    (out, logsumexp), _ = both_passes(name, "tokens", tiles, arrays)
    plain = OPERATORS[2](
        *(jnp.repeat(array, COPIES, 0) for array in arrays[:3]),
        **window_of(name),
        backend="cutlass-fna",
        **tiles_of_pass("forward", tiles[0]),
        return_lse=True,
    )
    jax.tree.map(np.testing.assert_array_equal, (out, logsumexp), tuple(plain))


# The kernels for small windows with a ring: what they compute where they are chosen, and what is promised of bits.
#
# For random problems run ``python -m tests.fuzz --backend cutlass --direct --feature ring``.


#: Layout, window, heads of queries and of keys, their width; each has borders on all sides, most ragged ones.
PLAIN_PROBLEMS: dict[str, tuple[tuple[int, ...], dict[str, Any], int, int, int]] = {
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


def problem_named(name: str, batch: int, dtype: Any) -> Problem:
    layout, window, heads, heads_kv, width = PLAIN_PROBLEMS[name]
    sizes: dict[str, Any] = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "head_dim": width}
    return problem_of(layout, **(DEFAULTS | window), dtype=jnp.dtype(dtype).name, **sizes)


def plain_tiles(problem: Problem) -> TilePair:
    """The fastest tiles that have a ring."""
    return first_tiles(problem, "forward", lambda kernels: kernels[0] == "forward with a ring")


def plain_arrays(name: str, batch: int, dtype: Any, gain: float = 1.0) -> list[jax.Array]:
    layout, _, heads, heads_kv, width = PLAIN_PROBLEMS[name]
    shapes = [(batch, *layout, n, width) for n in (heads, heads_kv, heads_kv)]
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.float32) for i, shape in enumerate(shapes)]
    return [(array * factor).astype(dtype) for array, factor in zip(arrays, (gain, 1.0, 1.0), strict=True)]


def attend(name: str, arrays: list[jax.Array], **terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp; ``terms`` are operands of the operator beside the arrays."""
    layout, window, *_ = PLAIN_PROBLEMS[name]
    pair = plain_tiles(problem_named(name, arrays[0].shape[0], arrays[0].dtype))
    function = functools.partial(
        OPERATORS[len(layout)],
        **window,
        backend="cutlass-fna",
        **tiles_of_pass("forward", pair),
        return_lse=True,
    )
    found: tuple[jax.Array, jax.Array] = jax.jit(function)(*arrays, **terms)
    return found


def mask_of(name: str) -> np.ndarray:
    layout, window, *_ = PLAIN_PROBLEMS[name]
    return oracle.neighborhood_mask(layout, **windows_of(layout, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 40.0])  # the larger logits are computed once more, relative to the largest
@pytest.mark.parametrize("name", PLAIN_PROBLEMS)
def test_rings_are_exact_to_rounding(name: str, gain: float, dtype: Any) -> None:
    _, _, heads, heads_kv, width = PLAIN_PROBLEMS[name]
    arrays = plain_arrays(name, 8, dtype, gain)
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
    _, _, heads, _, width = PLAIN_PROBLEMS[name]
    arrays = plain_arrays(name, 8, dtype, gain)
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
def plain_gradients(name: str, pair: TilePair, cotangent: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    layout, window, *_ = PLAIN_PROBLEMS[name]
    function = functools.partial(
        OPERATORS[len(layout)],
        **window,
        backend="cutlass-fna",
        **tiles_of_pass("backward", pair),
    )
    _, pullback = jax.vjp(function, *arrays)
    found: tuple[jax.Array, ...] = pullback(cotangent)
    return found


def cotangent_of(query: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(9), query.shape, jnp.float32).astype(query.dtype)


#: Those that are estimated to take a ring backwards.
BACKWARD = [name for name in PLAIN_PROBLEMS if name != "causal clips"]


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # large logits need more digits than float32 has
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_exact_to_rounding(name: str, dtype: Any, gain: float) -> None:
    if gain > 100 and dtype == jnp.float16:
        pytest.skip("float16 has no such numbers")
    _, _, heads, heads_kv, width = PLAIN_PROBLEMS[name]
    arrays = plain_arrays(name, 8, dtype, gain)
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
        found = plain_gradients(name, pair, cotangent, *arrays)
        for gradient, own, expected in zip(found, own_of, exact.gradients[:3], strict=True):
            error = np.asarray(gradient[own], np.float64) - expected
            # Gradients of queries and keys are differences of what large logits leave of the softmax.
            assert np.linalg.norm(error) <= 3 * bound * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_gradients_are_reproducible(name: str) -> None:
    arrays = plain_arrays(name, 8, jnp.bfloat16)
    cotangent = cotangent_of(arrays[0])
    for pair in gradient_tiles(problem_named(name, 8, jnp.bfloat16)):
        first = plain_gradients(name, pair, cotangent, *arrays)
        for _ in range(20):
            jax.tree.map(np.testing.assert_array_equal, plain_gradients(name, pair, cotangent, *arrays), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume", "causal clips"])
def test_rings_are_reproducible(name: str, dtype: Any) -> None:
    arrays = plain_arrays(name, 8, dtype)
    first = attend(name, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, attend(name, arrays), first)


def test_rings_of_batch_entries_do_not_depend_on_others() -> None:
    arrays = plain_arrays("13x13", 8, jnp.bfloat16)
    every = attend("13x13", arrays)
    some = attend("13x13", [array[3:7] for array in arrays])
    jax.tree.map(lambda found, of_all: np.testing.assert_array_equal(found, of_all[3:7]), some, every)


def test_a_number_that_is_not_finite_stays_in_its_entry_and_head() -> None:
    arrays = plain_arrays("13x13", 8, jnp.bfloat16)
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
