"""Dilations that the simulator recommends: none is better, and each is worth it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from natten_jax import simulator
from natten_jax.performance import TilePair
from natten_jax.problem import Problem
from natten_jax.profiler.__main__ import main

HOPPER = "--compute-capability 9.0"


def problems() -> list[tuple[Problem, TilePair]]:
    draw = np.random.default_rng(4)
    found: list[tuple[Problem, TilePair]] = []
    for _ in range(60):
        rank = int(draw.integers(1, 4))
        layout = draw.integers(4, {1: 90, 2: 24, 3: 12}[rank], rank)
        kernel = [int(draw.integers(1, extent + 1)) for extent in layout]
        stride = [int(draw.integers(1, min(each, 3) + 1)) for each in kernel]
        tiles = tuple(tuple(int(each) for each in draw.integers(1, 7, rank)) for _ in range(2))
        problem = simulator.problem_of(list(map(int, layout)), kernel, stride, is_causal=bool(draw.integers(0, 2)))
        found.append((problem, (tiles[0], tiles[1])))
    return found


def test_no_dilation_is_better() -> None:
    recommended = 0
    for problem, pair in problems():
        dilations = itertools.product(*(range(1, axis.kv_extent // axis.kernel_size + 1) for axis in problem.axes))
        best = min(simulator.simulate(problem.with_axes(dilation=each), pair).executed_flops for each in dilations)
        own = simulator.simulate(problem, pair).executed_flops
        found = simulator.recommend_dilation(problem, [pair])
        if found is None:
            assert own <= 1.02 * best
            continue
        recommended += 1
        assert found.simulation.problem == problem.with_axes(dilation=found.dilation)
        assert 1.02 * found.simulation.executed_flops <= own
        assert found.simulation.executed_flops <= 1.02 * best
    assert 10 < recommended < 55


def test_windows_that_fill_their_groups_need_no_mask() -> None:
    found = simulator.recommend_dilation(simulator.problem_of((48, 96), 24), [((8, 8), (8, 8))])
    assert found is not None
    assert found.dilation == (2, 4)
    assert found.simulation.counts.is_fully_block_sparse
    assert found.simulation.executed_flops == found.simulation.flops


def test_there_may_be_none() -> None:
    pairs: list[TilePair] = [((8, 8), (8, 8))]
    assert simulator.recommend_dilation(simulator.problem_of((24, 24), 24), pairs) is None  # windows are the layout
    dilated = simulator.problem_of((48, 96), 24, dilation=(2, 4))
    assert simulator.recommend_dilation(dilated, pairs) is None
    assert simulator.recommend_dilation(dilated, []) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-i 30 48 80 -n 24 -d 128 -w 18 24 24", "Dilation (1, 2, 2) is the smallest at nearly the best speed"),
        ("-i 32768 -d 128 -w 2048", "Dilation 16 is the smallest at nearly the best speed, without any mask"),
        ("-i 65536 -w 8", "No dilation that was tried makes the forward pass faster."),
        ("-i 20 20", None),
    ],
)
def test_the_command_line_says_it(
    arguments: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert main(f"{arguments} --simulate {HOPPER} --json {path}".split()) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert said in output if said else "ilation" not in output
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = result["dilation_recommendation"]
    if said is None or said.startswith("No"):
        assert found is None
        return
    assert f"--dilation {' '.join(map(str, found['dilation']))};" in output
    assert found["predicted_seconds"] < result["passes"]["forward"]["predicted_seconds"]
