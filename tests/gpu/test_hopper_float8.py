"""The Hopper kernels for 8-bit arrays: against float64 of the numbers that the 8 bits are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.support import oracle
from tests.support.float8 import factors_for, scaled
from tests.support.problems import Case

pytestmark = pytest.mark.gpu

E4M3 = "float8_e4m3fn"
#: Relative error of a weight that is rounded to e4m3, and of sums of products: the matrix units keep 13 bits.
OF_WEIGHTS, OF_SUMS = 2.0**-4, 2.0**-12

CASES = {
    "1-D causal": Case((500,), (77,), dilation=(2,), is_causal=(True,), heads=4, heads_kv=2, head_dim=128, batch=2),
    "2-D": Case((31, 40), (9, 13), stride=(2, 1), heads=2, head_dim=128, batch=2),
    "2-D cut": Case((31, 40), (9, 13), edges=("cut", "shift"), heads=2, head_dim=96, batch=2),
    "2-D around": Case((32, 40), (9, 13), edges=("wrap", "cut"), heads=2, head_dim=128, batch=1),
    "3-D": Case((9, 12, 14), (5, 6, 7), stride=(1, 2, 2), heads=3, heads_kv=1, head_dim=128, batch=1),
    "3-D dilated": Case((9, 12, 14), (3, 3, 4), dilation=(2, 2, 3), heads=2, head_dim=64, batch=1),
    "additional": Case((20, 30), (7, 9), heads=4, heads_kv=2, head_dim=128, batch=2, additional=37, fused=True),
    "narrow": Case((20, 30), (7, 9), heads=4, heads_kv=2, head_dim=24, head_dim_v=48, batch=2),
    "wide": Case((20, 30), (7, 9), heads=2, head_dim=192, head_dim_v=208, batch=1),
    "wider values": Case((20, 30), (7, 9), heads=2, head_dim=64, head_dim_v=256, batch=1, additional=10, fused=True),
    "widest": Case((400,), queries=300, heads=2, head_dim=256, batch=1),
    "attention": Case((333,), queries=201, is_causal=(True,), heads=4, heads_kv=2, head_dim=128, batch=2),
}


def check(case: Case, kind: str | None, seed: int, **arguments: Any) -> None:
    """Compare output and logsumexp with the oracle's."""
    operands = case.host_operands(E4M3, seed)
    factors = {} if kind is None else factors_for(kind, case, seed)
    wide = scaled(case, operands, factors) if factors else jax.tree.map(lambda each: each.astype(np.float64), operands)
    backend = "hopper-fna" if case.queries is None else "hopper-fmha"
    out, logsumexp = jax.jit(case.operator(backend, **factors, **arguments))(jax.tree.map(jnp.asarray, operands))
    expected = oracle.forward(wide, case.mask(), case.actual_scale)
    spread = oracle.spread(wide, case.mask(), case.actual_scale)
    rounding = float(jnp.finfo(out.dtype).eps) / 2
    largest = max(np.linalg.norm(each, axis=-1).max() for each in (wide.query, wide.key))
    of_logits = OF_SUMS * case.actual_scale * largest**2
    off = np.linalg.norm(np.asarray(out, np.float64) - expected.out)
    assert off <= OF_WEIGHTS * np.linalg.norm(spread) + (rounding + of_logits) * np.linalg.norm(expected.out)
    assert np.abs(np.asarray(logsumexp, np.float64) - expected.lse).max() <= of_logits


@pytest.mark.parametrize("kind", [None, "tensor", "head"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_numbers(name: str, kind: str | None) -> None:
    check(CASES[name], kind, 0)


@pytest.mark.parametrize("schedule", ["non", "coop", "pp"])
def test_schedules(schedule: str) -> None:
    check(CASES["3-D"], "head", 1, kernel_schedule=schedule)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_output_has_the_type_that_is_asked_for(out_dtype: str) -> None:
    check(CASES["2-D"], "head", 2, out_dtype=out_dtype)


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_over_many_keys_lose_nothing(head_dim: int) -> None:
    """Weights that are much the same and values of one sign: 13 bits would lose a third of such sums."""
    keys = 131_072
    query, key = ((0.5 * draw(i, 1, n, 1, head_dim)).astype(E4M3) for i, n in enumerate((128, keys)))
    value = jnp.ones((1, keys, 1, head_dim), E4M3)
    out = natten_jax.attention(query, key, value, backend="hopper-fmha", out_dtype="float16")
    np.testing.assert_allclose(np.asarray(out, np.float64), 1, atol=2e-3)


def test_weights_do_not_saturate_where_logits_keep_rising() -> None:
    """Each tile of keys has logits that are larger than those before, by less and by more than a factor of two."""
    tokens = 2048
    steps = jnp.linspace(0, 40, tokens).reshape(1, tokens, 1, 1)
    query = jnp.ones((1, 128, 1, 64), E4M3)
    key = jnp.broadcast_to(steps / 64, (1, tokens, 1, 64)).astype(E4M3)
    value = draw(0, 1, tokens, 1, 64).astype(E4M3)
    for scale in (0.25, 1.0, 8.0):
        out = natten_jax.attention(query, key, value, scale=scale, backend="hopper-fmha")
        wide = oracle.Tensors(*(np.asarray(each, np.float64) for each in (query, key, value)))
        mask = oracle.attention_mask(128, tokens, False)
        expected, spread = oracle.forward(wide, mask, scale).out, oracle.spread(wide, mask, scale)
        assert np.linalg.norm(np.asarray(out, np.float64) - expected) <= OF_WEIGHTS * np.linalg.norm(spread)


def test_large_logits_leave_the_largest_alone() -> None:
    query = (448 * jnp.sign(draw(0, 1, 128, 2, 128))).astype(E4M3)
    key = (448 * jnp.sign(draw(1, 1, 300, 2, 128))).astype(E4M3)
    value = draw(2, 1, 300, 2, 128).astype(E4M3)
    products = jnp.einsum("bqhd,bkhd->bhqk", *(each.astype(jnp.float32) for each in (query, key)))
    best = jnp.argmax(products, axis=-1)[0]
    is_alone = np.asarray(jnp.sum(products == products.max(-1, keepdims=True), axis=-1)[0] == 1)
    expected = jnp.take_along_axis(value[0].astype(jnp.float32).swapaxes(0, 1), best[..., None], axis=1)
    for scale in (1.0, 1e4):
        out, logsumexp = natten_jax.attention(query, key, value, scale=scale, backend="hopper-fmha", return_lse=True)
        found = np.asarray(out[0], np.float64).swapaxes(0, 1)
        np.testing.assert_allclose(found[is_alone], np.asarray(expected, np.float64)[is_alone], rtol=0, atol=0)
        assert np.isfinite(np.asarray(logsumexp)).all()


def test_numbers_that_are_none_stay_where_they_are() -> None:
    query, key, value = (draw(i, 1, 256, 2, 128).astype(E4M3) for i in range(3))
    key = key.at[0, 7, 0, 3].set(jnp.nan)
    out = natten_jax.na1d(query, key, value, 31, backend="hopper-fna")
    is_nan = np.all(np.isnan(np.asarray(out[0], np.float32)), axis=-1)
    windows = oracle.neighborhood_mask((256,), (31,), (1,), (1,), (False,))
    np.testing.assert_array_equal(is_nan[:, 0], windows[:, 7])
    assert not is_nan[:, 1].any()


def test_outputs_of_32_bits_are_refused() -> None:
    query, key, value = (draw(i, 1, 256, 2, 128).astype(E4M3) for i in range(3))
    with pytest.raises(ValueError, match="have outputs of float16 or bfloat16, not float32"):
        natten_jax.na1d(query, key, value, 31, backend="hopper-fna", out_dtype="float32")
