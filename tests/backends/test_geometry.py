"""Hulls of the flex backend's tiles, and the cost of seams on Hopper.

The hull of a query tile is the range from the first to the last key that its queries see. The hull of a key tile is the
range of queries that see it. A seam is the point at which a wrapped dimension continues at its other end.
"""

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
    """Compute the largest hull of all tiles from the oracle's mask."""
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
    """Compute the largest hull of a wrapped dimension from all windows. It may be longer than the layout."""
    length, largest = axis.kv_extent // axis.dilation, 1
    # Keys of an unaligned tile may lie beyond the end of the layout, in a halo.
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
    """Tracing and lowering create no NumPy array with as many elements as the layout has tokens."""
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
        # 16 queries see 22 keys, which fit in three tiles of 8 with 2 keys to spare. 22 of the 64 possible ranges of 22
        # keys contain a seam. No box of 4 keys can cross the seam, so the first tile begins 0 to 3 keys earlier. If it
        # begins 3 keys earlier, a tile is added, because there are only 2 keys to spare. A tile has two boxes; up to
        # three boxes do not cost extra time.
        (64, 7, "wrap", (16, 8), 1 + 22 / 64 * 1 / (3 * 4)),
        (30, 7, "wrap", (16, 8), 1 + 22 / 30 * 1 / (3 * 4)),
        # 22 keys fit in two tiles of 16 with 10 keys to spare. Boxes of 8 begin up to 7 keys earlier, and add no tile.
        (48, 7, "wrap", (16, 16), 1),
        # The tile contains all 48 queries, which see 52 keys. These keys fit in one tile of 64 with 12 keys to spare,
        # and always contain a seam. Boxes of 64 or 32 keys would cross the seam. Boxes of 16 begin 0 to 15 keys
        # earlier. If they begin 13, 14 or 15 keys earlier, a tile is added. Four boxes per tile take a third longer
        # than three.
        (48, 5, "wrap", (64, 64), (1 + 1 * 3 / (1 * 16)) * 4 / 3),
        (64, 7, "shift", (16, 8), 1),
    ],
)
def test_one_dimension(extent: int, kernel_size: int, edges: Edge, tiles: tuple[int, int], expected: float) -> None:
    problem = simulator.problem_of((extent,), kernel_size, edges=edges)
    query, key = tiles
    assert hopper.seam_slowdown(problem, "forward", ((query,), (key,))) == pytest.approx(expected, rel=1e-12)


@needs_native
def test_steps_multiply_over_dimensions_and_share_loads() -> None:
    problem = simulator.problem_of((64, 64), 7, edges=("wrap", "wrap"))
    along, across = (
        hopper.seam_slowdown(simulator.problem_of((64,), 7, edges="wrap"), "forward", pair)
        for pair in (((16,), (8,)), ((8,), (16,)))
    )
    both = hopper.seam_slowdown(problem, "forward", ((16, 8), (8, 16)))
    assert along * across <= both < 1.25 * along * across


@needs_native
def test_tiles_are_ranked_by_it() -> None:
    problem = simulator.problem_of((48,), 5, edges="wrap")
    slow, fast = ((64,), (64,)), ((16,), (16,))
    ranked = hopper.rank_with_seams(problem, "forward", ((slow, 1.0), (fast, 1.2)))
    assert [pair for pair, _ in ranked] == [fast, slow]
    assert hopper.rank_with_seams(simulator.problem_of((48,), 5), "forward", ((slow, 1.0),)) == ((slow, 1.0),)
