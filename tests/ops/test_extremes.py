"""Operands at the limits of floating point: large logits, NaN and infinity."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Saved
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.performance import PASSES, tile_names
from natten_jax.windows import WindowArguments
from tests.support import oracle
from tests.support.families import BOUNDS, Family, tile_pair
from tests.support.plans import plans_of
from tests.support.problems import Case, both_passes, element_types, errors_of, expected_of, value_and_gradients

# Gradients at large logits ------------------------------------------------------------------------------------------

#: Magnitudes of the largest logit of a problem. Consecutive float32 numbers differ by 0.00012 at the smallest
#: magnitude, and by 128 at the largest.
LADDER = (2e3, 2e5, 2e7, 2e8, 2e9)

CASES = {
    "1d": Case((64,), (9,), head_dim=32),
    "1d-small": Case((7,), (3,), head_dim=40),
    "1d-causal-strided": Case((150,), (21,), stride=(4,), is_causal=(True,), head_dim=64),
    "2d-grouped": Case((9, 14), (4, 5), dilation=(1, 2), batch=2, heads=4, heads_kv=2, head_dim=16),
    "3d-additional": Case((3, 5, 6), (2, 3, 5), heads=2, additional=5, fused=True, head_dim=24),
    "negative-scale": Case((40,), (13,), scale=-0.3, head_dim=17, head_dim_v=5),
    "attention": Case((33,), queries=70, is_causal=(True,), head_dim=48),
}


def with_largest_logit(case: Case, largest: float, dtype: str, seed: int = 0) -> oracle.Tensors:
    """Return operands of ``case``, scaled so that the largest logit has the magnitude ``largest``."""
    operands = case.operands(dtype, seed)
    keys = [a for a in (operands.key, operands.additional_keys) if a is not None]
    rows = [np.asarray(a, np.float64) for a in (operands.query, *keys)]
    products = (np.einsum("bqhd,bkgd->bhgqk", *(flat(a) for a in (rows[0], each))) for each in rows[1:])
    factor = (largest / (abs(case.actual_scale) * max(np.abs(each).max() for each in products))) ** 0.5

    def multiplied(array: Any) -> Any:
        return None if array is None else jnp.asarray(np.asarray(array, np.float64) * factor, dtype)

    return operands._replace(
        query=multiplied(operands.query),
        key=multiplied(operands.key),
        additional_keys=multiplied(operands.additional_keys),
    )


def flat(array: Any) -> Any:
    return array.reshape(array.shape[0], -1, *array.shape[-2:])


def climbed(case: Case, function: Callable[[oracle.Tensors], Any], dtype: str) -> dict[tuple[float, str], float]:
    """Return the error of each result at each magnitude in ``LADDER``. Keys are the magnitude and the result's name."""
    differentiated = jax.jit(both_passes(function))
    cotangents, found = case.cotangents(dtype, 0), {}
    for largest in LADDER:
        if dtype == "float16" and largest > 2e7:
            continue  # the operands would exceed the range of float16
        operands = with_largest_logit(case, largest, dtype)
        results = differentiated(operands, cotangents)
        expected = expected_of(case, operands, cotangents)
        found.update({(largest, name): error for name, error in errors_of(expected, *results).items()})
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_at_large_logits(family: Family, dtype: str, name: str) -> None:
    case = CASES[name].fitted(family)
    with element_types(dtype):
        found = climbed(case, case.operator(family.fna if case.queries is None else family.fmha), dtype)
    too_large = {rung: error for rung, error in found.items() if not error <= max(1e-5, BOUNDS[dtype])}
    assert not too_large


def test_large_logits_of_other_forward_passes(pure_family: Family) -> None:
    """A backward pass accepts a logsumexp that is computed elsewhere and rounded to float32.

    It normalizes the weights with a logsumexp that it computes from its own logits.
    """
    case = CASES["1d-small"]
    cotangents = case.cotangents("float32", 0)
    for largest in LADDER:
        operands = with_largest_logit(case, largest, "float32")
        expected = oracle.forward(oracle.Tensors(*map(np.asarray, operands[:3])), case.mask(), case.actual_scale)
        out, logsumexp = (jnp.asarray(array, jnp.float32) for array in expected)
        saved = Saved(out, logsumexp, remainder=None)
        problem = neighborhood_problem(1, Inputs(*operands[:3]), WindowArguments(**case.window_arguments))
        backend, plans = plans_of(pure_family.fna, problem)
        gradients = jax.jit(functools.partial(backend.backward, plans["backward"]))(
            Operands(Inputs(*operands[:6])), saved, Cotangents(*cotangents)
        )
        found = errors_of(expected_of(case, operands, cotangents), saved[:2], oracle.Tensors(*gradients[:8]))
        assert max(found.values()) <= 1e-5, (largest, found)


def test_large_logits_in_a_part_of_a_mapped_axis(pure_family: Family) -> None:
    case = CASES["2d-grouped"]
    cotangents = case.cotangents("float32", 0)
    parts = [with_largest_logit(case, largest, "float32", seed) for seed, largest in enumerate((3, 2e7, 20))]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts)
    mapped = jax.vmap(both_passes(case.operator(pure_family.fna)), (0, None))
    results = jax.jit(mapped)(stacked, cotangents)
    for i, operands in enumerate(parts):
        found = errors_of(expected_of(case, operands, cotangents), *jax.tree.map(lambda array, i=i: array[i], results))
        assert max(found.values()) <= 1e-5, (i, found)


@pytest.mark.parametrize(("unit", "tokens"), [(32, (5, 290)), (2, (5, 6))], ids=["far", "near"])
def test_largest_logits_one_unit_apart(family: Family, dtype: str, unit: int, tokens: tuple[int, int]) -> None:
    """The two largest dot products of a query with keys differ by one unit in the last place of float32.

    The later of these two keys has the larger dot product. After the multiplication by the scale, rounding errors may
    exceed the difference.
    """
    scale, q = 32.0, 2.0**14
    in_base_2 = float(np.float32(scale) * np.float32(np.log2(np.e)))

    def stays_above(mantissa: int) -> float:
        """Return the smaller logit minus the larger logit, if only the larger logit is rounded down to float32."""
        larger, smaller = ((mantissa + more) * unit * in_base_2 for more in (1, 0))
        rounded = np.float32(larger)
        return smaller - float(rounded if float(rounded) <= larger else np.nextafter(rounded, np.float32(0)))

    # With a unit of 32, the difference that ``stays_above`` returns exceeds 160, and 2**160 overflows float32.
    mantissa = next(m for m in range(2**24 - 2, 0, -1) if stays_above(m) > 5 * unit)
    case = Case((300,), queries=70, scale=scale, head_dim=16)
    with element_types(dtype):
        operands, cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)
        query, key = np.zeros(operands.query.shape), np.zeros(operands.key.shape)
        query[..., :3] = q
        for token, number in zip(tokens, (mantissa, mantissa + 1), strict=True):
            key[:, token, :, :3] = np.array([number & 0xFF0000, number & 0xFF00, number & 0xFF]) * unit / q
        operands = operands._replace(query=jnp.asarray(query, dtype), key=jnp.asarray(key, dtype))
        results = jax.jit(both_passes(case.operator(family.fmha)))(operands, cotangents)
    found = errors_of(expected_of(case, operands, cotangents), *results)
    # Gradients of query and key are not compared, because they exceed the range of float16.
    too_large = {name: found[name] for name in ("out", "lse", "d_value") if not found[name] <= max(1e-5, BOUNDS[dtype])}
    assert not too_large


# NaN and infinity ---------------------------------------------------------------------------------------------------

TOKENS, WINDOW = 2048, 9
LONG = Case((TOKENS,), (WINDOW,), head_dim=8)
#: Index of the token that gets a non-finite number. It is more than two tiles away from both ends of the layout.
BROKEN_TOKEN = 1000
BACKWARD_TILES = ("backward_q_tile_shape", "backward_kv_tile_shape")


class Results(NamedTuple):
    """Results of a call and of its backward pass; shapes ``[tokens, ...]``."""

    out: Any
    lse: Any
    d_query: Any
    d_key: Any
    d_value: Any


def by_visible_pairs(operands: oracle.Tensors, cotangents: tuple[Any, Any]) -> Results:
    """Return the results of ``LONG`` in float64, computed only from pairs of a query and a key in its window."""
    query, key, value, d_out, d_lse = (
        np.asarray(a, np.float64).reshape(TOKENS, -1) for a in (*operands[:3], *cotangents)
    )
    starts = np.clip(np.arange(TOKENS) - WINDOW // 2, 0, TOKENS - WINDOW)
    seen = starts[:, None] + np.arange(WINDOW)
    logits = LONG.actual_scale * np.einsum("nd,nkd->nk", query, key[seen])
    highest = logits.max(1, keepdims=True)
    weights = np.exp(logits - highest)
    total = weights.sum(1, keepdims=True)
    weights = weights / total
    out = np.einsum("nk,nkd->nd", weights, value[seen])
    delta = (d_out * out).sum(1, keepdims=True) - d_lse
    d_logits = LONG.actual_scale * weights * (np.einsum("nd,nkd->nk", d_out, value[seen]) - delta)
    d_key, d_value = np.zeros_like(key), np.zeros_like(value)
    np.add.at(d_key, seen, d_logits[..., None] * query[:, None])
    np.add.at(d_value, seen, weights[..., None] * d_out[:, None])
    return Results(out, highest + np.log(total), np.einsum("nk,nkd->nd", d_logits, key[seen]), d_key, d_value)


def smallest_tiles(family: Family, dtype: str) -> dict[str, tuple[int, ...]]:
    """Return tile arguments for ``LONG`` with the smallest tiles that the family lists for each pass."""
    tokens = jax.ShapeDtypeStruct((1, TOKENS, 1, LONG.head_dim), dtype)
    tiles: dict[str, tuple[int, ...]] = {}
    for pass_ in PASSES:
        pairs = map(tile_pair, family.query("fna", pass_)(tokens, tokens, tokens, **LONG.window_arguments))
        smallest: Any = min(pairs, key=lambda pair: pair[0][0] + pair[1][0])
        tiles.update(zip(tile_names(pass_), smallest, strict=True))
    return tiles


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "d_out"])
def test_one_number_that_is_not_finite(family: Family, name: str, number: float) -> None:
    """Results that depend on the non-finite number are not finite. Results beyond the neighboring tiles are finite."""
    operands, (d_out, d_lse) = LONG.operands(family.dtype, 0), LONG.cotangents(family.dtype, 0)
    # Make feature 0 of all keys nonnegative. If feature 0 of a query is -inf, all its logits are then -inf.
    operands = operands._replace(key=operands.key.at[..., 0].set(abs(operands.key[..., 0])))
    where = (0, BROKEN_TOKEN, 0, 0)
    if name == "d_out":
        d_out = d_out.at[where].set(number)
    else:
        operands = operands._replace(**{name: getattr(operands, name).at[where].set(number)})
    tiles = smallest_tiles(family, family.dtype)
    (out, lse), gradients = value_and_gradients(LONG.operator(family.fna, **tiles), operands, (d_out, d_lse))
    found = Results(*(np.asarray(a, np.float64).reshape(TOKENS, -1) for a in (out, lse, *gradients[:3])))
    if name == "query" and number == -np.inf and family.target is not None:
        # Kernels treat a query whose logits are all -inf like a query without keys. Queries without keys occur in calls
        # that compute a part of a layout.
        assert not np.isfinite(found.lse[BROKEN_TOKEN])
        out = found.out[BROKEN_TOKEN]
        assert (out == 0).all() or np.isnan(out).all()
        return
    with np.errstate(invalid="ignore"):
        expected = by_visible_pairs(operands, (d_out, d_lse))

    distance = np.abs(np.arange(TOKENS) - BROKEN_TOKEN)
    reach = WINDOW + tiles["q_tile_shape"][0] + tiles["kv_tile_shape"][0]
    backward_reach = reach + WINDOW + sum(tiles.get(name, (64,))[0] for name in BACKWARD_TILES)
    assert backward_reach < TOKENS // 3
    tolerance = 20 * BOUNDS[family.dtype]
    for result in Results._fields:
        ours, reference = getattr(found, result), getattr(expected, result)
        is_finite, should_be_finite = np.isfinite(ours).all(1), np.isfinite(reference).all(1)
        assert should_be_finite.sum() >= TOKENS - 4 * WINDOW, result
        assert not (is_finite & ~should_be_finite).any(), f"{result} hides it"
        both = np.isfinite(ours) & np.isfinite(reference)
        np.testing.assert_allclose(ours[both], reference[both], atol=tolerance, rtol=tolerance, err_msg=result)
        is_far = distance > (reach if result in ("out", "lse") else backward_reach)
        assert is_finite[is_far].all(), f"{result} of tokens far from it"


def test_masking_by_a_feature(family: Family) -> None:
    """Mask keys by an additional feature, which makes their logits very low. Results depend only on the other keys."""
    case = Case((20,), queries=24, head_dim=16)
    dtype, scale = family.dtype, case.actual_scale
    (query, key, value, *_), cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)
    valid = np.random.default_rng(0).random(20) < 0.6

    def with_feature(array: jax.Array, number: Any) -> jax.Array:
        feature = jnp.broadcast_to(number, (*array.shape[:-1], 1)).astype(array.dtype)
        return jnp.concatenate([array, jnp.pad(feature, [(0, 0)] * (array.ndim - 1) + [(0, 7)])], axis=-1)

    def masked(operands: oracle.Tensors) -> tuple[Any, Any]:
        key = with_feature(operands.key, jnp.where(valid[:, None, None], 0, -1e3 / scale))
        return natten_jax.attention(
            with_feature(operands.query, 1), key, operands.value, scale, backend=family.fmha, return_lse=True
        )

    outputs, gradients = value_and_gradients(masked, oracle.Tensors(query, key, value), cotangents)
    assert not gradients.key[:, ~valid].any() and not gradients.value[:, ~valid].any()
    alone = oracle.Tensors(query, key[:, valid], value[:, valid])
    gradients = gradients._replace(key=gradients.key[:, valid], value=gradients.value[:, valid])
    fewer = Case((int(valid.sum()),), queries=24, head_dim=16)
    found = errors_of(expected_of(fewer, alone, cotangents), outputs, gradients)
    assert max(found.values()) <= 10 * BOUNDS[dtype], found
