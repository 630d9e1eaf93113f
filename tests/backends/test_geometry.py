"""Hulls of the flex backend's tiles, and the cost of seams on Hopper."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from natten_jax import simulator
from natten_jax.backends import hopper
from natten_jax.backends.flex.geometry import largest_hull
from natten_jax.windows import EDGES, Axis, Edge
from tests.support import oracle
from tests.support.native_programs import needs_native
from tests.support.problems import OPERATORS


@st.composite
def dimensions(draw: st.DrawFn) -> tuple[int, int, int, int, int, bool, Edge]:
    """Draw queries, keys, kernel_size, stride, dilation, is_causal and edges."""
    keys = draw(st.integers(1, 200))
    dilation = draw(st.integers(1, min(keys, 5)))
    kernel_size = draw(st.integers(1, keys // dilation))
    stride = draw(st.integers(1, kernel_size))
    queries = draw(st.integers(1, 200)) if kernel_size == keys else keys
    is_causal = draw(st.booleans())
    choices = EDGES[: 2 + (keys % dilation == 0)] if queries == keys and not is_causal else EDGES[:1]
    return (
        queries,
        keys,
        kernel_size,
        1 if queries != keys else stride,
        dilation,
        is_causal,
        draw(st.sampled_from(choices)),
    )


def walked(
    queries: int,
    keys: int,
    kernel_size: int,
    stride: int,
    dilation: int,
    is_causal: bool,
    edges: Edge,
    tile: int,
    outer_is_query: bool,
    is_aligned: bool,
) -> int:
    """Return the largest hull of all tiles, from the oracle's mask."""
    if queries != keys:
        mask = oracle.attention_mask(queries, keys, is_causal)
    else:
        mask = oracle.line_mask(keys, kernel_size, stride, dilation, is_causal, edges)
    largest = 1
    for group in range(dilation):
        seen = mask[group::dilation, group::dilation]
        seen = seen if outer_is_query else seen.T
        for first in range(0, len(seen), tile if is_aligned else 1):
            others = np.flatnonzero(seen[first : first + tile].any(axis=0))
            largest = max(largest, int(others[-1] - others[0]) + 1 if len(others) else 0)
    return largest


def walked_around(axis: Axis, tile: int, outer_is_query: bool, is_aligned: bool) -> int:
    """Return the longest hull of a wrapped dimension, from the bounds of every token; it may exceed the layout."""
    length, largest = axis.kv_extent // axis.dilation, 1
    # Halos of keys continue beyond the end.
    tokens = np.arange(length if outer_is_query or is_aligned else length + tile)
    start, end = axis.bounds(tokens, (length, length), of_query=outer_is_query)
    for first in range(0, length, tile if is_aligned else 1):
        tile_of = slice(first, first + tile)
        largest = max(largest, int(end[tile_of].max() - start[tile_of].min()))
    return largest


@settings(max_examples=3000)
@example((66, 66, 50, 48, 1, True, "shift"), 1, True, False)
@example((59, 59, 31, 23, 1, False, "shift"), 1, False, True)
@given(dimensions(), st.integers(1, 64), st.booleans(), st.booleans())
def test_largest_hull_equals_that_of_all_tiles(
    dimension: tuple[int, int, int, int, int, bool, Edge], tile: int, outer_is_query: bool, is_aligned: bool
) -> None:
    arguments = (*dimension, tile, outer_is_query, is_aligned)
    axis = Axis(*dimension)
    expected = walked_around(axis, *arguments[7:]) if axis.edges == "wrap" else walked(*arguments)
    assert largest_hull(axis, tile, outer_is_query, is_aligned) == expected, arguments


@pytest.mark.parametrize("is_causal", [False, True])
def test_programs_for_the_longest_layouts_are_lowered(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing and lowering compute no array with an entry for each token of the layout."""
    arange = np.arange
    lengths = []

    def recorded(*arguments: int, **options: Any) -> np.ndarray:
        if len(range(*arguments)) > 1 << 20:
            raise MemoryError(f"np.arange{arguments}")
        lengths.append(len(range(*arguments)))
        return arange(*arguments, **options)

    monkeypatch.setattr(np, "arange", recorded)
    tokens = jax.ShapeDtypeStruct((1, 2**31 - 1, 1, 8), "bfloat16")

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        window = {"kernel_size": 2**20 + 1, "stride": 513, "is_causal": is_causal}
        return OPERATORS[1](query, key, value, **window, backend="flex-fna")

    out = jax.jit(function).lower(tokens, tokens, tokens).out_info
    assert out.shape == tokens.shape
    gradients = jax.jit(lambda *a: jax.vjp(function, *a)[1](a[0])).lower(tokens, tokens, tokens).out_info
    assert [each.shape for each in gradients] == [tokens.shape] * 3
    assert lengths


@needs_native
@pytest.mark.parametrize(
    ("extent", "kernel_size", "edges", "tiles", "expected"),
    [
        # 16 queries see 22 keys: three tiles of 8, with room for 2 more. Of 64 such ranges, 22 have a seam, for which
        # boxes of 4 begin 0 to 3 keys earlier: only the offset of 3 exceeds the room and adds a tile. Two boxes per
        # tile cost nothing extra; more than three would.
        (64, 7, "wrap", (16, 8), 1 + 22 / 64 * 1 / (3 * 4)),
        (30, 7, "wrap", (16, 8), 1 + 22 / 30 * 1 / (3 * 4)),
        # Two tiles of 16 have room for 10: boxes of 8 begin up to 7 keys earlier.
        (48, 7, "wrap", (16, 16), 1),
        # 48 queries, the whole layout, see 52 keys, always with a seam, in a tile with room for 12. Boxes of 64 or 32
        # would be cut; four boxes of 16, which begin 0 to 15 keys earlier, take a third longer.
        (48, 5, "wrap", (64, 64), (1 + 1 * 3 / (1 * 16)) * 4 / 3),
        (64, 7, "shift", (16, 8), 1),
    ],
)
def test_one_dimension(extent: int, kernel_size: int, edges: Edge, tiles: tuple[int, int], expected: float) -> None:
    problem = simulator.problem_of((extent,), kernel_size, edges=edges)
    query, key = tiles
    assert hopper.times_as_long(problem, "forward", ((query,), (key,))) == pytest.approx(expected, rel=1e-12)


@needs_native
def test_steps_multiply_over_dimensions_and_share_loads() -> None:
    problem = simulator.problem_of((64, 64), 7, edges=("wrap", "wrap"))
    along, across = (
        hopper.times_as_long(simulator.problem_of((64,), 7, edges="wrap"), "forward", pair)
        for pair in (((16,), (8,)), ((8,), (16,)))
    )
    both = hopper.times_as_long(problem, "forward", ((16, 8), (8, 16)))
    assert along * across <= both < 1.25 * along * across


@needs_native
def test_tiles_are_ranked_by_it() -> None:
    problem = simulator.problem_of((48,), 5, edges="wrap")
    slow, fast = ((64,), (64,)), ((16,), (16,))
    ranked = hopper.ranked_around(problem, "forward", ((slow, 1.0), (fast, 1.2)))
    assert [pair for pair, _ in ranked] == [fast, slow]
    assert hopper.ranked_around(simulator.problem_of((48,), 5), "forward", ((slow, 1.0),)) == ((slow, 1.0),)
