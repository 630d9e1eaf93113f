"""Where a ring of keys is expected to be faster than a region, and what such a launch is said to execute."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from natten_jax import simulator
from natten_jax.backends.select import resolve
from natten_jax.cost_model import small_windows
from natten_jax.native import module as native
from natten_jax.native.module import axis_rows
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem

RING = "forward with a ring"
HOPPER = (9, 0)


def problem_of(
    layout: tuple[int, ...] = (128, 128), kernel_size: int | tuple[int, ...] = 13, **changes: Any
) -> Problem:
    window = {name: changes.pop(name) for name in ("stride", "dilation", "is_causal") if name in changes}
    operands: dict[str, Any] = {
        name: True for name in ("relative_bias", "key_bias", "own_origins", "own_extents") if changes.pop(name, 0)
    }
    sizes: dict[str, Any] = {"batch": 8, "heads": 8, "head_dim": 64, "dtype": "bfloat16"} | changes
    return dataclasses.replace(simulator.problem_of(layout, kernel_size, **window, **sizes), **operands)


def launches(problem: Problem, capability: ComputeCapability | None = HOPPER) -> dict[TilePair, small_windows.Launch]:
    """The forward launch of every pair of tiles."""
    ranked = small_windows.ranked("cutlass", problem, "forward", capability)
    found = {pair: small_windows.estimate("cutlass", problem, "forward", pair, capability) for pair, _ in ranked}
    return {pair: estimate.launches[0] for pair, estimate in found.items() if estimate is not None}


@pytest.mark.parametrize(("kernel_size", "are_tiles_small"), [(13, True), (33, False)])
def test_windows_larger_than_those_of_rings_have_other_kernels(kernel_size: int, are_tiles_small: bool) -> None:
    """Estimates were fitted to windows of up to 400 keys."""
    request = Request(problem_of((96, 96), kernel_size, batch=1, heads=4, head_dim=32))
    plan = resolve(request, Device("cuda", HOPPER, is_present=False), "forward")
    assert (sorted(map(math.prod, plan.tiles)) == [8, 16]) == are_tiles_small


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_windows_of_many_keys_have_a_ring(capability: ComputeCapability) -> None:
    assert next(iter(launches(problem_of(), capability).values())).kernel == RING


@pytest.mark.parametrize(
    "changes",
    [
        {"dilation": 2},
        {"additional_kv": 3},
        {"head_dim": 128},
        {"head_dim": 56},
        {"head_dim_v": 32},
        {"layout": (16, 16), "batch": 1, "heads": 1},
        {"layout": (2048, 8192), "batch": 1, "heads": 1},  # no dimension that is short enough to go along
        {"kernel_size": 9},
        {"layout": (4096,), "kernel_size": 128},
        {"layout": (16, 4096), "kernel_size": (1, 128)},
        {"own_origins": True},
        {"own_extents": True},
    ],
    ids=str,
)
def test_what_the_form_does_not_take_has_none(changes: dict[str, Any]) -> None:
    fastest = next(iter(launches(problem_of(**changes)).values()))
    assert fastest.kernel == "forward"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_estimates_of_sequences_do_not_jump_where_other_windows_have_rings(pass_: Pass, is_causal: bool) -> None:
    found = []
    for kernel_size in (99, 100):
        problem = problem_of((16384,), kernel_size, is_causal=is_causal, batch=2, heads=16)
        found.append(next(iter(small_windows.ranked("cutlass", problem, pass_, HOPPER)))[1])
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_biases_of_keys_come_beside_boxes() -> None:
    biased = problem_of(key_bias=True)
    assert next(iter(launches(biased).values())).kernel == RING
    assert all(launch.kernel == "forward" for launch in launches(biased, (8, 0)).values())


def test_parts_of_a_layout_take_the_tiles_of_regions() -> None:
    # Rings are of whole layouts: beside them, regions would have the tiles that suit rings.
    problem = problem_of()
    whole, part, box = (
        resolve(Request(each, backend="cutlass-fna", parts=parts), Device("cuda", HOPPER, is_present=False), "forward")
        for each, parts in ((problem, ()), (problem, (2, 1)), (dataclasses.replace(problem, own_origins=True), ()))
    )
    assert launches(problem)[whole.tiles].kernel == RING
    assert part.tiles == box.tiles != whole.tiles


def test_products_are_those_of_the_blocks_that_warps_multiply() -> None:
    # 4 x 4 queries see 4 groups of 4 columns, and 4 slabs of 4 rows: those of the middle end where slabs do.
    problem = problem_of()
    pair: TilePair = ((4, 4), (2, 4))
    launch = launches(problem)[pair]
    assert launch.kernel == RING
    assert launch.pairs == 128 * 128 * 16 * 16
    calibration = simulator.calibration_for("cutlass")
    found = simulator.simulate(problem, pair, calibration=calibration)
    assert found.counts.executed_pairs == launch.pairs
    assert found.executed_flops == 2 * 2 * 8 * 8 * 64 * launch.pairs
    # Each key is loaded once for a strip, and strips see no more than a window beyond their queries.
    assert math.prod(problem.kv_layout) <= launch.regions * launch.columns < 4 * math.prod(problem.kv_layout)


def backward_kernels(problem: Problem, capability: ComputeCapability | None = HOPPER) -> tuple[str, ...]:
    """Those of the fastest pair of tiles."""
    pair, _ = next(small_windows.ranked("cutlass", problem, "backward", capability))
    estimate = small_windows.estimate("cutlass", problem, "backward", pair, capability)
    assert estimate is not None
    return tuple(launch.kernel for launch in estimate.launches)


def test_key_and_value_gradients_have_a_ring_whose_tiles_are_its_own() -> None:
    problem = problem_of(head_dim=32)
    assert backward_kernels(problem)[1] == "key/value gradient with a ring"
    rings = {
        estimate.launches[1]
        for pair, _ in small_windows.ranked("cutlass", problem, "backward", HOPPER)
        if (estimate := small_windows.estimate("cutlass", problem, "backward", pair, HOPPER)) is not None
    }
    assert len({launch for launch in rings if "ring" in launch.kernel}) == 1
    assert backward_kernels(problem, (8, 0))[1] == "key/value gradient with a ring"


def test_a_relative_bias_leaves_query_gradients_to_regions() -> None:
    problem = problem_of(head_dim=32, relative_bias=True)
    assert next(iter(launches(problem).values())).kernel == RING
    assert backward_kernels(problem) == ("query gradient", "key/value gradient with a ring")
    # Elsewhere no ring is compiled for it.
    assert all(launch.kernel == "forward" for launch in launches(problem, (8, 0)).values())
    assert backward_kernels(problem, (8, 0)) == ("query gradient", "key/value gradient")


@pytest.mark.parametrize("changes", [{"heads_kv": 2}, {"additional_kv": 3}, {"own_extents": True}], ids=str)
def test_key_and_value_gradients_without_a_ring(changes: dict[str, Any]) -> None:
    assert backward_kernels(problem_of(head_dim=32, **changes))[1] == "key/value gradient"


def test_products_of_gradients_are_counted_for_both_kernels() -> None:
    problem = problem_of(head_dim=32)
    pair, _ = next(small_windows.ranked("cutlass", problem, "backward", HOPPER))
    estimate = small_windows.estimate("cutlass", problem, "backward", pair, HOPPER)
    assert estimate is not None
    found = simulator.simulate(problem, pair, pass_="backward", calibration=simulator.calibration_for("cutlass"))
    of_keys = estimate.launches[1].pairs
    assert of_keys >= found.counts.visible_pairs
    # Four products of a pair there, three where rows are queries.
    assert found.executed_flops > 2 * 8 * 8 * 32 * (4 * of_keys + 3 * found.counts.visible_pairs)
    assert found.executed_flops < 2 * 8 * 8 * 32 * 3 * (4 * of_keys)


@pytest.mark.parametrize(("length", "has_ring"), [(2**16, True), (2**31 - 1, False)])
def test_dimensions_whose_strips_nobody_would_count_have_no_ring(length: int, has_ring: bool) -> None:
    """An answer comes at once: strips are counted one by one."""
    problem = problem_of((64, length), (10, 10), batch=1, heads=1)
    ring = native.gradient_ring_of_small_windows(
        axis_rows(problem),
        (1, 1, 1, 64, 64, 0),
        shared_memory=227 << 10,
        multiprocessors=132,
        ring_has_boxes=True,
        has_relative_bias=False,
        has_key_bias=False,
    )
    assert (ring is not None) == has_ring
