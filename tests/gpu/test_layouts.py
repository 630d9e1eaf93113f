"""Batch entries with separate layouts, and windows that wrap, in kernels for NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natten_jax
from natten_jax import na2d
from tests.fuzz.execution import find_errors
from tests.fuzz.problem import Fuzzed, variants
from tests.support.families import family_named
from tests.support.problems import Case, both_passes

# Batch entries with separate extents and query origins, which the NVIDIA GPU kernels compute in a single launch.
#
# ``tests/ops/test_random_features.py`` compares such problems with the oracle.


pytestmark = pytest.mark.gpu

LARGE: dict[str, Any] = {
    "q_tile_shape": (8, 16),
    "kv_tile_shape": (8, 16),
    "backward_q_tile_shape": (8, 8),
    "backward_kv_tile_shape": (8, 16),
}

SMALL: dict[str, Any] = {
    "q_tile_shape": (8, 2),
    "kv_tile_shape": (1, 8),
    "backward_q_tile_shape": (2, 4),
    "backward_kv_tile_shape": (4, 4),
}

#: Arguments of ``na2d`` that select large-window kernels, and small-window kernels with and without TMA boxes.
KERNELS: dict[str, dict[str, Any]] = {
    "hopper": {"backend": "hopper-fna", "kernel_size": (9, 21), **LARGE},
    "hopper, dilated": {"backend": "hopper-fna", "kernel_size": (5, 7), "dilation": (3, 2), **LARGE},
    "hopper, causal": {"backend": "hopper-fna", "kernel_size": 9, "stride": 3, "is_causal": (True, False), **LARGE},
    "hopper, reproducible": {"backend": "hopper-fna", "kernel_size": 13, "backward_deterministic": True, **LARGE},
    "cutlass": {"backend": "cutlass-fna", "kernel_size": (9, 21), **LARGE},
    "small": {"backend": "cutlass-fna", "kernel_size": 7, **SMALL},
    "small, dilated": {"backend": "cutlass-fna", "kernel_size": 5, "dilation": (2, 3), **SMALL},
    "small, causal": {"backend": "cutlass-fna", "kernel_size": 6, "stride": 2, "is_causal": (True, False), **SMALL},
    "small, cut": {"backend": "cutlass-fna", "kernel_size": (5, 8), "stride": (3, 1), "edges": "cut", **SMALL},
}


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def found_of(arguments: dict[str, Any], arrays: Any, cotangents: Any, **more: Any) -> dict[str, np.ndarray]:
    attend: Any = functools.partial(natten_jax.na2d, **arguments, **more, return_lse=True)
    (out, lse), gradients = jax.jit(both_passes(lambda inputs: attend(*inputs)))(arrays, cotangents)
    found = {"out": out, "lse": lse} | dict(zip("qkv", gradients, strict=True))
    return {name: np.asarray(array.astype(jnp.float32)) for name, array in found.items()}


def check_padded(
    arguments: dict[str, Any],
    extents: np.ndarray,
    heads: tuple[int, int],
    head_dim: int,
    is_exact: Callable[[str], bool] = lambda name: True,
) -> None:
    """Compare the results of a call with padded layouts to those of a call per cropped layout.

    Results for which ``is_exact(name)`` is true must be bitwise equal. Other results must be equal within a tolerance.
    """
    (height, width), (heads_of_queries, heads_kv) = extents.max(axis=0), heads
    y, x = np.indices((height, width))
    is_padding = np.stack([(y >= rows) | (x >= columns) for rows, columns in extents])
    *inputs, out_cotangent = (
        jnp.where(is_padding[..., None, None], jnp.nan, draw(seed, *is_padding.shape, n, head_dim))
        for seed, n in enumerate((heads_of_queries, heads_kv, heads_kv, heads_of_queries))
    )
    lse_cotangent = draw(4, *out_cotangent.shape[:-1]).astype(jnp.float32)
    padded = found_of(arguments, inputs, (out_cotangent, lse_cotangent), extents=jnp.asarray(extents, jnp.int32))
    for name, array in padded.items():
        assert (array[is_padding] == (-math.inf if name == "lse" else 0)).all(), name
    for height, width in np.unique(extents[(extents > 0).all(axis=-1)], axis=0):
        entries = np.flatnonzero((extents == (height, width)).all(axis=-1))
        box = (entries, slice(height), slice(width))
        cotangents = out_cotangent[box], lse_cotangent[box]
        alone = found_of(arguments, [each[box] for each in inputs], cotangents, clamp_window=True)
        for name, array in alone.items():
            message = f"{name} of {height} x {width}"
            tolerance = 0 if is_exact(name) else 2e-2
            np.testing.assert_allclose(padded[name][box], array, rtol=tolerance, atol=tolerance, err_msg=message)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("kernels", KERNELS)
def test_padded_layouts_are_as_cropped_ones(kernels: str, head_dim: int) -> None:
    """Results of padded layouts equal results of cropped layouts.

    They are bitwise equal, except for query gradients of large-window kernels, to which several key tiles add.
    """
    extents = np.array([[33, 47], [29, 17], [18, 46], [16, 27]])
    check_padded(KERNELS[kernels], extents, (4, 4), head_dim, lambda name: name != "q" or "small" in kernels)


@pytest.mark.parametrize("tile", [(2, 8), (8, 2), (1, 16), (16, 1), (4, 4)])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_short_layouts_are_as_cropped_ones(heads: tuple[int, int], tile: tuple[int, int]) -> None:
    """Test layouts in which some keys are near both ends of a dimension. More queries attend to these keys."""
    arguments = {**KERNELS["small"], "backward_kv_tile_shape": tile, "q_tile_shape": tile}
    extents = np.array([[14, 22], [22, 13], [13, 14], [20, 6], [30, 29]])
    # Calls with cropped layouts may use kernels that round differently, for two reasons. If a layout fits in a thread
    # block and heads are not grouped, one kernel computes all gradients. With the longest tile, kernels order the
    # dimensions of some layouts differently.
    has_other_kernels = heads == (1, 1) or tile == (1, 16)
    check_padded(arguments, extents, heads, 32, lambda name: name not in "qkv" or not has_other_kernels)


@pytest.mark.parametrize("heads", [(1, 1), (6, 3)])
@pytest.mark.parametrize("kernels", ["small", "small, dilated"])
def test_entries_that_share_plans_equal_single_calls(kernels: str, heads: tuple[int, int]) -> None:
    """Test 70 batch entries in random order. A CTA groups at most 32 entries by layout.

    Some entries have equal layouts, and some contain only padding.
    """
    different = np.array([[40, 44], [40, 23], [27, 44], [18, 9], [17, 9], [0, 44]])
    extents = different[np.random.default_rng(0).integers(len(different), size=70)]
    check_padded(KERNELS[kernels], extents, heads, 32)


@pytest.mark.parametrize("kernels", ["hopper", "cutlass", "small"])
def test_one_launch_processes_all_entries_without_copies(kernels: str) -> None:
    arguments = KERNELS[kernels]
    arrays = [draw(seed, 5, 33, 47, 2, 64) for seed in range(3)]
    traced = []

    def attend(origin: jax.Array, extents: jax.Array, *inputs: jax.Array) -> jax.Array:
        traced.append(extents)
        query, key, value = inputs
        given: dict[str, Any] = {"query_origin": origin, "extents": extents, **arguments}
        result: jax.Array = natten_jax.na2d(query[:, :16, :32], key, value, **given)
        return result

    compiled = jax.jit(attend).lower(*(jnp.zeros((5, 2), jnp.int32),) * 2, *arrays).compile()
    text = compiled.as_text()
    assert text is not None
    assert text.count('custom_call_target="natten_jax') == 1
    assert not re.findall(r"bf16\[5,33,47,2,64\]\S* (?!parameter)\w+\(", text)
    rng = np.random.default_rng(0)
    for _ in range(100):
        origin, extents = rng.integers(0, (18, 16), (5, 2)), rng.integers(0, (34, 48), (5, 2))
        found = compiled(jnp.asarray(origin, jnp.int32), jnp.asarray(extents, jnp.int32), *arrays)
        real = origin[:, None, None] + np.indices((16, 32)).transpose(1, 2, 0) < extents[:, None, None]
        np.testing.assert_array_equal(np.any(np.asarray(found), axis=(-1, -2)), real.all(axis=-1))
    assert len(traced) == 1


@pytest.mark.parametrize("backend", ["hopper-fmha", "cutlass-fmha"])
def test_sequences_of_many_lengths(backend: str) -> None:
    lengths = np.array([700, 1, 0, 333])
    query, key, value = (draw(seed, 4, 700, 4, 64) for seed in range(3))
    outside = (np.arange(700) >= lengths[:, None])[..., None, None]
    arrays = [jnp.where(outside, jnp.nan, each) for each in (query, key, value)]
    given = {"query_lengths": jnp.asarray(lengths), "kv_lengths": jnp.asarray(lengths), "is_causal": True}

    def loss(*inputs: jax.Array, **arguments: Any) -> jax.Array:
        return jnp.sum(natten_jax.attention(*inputs, **arguments).astype(jnp.float32) ** 2)

    found = jax.grad(functools.partial(loss, **given, backend=backend), (0, 1, 2))(*arrays)
    expected = jax.grad(functools.partial(loss, **given, backend="flex-fmha"), (0, 1, 2))(query, key, value)
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(each.astype(jnp.float32)) for each in (one, other))
        assert (one[np.broadcast_to(outside, one.shape)] == 0).all()
        assert np.linalg.norm(one - other) < 1e-2 * np.linalg.norm(other)


# Windows that wrap in NVIDIA GPU kernels, compared with the oracle. Tiles and regions load keys past the end of a
# dimension, where the first key follows the last.


_HALVES = ("bfloat16", "float16")

#: Problems with windows that wrap in at least one dimension. If ``edges`` is not given, all dimensions wrap.
AROUND = {
    "sequence": Case((300,), (40,), heads=2, heads_kv=2, head_dim=32, batch=2),
    "short sequence": Case((21,), (19,), heads=3, heads_kv=3, head_dim=64, batch=2),
    "next to whole": Case((16, 17), (15, 16), heads=2, heads_kv=2, head_dim=32),
    "image": Case((24, 40), (7, 7), heads=2, heads_kv=2, head_dim=32, batch=3),
    "wide image": Case((30, 31), (13, 13), heads=2, heads_kv=2, head_dim=64, batch=2),
    "wide heads": Case((19, 29), (5, 9), heads=2, heads_kv=1, head_dim=128),
    "small image": Case((9, 9), (7, 8), heads=8, heads_kv=8, head_dim=32, batch=4),
    "longitude": Case((18, 36), (5, 9), edges=("cut", "wrap"), heads=4, heads_kv=4, head_dim=64),
    "latitude": Case((36, 18), (9, 5), edges=("wrap", "shift"), heads=4, heads_kv=2, head_dim=32),
    "dilated": Case((32, 51), (7, 5), dilation=(2, 3), heads=2, heads_kv=2, head_dim=32),
    "far apart": Case((60, 45), (3, 3), dilation=(12, 9), heads=2, heads_kv=2, head_dim=32),
    "strided": Case((27, 30), (6, 8), stride=(3, 5), heads=2, heads_kv=2, head_dim=32),
    "grouped heads": Case((18, 23), (5, 5), heads=6, heads_kv=2, head_dim=32, batch=2),
    "narrow heads": Case((20, 24), (5, 7), heads=3, heads_kv=3, head_dim=24, head_dim_v=40),
    "additional": Case((20, 24), (5, 7), heads=4, heads_kv=2, head_dim=32, additional=5),
    "scales": Case((19, 17), (5, 3), heads=4, heads_kv=2, head_dim=32, scales=(0.3, -0.5, 0.0, 8e-4)),
    "clip": Case((5, 12, 13), (3, 5, 5), heads=2, heads_kv=2, head_dim=32),
    "causal in time": Case(
        (5, 12, 14), (3, 5, 5), is_causal=(True, False, False), edges=("shift", "wrap", "wrap"), head_dim=64
    ),
    "volume": Case((8, 9, 10), (5, 5, 5), dilation=(1, 1, 2), heads=2, heads_kv=2, head_dim=64),
    "many entries": Case((12, 16), (5, 5), heads=4, heads_kv=4, head_dim=32, batch=24),
}


def _case(name: str) -> Case:
    case = AROUND[name]
    return case if case.edges is not None else dataclasses.replace(case, edges=("wrap",) * len(case.layout))


@pytest.mark.parametrize("kernels", ["cutlass", "hopper"])
@pytest.mark.parametrize("name", AROUND)
def test_windows_that_wrap(name: str, kernels: str) -> None:
    """Test each problem with default tiles and with random tiles, in both 16-bit types."""
    case = _case(name).fitted(family_named(kernels))
    problems = [each for dtype in _HALVES for each in variants(Fuzzed(kernels, case, dtype, 0), 2)]
    assert find_errors(problems) == [[]] * len(problems)


@pytest.mark.parametrize(("backend", "tiles"), [("cutlass-fna", SMALL), ("hopper-fna", {})])
def test_no_key_is_copied(backend: str, tiles: dict[str, Any]) -> None:
    shape = (2, 64, 48, 2, 64)
    arrays = [draw(seed, *shape) for seed in range(4)]

    attend: Any = functools.partial(na2d, kernel_size=7, edges="wrap", backend=backend, **tiles)
    run = jax.jit(both_passes(lambda inputs: attend(*inputs)))
    text = run.lower(arrays[:3], arrays[3]).compile().as_text()
    assert text is not None
    assert not re.findall(r"bf16\[2,\d+,\d+,2,64\]\S* (?:copy|pad|concatenate|slice|dynamic-slice|fusion)\(", text)
