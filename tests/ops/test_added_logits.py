"""Extreme numbers in biases, sinks and scales. Every backend follows the same rules:

- Numbers from ``finfo.min`` to half of it count as ``-inf``. A bias of ``-inf`` hides (masks out) keys.
- NaN and infinity make results non-finite.
- If all logits of a query are equally low, its keys have equal weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.fuzz.accuracy import excesses, expectation
from tests.fuzz.execution import find_leaks
from tests.fuzz.problem import Fuzzed, with_supported_terms
from tests.fuzz.spoiled import BROKEN, HIDING, TIED, Spoiled
from tests.support.families import Family
from tests.support.problems import QUICK_COMPILATION, Case, both_passes

CASES = {
    "all": Case((23,), (7,), batch=2, heads=4, heads_kv=2, relative_bias=True, key_bias="heads", sinks=True),
    "relative": Case((9, 8), (5, 3), heads=2, heads_kv=2, head_dim=16, relative_bias=True),
    "shared": Case((9, 11), (5, 4), dilation=(1, 2), batch=2, heads=2, heads_kv=1, key_bias="tokens"),
    "additional": Case((24,), (5,), heads=2, additional=7, fused=True, key_bias="heads", scales=(0.3, -0.5)),
    "merged": Case((24,), (5,), heads=2, heads_kv=2, additional=7, key_bias="tokens", sinks=True),
    "extents": Case((14,), (5,), batch=2, heads=2, extents=((9,), (14,)), key_bias="heads", sinks=True),
    "attention": Case((40,), queries=25, is_causal=(True,), heads=2, heads_kv=2, key_bias="heads", sinks=True),
}
#: Problems for GPUs. Each runs in another form (variant) of the GPU kernels.
GPU_CASES = {
    "7x7": Case((20, 20), (7, 7), heads=2, heads_kv=2, head_dim=32, relative_bias=True, key_bias="heads", sinks=True),
    "7x7 of keys": Case((20, 20), (7, 7), heads=2, heads_kv=2, head_dim=32, key_bias="heads", sinks=True),
    "7x7, table": Case((20, 20), (7, 7), heads=2, heads_kv=2, head_dim=32, relative_bias=True, sinks=True),
    "13x13": Case((33, 32), (13, 13), heads=2, heads_kv=2, head_dim=64, key_bias="tokens", sinks=True),
    "13x13, table": Case((33, 32), (13, 13), heads=2, heads_kv=2, head_dim=64, relative_bias=True),
    "33x33": Case((40, 40), (33, 33), heads=2, heads_kv=2, head_dim=128, key_bias="heads", sinks=True),
}
#: Replacements in operands: name of the operand, new number, and the elements that it replaces (``Spoiled.extent``).
SPOILED = [
    *(
        (name, number, extent)
        for name in ("relative_bias", "key_bias")
        for number in HIDING
        for extent in ("row", "all")
    ),
    *(("sinks", number, extent) for number in HIDING for extent in ("head", "all")),
    *((name, number, "all") for name in ("relative_bias", "key_bias", "sinks") for number in TIED),
    *((name, number, "number") for name in ("relative_bias", "key_bias", "sinks", "scale") for number in BROKEN),
    *((name, number, "head") for name in ("relative_bias", "key_bias") for number in BROKEN),
    ("scale", "-inf", "number"),
]


def problem_of(family: Family, case: Case, dtype: str) -> Fuzzed:
    """Return the problem without biases that the family does not support."""
    return with_supported_terms(Fuzzed(family.name, case.with_edges_of(family), dtype, 3), family)


def find_leaks_of(problem: Fuzzed, spoiled: list[Spoiled]) -> list[str]:
    """Run a problem once for each replacement in ``spoiled``, in one compiled program, and list wrong results."""

    run = jax.jit(both_passes(problem.case.operator(problem.backend)), compiler_options=QUICK_COMPILATION)

    def results_of(inputs: Any) -> Any:
        return jax.tree.map(np.asarray, run(*jax.tree.map(jax.device_put, inputs)))

    found = []
    for each in spoiled:
        with_numbers = dataclasses.replace(problem, spoiled=each)
        without = results_of(with_numbers.inputs())
        if each.is_broken:
            what = find_leaks(with_numbers, without, results_of(with_numbers.spoiled_inputs()))
        else:
            what = [str(excess) for excess in excesses(with_numbers, expectation(with_numbers), *without)]
        found += [f"{each}: {error}" for error in what]
    return found


def check(family: Family, case: Case, dtype: str, *, is_narrow: bool = False, without: Collection[str] = ()) -> None:
    """Check the results with every replacement in ``SPOILED``, except those whose new number is in ``without``."""
    problem = problem_of(family, case, dtype)
    operands, _ = problem.inputs()
    spoiled = [
        Spoiled(*each, batch=1, head=1, place=5, is_narrow=is_narrow and each[0] != "scale")
        for each in SPOILED
        if getattr(operands, each[0]) is not None and each[1] not in without
    ]
    if not spoiled:
        pytest.skip(f"{family.name} adds no such bias")
    assert find_leaks_of(problem, spoiled) == []


@pytest.mark.parametrize("name", CASES)
def test_one_rule_for_all_numbers(family: Family, name: str) -> None:
    check(family, CASES[name], family.dtype)


@pytest.mark.parametrize(
    "hidden",
    [
        {"key_bias": np.zeros((1, 6), bool)},
        {"key_bias": np.full((1, 6), -np.inf)},
        {"relative_bias": np.full((2, 5), -np.inf)},
    ],
    ids=["mask", "key_bias", "relative_bias"],
)
def test_rows_without_keys_are_zero_and_leave_no_trace_in_merges(family: Family, hidden: dict[str, Any]) -> None:
    """Check what the table of libraries in docs/numerics.md says about this package and about JAX."""
    if not hidden.keys() <= set(family.capabilities.features):
        pytest.skip(f"{family.name} adds no such bias")
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 8)).astype(family.dtype)
    hidden = {name: jnp.asarray(each, None if each.dtype == bool else family.dtype) for name, each in hidden.items()}
    backend = f"{family.name}-fna"
    empty = natten_jax.na1d(query, key, value, 3, backend=backend, return_lse=True, **hidden)
    assert not empty[0].any() and (empty[1] == -jnp.inf).all()
    full = natten_jax.na1d(query, key, value, 3, backend=backend, return_lse=True)
    for parts in ((empty, full), (full, empty)):
        merged = natten_jax.merge_attentions(*zip(*parts, strict=True))
        np.testing.assert_array_equal(merged[0], full[0])
    mean = jax.nn.dot_product_attention(query, key, value, mask=jnp.zeros((1, 1, 6, 6), bool))
    np.testing.assert_allclose(mean, jnp.broadcast_to(value.mean(1, keepdims=True), value.shape), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", GPU_CASES)
def test_one_rule_for_kernels_of_gpus(family: Family, name: str) -> None:
    if not family.needs_gpu:
        pytest.skip("of kernels for GPUs")
    check(family, GPU_CASES[name], "bfloat16" if "bfloat16" in family.dtypes else family.dtype)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_masks_hide_by_their_own_minimum(family: Family, half: str) -> None:
    if half not in family.dtypes:
        pytest.skip(f"{family.name} has no {half}")
    check(family, CASES["merged"], half, is_narrow=True)


def test_sums_of_finite_biases_hide_no_key(family: Family) -> None:
    """A bias of at most ``finfo.min / 2`` hides its key. The sum of two larger biases can be lower and hides no key."""
    case = dataclasses.replace(CASES["all"], sinks=False)
    problem = problem_of(family, case, family.dtype)
    if len(problem.description().biases) < 2:
        pytest.skip(f"{family.name} does not add both biases")
    operands, cotangents = problem.inputs()
    assert operands.relative_bias is not None and operands.key_bias is not None
    low = 0.49 * np.finfo(np.float32).min
    low_everywhere = operands._replace(
        relative_bias=np.full_like(operands.relative_bias, low), key_bias=np.full_like(operands.key_bias, low)
    )
    (out, lse), pullback = jax.vjp(case.operator(problem.backend), low_everywhere)
    assert np.isfinite(np.asarray(lse)).all()
    np.testing.assert_allclose(
        np.asarray(out)[:, 11, 0], operands.value[:, 8:15, 0].astype(np.float32).mean(axis=1), rtol=0.02, atol=0.02
    )
    assert all(np.isfinite(np.asarray(each)).all() for each in pullback(cotangents)[0] if each is not None)


@pytest.mark.parametrize("low", [-1e9, -3e13, -1e30, -1.7e38])
def test_low_products_of_queries_and_keys_have_equal_weights(family: Family, low: float) -> None:
    """Equal keys have equal weights, even if the logit that they share is very low."""
    dtype = "bfloat16" if "bfloat16" in family.dtypes else family.dtype
    root = float(np.sqrt(-low / 8))
    query = jnp.full((1, 21, 2, 8), root, dtype)
    value = jax.random.normal(jax.random.key(0), query.shape).astype(dtype)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return natten_jax.na1d(query, key, value, 5, scale=1.0, backend=family.fna, return_lse=True)

    (out, lse), pullback = jax.vjp(attend, query, -query, value)
    np.testing.assert_allclose(np.asarray(lse, np.float64), -8 * float(query[0, 0, 0, 0]) ** 2, rtol=1e-5)
    mean = np.asarray(value[0, 8:13, 0], np.float64).mean(axis=0)
    np.testing.assert_allclose(np.asarray(out[0, 10, 0], np.float64), mean, atol=0.01)
    value_gradient = pullback((jnp.ones_like(out), jnp.zeros_like(lse)))[2]
    np.testing.assert_allclose(np.asarray(value_gradient[0, 10], np.float64), 1, atol=0.01)


@pytest.mark.parametrize("number", ["nan", "inf", "min"])
def test_weights_as_an_array_follow_the_rule(number: str) -> None:
    query = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    value = float(jnp.finfo("float32").min) if number == "min" else float(number)
    table = jnp.zeros((2, 5)).at[0].set(value)

    def weights_of(table: Any) -> Any:
        return natten_jax.neighborhood_weights(query, query, 3, relative_bias=table)

    weights, pullback = jax.vjp(weights_of, table)
    (gradient,) = pullback(jnp.cos(weights) if number == "min" else jnp.ones_like(weights))
    np.testing.assert_array_equal(weights[..., 1, :], weights_of(jnp.zeros((2, 5)))[..., 1, :])
    if number == "min":
        np.testing.assert_array_equal(weights[..., 0, :], 0)
        np.testing.assert_array_equal(gradient[0], 0)
    else:
        assert np.isnan(weights[..., 0, :]).all()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_no_scale_of_weights_hides_keys(scale: float) -> None:
    ones, table = jnp.ones((1, 9, 1, 8)), jnp.zeros((1, 5))

    @jax.jit
    def weights_of(key: Any, scale: Any) -> Any:
        return natten_jax.neighborhood_weights(ones, key, 3, relative_bias=table, scale=scale)

    for key in (ones, -ones):
        weights = weights_of(key, scale)
        is_seen = np.asarray(natten_jax.neighborhood_weights(ones, key, 3)) > 0
        assert np.isnan(weights[is_seen]).all()


@pytest.mark.parametrize("low", [2.0**30, -(2.0**30), 1e13, -1e13, -1e30])
def test_equal_sinks_and_biases_share_weight(low: float) -> None:
    query = jnp.zeros((1, 5, 1, 8))
    value = jax.random.normal(jax.random.key(0), (1, 5, 1, 8))

    def attend(sink: Any) -> Any:
        bias = jnp.full((1, 5), low)
        return natten_jax.na1d(query, query, value, 3, key_bias=bias, sinks=sink[None], backend="cpu-fna")

    mean = value[0, 1:4].mean(0)
    np.testing.assert_allclose(attend(jnp.float32(low))[0, 2], 0.75 * mean, rtol=0.01)
    # The next float32 number below ``low`` is smaller by at least 64. A sink with this logit has almost no weight, and
    # almost no gradient.
    lower = jnp.nextafter(jnp.float32(low), -jnp.inf)
    out, pullback = jax.vjp(attend, lower)
    np.testing.assert_allclose(out[0, 2], mean, rtol=1e-6)
    np.testing.assert_allclose(pullback(out)[0], 0, atol=1e-20)


@pytest.mark.parametrize("name", ["key_bias", "sinks"])
@pytest.mark.parametrize("backend", ["cpu-fna", "flex-fna"])
def test_the_largest_numbers_are_finite(backend: str, name: str) -> None:
    query = jax.random.normal(jax.random.key(0), (1, 5, 1, 8))
    array = jnp.full((1, 5) if name == "key_bias" else (1,), jnp.finfo("float32").max)
    out, lse = natten_jax.na1d(query, query, query, 3, backend=backend, return_lse=True, **{name: array})  # type: ignore[call-overload]
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
