"""The kernels for small windows: what chooses them, extremes that make them compute anew, and what is promised of bits.

Random problems with their tiles are part of ``test_operators.py`` and of ``python -m tests.fuzz --backend cutlass``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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
from tests.support.families import family_named
from tests.support.problems import Case, Trial, check_all

pytestmark = pytest.mark.gpu

TILES: dict[str, Any] = {
    "q_tile_shape": (8, 2),
    "kv_tile_shape": (1, 8),
    "backward_q_tile_shape": (2, 4),
    "backward_kv_tile_shape": (4, 4),
}


def draw(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def cotangents_of(query: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the output and the logsumexp are differentiated with."""
    shape = query.shape[:-1]
    return draw(9, *shape, value.shape[-1], dtype=query.dtype), draw(10, *shape, dtype=jnp.float32)


@jax.jit
def small(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """Output, logsumexp and gradients."""
    function = functools.partial(natten_jax.na2d, kernel_size=7, return_lse=True, backend="cutlass-fna", **TILES)
    results, pullback = jax.vjp(function, query, key, value)
    return (*results, *pullback(cotangents_of(query, value)))


def expected(arrays: Sequence[jax.Array], window: dict[str, Any], cotangents: Sequence[jax.Array]) -> oracle.Reference:
    """Both passes in float64; ``arrays`` may end with additional keys and values."""
    layout = arrays[0].shape[1:-2]
    defaults: dict[str, Any] = {"stride": 1, "dilation": 1, "is_causal": False}
    per_dimension = {
        name: value if isinstance(value, tuple) else (value,) * len(layout)
        for name, value in (defaults | window).items()
    }
    mask = oracle.neighborhood_mask(layout, **per_dimension)
    scale = arrays[0].shape[-1] ** -0.5
    entries = [
        oracle.reference(oracle.Tensors(*entry[:-2]), mask, scale, *entry[-2:])
        for entry in (
            [np.asarray(array[number : number + 1]) for array in (*arrays, *cotangents)]
            for number in range(arrays[0].shape[0])
        )
    ]
    together: oracle.Reference = jax.tree.map(lambda *parts: np.concatenate(parts), *entries)
    return together


def error(found: jax.Array, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layout", [(11, 19), (40, 37)])  # of which a block holds one whole
@pytest.mark.parametrize(("amplitude", "offset"), [(1.0, 0.0), (40.0, 0.0), (1000.0, 0.0), (1.0, 30.0), (1.0, -30.0)])
def test_large_logits_lose_no_digits(dtype: Any, amplitude: float, offset: float, layout: tuple[int, int]) -> None:
    """Logits of either sign, whose weights neither element type could hold if they were relative to nothing."""
    shape = 1, *layout, 2, 32
    query = (draw(0, *shape, dtype=jnp.float32) * amplitude + offset).astype(dtype)
    key = (draw(1, *shape, dtype=jnp.float32) + (1.0 if offset else 0.0)).astype(dtype)
    value = draw(2, *shape, dtype=dtype)
    reference = expected((query, key, value), {"kernel_size": 7}, cotangents_of(query, value))
    out, logsumexp, d_query, d_key, d_value = small(query, key, value)
    bound = 6e-3 if dtype == jnp.bfloat16 else 1e-3
    assert error(logsumexp, reference.forward.lse) <= 2e-6
    assert error(out, reference.forward.out) <= bound
    assert error(d_value, reference.gradients.value) <= bound
    # Gradients of queries and keys are differences of what large logits leave of the softmax.
    assert error(d_query, reference.gradients.query) <= 3 * bound
    assert error(d_key, reference.gradients.key) <= 3 * bound


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_logsumexp_of_one_key_is_its_logit(dtype: Any) -> None:
    """However small: it is not the logarithm of a weight next to 1."""
    query, key, value = draw(0, 2, 12, 3, 32), draw(1, 2, 1, 3, 32), draw(2, 2, 1, 3, 32)
    query = (query * 1e-3).astype(dtype)
    key, value = key.astype(dtype), value.astype(dtype)
    tiles: dict[str, Any] = {"q_tile_size": 16, "kv_tile_size": 8}
    _, found = natten_jax.attention(query, key, value, backend="cutlass-fmha", return_lse=True, **tiles)
    logits = np.einsum("bqhd,bkhd->bqh", *(np.asarray(array, np.float64) for array in (query, key))) / 32**0.5
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-9)


def test_results_are_reproducible_and_a_batch_entry_does_not_depend_on_others() -> None:
    arrays = [draw(i, 6, 17, 23, 3, 32) for i in range(3)]
    first = small(*arrays)
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, small(*arrays), first)
    # Cotangents are drawn for the whole batch: those of the entries have to be the same ones.
    out, pullback = jax.vjp(functools.partial(natten_jax.na2d, kernel_size=7, backend="cutlass-fna", **TILES), *arrays)
    cotangent = draw(9, *out.shape)
    together = (out, *pullback(cotangent))
    for entries in (slice(0, 1), slice(2, 5)):
        parts = [array[entries] for array in arrays]
        out, pullback = jax.vjp(
            functools.partial(natten_jax.na2d, kernel_size=7, backend="cutlass-fna", **TILES), *parts
        )
        alone = (out, *pullback(cotangent[entries]))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)[entries]), alone, together)  # noqa: B023


def symbols(function: Any, *arrays: jax.Array) -> set[str]:
    """Kernels that a function launches."""
    compiled = compile_for_trace(function, *arrays)
    jax.block_until_ready(compiled(*arrays))
    (events,) = capture(lambda: compiled(*arrays), 1, Program.from_compiled(compiled), "cuda")
    return {event.symbol for event in events}


@pytest.mark.parametrize("key_bias", [None, "tokens"])
@pytest.mark.parametrize("queries", [1, 36, 61])
def test_gradients_of_some_queries_that_see_all_keys(queries: int, key_bias: str | None) -> None:
    """Attention of fewer queries than the layout has, which needs no origin; a block could hold all of the layout."""
    case = Case((62,), (62,), box=(queries,), origins=((1,),), batch=2, heads=3, heads_kv=3, head_dim=32)
    case = dataclasses.replace(case, key_bias=key_bias)
    tiles: dict[str, Any] = {"q_tile_shape": (16,), "kv_tile_shape": (8,)}
    tiles |= {"backward_q_tile_shape": (8,), "backward_kv_tile_shape": (16,)}
    check_all([Trial(case, dtype, 0, tiles) for dtype in ("float16", "bfloat16")], family_named("cutlass"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("layout", "window", "head_dim"),
    [
        ((7, 7), {"kernel_size": 7}, 32),
        ((7, 7), {"kernel_size": 7}, 64),
        ((13, 11), {"kernel_size": (5, 4), "stride": (3, 1), "is_causal": (True, False)}, 32),
        ((8, 7), {"kernel_size": (5, 4), "stride": (3, 1), "is_causal": (True, False)}, 64),
        ((15, 27), {"kernel_size": (5, 7), "dilation": (2, 3), "stride": (1, 2)}, 32),
        ((15, 27), {"kernel_size": (5, 7), "dilation": (2, 3), "stride": (1, 2)}, 64),
        ((3, 4, 9), {"kernel_size": (2, 3, 5), "is_causal": (False, False, True)}, 32),
        ((2, 4, 8), {"kernel_size": (2, 3, 5), "is_causal": (False, False, True)}, 64),
        ((61,), {"kernel_size": 16, "stride": 5}, 32),
        ((61,), {"kernel_size": 16, "stride": 5}, 64),
    ],
)
def test_gradients_of_layouts_that_a_block_holds_whole(
    layout: tuple[int, ...], window: dict[str, Any], head_dim: int, dtype: Any
) -> None:
    """One launch for all of them, as far as there are many heads and batch entries."""
    if (devices.default_device().compute_capability or (0, 0)) < (9, 0):
        pytest.skip("needs the engine that copies boxes")
    shape = 48, *layout, 3, head_dim
    arrays = [draw(i, *shape, dtype=dtype) for i in range(3)]
    operator = functools.partial(getattr(natten_jax, f"na{len(layout)}d"), return_lse=True, **window)
    cotangents = cotangents_of(arrays[0], arrays[2])

    def gradients(operator: Any, cotangents: Any, *arrays: jax.Array) -> Any:
        return jax.vjp(operator, *arrays)[1](cotangents)

    found = jax.jit(functools.partial(gradients, functools.partial(operator, backend="cutlass-fna"), cotangents))
    assert any("whole_gradient" in symbol for symbol in symbols(found, *arrays))
    reference = expected(arrays, window, cotangents).gradients[:3]
    for number, (result, exact) in enumerate(zip(found(*arrays), reference, strict=True)):
        assert error(result, exact) <= (6e-3 if dtype == jnp.bfloat16 else 1e-3), number


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
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
    dtype: Any,
) -> None:
    """Reproducible ones, of few queries and of many."""
    (heads_q, heads_kv), (head_dim, head_dim_v) = heads, head_dims
    arrays = [
        (amplitude * draw(0, 2, *layout, heads_q, head_dim, dtype=jnp.float32)).astype(dtype),
        draw(1, 2, *layout, heads_kv, head_dim, dtype=dtype),
        draw(2, 2, *layout, heads_kv, head_dim_v, dtype=dtype),
        draw(3, 2, count, heads_kv, head_dim, dtype=dtype),
        draw(4, 2, count, heads_kv, head_dim_v, dtype=dtype),
    ]
    cotangents = cotangents_of(arrays[0], arrays[2])

    @jax.jit
    def gradients(*arrays: jax.Array) -> Any:
        def operator(query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> Any:
            return natten_jax.na2d(
                *(query, key, value, 5),
                additional_keys=more[0],
                additional_values=more[1],
                return_lse=True,
                backend="cutlass-fna",
                **TILES,
            )

        return jax.vjp(operator, *arrays)[1](cotangents)

    found = gradients(*arrays)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, gradients(*arrays), found)
    reference = jax.tree.leaves(expected(arrays, {"kernel_size": 5}, cotangents).gradients)
    bound = (6e-3 if dtype == jnp.bfloat16 else 1e-3) * (1 if amplitude == 1 else 3)
    for number, (result, exact) in enumerate(zip(found, reference, strict=True)):
        assert error(result, exact) <= bound, number


def test_what_is_not_finite_stays_with_the_queries_that_see_it() -> None:
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
def test_the_cost_model_prefers_them_where_windows_are_small(pass_: Any) -> None:
    device = devices.default_device()

    def plan(layout: tuple[int, ...], kernel_size: Any, batch: int) -> Any:
        array = jax.ShapeDtypeStruct((batch, *layout, 4, 32), jnp.bfloat16)
        window = 1, 1, False
        problem = neighborhood_problem(len(layout), Inputs(array, array, array), WindowArguments(kernel_size, *window))  # type: ignore[arg-type]
        return resolve(Request(problem), device, pass_)

    assert sorted(map(np.prod, plan((56, 56), 7, 16).tiles)) == [8, 16]
    assert sorted(map(np.prod, plan((96, 96), 33, 1).tiles)) != [8, 16]
