"""Counts of many tiles, which are not looked at one by one: equal to what that gives, and quick for any extent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from natten_jax import simulator
from natten_jax.cost import axis_sums, axis_tiles, work
from natten_jax.cost.axis_tiles import Placement
from natten_jax.performance import PASSES
from natten_jax.profiler.__main__ import main
from natten_jax.windows import EDGES, Axis

HUGE = 2**40


def random_axis(generator: np.random.Generator) -> tuple[Axis, int, int]:
    """A dimension, and an outer and an inner tile."""

    def number(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    keys = number(1, int(generator.choice([30, 200, 2000])))
    dilation = int(generator.choice([1, 1, number(1, min(keys, 5))]))
    kernel = number(1, keys // dilation)
    stride = number(1, min(kernel, int(generator.choice([1, 3, 8, 40]))))
    queries = keys
    if number(0, 5) == 0:  # attention between sequences of different lengths
        queries, kernel, dilation = number(1, 2000), keys, 1
        stride = min(stride, kernel)
    tiles = (number(1, int(generator.choice([2, 9, 40, 3000]))) for _ in range(2))
    is_causal = bool(number(0, 1))
    fitting = 3 if keys % dilation == 0 else 2
    edges = EDGES[number(0, fitting - 1)] if queries == keys and not is_causal else "shift"
    return Axis(queries, keys, kernel, stride, dilation, is_causal, edges), *tiles  # type: ignore[return-value]


def figures(axis: Axis, outer: int, inner: int, rows: Any) -> list[Any]:
    """Everything that is counted in one dimension."""
    axis_tiles._judged_tiles.cache_clear()
    found: list[Any] = [work.visible_pairs_of_axis(axis)]
    placements: tuple[Placement, ...] = ("anchored", "aligned")
    for pass_, placement in itertools.product(PASSES, placements):
        found.append(axis_tiles.axis_counts.__wrapped__(axis, outer, inner, placement, pass_))
        found.append(axis_tiles.judged_tiles(axis, outer, (inner, 2 * inner), placement, pass_, rows).tolist())
    return found


def test_repeating_tiles_are_counted_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    repeated = 0
    pieces = axis_sums._pieces

    def noted(*arguments: Any) -> Any:
        nonlocal repeated
        repeated += 1
        return pieces(*arguments)

    monkeypatch.setattr(axis_sums, "_pieces", noted)
    for _ in range(400):
        axis, outer, inner = random_axis(generator)
        ends = [sorted(generator.integers(0, outer, 2).tolist()) for _ in range(2)]
        rows = tuple((first, last) for first, last in ends)
        monkeypatch.setattr(axis_sums, "_FEW", 1 << 20)
        expected = figures(axis, outer, inner, rows)
        monkeypatch.setattr(axis_sums, "_FEW", 2)
        assert figures(axis, outer, inner, rows) == expected, (axis, outer, inner, rows)
    assert repeated > 2000


def test_row_groups_that_share_rows_judge_alike() -> None:
    generator = np.random.default_rng(4)
    for _ in range(200):
        axis, outer, inner = random_axis(generator)
        first, second = (tuple(sorted(generator.integers(0, outer, 2).tolist())) for _ in range(2))
        pass_ = PASSES[generator.integers(2)]
        arguments: Any = axis, outer, (inner, inner + 5), "anchored", pass_, (first, second, first)
        each_by_itself = axis_tiles._judged_tiles.__wrapped__(*arguments)
        assert axis_tiles.judged_tiles(*arguments).tolist() == each_by_itself.tolist(), arguments


@pytest.mark.parametrize("window", [1, 2048, HUGE // 2 + 1, HUGE])
def test_pairs_of_giant_extents(window: int) -> None:
    def pairs(**parameters: Any) -> int:
        return work.visible_pairs(simulator.problem_of((HUGE,), window, **parameters))

    assert pairs() == HUGE * window
    assert pairs(is_causal=True) == HUGE * window - window * (window - 1) // 2
    if window == 2048:
        assert pairs(dilation=HUGE // 4096 + 1) == HUGE * window
        assert pairs(stride=2048) == HUGE * window
        # In the causal case query i of a stride group sees the group's last 2048 keys up to itself.
        first = window * (window + 1) // 2
        assert pairs(stride=2048, is_causal=True) == HUGE // window * first


def test_tiles_of_giant_extents_in_three_dimensions() -> None:
    # All windows are whole stride groups of whole tiles: nothing is masked, and all of it is a product.
    problem = simulator.problem_of((HUGE,) * 3, 512, 512)
    counts = simulator.count_tiles(problem, ((4, 4, 8), (8, 4, 4)))
    assert counts.outer == (HUGE // 4) ** 2 * (HUGE // 8)
    assert counts.inner == counts.outer * 64 * 128 * 128
    assert counts.is_fully_block_sparse
    assert counts.executed_pairs == counts.visible_pairs == HUGE**3 * 512**3
    kernel = simulator.Kernel(128, 128, 128, 1e-6, 1e-6, 0.0, row_groups=2)
    parts = simulator.count_tiles(problem, ((4, 4, 8), (8, 4, 4)), kernel=kernel)
    assert (parts.seen_parts, parts.full_parts, parts.partial) == (2 * counts.inner, 2 * counts.inner, 0)


def test_tiles_of_giant_extents_are_ranked_by_the_simulated_time() -> None:
    problem = simulator.problem_of((HUGE, 40), (3001, 7), additional_kv=HUGE, head_dim=128)
    calibration = simulator.calibration_for("hopper")
    pairs = [((16, 8), (16, 8)), ((16, 8), (12, 8)), ((16, 8), (8, 16)), ((64, 2), (1, 128))]
    ranked = simulator.rank(problem, pairs, "forward", calibration)
    expected = [simulator.simulate(problem, pair, calibration=calibration).seconds for pair, _ in ranked]
    assert [seconds for _, seconds in ranked] == expected == sorted(expected)  # type: ignore[type-var]


def test_additional_tiles_of_a_longer_sequence_are_those_in_its_middle() -> None:
    def counts(extent: int) -> Any:
        return simulator.count_tiles(simulator.problem_of((extent,), 1000, 24), ((128,), (96,)), "backward")

    period = 128 * 24 * 96
    near, far, further = (counts(100 * period + each) for each in (0, period, HUGE * period))
    for name in ("outer", "inner", "full", "visible_pairs", "hull_pairs"):
        first, second, last = (getattr(each, name) for each in (near, far, further))
        assert last - first == HUGE * (second - first), name
    assert near.most_inner == further.most_inner


def test_strides_without_masks_of_giant_windows() -> None:
    def least(window: int, pair: Any, **parameters: Any) -> Any:
        return simulator.least_block_sparse_stride(simulator.problem_of((HUGE,), window, **parameters), pair)

    assert least(HUGE // 2, ((128,), (64,))) == (128,)
    assert least(HUGE // 2 + 1, ((128,), (64,))) is None
    assert least(HUGE // 2, ((128,), (64,)), is_causal=True) is None


@pytest.mark.parametrize(
    ("layout", "parameters", "message"),
    [
        ((2**61,), {}, "too many to count"),
        ((HUGE,), {"stride": 2**30 + 1}, "tiles repeat only after 1073741825 of them"),
    ],
)
def test_what_cannot_be_counted_is_refused(layout: Any, parameters: Any, message: str) -> None:
    problem = simulator.problem_of(layout, 2**31, **parameters)
    with pytest.raises(ValueError, match=message):
        simulator.count_tiles(problem, ((128,), (128,)))


@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
@pytest.mark.parametrize("device", ["", "--compute-capability 9.0"])
@pytest.mark.parametrize(
    "problem",
    [
        f"-i {HUGE} -w 2048 -s 256",
        f"-i {HUGE} {HUGE} -w {HUGE // 2} 31 -c 0 1 --dilation 1 1000003",
        f"-i {HUGE} -b {2**63 - 1} -n {2**63 - 1}",
    ],
)
def test_giant_extents_on_the_command_line(
    problem: str, mode: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{problem} {mode} {device} --backprop".split()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (f"-i {2**63 - 1}", "too many to count"),
        (f"-i {HUGE} -w {HUGE // 2} -s {2**30 + 1}", "too many to count"),
    ],
)
def test_extents_that_cannot_be_counted_are_one_sentence(
    problem: str, mode: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"{problem} {mode}".split()) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
