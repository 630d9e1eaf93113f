"""Records of the sums for relative biases have room for the offsets of every tile, and lanes find entries of tables in
different banks of shared memory."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from natten_jax import backends
from natten_jax.native import module as native
from natten_jax.native.module import axis_rows
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from natten_jax.windows import Edge
from tests.support import oracle

#: Behind a record: where it begins.
_HEADER = 4


def offsets_of_tiles(mask: np.ndarray, tile: int) -> list[int]:
    """How many offsets of keys from queries tiles of so many queries have, from the least to the largest one."""
    found = []
    for first in range(0, len(mask), tile):
        queries, keys = np.nonzero(mask[first : first + tile])
        offsets = keys - queries
        found.append(int(offsets.max() - offsets.min() + 1))
    return found


@pytest.mark.parametrize("tile", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("edges", ["shift", "cut"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_records_hold_what_tiles_see(tile: int, edges: Edge, is_causal: bool) -> None:
    if is_causal and edges == "cut":
        pytest.skip("causal windows are cut as they are")
    for extent, kernel_size, stride in itertools.product((7, 12, 33), (1, 2, 5, 7, 12, 31), (1, 2, 3, 5)):
        if kernel_size > extent or stride > kernel_size:
            continue
        problem = problem_of((extent,), kernel_size, stride, is_causal=is_causal, edges=edges)
        mask = oracle.neighborhood_mask(
            (extent,),
            kernel_size=(kernel_size,),
            stride=(stride,),
            dilation=(1,),
            is_causal=(is_causal,),
            edges=(edges,),
        )
        found = native.bias_sums(axis_rows(problem), (1, 1, extent), (1, 1, tile), (1, 1, 8))
        # Rows of which every other one begins a number later.
        assert found.record - _HEADER >= max(offsets_of_tiles(mask, tile)) + 1
        assert found.tiles == -(-extent // tile)
        assert found.record <= 2 * kernel_size + 16 + _HEADER


def test_tiles_of_all_dilation_groups_are_counted() -> None:
    problem = problem_of((13, 20), (5, 3), dilation=(2, 3))
    found = native.bias_sums(axis_rows(problem), (1, 13, 20), (1, 4, 4), (1, 1, 8))
    assert found.tiles == 2 * 2 * 3 * 2
    assert found.parts == 1


@pytest.mark.parametrize("pass_", PASSES)
def test_tiles_have_no_rows_beside_the_only_token_of_a_dimension(pass_: Pass) -> None:
    """Such rows are not hidden, and their logits' gradients would be summed up."""
    backend, device = backends.find("cutlass-fna", "fna"), Device("cuda", (9, 0), is_present=False)
    rows = 0 if pass_ == "forward" else 1
    for layout, kernel_size in (((1, 1, 40), (1, 1, 7)), ((1, 12, 9), (1, 3, 5)), ((40, 1), (7, 1))):
        problem = dataclasses.replace(problem_of(layout, kernel_size, head_dim=32), relative_bias=True)
        assert backend.rejection(problem, device, pass_) is None
        for pair in backend.tile_pairs(problem, device, pass_):
            assert all(tile == 1 for tile, extent in zip(pair[rows], layout, strict=True) if extent == 1)


def reads_of_warp(line: int, lines: int, tile: tuple[int, ...], group: tuple[int, ...], order: tuple[int, ...]) -> int:
    """Words of a table that lanes of a warp find in one bank: a lane for each of 8 rows and each pair of columns."""
    pitch = (line * lines, line, 1)
    words = set()
    for row, column in itertools.product(range(8), range(0, 8, 2)):
        word = 0
        for d in order:
            word += pitch[d] * (column % group[d] - row % tile[d])
            row, column = row // tile[d], column // group[d]
        words.add(word)
    return max(collections.Counter(word % 32 for word in words).values())


@pytest.mark.parametrize(
    ("kernel_size", "tile", "group", "order", "expected"),
    [
        ((7, 7), (1, 2, 8), (1, 8, 1), (1, 2, 0), 20),
        ((7, 7), (1, 8, 2), (1, 1, 8), (2, 1, 0), 24),
        ((7, 7), (1, 4, 4), (1, 1, 8), (2, 1, 0), 13),
        ((13, 13), (1, 4, 4), (1, 1, 8), (2, 1, 0), 42),
        ((4, 5, 6), (1, 4, 4), (1, 1, 8), (2, 1, 0), None),
    ],
)
def test_lanes_find_entries_in_different_banks(
    kernel_size: tuple[int, ...],
    tile: tuple[int, ...],
    group: tuple[int, ...],
    order: tuple[int, ...],
    expected: int | None,
) -> None:
    problem = problem_of((40,) * len(kernel_size), kernel_size)
    line = native.bias_line(axis_rows(problem), tile, group)
    *_, of_plane, own = (2 * k - 1 for k in kernel_size)
    assert expected is None or line == expected
    assert reads_of_warp(line, of_plane, tile, group, order) == 1
    assert all(reads_of_warp(shorter, of_plane, tile, group, order) > 1 for shorter in range(own, line))


def test_lines_of_one_line_are_not_filled_up() -> None:
    assert native.bias_line(axis_rows(problem_of((300,), 40)), (1, 1, 16), (1, 1, 8)) == 79
