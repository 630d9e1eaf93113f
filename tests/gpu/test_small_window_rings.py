"""Small-window kernels with a ring buffer in shared memory: without biases, and with relative biases or key biases."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.performance import PASSES, Pass, TilePair, tile_names
from natten_jax.problem import Problem
from tests.fuzz.problem import Fuzzed
from tests.support import oracle
from tests.support.families import BOUNDS
from tests.support.plans import kernels_by_tiles
from tests.support.problems import Case

# Results and all gradients of kernels with a ring, for problems with a bias.
#
# For random problems run ``python -m tests.fuzz --backend cutlass --direct --feature relative_bias ring``, or
# ``key_bias ring``.


pytestmark = pytest.mark.gpu


#: Problems with tiles at both ends of each dimension. In most problems, the last tiles of a dimension are only partly
#: filled.
PROBLEMS = {
    "13x13": Case((37, 33), (13, 13), heads=8, heads_kv=8, head_dim=64),
    "13x13, narrow": Case((34, 41), (13, 13), heads=8, heads_kv=8, head_dim=32),
    "strides": Case((36, 38), (13, 12), stride=(1, 3), heads=8, heads_kv=8, head_dim=64),
    "causal": Case((38, 35), (13, 13), is_causal=(False, True), heads=8, heads_kv=8, head_dim=64),
    "clips": Case((8, 13, 12), (8, 7, 7), heads=6, heads_kv=6, head_dim=32),
    "volume": Case((11, 12, 10), (5, 5, 5), heads=4, heads_kv=4, head_dim=32),
}

DTYPES = ["bfloat16", "float16"]

#: Kinds of bias: a relative bias table, a key bias per token, or a key bias per head and token.
KINDS = ["table", "tokens", "heads"]

#: Number of equal batch entries. Any difference between their results indicates a race.
COPIES = 40


def biased(name: str, kind: str) -> Case:
    """Return a problem with one kind of bias."""
    is_table = kind == "table"
    return dataclasses.replace(PROBLEMS[name], relative_bias=is_table, key_bias=None if is_table else kind)


def described(case: Case, dtype: str, copies: int = 1) -> Problem:
    return Fuzzed("cutlass", case, dtype, 0, copies=copies).description()


def tiles_of(case: Case, dtype: str) -> tuple[TilePair, TilePair]:
    """Return, for each pass, the fastest tiles with which all kernels of the pass have a ring.

    With a relative bias table, only the last kernel of the pass must have a ring.
    """
    problem = described(case, dtype, COPIES)

    def first(pass_: Pass) -> TilePair:
        return next(
            pair
            for pair, kernels in kernels_by_tiles(problem, pass_)
            if all("with a ring" in kernel for kernel in (kernels[-1:] if case.relative_bias else kernels))
        )

    return first("forward"), first("backward")


def as_arguments(tiles: tuple[TilePair, TilePair]) -> dict[str, Any]:
    names = (name for pass_ in PASSES for name in tile_names(pass_))
    return dict(zip(names, (*tiles[0], *tiles[1]), strict=True))


class Biased(NamedTuple):
    """Operands of a batch entry, cotangent of its output, and cotangent of its logsumexp."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array
    cotangent: jax.Array
    lse_cotangent: jax.Array


def drawn(case: Case, dtype: str, gain: float = 1.0) -> Biased:
    """Draw a batch entry.

    Some biases are -inf and hide (mask out) keys. A relative bias hides one row of offsets in one head, so that every
    query still sees some keys. A key bias hides a third of the keys. It also hides all keys that the queries in a
    corner see. Each of these queries has a logsumexp cotangent of zero.
    """
    kernel_size = case.window_arguments["kernel_size"]
    shape = (1, *case.layout, case.heads, case.head_dim)
    query, key, value, cotangent = (jax.random.normal(jax.random.key(i), shape, jnp.float32) for i in range(4))
    lse_cotangent = jax.random.normal(jax.random.key(6), shape[:-1])
    if case.relative_bias:
        bias = jax.random.normal(jax.random.key(4), (case.heads, *(2 * k - 1 for k in kernel_size)))
        bias = bias.at[1, 1].set(-jnp.inf)
    else:
        heads = (case.heads,) if case.key_bias == "heads" else ()
        bias = 2 * jax.random.normal(jax.random.key(4), (1, *heads, *case.layout))
        bias = jnp.where(jax.random.bernoulli(jax.random.key(5), 1 / 3, bias.shape), -jnp.inf, bias)
        corner = tuple(slice(0, k + 2) for k in kernel_size)
        bias = bias.at[(..., *corner)].set(-jnp.inf)
        lse_cotangent = lse_cotangent.at[(0, *corner)].set(0.0)
    query, key, value, cotangent = (array.astype(dtype) for array in (gain * query, key, value, cotangent))
    return Biased(query, key, value, bias, cotangent, lse_cotangent)


@functools.partial(jax.jit, static_argnums=(0, 1))
def both_passes(
    case: Case, tiles: tuple[TilePair, TilePair], arrays: Biased
) -> tuple[tuple[jax.Array, jax.Array], oracle.Tensors]:
    """Return output, logsumexp and gradients of ``COPIES`` copies of a batch entry, which share one relative bias."""
    query, key, value, bias, *cotangents = (jnp.repeat(array, COPIES, 0) for array in arrays)
    operands = oracle.Tensors(query, key, value, key_bias=bias)
    if case.relative_bias:
        operands = oracle.Tensors(query, key, value, relative_bias=arrays.bias)
    results, pullback = jax.vjp(case.operator("cutlass-fna", **as_arguments(tiles)), operands)
    return results, pullback(tuple(cotangents))[0]


def assert_close(found: Any, expected: Any, bound: float, floor: float = 0.0) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected) + floor * np.sqrt(found.size)


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # large logits need more digits than float32 has
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_biases(name: str, kind: str, dtype: str, gain: float) -> None:
    if gain > 100 and dtype == "float16":
        pytest.skip("float16 has no such numbers")
    case = biased(name, kind)
    arrays = drawn(case, dtype, gain)
    (out, logsumexp), gradients = both_passes(case, tiles_of(case, dtype), arrays)
    out_bound = gradient_bound = 3 * BOUNDS[dtype]
    if gain > 100:
        # For most queries, one key has nearly all the weight, and the gradient is zero. For the remaining queries,
        # gradients are small differences of rounded numbers. If outputs are rounded to bfloat16, the errors of the
        # gradients are up to 3.9e-2, even if all other computations are in float64.
        gradient_bound = 7e-2
        out_bound = out_bound if kind == "table" else gradient_bound
    mask, entries, key_bias_sum = case.mask(), case.entries(), np.zeros((1, *case.layout))
    for head in range(case.heads):
        own = slice(head, head + 1)
        query, key, value, upstream = (np.asarray(arrays[i][..., own, :]) for i in (0, 1, 2, 4))
        bias = np.asarray({"table": arrays.bias[own], "heads": arrays.bias[:, own], "tokens": arrays.bias}[kind])
        operands = oracle.Tensors(query, key, value, **{"relative_bias" if kind == "table" else "key_bias": bias})
        upstream_lse = np.asarray(arrays.lse_cotangent[..., own])
        exact = oracle.reference(operands, mask, case.actual_scale, upstream, upstream_lse, entries=entries)
        compared = [(out[..., own, :], exact.forward.out, out_bound)]
        compared += [
            (each[..., own, :], expected, gradient_bound)
            for each, expected in zip(gradients[:3], exact.gradients[:3], strict=True)
        ]
        if kind == "heads":
            compared.append((gradients.key_bias[:, own], np.asarray(exact.gradients.key_bias), gradient_bound))
        elif kind == "table":
            table = np.asarray(exact.gradients.relative_bias)
            assert_close(gradients.relative_bias[own], COPIES * table, gradient_bound)
        else:
            key_bias_sum += np.asarray(exact.gradients.key_bias).reshape(key_bias_sum.shape)
        row_lse = np.asarray(logsumexp[..., own])
        for values in (row_lse, *(np.asarray(each) for each, _, _ in compared)):
            np.testing.assert_array_equal(values, np.broadcast_to(values[:1], values.shape))
        for each, expected, bound in compared:
            assert_close(each[:1], expected, bound)
        is_seen = np.isfinite(exact.forward.lse)
        assert is_seen.all() if kind == "table" else 0 < is_seen.sum() < is_seen.size
        np.testing.assert_array_equal(row_lse[:1][~is_seen], exact.forward.lse[~is_seen])
        assert_close(row_lse[:1][is_seen], exact.forward.lse[is_seen], 2e-6)
    if kind == "tokens":
        assert_close(gradients.key_bias[:1], key_bias_sum, gradient_bound)


@pytest.mark.parametrize("kind", ["table", "heads"])
@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_a_call_with_a_bias_is_reproducible(name: str, kind: str) -> None:
    case = biased(name, kind)
    arrays, tiles = drawn(case, "bfloat16"), tiles_of(case, "bfloat16")
    first = both_passes(case, tiles, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, both_passes(case, tiles, arrays), first)


def test_heads_have_scales_sinks_and_tables_of_their_own() -> None:
    """Gradients that ``vmap`` maps over relative bias tables and scales agree with the gradients of separate calls."""
    case = biased("13x13, narrow", "table")
    *arrays, table, cotangent, _ = drawn(case, "bfloat16")
    batch = 4
    shift = jnp.arange(COPIES * batch, dtype=jnp.float32)
    tables = table + 0.01 * shift[::COPIES, None, None, None]
    scales = case.actual_scale * jnp.linspace(0.5, 1.5, batch * case.heads).reshape(batch, case.heads)
    sinks = jnp.linspace(-4.0, 4.0, case.heads)
    operator = case.operator("cutlass-fna", **as_arguments(tiles_of(case, "bfloat16")))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, table: jax.Array, scale: jax.Array) -> jax.Array:
        query, key, value = (jnp.repeat(array, COPIES, 0) for array in (query, key, value))
        found, _ = operator(oracle.Tensors(query, key, value, scale=scale, relative_bias=table, sinks=sinks))
        return jnp.sum(found.astype(jnp.float32) * cotangent.astype(jnp.float32))

    differentiate = jax.grad(attend, (0, 1, 2, 3))
    mapped = jax.jit(jax.vmap(differentiate, (None, None, None, 0, 0)))(*arrays, tables, scales)
    for i in range(batch):
        alone = jax.jit(differentiate)(*arrays, tables[i], scales[i])
        for one, other in zip(mapped, alone, strict=True):
            assert_close(one[i], other, 1e-3)


def test_zero_biases_have_no_effect() -> None:
    """A call with a key bias of zeros gives bitwise the same output and logsumexp as a call without a bias."""
    case = biased("13x13", "tokens")
    arrays, tiles = drawn(case, "bfloat16"), tiles_of(case, "bfloat16")
    results, _ = both_passes(case, tiles, arrays._replace(bias=jnp.zeros_like(arrays.bias)))
    operands = oracle.Tensors(*(jnp.repeat(array, COPIES, 0) for array in arrays[:3]))
    plain = case.operator("cutlass-fna", **dict(zip(tile_names("forward"), tiles[0], strict=True)))(operands)
    jax.tree.map(np.testing.assert_array_equal, tuple(results), tuple(plain))


# Small-window kernels with a ring, for problems without a bias: accuracy, and bitwise equal results of repeated calls.
#
# For random problems run ``python -m tests.fuzz --backend cutlass --direct --feature ring``.


#: Problems with tiles at both ends of each dimension. In most problems, the last tiles of a dimension are only partly
#: filled.
PLAIN_PROBLEMS = {
    "13x13": Case((61, 75), (13, 13), heads=8, heads_kv=8, head_dim=64, batch=8),
    "13x13, narrow": Case((62, 77), (13, 13), heads=8, heads_kv=8, head_dim=32, batch=8),
    "strides": Case((64, 50), (13, 12), stride=(1, 3), heads=8, heads_kv=8, head_dim=64, batch=8),
    "causal": Case((90, 77), (13, 13), is_causal=(False, True), heads=8, heads_kv=8, head_dim=64, batch=8),
    "grouped heads": Case((48, 64), (12, 11), heads=16, heads_kv=4, head_dim=32, batch=8),
    "clips": Case((8, 28, 31), (8, 7, 7), heads=6, heads_kv=6, head_dim=32, batch=8),
    "volume": Case((17, 18, 21), (5, 5, 5), heads=4, heads_kv=4, head_dim=32, batch=8),
    "causal volume": Case(
        (12, 21, 18), (5, 5, 4), is_causal=(True, False, False), heads=4, heads_kv=2, head_dim=64, batch=8
    ),
    "causal clips": Case(
        (15, 7, 11), (7, 3, 8), is_causal=(True, False, False), heads=6, heads_kv=3, head_dim=64, batch=8
    ),
}


def plain_arrays(name: str, dtype: str, gain: float = 1.0) -> oracle.Tensors:
    case = PLAIN_PROBLEMS[name]
    shapes = [(case.batch, *case.layout, n, case.head_dim) for n in (case.heads, case.heads_kv, case.heads_kv)]
    query, key, value = (jax.random.normal(jax.random.key(i), shape, jnp.float32) for i, shape in enumerate(shapes))
    return oracle.Tensors(*(array.astype(dtype) for array in (gain * query, key, value)))


def attend(name: str, operands: oracle.Tensors) -> tuple[jax.Array, jax.Array]:
    """Return output and logsumexp, computed with the fastest tiles whose forward kernel has a ring."""
    case, query = PLAIN_PROBLEMS[name], operands.query
    problem = described(dataclasses.replace(case, batch=len(query)), query.dtype.name)
    found = kernels_by_tiles(problem, "forward")
    pair = next(pair for pair, kernels in found if kernels[0] == "forward with a ring")
    tiles = dict(zip(tile_names("forward"), pair, strict=True))
    results: tuple[jax.Array, jax.Array] = jax.jit(case.operator("cutlass-fna", **tiles))(operands)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 40.0])  # large logits are recomputed relative to the largest logit
@pytest.mark.parametrize("name", PLAIN_PROBLEMS)
def test_rings_are_exact_to_rounding(name: str, gain: float, dtype: str) -> None:
    case = PLAIN_PROBLEMS[name]
    operands = plain_arrays(name, dtype, gain)
    out, logsumexp = attend(name, operands)
    # Compare only one batch entry and two heads. Their results do not depend on the others.
    entry, group = slice(5, 6), case.heads // case.heads_kv
    for head in (0, case.heads - 1):
        own, shared = slice(head, head + 1), slice(head // group, head // group + 1)
        head_arrays = zip(operands[:3], (own, shared, shared), strict=True)
        compared = oracle.Tensors(*(np.asarray(array[entry, ..., heads, :]) for array, heads in head_arrays))
        exact = oracle.forward(compared, case.mask(), case.actual_scale)
        assert_close(out[entry, ..., own, :], exact.out, BOUNDS[dtype])
        assert_close(logsumexp[entry, ..., own], exact.lse, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.0, 40.0])
@pytest.mark.parametrize("name", ["13x13", "clips"])
def test_heads_have_scales_and_sinks_of_their_own(name: str, gain: float, dtype: str) -> None:
    case = PLAIN_PROBLEMS[name]
    operands = plain_arrays(name, dtype, gain)
    scales = case.actual_scale * jnp.linspace(0.5, 1.5, case.heads)
    # The sinks of the first heads have almost no weight. The sinks of the last heads have more weight than all keys
    # together.
    sinks = jnp.linspace(-20.0, 20.0, case.heads) * gain
    out, logsumexp = attend(name, operands._replace(scale=scales, sinks=sinks))
    for head in (0, case.heads // 2, case.heads - 1):
        own = slice(head, head + 1)
        query, key, value = (np.asarray(array[3:4, ..., own, :]) for array in operands[:3])
        compared = oracle.Tensors(query, key, value, sinks=np.asarray(sinks[own]))
        exact = oracle.forward(compared, case.mask(), float(scales[head]))
        # If a sink has nearly all the weight, float16 outputs are subnormal and less precise.
        assert_close(out[3:4, ..., own, :], exact.out, BOUNDS[dtype], floor=1e-6)
        assert_close(logsumexp[3:4, ..., own], exact.lse, 2e-6)


def gradient_tiles(case: Case, dtype: str) -> list[TilePair]:
    """Return backward tiles that select kernels with a ring: the fastest tiles for each combination of kernels."""
    found: dict[tuple[str, ...], TilePair] = {}
    for pair, kernels in kernels_by_tiles(described(case, dtype), "backward"):
        found.setdefault(kernels, pair)
    with_rings = [pair for kernels, pair in found.items() if any("ring" in kernel for kernel in kernels)]
    assert with_rings
    return with_rings


@functools.partial(jax.jit, static_argnums=(0, 1))
def plain_gradients(case: Case, pair: TilePair, cotangent: jax.Array, operands: oracle.Tensors) -> oracle.Tensors:
    operator = case.operator("cutlass-fna", **dict(zip(tile_names("backward"), pair, strict=True)))
    found: oracle.Tensors = jax.vjp(lambda operands: operator(operands)[0], operands)[1](cotangent)[0]
    return found


def cotangent_of(query: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(9), query.shape, jnp.float32).astype(query.dtype)


#: Problems for which ``gradient_tiles`` finds backward tiles that select kernels with a ring.
BACKWARD = [name for name in PLAIN_PROBLEMS if name != "causal clips"]


@pytest.mark.parametrize("gain", [1.0, 40.0, 3000.0])  # large logits need more digits than float32 has
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_exact_to_rounding(name: str, dtype: str, gain: float) -> None:
    if gain > 100 and dtype == "float16":
        pytest.skip("float16 has no such numbers")
    case = PLAIN_PROBLEMS[name]
    arrays = plain_arrays(name, dtype, gain)
    cotangent = cotangent_of(arrays.query)
    # Compare the gradients of one batch entry, one key/value head, and the query heads that share this head.
    entry, group = slice(2, 3), case.heads // case.heads_kv
    key_slice = (entry, ..., slice(1, 2), slice(None))
    query_slice = (entry, ..., slice(group, 2 * group), slice(None))
    own_of = query_slice, key_slice, key_slice
    operands = oracle.Tensors(*(np.asarray(array[own]) for array, own in zip(arrays[:3], own_of, strict=True)))
    upstream = np.asarray(cotangent[query_slice])
    exact = oracle.reference(operands, case.mask(), case.actual_scale, upstream, np.zeros(upstream.shape[:-1]))
    for pair in gradient_tiles(case, dtype):
        found = plain_gradients(case, pair, cotangent, arrays)
        for gradient, own, expected in zip(found[:3], own_of, exact.gradients[:3], strict=True):
            # For large logits, the softmax saturates, and query and key gradients are small differences.
            assert_close(gradient[own], expected, 3 * BOUNDS[dtype])


@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume"])
def test_gradients_are_reproducible(name: str) -> None:
    case, arrays = PLAIN_PROBLEMS[name], plain_arrays(name, "bfloat16")
    cotangent = cotangent_of(arrays.query)
    for pair in gradient_tiles(case, "bfloat16"):
        first = plain_gradients(case, pair, cotangent, arrays)
        for _ in range(20):
            jax.tree.map(np.testing.assert_array_equal, plain_gradients(case, pair, cotangent, arrays), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["13x13", "13x13, narrow", "clips", "volume", "causal clips"])
def test_rings_are_reproducible(name: str, dtype: str) -> None:
    arrays = plain_arrays(name, dtype)
    first = attend(name, arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, attend(name, arrays), first)


def test_rings_of_batch_entries_do_not_depend_on_others() -> None:
    arrays = plain_arrays("13x13", "bfloat16")
    every = attend("13x13", arrays)
    some = attend("13x13", jax.tree.map(lambda array: array[3:7], arrays))
    jax.tree.map(lambda found, key_bias_sum: np.testing.assert_array_equal(found, key_bias_sum[3:7]), some, every)


def test_a_number_that_is_not_finite_stays_in_its_entry_and_head() -> None:
    arrays = plain_arrays("13x13", "bfloat16")
    first = attend("13x13", arrays)
    key, value = (array.at[2, ..., 3, :].set(jnp.nan) for array in arrays[1:3])
    for clean, found in zip(first, attend("13x13", arrays._replace(key=key, value=value)), strict=True):
        is_hit = np.zeros(clean.shape, bool)
        is_hit[2, :, :, 3] = True
        assert not np.isfinite(np.asarray(found, np.float32)[is_hit]).any()
        np.testing.assert_array_equal(np.asarray(found)[~is_hit], np.asarray(clean)[~is_hit])


@pytest.mark.parametrize(("width", "tile"), [(32, (1, 4, 2)), (64, (1, 2, 4)), (64, (1, 4, 2))])
def test_entries_that_are_alike_have_the_same_gradients(width: int, tile: tuple[int, ...]) -> None:
    """Gradients of equal batch entries are bitwise equal, even if the window has the length of a strip.

    Strips and steps are defined in ``ring_shape.h``. With such a window, all steps of a strip see the same tokens, so a
    step waits only for its own tiles.
    """
    window: dict[str, Any] = {"kernel_size": (4, 5, 8), "is_causal": (False, True, False)}
    keys = jax.random.split(jax.random.key(7), 4)
    arrays = [
        jnp.repeat(jax.random.normal(key, (1, 4, 10, 8, heads, width), jnp.bfloat16), 77, axis=0)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    ]
    tiles: dict[str, Any] = {"backward_q_tile_shape": tile, "backward_kv_tile_shape": (1, 8, 2)}
    function = functools.partial(natten_jax.na3d, **window, backend="cutlass-fna", **tiles)
    differentiate = jax.jit(lambda query, key, value, cotangent: jax.vjp(function, query, key, value)[1](cotangent))
    for _ in range(20):
        for gradient in differentiate(*arrays):
            np.testing.assert_array_equal(gradient, jnp.broadcast_to(gradient[:1], gradient.shape))
