"""Dimensions with very many tiles.

The simulator counts tiles in chunks, and rejects problems with too many tiles. Calls accept these problems.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import natten_jax
from natten_jax import simulator
from natten_jax.backends import select
from natten_jax.cost_model import tiles
from natten_jax.performance import PASSES
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Request
from natten_jax.profiler.__main__ import main

HUGE = 2**40
#: Maximum number of tokens that the simulator accepts in a dimension with tiles of 128 tokens (2**20 tiles).
LONGEST = 2**27


@pytest.mark.parametrize("window", [1, 2048, HUGE // 2 + 1, HUGE])
def test_pairs_of_giant_extents(window: int) -> None:
    def pairs(**parameters: Any) -> int:
        return tiles.visible_pairs(simulator.problem_of((HUGE,), window, **parameters))

    assert pairs() == pairs(edges="wrap") == HUGE * window
    assert pairs(stride=min(window, 2048)) == HUGE * window


def test_tiles_of_long_extents_in_three_dimensions() -> None:
    # Each window consists of whole tiles, so no tile is masked. Each count is a product of three factors, one per
    # dimension.
    extent = 2**18
    problem = simulator.problem_of((extent,) * 3, 512, 512)
    counts = simulator.count_tiles(problem, ((4, 4, 8), (8, 4, 4)))
    assert counts.outer == (extent // 4) ** 2 * (extent // 8)
    assert counts.inner == counts.outer * 64 * 128 * 128
    assert counts.is_fully_block_sparse
    assert counts.executed_pairs == counts.visible_pairs == extent**3 * 512**3
    kernel = simulator.Kernel(128, 128, 128, 1e-6, 1e-6, 0.0, row_groups=2)
    parts = simulator.count_tiles(problem, ((4, 4, 8), (8, 4, 4)), kernel=kernel)
    assert (parts.seen_parts, parts.full_parts, parts.partial) == (2 * counts.inner, 2 * counts.inner, 0)


def test_tiles_of_long_extents_are_ranked_by_the_simulated_time() -> None:
    problem = simulator.problem_of((2**18, 40), (3001, 7), additional_kv=HUGE, head_dim=128)
    calibration = simulator.calibration_for("hopper")
    pairs = [((16, 8), (16, 8)), ((16, 8), (12, 8)), ((16, 8), (8, 16)), ((64, 2), (1, 128))]
    ranked = simulator.rank(problem, pairs, "forward", calibration)
    expected = [simulator.simulate(problem, pair, calibration=calibration).seconds for pair, _ in ranked]
    assert [seconds for _, seconds in ranked] == expected == sorted(expected)  # type: ignore[type-var]


def test_strides_without_masks_of_long_windows() -> None:
    def least(window: int, pair: Any, **parameters: Any) -> Any:
        return simulator.least_block_sparse_stride(simulator.problem_of((2**20,), window, **parameters), pair)

    assert least(2**19, ((128,), (64,))) == (128,)
    assert least(2**19 + 1, ((128,), (64,))) is None
    assert least(2**19, ((128,), (64,)), is_causal=True) is None


@pytest.mark.parametrize(
    ("layout", "parameters", "pair"),
    [
        ((LONGEST + 1,), {}, ((128,), (128,))),
        ((HUGE,), {"is_causal": True}, ((2**40,), (2**40,))),
        ((2**21, 8), {}, ((1, 8), (128, 1))),
        ((2**61,), {"dilation": 2**10}, ((128,), (128,))),
    ],
)
def test_too_many_tiles_are_refused(layout: Any, parameters: Any, pair: Any) -> None:
    problem = simulator.problem_of(layout, 8, **parameters)
    with pytest.raises(ValueError, match=r"\d+ tokens have \d+ tiles of \d+, .*: at most 2\*\*20"):
        simulator.count_tiles(problem, pair)


@pytest.mark.parametrize("kernels", ["hopper", "cutlass", "blackwell"])
@pytest.mark.parametrize(
    ("layout", "kernel_size", "parameters"),
    [
        ((HUGE,), 2**31, {"stride": 2**30 + 1}),
        ((HUGE, 64), (HUGE, 33), {"is_causal": (True, False)}),
        ((2**30, 2**30, 2**30), (5, 7, 2**29), {"dilation": (2**20, 1, 1), "edges": "cut"}),
    ],
)
def test_tiles_of_calls_are_chosen_for_any_extents(
    kernels: str, layout: Any, kernel_size: Any, parameters: Any
) -> None:
    problem = simulator.problem_of(layout, kernel_size, heads=4, head_dim=64, dtype="bfloat16", **parameters)
    device = Device("cuda", (10, 0) if kernels == "blackwell" else (9, 0), is_present=False)
    for parts in ((), (2, *(1,) * (problem.rank - 1))):
        for pass_ in PASSES:
            backend = f"{kernels}-fna" if kernels != "blackwell" else None
            plan = select.resolve(Request(problem, backend=backend, parts=parts), device, pass_)
            assert plan.problem == problem
            assert all(plan.tiles)


def test_calls_of_giant_extents_are_traced() -> None:
    array = jax.ShapeDtypeStruct((1, 2**33, 2, 64), jnp.bfloat16)
    out = jax.eval_shape(lambda x: natten_jax.na1d(x, x, x, kernel_size=2049, is_causal=True), array)
    assert out.shape == array.shape


@pytest.mark.parametrize("device", ["", "--compute-capability 9.0"])
@pytest.mark.parametrize(
    "problem",
    [
        f"-i {HUGE} -w 2048 -s 256",
        f"-i {HUGE} {HUGE} -w {HUGE // 2} 31 -c 0 1 --dilation 1 1000003",
        f"-i {2**63 - 1}",
        f"-i {HUGE} -w {HUGE // 2} -s {2**30 + 1}",
    ],
)
@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
def test_giant_extents_on_the_command_line(
    problem: str, mode: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{problem} {mode} {device} --backprop".split()) == 1
    error = capsys.readouterr().err
    assert "too many to simulate" in error
    assert error.count("\n") == 1
