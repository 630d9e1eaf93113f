"""Biases and sinks in kernels for NVIDIA GPUs, compared with the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import na2d
from natten_jax.performance import PASSES, tile_names
from natten_jax.plan import devices
from natten_jax.problem import problem_of
from tests.execution.test_key_bias_columns import CASES
from tests.fuzz.execution import find_errors
from tests.fuzz.features import draw_with
from tests.ops.test_fitted_windows import CLAMPED_WITH_TABLES
from tests.support.families import FAMILIES, Family, family_named
from tests.support.problems import Case, Shape, Trial, check_all, check_gradients_repeat

# Biases that NVIDIA GPU kernels add to the logits, compared with the oracle: relative biases and key biases. Some
# kernels get key biases as additional columns of the head dimension.


pytestmark = pytest.mark.gpu

_GPU = [family for family in FAMILIES if family.name in ("hopper", "cutlass")]

_WITH_DTYPES = [pytest.param(family, dtype, id=f"{family.name}-{dtype}") for family in _GPU for dtype in family.dtypes]

_HALVES = ("bfloat16", "float16")

#: Number of random problems for each kind of bias, and number of problems in a compiled program.
_RANDOM_PROBLEMS, _AT_ONCE = 96, 32

#: Error bounds are multiplied by this factor: biases increase logits, and larger logits cause larger errors of weights.
_SLACK = 1.5


@pytest.mark.parametrize(("tested", "dtype"), _WITH_DTYPES)
def test_biases_of_keys(tested: Family, dtype: str) -> None:
    check_all([Trial(case.fitted(tested), dtype) for case in CASES.values()], tested, slack=_SLACK)


@pytest.mark.parametrize(
    ("name", "feature"), [("hopper", "key_bias"), ("cutlass", "key_bias"), ("cutlass", "relative_bias")]
)
def test_biases_of_random_problems(name: str, feature: str) -> None:
    """Call the kernels directly, with problems and tiles that ``python -m tests.fuzz --direct --feature`` draws."""
    for start in range(0, _RANDOM_PROBLEMS, _AT_ONCE):
        numbers = range(start, start + _AT_ONCE)
        problems = [draw_with((feature,), family_named(name), ("fna",), 0, i, is_direct=True) for i in numbers]
        wrong = {repr(problem): what for problem, what in zip(problems, find_errors(problems), strict=True) if what}
        assert not wrong


def test_tables_of_clamped_windows() -> None:
    tested = family_named("cutlass")
    trials = [
        Trial(
            dataclasses.replace(case, relative_bias=True, head_dim=32, key_bias=None, additional=0),
            "bfloat16",
            arguments={**asked, "clamp_window": True},
        )
        for name, (asked, case) in CLAMPED_WITH_TABLES.items()
        if name in ("published", "causal", "strided", "cut", "box")
    ]
    check_all(trials, tested, slack=_SLACK)


def windows(layout: Shape, kernel_size: Shape, heads: int = 2, head_dim: int = 32, **facts: Any) -> Case:
    """Return a problem. By default, there are as many key/value heads as query heads."""
    return Case(layout, kernel_size, heads=heads, head_dim=head_dim, **{"heads_kv": heads, **facts})


#: Problems with large windows, at least one for each head dimension that the kernels are specialised for.
LARGE_WINDOWS = {
    "heads of 64": windows((33, 40), (13, 20), 2, 64, key_bias="tokens", hidden=0.3, batch=2),
    "heads of 80": windows((300,), (200,), 4, 80, key_bias="heads", hidden=0.3, heads_kv=2, head_dim_v=128),
    "heads of 128": windows((30, 31), (25, 9), 6, 128, dilation=(1, 3), key_bias="heads", heads_kv=2),
    "heads of 192": windows((7, 9, 20), (3, 5, 11), 2, 192, key_bias="heads", hidden=0.6, heads_kv=1),
    "heads of 256": windows((500,), (300,), 2, 256, is_causal=(True,), key_bias="heads", hidden=0.4, heads_kv=1),
    "scales": windows((40, 24), (15, 15), 2, 128, key_bias="heads", scales=(0.02, -0.1)),
    "wraps": windows((24, 36), (11, 15), 2, 64, edges=("wrap",) * 2, key_bias="heads", hidden=0.3, heads_kv=1),
    "extents": windows((30, 40), (11, 15), 2, 128, key_bias="heads", hidden=0.2, batch=2, extents=((30, 17), (12, 40))),
    "additional": windows((40, 24), (15, 15), 2, 128, key_bias="tokens", hidden=0.5, additional=9, fused=True),
    "nothing is seen": windows((600,), (100,), 2, 128, key_bias="tokens", hidden=0.97),
}


def large_tiles(case: Case) -> dict[str, tuple[int, ...]]:
    """Return tiles of 64 tokens for both passes, which only large-window kernels support."""
    tile = (*(1,) * (len(case.layout) - 1), 64) if len(case.layout) != 2 else (8, 8)
    return {name: tile for pass_ in PASSES for name in tile_names(pass_)}


@pytest.mark.parametrize("dtype", _HALVES)
@pytest.mark.parametrize("tested", _GPU, ids=lambda family: family.name)
def test_biases_of_keys_in_kernels_for_large_windows(tested: Family, dtype: str) -> None:
    tiles = {name: large_tiles(case) if tested.name == "cutlass" else {} for name, case in LARGE_WINDOWS.items()}
    trials = [Trial(case, dtype, seed, tiles[name]) for name, case in LARGE_WINDOWS.items() for seed in (0, 1)]
    check_all(trials, tested, slack=_SLACK)


@pytest.mark.parametrize("dtype", _HALVES)
@pytest.mark.parametrize("tested", _GPU, ids=lambda family: family.name)
def test_biases_of_keys_have_all_their_digits(tested: Family, dtype: str) -> None:
    """A constant that is added to all key biases is added to the logsumexp, and changes outputs only by rounding."""
    query, key, value = jnp.asarray(jax.random.normal(jax.random.key(0), (3, 1, 30, 24, 2, 64)), dtype)
    bias = jax.random.normal(jax.random.key(1), (1, 30, 24))
    tiles: dict[str, Any] = {"q_tile_shape": (8, 16), "kv_tile_shape": (8, 16)}

    def attend(bias: Any) -> Any:
        return na2d(query, key, value, (13, 15), key_bias=bias, backend=tested.fna, return_lse=True, **tiles)

    (out, logsumexp), (same, moved) = attend(bias), attend(bias + 1000.0)
    # An output may be rounded to a neighboring number of its type, which differs by at most one step. The constant also
    # changes the rounding of weights. In a simulation with 195 keys, this changed outputs by up to 0.2 steps.
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(same, np.float32), np.asarray(out, np.float32), rtol=step, atol=step / 2)
    np.testing.assert_allclose(np.asarray(moved) - 1000, np.asarray(logsumexp), atol=1e-3)


@pytest.mark.parametrize("tested", _GPU, ids=lambda family: family.name)
def test_key_biases_if_blocks_compute_many_query_tiles(tested: Family) -> None:
    """A thread block computes about 26 tiles of 128 queries, and loads the biases of all tiles into the same memory."""
    side, window, heads, head_dim = 192, 41, 12, 64
    query, key, value = jnp.asarray(
        jax.random.normal(jax.random.key(0), (3, 1, side, side, heads, head_dim)), "bfloat16"
    )
    bias = 3 * jax.random.normal(jax.random.key(1), (1, side, side))
    bias = jnp.where(jax.random.uniform(jax.random.key(2), bias.shape) < 0.1, -jnp.inf, bias)
    tiles: dict[str, Any] = {"q_tile_shape": (8, 16), "kv_tile_shape": (8, 16)}
    first, *others = (
        [
            np.asarray(x, np.float32)[0]
            for x in na2d(query, key, value, window, key_bias=bias, backend=tested.fna, return_lse=True, **tiles)
        ]
        for _ in range(4)
    )
    for results in others:
        for one, again in zip(first, results, strict=True):
            np.testing.assert_array_equal(again, one)
    q, k, v, biases = (np.asarray(x[0], np.float32).astype(float) for x in (query, key, value, bias))
    for x, y in np.random.default_rng(0).integers(0, side, (64, 2)):
        seen = tuple(
            slice(begin, begin + window) for begin in np.clip((x - window // 2, y - window // 2), 0, side - window)
        )
        logits = np.einsum("hd,xyhd->hxy", q[x, y], k[seen]) / head_dim**0.5 + biases[seen]
        logsumexp = np.log(np.exp(logits).sum((1, 2)))
        out = np.einsum("hxy,xyhd->hd", np.exp(logits - logsumexp[:, None, None]), v[seen])
        np.testing.assert_allclose(first[1][x, y], logsumexp, atol=2e-3)
        np.testing.assert_allclose(first[0][x, y], out, rtol=0.01, atol=5e-3)


@pytest.mark.parametrize("tested", _GPU, ids=lambda family: family.name)
def test_gradients_of_biases_of_keys_are_reproducible_with_large_windows(tested: Family) -> None:
    """Key bias gradients are reproducible even if other gradients are not.

    A single thread block accumulates the gradient of a key's bias.
    """
    for name in ("heads of 64", "heads of 80", "heads of 256"):
        check_gradients_repeat(LARGE_WINDOWS[name], tested.fna, ("key_bias",))


_WINDOWS = {
    "regular": windows((24, 40), (7, 7), batch=3),
    "chunks": windows((20, 24), (5, 7), 3, 24),
    "wide": windows((30, 31), (13, 13), 2, 64),
    "whole layout": windows((7, 7), (7, 7), 8, batch=8),
    "whole groups": windows((14, 21), (7, 7), 4, dilation=(2, 3)),
    "dilated": windows((33, 50), (7, 5), dilation=(2, 3)),
    "far apart": windows((60, 40), (3, 3), dilation=(12, 9)),
    "grouped heads": windows((18, 23), (5, 5), 6, heads_kv=2, batch=2),
    "scales": windows((19, 17), (5, 3), 4, heads_kv=2, scales=(0.3, -0.5, 0.0, 8e-4)),
    "no scale": windows((19, 17), (5, 3), 1, scale=0.0),
    "negative scale": windows((19, 17), (5, 3), 1, scale=-0.2),
    "even, strided, causal": windows((26, 30), (6, 8), stride=(3, 5), is_causal=(False, True)),
    "cut": windows((26, 30), (6, 7), edges=("cut", "cut")),
    "sequence": windows((300,), (40,), batch=2),
    "causal sequence": windows((200,), (33,), 1, 64, stride=(4,), is_causal=(True,)),
    "clip": windows((4, 12, 13), (3, 5, 5)),
    "box": windows((19, 22), (3, 5), 1, dilation=(2, 1), batch=2, box=(9, 7), origins=((2, 3), (5, 7))),
    "one box": windows((29, 32), (7, 5), box=(9, 17), origins=((12, 13),)),
    "line of a volume": windows((1, 1, 9), (1, 1, 3)),
    "whole line of a volume": windows((1, 1, 4), (1, 1, 4), 1, 64),
    "slice of a volume": windows((1, 12, 9), (1, 3, 5)),
    "column of an image": windows((40, 1), (7, 1)),
    # In the following problems, the number of pairs of a batch entry and a head exceeds the number of CTAs that a GPU
    # runs at once. Each CTA therefore computes the gradients of several batch entries for one head. The last CTA of a
    # head computes fewer batch entries than the other CTAs.
    "many whole layouts": windows((7, 7), (7, 7), 16, batch=67),
    "many wide whole layouts": windows((4, 6), (3, 5), 3, 64, batch=501),
    "many whole groups": windows((10, 15), (5, 5), 4, dilation=(2, 3), batch=83),
    "many scales": windows((40,), (9,), 4, batch=331, scales=(0.3, -0.5, 0.0, 8e-4)),
    "with biases of keys": windows((19, 22), (5, 5), 2, 29, key_bias="heads", hidden=0.4, sinks=True),
}
SMALL_WINDOWS = {name: dataclasses.replace(case, relative_bias=True) for name, case in _WINDOWS.items()}


def cutlass() -> Family:
    """Return the family of the portable GPU kernels."""
    return family_named("cutlass")


@pytest.mark.parametrize("dtype", _HALVES)
def test_relative_biases_in_kernels_for_small_windows(dtype: str) -> None:
    check_all([Trial(case, dtype, seed) for case in SMALL_WINDOWS.values() for seed in (0, 1)], cutlass())


def _with_key_biases(number: int, case: Case) -> Case:
    """Return the problem with key biases, whose kind and masked fraction depend on ``number``, and no relative bias."""
    kind, hidden = ("tokens", "heads")[number % 2], (0.0, 0.3, 0.7)[number % 3]
    return dataclasses.replace(case, relative_bias=False, key_bias=kind, hidden=hidden)


KEYS = {name: _with_key_biases(number, case) for number, (name, case) in enumerate(SMALL_WINDOWS.items())} | {
    "additional": windows((19, 22), (5, 5), 4, key_bias="heads", hidden=0.3, heads_kv=2, additional=5, fused=True),
    "additional chunks": windows(
        (19, 22), (5, 5), 4, 48, key_bias="tokens", hidden=0.3, heads_kv=2, additional=20, fused=True
    ),
    "attention": Case((40,), queries=25, key_bias="tokens", hidden=0.5, heads=4, heads_kv=2, head_dim=32),
}


@pytest.mark.parametrize("dtype", _HALVES)
def test_biases_of_keys_in_kernels_for_small_windows(dtype: str) -> None:
    check_all([Trial(case, dtype, seed) for case in KEYS.values() for seed in (0, 1)], cutlass())


@pytest.mark.parametrize("kind", ["tokens", "heads"])
def test_gradients_of_biases_of_keys_are_reproducible(kind: str) -> None:
    for name in ("regular", "whole layout", "wide", "grouped heads"):
        case = dataclasses.replace(SMALL_WINDOWS[name], relative_bias=False, key_bias=kind, hidden=0.2)
        check_gradients_repeat(case, "cutlass-fna")


@pytest.mark.parametrize(
    ("tested", "dtype"),
    [pytest.param(tested, dtype, id=f"{tested.name}-{dtype}") for tested in _GPU for dtype in _HALVES],
)
def test_hidden_keys_have_no_effect(tested: Family, dtype: str) -> None:
    """Hidden (masked out) keys have gradients of 0, and queries that see only hidden keys have output 0."""
    query, key, value = jnp.asarray(jax.random.normal(jax.random.key(0), (3, 2, 24, 24, 2, 32)), dtype)
    is_hidden = jnp.zeros((2, 24, 24), bool).at[:, 4:16, 6:].set(True)
    bias = jnp.where(is_hidden, -jnp.inf, 0.0)

    def attend(query: Any, key: Any, value: Any, bias: Any) -> Any:
        out, logsumexp = na2d(query, key, value, 7, key_bias=bias, backend=tested.fna, return_lse=True)
        loss = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.where(jnp.isneginf(logsumexp), 0, logsumexp))
        return loss, (out, logsumexp)

    differentiate = jax.jit(jax.grad(attend, (0, 1, 2, 3), has_aux=True))
    (*gradients, bias_gradient), (out, logsumexp) = differentiate(query, key, value, bias)
    assert (np.asarray(out[:, 8, 12], np.float32) == 0).all() and (np.asarray(logsumexp[:, 8, 12]) == -np.inf).all()
    for gradient in gradients:
        assert (np.asarray(gradient[:, 8, 12], np.float32) == 0).all()
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert (np.asarray(bias_gradient)[np.asarray(is_hidden)] == 0).all()


def test_gradients_of_tables_are_reproducible() -> None:
    for name in ("regular", "whole layout", "wide", "grouped heads", "many whole layouts", "many whole groups"):
        check_gradients_repeat(SMALL_WINDOWS[name], "cutlass-fna")


@pytest.mark.parametrize(
    ("batch", "layout"),
    [(2, (7, 7)), (2, (14, 9)), (2, (28, 30)), (75, (7, 7))],
    ids=["whole", "several tiles", "regions", "several items of a CTA"],
)
@pytest.mark.parametrize("has_scales", [False, True])
def test_tables_of_mapped_calls(batch: int, layout: tuple[int, ...], has_scales: bool) -> None:
    """A call that is mapped over tables and scales agrees with separate calls.

    The calls may divide layouts into different regions, so results may be rounded differently.
    """
    query = jax.random.normal(jax.random.key(0), (3, batch, *layout, 4, 32), jnp.bfloat16)
    tables = jax.random.normal(jax.random.key(1), (3, 4, 13, 13))
    scales = jnp.linspace(0.1, 0.3, 12).reshape(3, 4) if has_scales else jnp.full((3,), 0.2)

    def gradients(query: Any, table: Any, scale: Any) -> Any:
        def loss(query: Any, table: Any) -> Any:
            out = na2d(query, query, query, min(*layout, 7), relative_bias=table, scale=scale)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1))(query, table)

    for axis, given in ((0, tables), (None, tables[0])):
        mapped = jax.jit(jax.vmap(gradients, (0, axis, 0)))(query, given, scales)
        for i in range(3):
            alone = jax.jit(gradients)(query[i], tables[i] if axis == 0 else given, scales[i])
            for one, other in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
                one, other = np.asarray(one[i], np.float32), np.asarray(other, np.float32)
                assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


@pytest.mark.parametrize("dtype", _HALVES)
def test_entries_of_minus_infinity_hide(dtype: str) -> None:
    """Table entries of -inf mask out keys.

    If only the inner entries are finite, results equal those of a smaller window. If no entry is finite,
    the output is 0.
    """
    query, key, value = jnp.asarray(jax.random.normal(jax.random.key(0), (3, 2, 24, 24, 2, 32)), dtype)
    narrow = jnp.full((2, 13, 13), -jnp.inf).at[:, 5:8, 5:8].set(0)

    def attend(kernel_size: int, bias: Any = None) -> Any:
        def loss(query: Any, key: Any, value: Any, bias: Any) -> Any:
            out = na2d(query, key, value, kernel_size, relative_bias=bias, backend="cutlass-fna").astype(jnp.float32)
            return jnp.sum(jnp.sin(out[:, 3:-3, 3:-3])), out[:, 3:-3, 3:-3]

        return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value, bias)

    for one, other in zip(*map(jax.tree.leaves, (attend(7, narrow), attend(3))), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 6e-3 * np.linalg.norm(other)
    nothing = jnp.full((2, 13, 13), -jnp.inf)
    for result in jax.tree.leaves(attend(7, nothing)):
        np.testing.assert_array_equal(np.asarray(result, np.float32), 0)


def test_unsupported_biases_are_reported() -> None:
    device = devices.default_device()
    problem = dataclasses.replace(problem_of((32, 32), 7, head_dim=32), relative_bias=True)
    for changes, words in (
        ({"dtype": "float32"}, "16-bit arrays only"),
        ({"additional_kv": 3}, "do not support additional tokens"),
        ({"head_dim": 128, "head_dim_v": 128}, "heads of at most 64"),
    ):
        reason = cutlass().backend.rejection(dataclasses.replace(problem, **changes), device, "forward")
        assert words in str(reason)
    for pass_ in PASSES:
        assert cutlass().backend.rejection(problem, device, pass_) is None


# Gradients of sinks on NVIDIA GPUs, for every kind of small-window kernel.


SINK_CASES = {
    # In the following problems, the query gradient kernel computes a partial gradient of sinks per query tile, and the
    # key/value gradient kernel adds them up.
    "regions": windows((40, 56), (7, 7), 3, batch=2),
    "regions that are not full": windows((37, 19), (5, 5), 2, 64, batch=3),
    "dilation groups of unlike lengths": windows((33, 50), (7, 5), dilation=(4, 3)),
    "chunks": windows((20, 24), (5, 7), 6, 24, heads_kv=2, batch=2),
    "wide heads": windows((24, 20), (5, 5), 2, 128),
    "more heads than regions": windows((4, 4), (3, 3), 48, heads_kv=16),
    "many entries": windows((20, 9), (5, 5), 5, batch=70),
    "additional tokens": windows((19, 22), (5, 5), 4, heads_kv=2, additional=9, fused=True),
    "a relative bias": windows((24, 31), (7, 7), relative_bias=True),
    "biases of keys": windows((24, 31), (7, 7), key_bias="tokens", hidden=0.4),
    "nothing is seen": windows((18, 17), (3, 3), key_bias="heads", hidden=0.9),
    "wraps": windows((18, 26), (5, 5), edges=("wrap", "wrap")),
    # In the following problems, one kernel computes all other gradients, and a separate kernel adds up the partial
    # gradients of sinks.
    "whole layout": windows((7, 7), (7, 7), 8, batch=8),
    "many whole layouts": windows((7, 7), (7, 7), 16, batch=67),
    "whole groups": windows((14, 21), (7, 7), 4, dilation=(2, 3)),
    "groups that are not full": windows((15, 19), (7, 5), 3, 64, dilation=(2, 3), batch=5),
    "whole layout with a relative bias": windows((7, 7), (7, 7), 4, relative_bias=True),
    "whole layout with biases of keys": windows((7, 6), (7, 5), 4, key_bias="tokens"),
    # Separate kernels compute the whole gradient of sinks if the problem has per-entry extents, or if the query
    # gradient kernel has a ring.
    "layouts": windows((19, 22), (5, 5), batch=2, extents=((19, 13), (7, 22))),
    "ring": windows((30, 40), (13, 13), 2, 64, batch=2),
    "scales": windows((19, 17), (5, 3), 4, heads_kv=2, scales=(0.3, -0.5, 0.0, 8e-4)),
}


def _with_sinks(case: Case) -> Case:
    return dataclasses.replace(case, sinks=True)


@pytest.mark.parametrize("dtype", _HALVES)
def test_gradients_of_sinks(dtype: str) -> None:
    check_all(
        [Trial(_with_sinks(case), dtype, seed) for case in SINK_CASES.values() for seed in (0, 1)], cutlass(), slack=1.5
    )


def test_gradients_of_sinks_are_reproducible() -> None:
    for name in ("regions", "many entries", "many whole layouts", "groups that are not full", "layouts", "ring"):
        check_gradients_repeat(_with_sinks(SINK_CASES[name]), "cutlass-fna", ("sinks",))


@pytest.mark.parametrize("layout", [(7, 7), (28, 30)], ids=["whole", "regions"])
def test_sinks_of_each_entry_of_a_mapped_call(layout: tuple[int, int]) -> None:
    """A call that is mapped over sinks agrees with separate calls."""
    query = jax.random.normal(jax.random.key(0), (3, 2, *layout, 4, 32), jnp.bfloat16)
    sinks = jax.random.normal(jax.random.key(1), (3, 4))

    def gradient(query: Any, sinks: Any) -> Any:
        def loss(sinks: Any) -> Any:
            out = na2d(query, query, query, 7, sinks=sinks, backend="cutlass-fna")
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss)(sinks)

    together = np.asarray(jax.jit(jax.vmap(gradient))(query, sinks))
    alone = np.stack([np.asarray(jax.jit(gradient)(*each)) for each in zip(query, sinks, strict=True)])
    np.testing.assert_allclose(together, alone, rtol=2e-3, atol=1e-3)  # the two programs may round outputs differently


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("dtype", _HALVES)
def test_scales_and_sinks_of_more_items_than_a_warp_has_lanes(dtype: str, head_dim: int) -> None:
    """A CTA loads the scales and sinks of 32 items at a time, but computes more items.

    An item is a pair of a batch entry and a head.
    """
    batch, heads = 4096, 12
    query = jax.random.normal(jax.random.key(0), (batch, 7, 7, heads, head_dim), jnp.dtype(dtype))
    scale = jnp.linspace(0.05, 0.4, heads)
    sinks = jnp.linspace(-3.0, 6.0, heads)

    out = na2d(query, query, query, 7, scale=scale, sinks=sinks, backend="cutlass-fna")
    for first in range(0, batch, 512):
        tokens = query[first : first + 8].reshape(8, 49, heads, head_dim).astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            logits = jnp.einsum("bqhd,bkhd->bhqk", tokens, tokens) * scale[:, None, None]
            sink_logits = jnp.broadcast_to(sinks[:, None, None], (8, heads, 49, 1))
            weights = jax.nn.softmax(jnp.concatenate([logits, sink_logits], -1), -1)[..., :-1]
            expected = jnp.einsum("bhqk,bkhd->bqhd", weights, tokens)
        found = out[first : first + 8].reshape(expected.shape).astype(jnp.float32)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-2, atol=2e-2)
