"""The small-window kernels: selection, recomputation for extreme inputs, and bitwise equal results of repeated calls.

``test_operators.py`` and ``python -m tests.fuzz --backend cutlass`` test random problems with these kernels' tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax.arrays.operands import Inputs
from natten_jax.backends.select import resolve
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.plan import devices
from natten_jax.plan.plan import Request
from natten_jax.profiler.capture import capture
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.windows import WindowArguments
from tests.support import oracle
from tests.support.families import BOUNDS, family_named
from tests.support.problems import Case, Trial, both_passes, check_all, expected_of

pytestmark = pytest.mark.gpu

TILES: dict[str, Any] = {
    "q_tile_shape": (8, 2),
    "kv_tile_shape": (1, 8),
    "backward_q_tile_shape": (2, 4),
    "backward_kv_tile_shape": (4, 4),
}


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


Cotangents = tuple[jax.Array, jax.Array]


def expected(case: Case, operands: oracle.Tensors, cotangents: Cotangents) -> oracle.Reference:
    """Return the oracle's float64 results of both passes, computed one batch entry at a time."""
    alone = dataclasses.replace(case, batch=1)
    entries = [
        expected_of(alone, *jax.tree.map(lambda array, i=i: array[i : i + 1], (operands, cotangents)))
        for i in range(case.batch)
    ]
    together: oracle.Reference = jax.tree.map(lambda *parts: np.concatenate(parts), *entries)
    return together


def error(found: Any, exact: Any) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [(11, 19), (40, 37)])  # the first layout fits in a thread block
@pytest.mark.parametrize(("amplitude", "offset"), [(1.0, 0.0), (40.0, 0.0), (1000.0, 0.0), (1.0, 30.0), (1.0, -30.0)])
def test_large_logits_lose_no_digits(dtype: str, amplitude: float, offset: float, layout: tuple[int, int]) -> None:
    """Test large positive and negative logits. Without a shift, their exponentials would overflow or underflow."""
    shape = 1, *layout, 2, 32
    query = (draw(0, *shape, dtype=jnp.float32) * amplitude + offset).astype(dtype)
    key = (draw(1, *shape, dtype=jnp.float32) + (1.0 if offset else 0.0)).astype(dtype)
    operands = oracle.Tensors(query, key, draw(2, *shape, dtype=dtype))
    cotangents = draw(9, *shape, dtype=dtype), draw(10, *shape[:-1], dtype=jnp.float32)
    case = Case(layout, (7, 7), heads=2, heads_kv=2, head_dim=32)
    reference = expected(case, operands, cotangents)
    (out, logsumexp), gradients = jax.jit(both_passes(case.operator("cutlass-fna", **TILES)))(operands, cotangents)
    assert error(logsumexp, reference.forward.lse) <= 2e-6
    assert error(out, reference.forward.out) <= BOUNDS[dtype]
    assert error(gradients.value, reference.gradients.value) <= BOUNDS[dtype]
    # For large logits, the softmax saturates, and query and key gradients are small differences.
    assert error(gradients.query, reference.gradients.query) <= 3 * BOUNDS[dtype]
    assert error(gradients.key, reference.gradients.key) <= 3 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_logsumexp_of_one_key_is_its_logit(dtype: Any) -> None:
    """The logsumexp of a single small logit is accurate, although the exponential of the logit is near 1."""
    query, key, value = draw(0, 2, 12, 3, 32), draw(1, 2, 1, 3, 32), draw(2, 2, 1, 3, 32)
    query = (query * 1e-3).astype(dtype)
    key, value = key.astype(dtype), value.astype(dtype)
    tiles: dict[str, Any] = {"q_tile_size": 16, "kv_tile_size": 8}
    _, found = natten_jax.attention(query, key, value, backend="cutlass-fmha", return_lse=True, **tiles)
    logits = np.einsum("bqhd,bkhd->bqh", *(np.asarray(array, np.float64) for array in (query, key))) / 32**0.5
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-9)


def test_results_are_reproducible_and_a_batch_entry_does_not_depend_on_others() -> None:
    case = Case((17, 23), (7, 7), batch=6, heads=3, heads_kv=3, head_dim=32)
    operands, cotangents = case.operands("bfloat16", 0), case.cotangents("bfloat16", 0)
    run = jax.jit(both_passes(case.operator("cutlass-fna", **TILES)))
    first = run(operands, cotangents)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, run(operands, cotangents), first)
    given = operands, (cotangents[0], jnp.zeros_like(cotangents[1]))
    together = run(*given)
    for entries in (slice(0, 1), slice(2, 5)):
        parts, expected = (jax.tree.map(lambda array, own=entries: array[own], each) for each in (given, together))
        jax.tree.map(np.testing.assert_array_equal, run(*parts), expected)


def symbols(function: Any, *arrays: Any) -> set[str]:
    """Return the names of the kernels that a function launches."""
    compiled = compile_for_trace(function, *arrays)
    jax.block_until_ready(compiled(*arrays))
    (events,) = capture(lambda: compiled(*arrays), 1, Program.from_compiled(compiled), "cuda")
    return {event.symbol for event in events}


@pytest.mark.parametrize("key_bias", [None, "tokens"])
@pytest.mark.parametrize("queries", [1, 36, 61])
def test_gradients_of_some_queries_that_see_all_keys(queries: int, key_bias: str | None) -> None:
    """The window is the whole layout, which fits in a thread block, but there are fewer queries than keys.

    The operator then computes plain attention, which needs no query origin.
    """
    case = Case((62,), (62,), box=(queries,), origins=((1,),), batch=2, heads=3, heads_kv=3, head_dim=32)
    case = dataclasses.replace(case, key_bias=key_bias)
    tiles: dict[str, Any] = {"q_tile_shape": (16,), "kv_tile_shape": (8,)}
    tiles |= {"backward_q_tile_shape": (8,), "backward_kv_tile_shape": (16,)}
    check_all([Trial(case, dtype, 0, tiles) for dtype in ("float16", "bfloat16")], family_named("cutlass"))


#: Problems whose layout, or each of its dilation groups, fits in one thread block. Names begin with the head dimension.
WHOLE = {
    "32, whole": Case((7, 7), (7, 7), head_dim=32),
    "64, whole": Case((7, 7), (7, 7), head_dim=64),
    "32, causal": Case((13, 11), (5, 4), stride=(3, 1), is_causal=(True, False), head_dim=32),
    "64, causal": Case((8, 7), (5, 4), stride=(3, 1), is_causal=(True, False), head_dim=64),
    "32, dilated": Case((15, 27), (5, 7), dilation=(2, 3), stride=(1, 2), head_dim=32),
    "64, dilated": Case((15, 27), (5, 7), dilation=(2, 3), stride=(1, 2), head_dim=64),
    "32, volume": Case((3, 4, 9), (2, 3, 5), is_causal=(False, False, True), head_dim=32),
    "64, volume": Case((2, 4, 8), (2, 3, 5), is_causal=(False, False, True), head_dim=64),
    "32, sequence": Case((61,), (16,), stride=(5,), head_dim=32),
    "64, sequence": Case((61,), (16,), stride=(5,), head_dim=64),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", WHOLE)
def test_gradients_of_layouts_that_a_block_holds_whole(name: str, dtype: str) -> None:
    """If there are many heads and batch entries, a single launch computes all gradients."""
    if (devices.default_device().compute_capability or (0, 0)) < (9, 0):
        pytest.skip("needs the engine that copies boxes")
    case = dataclasses.replace(WHOLE[name], batch=48, heads=3, heads_kv=3)
    operands, cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)
    run = jax.jit(both_passes(case.operator("cutlass-fna")))
    assert any("whole_gradient" in symbol for symbol in symbols(run, operands, cotangents))
    reference = expected(case, operands, cotangents).gradients
    for result, exact in zip(run(operands, cotangents)[1][:3], reference[:3], strict=True):
        assert error(result, exact) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("layout", "heads", "head_dims", "count", "amplitude"),
    [
        ((19, 21), (2, 2), (32, 32), 1, 1.0),
        ((40, 52), (6, 2), (32, 24), 17, 1.0),
        ((40, 52), (6, 2), (32, 24), 17, 40.0),
        ((9, 7), (4, 1), (64, 64), 5, 40.0),
        ((33, 31), (1, 1), (40, 64), 40, 1.0),
        ((18, 30), (2, 1), (128, 96), 16, 1.0),
    ],
)
def test_gradients_of_additional_tokens(
    layout: tuple[int, ...],
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    count: int,
    amplitude: float,
    dtype: str,
) -> None:
    """Gradients of additional tokens are reproducible, in small and large layouts."""
    case = Case(layout, (5, 5), None, None, None, None, 2, *heads, *head_dims, additional=count, fused=True)
    operands, cotangents = case.operands(dtype, 0), case.cotangents(dtype, 0)
    operands = operands._replace(query=(amplitude * operands.query.astype(jnp.float32)).astype(dtype))
    run = jax.jit(both_passes(case.operator("cutlass-fna", **TILES)))
    found = run(operands, cotangents)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(operands, cotangents), found)
    reference = expected(case, operands, cotangents).gradients
    bound = BOUNDS[dtype] * (1 if amplitude == 1 else 3)
    for result, exact in zip(found[1][:5], reference[:5], strict=True):
        assert error(result, exact) <= bound


def test_non_finite_numbers_affect_only_queries_that_see_them() -> None:
    query, key, value = (np.array(draw(i, 1, 16, 16, 1, 32), np.float32) for i in range(3))
    query[0, 3, 4], key[0, 12, 12] = np.nan, np.inf
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in (query, key, value)]
    out = natten_jax.na2d(arrays[0], arrays[1], arrays[2], kernel_size=3, backend="cutlass-fna", **TILES)
    is_finite = np.array(jnp.isfinite(out).all(-1)[0, :, :, 0])
    sees = np.zeros((16, 16), bool)
    sees[3, 4] = sees[11:14, 11:14] = True
    assert not is_finite[3, 4]
    np.testing.assert_array_equal(is_finite[~sees], True)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_cost_model_prefers_them_for_small_windows(pass_: Any) -> None:
    device = devices.default_device()

    def plan(layout: tuple[int, ...], kernel_size: Any, batch: int) -> Any:
        array = jax.ShapeDtypeStruct((batch, *layout, 4, 32), jnp.bfloat16)
        window = 1, 1, False
        problem = neighborhood_problem(len(layout), Inputs(array, array, array), WindowArguments(kernel_size, *window))  # type: ignore[arg-type]
        return resolve(Request(problem), device, pass_)

    assert sorted(map(np.prod, plan((56, 56), 7, 16).tiles)) == [8, 16]
    assert sorted(map(np.prod, plan((96, 96), 33, 1).tiles)) != [8, 16]
