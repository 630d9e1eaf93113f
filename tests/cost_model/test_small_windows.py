"""Small-window kernels: predicted times, and the choice of ring kernels.

Predicted times are compared with peak rates of the device.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from natten_jax import backends, simulator
from natten_jax.backends.base import Backend
from natten_jax.backends.select import resolve
from natten_jax.cost_model import small_windows
from natten_jax.native import module as native
from natten_jax.native.module import axis_rows
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem
from natten_jax.profiler.__main__ import main
from tests.support.plans import kernels_by_tiles, launches_by_tiles

# Simulated rates never exceed the peaks of the device.


PROBLEMS = 120

HOPPER_GPU = Device("cuda", (9, 0), is_present=False)


class Peak(NamedTuple):
    """Peak rates of a device.

    Attributes:
        flops: Floating-point operations per second by element type, without sparsity.
        bytes: Bytes per second that the device reads and writes.
    """

    flops: dict[str, float]
    bytes: float


#: Rates of the SXM version, from the datasheet "NVIDIA H200 Tensor Core GPU". Float32 is computed as TF32.
PEAKS = {"NVIDIA H200": Peak({"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 494.7e12}, 4.8e12)}


def random_problem(draw: random.Random) -> Problem:
    rank = draw.choice([1, 1, 1, 2, 2, 2, 2, 3])
    most = {1: 1 << draw.randint(2, 14), 2: draw.choice([7, 14, 28, 56, 112, 256]), 3: draw.choice([4, 8, 16, 32])}[
        rank
    ]
    layout = [draw.randint(1, most) if draw.random() < 0.5 else most for _ in range(rank)]
    dilation = [min(draw.choice([1, 1, 1, 2, 3]), extent) for extent in layout]
    kernel = [
        draw.randint(1, min(n // d, draw.choice([3, 7, 13, 32, 4096]))) for n, d in zip(layout, dilation, strict=True)
    ]
    heads_kv, head_dim = draw.choice([1, 2, 4, 16]), draw.choice([8, 16, 32, 32, 48, 64, 64, 96, 128, 128, 192, 256])
    return simulator.problem_of(
        layout,
        kernel,
        [draw.randint(1, k) if draw.random() < 0.3 else 1 for k in kernel],
        dilation,
        [draw.random() < 0.2 for _ in kernel],
        batch=draw.choice([1, 1, 4, 64, 1024]),
        heads=heads_kv * draw.choice([1, 1, 1, 2, 4]),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=draw.choice([head_dim, head_dim, head_dim, 64]),
        dtype=draw.choice(["bfloat16", "float16", "float32"]),
        additional_kv=draw.choice([0, 0, 0, 1, 17, 300]),
    )


def listed(problem: Problem, draw: random.Random) -> Iterator[tuple[Backend, Pass, TilePair]]:
    """Yield the two best pairs of tiles of every backend and pass, and two random pairs."""
    for backend in backends.registered():
        for pass_ in PASSES:
            for device in (HOPPER_GPU, Device("cpu")):
                if backend.rejection(problem, device, pass_) is None:
                    pairs = list(backend.tile_pairs(problem, device, pass_))
                    for pair in (*pairs[:2], *draw.sample(pairs, min(2, len(pairs)))):
                        yield backend, pass_, pair


def test_no_prediction_is_faster_than_the_device() -> None:
    draw = random.Random(5)
    seen = dict.fromkeys([("hopper", False), ("cutlass", False), ("cutlass", True)], 0)
    for _ in range(PROBLEMS):
        problem = random_problem(draw)
        for backend, pass_, pair in listed(problem, draw):
            model = simulator.calibration_for(backend.family)
            found = simulator.simulate(problem, pair, pass_, calibration=model)
            assert found.executed_flops >= found.flops, (problem, pair, pass_)
            if model is None or found.seconds is None:
                continue
            peak = PEAKS[model.device]
            assert found.executed_flops < found.seconds * peak.flops[problem.dtype], (problem, pair, pass_)
            assert found.least_bytes < found.seconds * peak.bytes, (problem, pair, pass_)
            seen[backend.family, small_windows.is_for(model, problem, pass_, pair)] += 1
    assert min(seen.values()) > 100, seen


def test_the_ranking_times_small_windows_as_the_simulation_does() -> None:
    problem = simulator.problem_of((56, 56), 7, batch=64, heads=2, head_dim=32)
    model = simulator.calibration_for("cutlass")
    pairs: list[TilePair] = [((2, 8), (8, 1)), ((4, 4), (2, 4)), ((8, 8), (8, 8))]
    ranked = simulator.rank(problem, pairs, "forward", model)
    assert dict(ranked) == {pair: simulator.simulate(problem, pair, calibration=model).seconds for pair in pairs}


def test_parts_of_small_windows_take_their_share_of_the_time() -> None:
    problem = simulator.problem_of((56, 56), 7, batch=64, heads=2, head_dim=32)
    model = simulator.calibration_for("cutlass")
    assert model is not None
    plan = resolve(Request(problem, backend="cutlass-fna"), HOPPER_GPU, "forward")
    whole = simulator.simulate(plan.problem, plan.tiles, calibration=model).seconds
    split = simulator.predict_split(plan, (2, 1), model)
    assert whole is not None and split is not None
    assert 0.45 * whole < split.compute < whole


@pytest.mark.parametrize("arguments", ["-i 56 56 -n 2 -d 32 -w 7 -b 64 --backprop", "-i 14 14 -n 16 -d 32 -w 7 -b 64"])
def test_command_line_predictions_are_plausible(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert main([*arguments.split(), "--simulate", "--compute-capability", "9.0", "--json", str(path)]) == 0
    assert "98.5%" not in capsys.readouterr().out
    passes: dict[str, Any] = json.loads(path.read_text())["passes"]
    for found in passes.values():
        assert found["backend"] == "cutlass-fna"
        assert found["executed_flops"] < 500e12 * found["predicted_seconds"]
        counts = found["counts"]
        assert counts["visited_pairs"] - counts["hull_pairs"] < 0.3 * counts["visited_pairs"]


# Choice between ring kernels and region kernels. A ring kernel moves along a strip of the layout, and loads keys into a
# ring of buffers. A region kernel loads all keys that a region of queries sees.


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
    """Return the launch of the forward pass for each pair of tiles that the backend lists."""
    return {pair: forward for pair, (forward,) in launches_by_tiles(problem, "forward", capability)}


@pytest.mark.parametrize(("kernel_size", "are_tiles_small"), [(13, True), (33, False)])
def test_windows_too_large_for_rings_have_other_kernels(kernel_size: int, are_tiles_small: bool) -> None:
    """Windows of 33 x 33 keys use large-window kernels.

    The time estimates that were fitted to windows of 100 to 400 keys are not used for such windows.
    """
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
        {"layout": (2048, 8192), "batch": 1, "heads": 1},  # every dimension is too long for a strip
        {"kernel_size": 9},
        {"layout": (4096,), "kernel_size": 128},
        {"layout": (16, 4096), "kernel_size": (1, 128)},
        {"own_origins": True},
        {"own_extents": True},
    ],
    ids=str,
)
def test_unsupported_problems_do_not_use_the_ring(changes: dict[str, Any]) -> None:
    fastest = next(iter(launches(problem_of(**changes)).values()))
    assert fastest.kernel == "forward"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_estimates_of_sequences_are_smooth_at_the_ring_threshold(pass_: Pass, is_causal: bool) -> None:
    found = []
    for kernel_size in (99, 100):
        problem = problem_of((16384,), kernel_size, is_causal=is_causal, batch=2, heads=16)
        found.append(next(iter(small_windows.ranked("cutlass", problem, pass_, HOPPER)))[1])
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_key_biases_use_rings_only_on_hopper() -> None:
    biased = problem_of(key_bias=True)
    assert next(iter(launches(biased).values())).kernel == RING
    assert all(launch.kernel == "forward" for launch in launches(biased, (8, 0)).values())


def test_parts_of_a_layout_take_the_tiles_of_regions() -> None:
    # Ring kernels need whole layouts. Parts of a layout use the tiles that are best for region kernels.
    problem = problem_of()
    whole, part, box = (
        resolve(Request(each, backend="cutlass-fna", parts=parts), Device("cuda", HOPPER, is_present=False), "forward")
        for each, parts in ((problem, ()), (problem, (2, 1)), (dataclasses.replace(problem, own_origins=True), ()))
    )
    assert launches(problem)[whole.tiles].kernel == RING
    assert part.tiles == box.tiles != whole.tiles


def test_rings_multiply_the_blocks_that_some_query_sees() -> None:
    # A tile of 4 x 4 queries with windows of 13 x 13 sees 16 x 16 keys: 4 slabs of 4 rows, with 4 blocks of 4 x 4 keys
    # each.
    problem = problem_of()
    pair: TilePair = ((4, 4), (2, 4))
    launch = launches(problem)[pair]
    assert launch.kernel == RING
    assert launch.pairs == 128 * 128 * 16 * 16


def backward_kernels(problem: Problem, capability: ComputeCapability | None = HOPPER) -> tuple[str, ...]:
    """Return the kernels that the backward pass launches with the fastest pair of tiles."""
    return next(kernels_by_tiles(problem, "backward", capability))[1]


def test_key_and_value_gradients_have_a_ring_whose_tiles_are_its_own() -> None:
    problem = problem_of(head_dim=32)
    assert backward_kernels(problem)[1] == "key/value gradient with a ring"
    key_gradients = {launches[1] for _, launches in launches_by_tiles(problem, "backward")}
    assert len({launch for launch in key_gradients if "ring" in launch.kernel}) == 1
    assert backward_kernels(problem, (8, 0))[1] == "key/value gradient with a ring"


def test_a_relative_bias_leaves_query_gradients_to_regions() -> None:
    problem = problem_of(head_dim=32, relative_bias=True)
    assert next(iter(launches(problem).values())).kernel == RING
    assert backward_kernels(problem) == ("query gradient", "key/value gradient with a ring")
    # The ring kernel with a relative bias is not compiled for older architectures.
    assert all(launch.kernel == "forward" for launch in launches(problem, (8, 0)).values())
    assert backward_kernels(problem, (8, 0)) == ("query gradient", "key/value gradient")


@pytest.mark.parametrize("changes", [{"heads_kv": 2}, {"additional_kv": 3}, {"own_extents": True}], ids=str)
def test_key_and_value_gradients_without_a_ring(changes: dict[str, Any]) -> None:
    assert backward_kernels(problem_of(head_dim=32, **changes))[1] == "key/value gradient"


@pytest.mark.parametrize(("length", "has_ring"), [(2**16, True), (2**31 - 1, False)])
def test_dimensions_with_too_many_strips_have_no_ring(length: int, has_ring: bool) -> None:
    """The native function counts strips one by one, but returns quickly even for the longest dimension."""
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
