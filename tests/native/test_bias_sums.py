"""Records of the sums for relative biases have room for the offsets of every tile."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from natten_jax import backends
from natten_jax.native import module as native
from natten_jax.native.abi import axis_rows
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
