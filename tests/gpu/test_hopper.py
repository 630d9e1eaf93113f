"""The kernels for Hopper: calls, large arrays, gradients and 8-bit arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from tests.fuzz.execution import find_errors
from tests.fuzz.problem import Fuzzed
from tests.support import oracle
from tests.support.families import BOUNDS, family_named
from tests.support.float8 import factors_for, scaled
from tests.support.problems import Case, Trial, both_passes, check_all, check_gradients_repeat

# Very large arrays, and additional tokens that may end within a tile.
#
# Other tests of the results are in ``test_operators.py``, which tests every family.


pytestmark = pytest.mark.gpu


@functools.partial(jax.jit, static_argnums=(0, 1))
def hashed(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Return numbers in [-1.7, 1.7), computed without temporary arrays: each is a hash (murmur3) of its position."""
    x = jnp.full(shape, seed * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    for dimension in range(len(shape)):
        pitch = math.prod(shape[dimension + 1 :])
        x += jax.lax.broadcasted_iota(jnp.uint32, shape, dimension) * jnp.uint32(pitch)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return ((x ^ (x >> 16)).astype(jnp.float32) * (3.4 / 2**32) - 1.7).astype(jnp.bfloat16)


def check_large_arrays(
    batch: int, layout: tuple[int, ...], heads: int, kernel_size: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    """Compare some queries with float64 results, including queries near the 2^31st element of the arrays."""
    head_dim, rank = 128, len(layout)
    tokens = batch * math.prod(layout)
    query, key, value = (hashed(i, (batch, *layout, heads, head_dim)) for i in range(3))
    operator = getattr(natten_jax, f"na{rank}d")
    out, logsumexp = operator(query, key, value, kernel_size, dilation=dilation, backend="hopper-fna", return_lse=True)

    rng = np.random.default_rng(0)
    boundary = 2**31 // (heads * head_dim)  # index of the token that contains the 2^31st element
    sample = {0, 1, tokens - 1, tokens - 2, *(boundary + np.arange(-2, 3)), *rng.integers(0, tokens, 40)}
    take = jax.jit(lambda array, rows: array.reshape(-1, *array.shape[1 + rank :])[rows])

    def rows(array: jax.Array, indices: Any) -> np.ndarray:
        return np.asarray(take(array, np.asarray(indices)), np.float64)

    errors = []
    for token in map(int, sample):
        entry, *position = np.unravel_index(token, (batch, *layout))
        lines = []
        for at, extent, window, step in zip(map(int, position), layout, kernel_size, dilation, strict=True):
            length = len(range(at % step, extent, step))
            lines.append([at % step + step * j for j in oracle.window(at // step, length, window, 1, False)])
        seen = np.ravel_multi_index(np.meshgrid([entry], *lines, indexing="ij"), (batch, *layout)).ravel()
        logits = np.einsum("hd,khd->hk", rows(query, [token])[0], rows(key, seen)) * head_dim**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        expected = np.einsum("hk,khd->hd", weights / total, rows(value, seen))
        expected_lse = (np.log(total) + logits.max(-1, keepdims=True))[:, 0]
        errors += [
            np.linalg.norm(rows(out, [token])[0] - expected) / np.linalg.norm(expected),
            np.linalg.norm(rows(logsumexp, [token])[0] - expected_lse) / np.linalg.norm(expected_lse),
        ]
    assert max(errors) < BOUNDS["bfloat16"]


@pytest.mark.parametrize(
    "problem", [(1, (264_001,), 64, (9,), (2,)), (5, (33, 70, 64), 23, (3, 4, 5), (1, 3, 2))], ids=["1d", "3d"]
)
def test_arrays_of_more_than_2_31_elements(problem: tuple[Any, ...]) -> None:
    """Run the call in a new process, because the test process would keep GPU memory that other processes need."""
    batch, layout, heads, *_ = problem
    elements = batch * math.prod(layout) * heads * 128
    assert elements > 2**31
    stats = jax.devices()[0].memory_stats() or {}
    if stats.get("bytes_limit", 0) < 9 * elements:
        pytest.skip(f"needs {9 * elements / 2**30:.0f} GiB of a device's memory")
    program = f"from tests.gpu.test_hopper import check_large_arrays; check_large_arrays(*{problem})"
    root = Path(__file__).parents[2]
    finished = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("additional", [1, 48, 97, 128, 300])
@pytest.mark.parametrize(
    ("head_dim", "q_tile", "kv_tile"), [(64, 192, 128), (64, 192, 48), (128, 128, 96), (128, 64, 48)]
)
def test_additional_tokens_end_within_tiles(additional: int, head_dim: int, q_tile: int, kv_tile: int) -> None:
    case = Case((250,), (70,), heads=2, heads_kv=2, head_dim=head_dim, additional=additional, fused=True)
    tiles = {"q_tile_shape": (q_tile,), "kv_tile_shape": (kv_tile,)}
    check_all([Trial(case, "bfloat16", arguments=tiles)], family_named("hopper"))


# Gradients of the Hopper kernels. ``test_operators.py`` also tests them.


@pytest.mark.parametrize(
    ("layout", "windows", "q_tile", "kv_tile"),
    [
        ((301,), {"kernel_size": (70,), "stride": (9,)}, (64,), (128,)),
        ((301,), {"kernel_size": (31,), "dilation": (4,), "is_causal": (True,)}, (50,), (90,)),
        ((37, 29), {"kernel_size": (11, 7), "stride": (3, 2)}, (7, 9), (9, 13)),
        ((23, 31), {"kernel_size": (5, 9), "dilation": (3, 2), "is_causal": (False, True)}, (16, 4), (8, 16)),
        ((7, 11, 13), {"kernel_size": (3, 5, 7), "stride": (1, 2, 5)}, (2, 4, 8), (3, 5, 7)),
        ((9, 10, 11), {"kernel_size": (4, 3, 2), "dilation": (2, 3, 4)}, (1, 3, 5), (2, 8, 8)),
    ],
)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 64), (8, 24), (40, 128), (64, 48), (192, 136), (64, 256)])
def test_tiles_and_windows_that_do_not_divide_the_layout(
    layout: tuple[int, ...],
    windows: dict[str, Any],
    q_tile: tuple[int, ...],
    kv_tile: tuple[int, ...],
    head_dim: int,
    head_dim_v: int,
) -> None:
    if max(head_dim, head_dim_v) > 128:  # the kernel for these head dimensions has half as many keys per tile
        kv_tile = (*kv_tile[:-1], kv_tile[-1] // 2)
    case = Case(layout, **windows, heads=4, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim_v, batch=2)
    tiles = {"backward_q_tile_shape": q_tile, "backward_kv_tile_shape": kv_tile}
    check_all([Trial(case, "bfloat16", arguments=tiles)], family_named("hopper"))


def test_batches_may_be_larger_than_a_grid_is_high() -> None:
    """The batch may exceed 65,535, the maximum extent of a CUDA grid in its y and z dimensions."""
    case = Case((8,), (3,), heads=2, head_dim=64)
    assert find_errors([Fuzzed("hopper", case, "bfloat16", 0, copies=65_537)]) == [[]]


def test_the_reduction_may_be_left_to_xla() -> None:
    case = Case((40, 24), (7, 7), batch=2, heads=4, heads_kv=4, head_dim=64)
    operands, cotangents = case.operands("bfloat16", 0), case.cotangents("bfloat16", 0)

    def gradients(use_xla: bool) -> Any:
        operator = case.operator("hopper-fna", backward_use_xla_reduction=use_xla)
        return jax.jit(both_passes(operator))(operands, cotangents)[1]

    for one, other in zip(*(jax.tree.leaves(gradients(each)) for each in (False, True)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(one)


@pytest.mark.parametrize(
    "case",
    [
        Case((4096,), (4096,)),
        Case((4096,), (4096,), is_causal=(True,)),
        Case((5000,), (777,), dilation=(3,)),
        Case((96, 80), (25, 19), stride=(2, 3)),
        Case((18, 20, 33), (7, 8, 9), dilation=(2, 1, 3), is_causal=(True, False, False)),
    ],
    ids=lambda case: f"{len(case.layout)}d-{case.kernel_size[0]}-{case.causal[0]}",
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients_are_the_same_in_every_run(case: Case, is_deterministic: bool) -> None:
    case = dataclasses.replace(case, batch=2, heads=6, heads_kv=3, head_dim=128, head_dim_v=72)
    names = ("query", "key", "value")[0 if is_deterministic else 1 :]  # key and value gradients are always reproducible
    check_gradients_repeat(case, "hopper-fna", names, backward_deterministic=is_deterministic)


# The Hopper kernels for 8-bit arrays, compared with results that are computed in float64 from the decoded numbers.


E4M3 = "float8_e4m3fn"

#: Bounds of two relative errors. The first is of a weight that is rounded to e4m3. The second is of a sum of products:
#: tensor cores keep 13 bits of it.
WEIGHT_BOUND, SUM_BOUND = 2.0**-4, 2.0**-12

FLOAT8_CASES = {
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
    """Compare output and logsumexp with the results of the oracle."""
    operands = case.host_operands(E4M3, seed)
    factors = {} if kind is None else factors_for(kind, case, seed)
    wide = scaled(case, operands, factors) if factors else jax.tree.map(lambda each: each.astype(np.float64), operands)
    backend = "hopper-fna" if case.queries is None else "hopper-fmha"
    out, logsumexp = jax.jit(case.operator(backend, **factors, **arguments))(jax.tree.map(jnp.asarray, operands))
    expected = oracle.forward(wide, case.mask(), case.actual_scale)
    spread = oracle.spread(wide, case.mask(), case.actual_scale)
    rounding = float(jnp.finfo(out.dtype).eps) / 2
    largest = max(np.linalg.norm(each, axis=-1).max() for each in (wide.query, wide.key))
    logit_bound = SUM_BOUND * case.actual_scale * largest**2
    off = np.linalg.norm(np.asarray(out, np.float64) - expected.out)
    assert off <= WEIGHT_BOUND * np.linalg.norm(spread) + (rounding + logit_bound) * np.linalg.norm(expected.out)
    assert np.abs(np.asarray(logsumexp, np.float64) - expected.lse).max() <= logit_bound


@pytest.mark.parametrize("kind", [None, "tensor", "head"])
@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_results_equal_attention_over_the_dequantized_arrays(name: str, kind: str | None) -> None:
    check(FLOAT8_CASES[name], kind, 0)


@pytest.mark.parametrize("schedule", ["non", "coop", "pp"])
def test_schedules(schedule: str) -> None:
    check(FLOAT8_CASES["3-D"], "head", 1, kernel_schedule=schedule)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_output_has_the_requested_type(out_dtype: str) -> None:
    check(FLOAT8_CASES["2-D"], "head", 2, out_dtype=out_dtype)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_over_many_keys_keep_precision(head_dim: int) -> None:
    """Add up nearly equal weights of 131,072 keys. Accumulating in 13 bits would lose a third of the sum."""
    keys = 131_072
    query, key = ((0.5 * drawn(i, 1, n, 1, head_dim)).astype(E4M3) for i, n in enumerate((128, keys)))
    value = jnp.ones((1, keys, 1, head_dim), E4M3)
    out = natten_jax.attention(query, key, value, backend="hopper-fmha", out_dtype="float16")
    np.testing.assert_allclose(np.asarray(out, np.float64), 1, atol=2e-3)


def test_weights_do_not_saturate_if_logits_keep_rising() -> None:
    """Logits increase from key tile to key tile, so that exponentials must be rescaled.

    Depending on the scale, a tile's largest exponential grows by less or by more than a factor of two.
    """
    tokens = 2048
    steps = jnp.linspace(0, 40, tokens).reshape(1, tokens, 1, 1)
    query = jnp.ones((1, 128, 1, 64), E4M3)
    key = jnp.broadcast_to(steps / 64, (1, tokens, 1, 64)).astype(E4M3)
    value = drawn(0, 1, tokens, 1, 64).astype(E4M3)
    for scale in (0.25, 1.0, 8.0):
        out = natten_jax.attention(query, key, value, scale=scale, backend="hopper-fmha")
        wide = oracle.Tensors(*(np.asarray(each, np.float64) for each in (query, key, value)))
        mask = oracle.attention_mask(128, tokens, False)
        expected, spread = oracle.forward(wide, mask, scale).out, oracle.spread(wide, mask, scale)
        assert np.linalg.norm(np.asarray(out, np.float64) - expected) <= WEIGHT_BOUND * np.linalg.norm(spread)


def test_large_logits_leave_only_the_largest_weight() -> None:
    query = (448 * jnp.sign(drawn(0, 1, 128, 2, 128))).astype(E4M3)
    key = (448 * jnp.sign(drawn(1, 1, 300, 2, 128))).astype(E4M3)
    value = drawn(2, 1, 300, 2, 128).astype(E4M3)
    products = jnp.einsum("bqhd,bkhd->bhqk", *(each.astype(jnp.float32) for each in (query, key)))
    best = jnp.argmax(products, axis=-1)[0]
    is_alone = np.asarray(jnp.sum(products == products.max(-1, keepdims=True), axis=-1)[0] == 1)
    expected = jnp.take_along_axis(value[0].astype(jnp.float32).swapaxes(0, 1), best[..., None], axis=1)
    for scale in (1.0, 1e4):
        out, logsumexp = natten_jax.attention(query, key, value, scale=scale, backend="hopper-fmha", return_lse=True)
        found = np.asarray(out[0], np.float64).swapaxes(0, 1)
        np.testing.assert_allclose(found[is_alone], np.asarray(expected, np.float64)[is_alone], rtol=0, atol=0)
        assert np.isfinite(np.asarray(logsumexp)).all()


def test_nans_stay_in_their_entries() -> None:
    query, key, value = (drawn(i, 1, 256, 2, 128).astype(E4M3) for i in range(3))
    key = key.at[0, 7, 0, 3].set(jnp.nan)
    out = natten_jax.na1d(query, key, value, 31, backend="hopper-fna")
    is_nan = np.all(np.isnan(np.asarray(out[0], np.float32)), axis=-1)
    windows = oracle.neighborhood_mask((256,), (31,), (1,), (1,), (False,))
    np.testing.assert_array_equal(is_nan[:, 0], windows[:, 7])
    assert not is_nan[:, 1].any()


def test_outputs_of_32_bits_are_refused() -> None:
    query, key, value = (drawn(i, 1, 256, 2, 128).astype(E4M3) for i in range(3))
    with pytest.raises(ValueError, match="have outputs of float16 or bfloat16, not float32"):
        natten_jax.na1d(query, key, value, 31, backend="hopper-fna", out_dtype="float32")
