"""What seams cost Hopper's kernels, worked out by hand; launches choose their boxes by the same native code."""

from __future__ import annotations

import pytest

from natten_jax import simulator
from natten_jax.backends import hopper
from natten_jax.native import module as native
from natten_jax.windows import Edge

pytestmark = pytest.mark.skipif(native.path() is None, reason="the native module is not built")


@pytest.mark.parametrize(
    ("extent", "kernel_size", "edges", "tiles", "expected"),
    [
        # 16 queries see 22 keys: three tiles of 8, with room for 2 more. Of 64 such ranges 22 have a seam. Boxes of
        # 4 begin up to 3 keys earlier for it, one more than there is room for; two of them are no more than three.
        (64, 7, "wrap", (16, 8), 1 + 22 / 64 * 1 / (3 * 4)),
        (30, 7, "wrap", (16, 8), 1 + 22 / 30 * 1 / (3 * 4)),
        # Two tiles of 16 have room for 10: boxes of 8 begin up to 7 keys earlier.
        (48, 7, "wrap", (16, 16), 1),
        # 48 queries and no more see 52 keys, always with a seam, in a tile with room for 12. Boxes of 64 or 32 would be
        # cut, and four of 16, which begin up to 15 keys earlier, take a third longer.
        (48, 5, "wrap", (64, 64), (1 + 1 * 3 / (1 * 16)) * 4 / 3),
        (64, 7, "shift", (16, 8), 1),
    ],
)
def test_one_dimension(extent: int, kernel_size: int, edges: Edge, tiles: tuple[int, int], expected: float) -> None:
    problem = simulator.problem_of((extent,), kernel_size, edges=edges)
    query, key = tiles
    assert hopper.times_as_long(problem, "forward", ((query,), (key,))) == pytest.approx(expected, rel=1e-12)


def test_dimensions_multiply_and_share_what_is_loaded_meanwhile() -> None:
    problem = simulator.problem_of((64, 64), 7, edges=("wrap", "wrap"))
    along, across = (
        hopper.times_as_long(simulator.problem_of((64,), 7, edges="wrap"), "forward", pair)
        for pair in (((16,), (8,)), ((8,), (16,)))
    )
    both = hopper.times_as_long(problem, "forward", ((16, 8), (8, 16)))
    assert along * across <= both < 1.25 * along * across


def test_tiles_are_ranked_by_it() -> None:
    problem = simulator.problem_of((48,), 5, edges="wrap")
    slow, fast = ((64,), (64,)), ((16,), (16,))
    ranked = hopper.ranked_around(problem, "forward", ((slow, 1.0), (fast, 1.2)))
    assert [pair for pair, _ in ranked] == [fast, slow]
    assert hopper.ranked_around(simulator.problem_of((48,), 5), "forward", ((slow, 1.0),)) == ((slow, 1.0),)
