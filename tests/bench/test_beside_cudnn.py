"""Sliding windows and videos that are causal in time, beside what JAX has: measured, saved and drawn."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2] / "bench"))

import beside_cudnn
import peers
import plot
from benchmarks import Benchmark
from lib.implementations import IMPLEMENTATIONS, sliding_window

SEQUENCE = Benchmark((24,), 4, 16, (5,), is_causal=True, dtype="float32", heads_kv=2)
VIDEO = Benchmark((4, 3, 5), 2, 16, (4, 3, 5), causal=(True, False, False), dtype="float32")
GROUPS = {"sliding": {"sequence": SEQUENCE}, "video": {"video": VIDEO}}


def test_windows_over_sequences_are_the_same_on_both_sides() -> None:
    _, *arrays = peers.draw(SEQUENCE)
    ours, other = (IMPLEMENTATIONS[name](SEQUENCE)(*arrays) for name in ("natten_jax", "xla-window"))
    np.testing.assert_allclose(ours, other, atol=2e-6)


@pytest.mark.parametrize(
    "change", [{"is_causal": False}, {"kernel_size": None}, {"stride": (2,)}, {"dilation": (2,)}, {"additional_kv": 3}]
)
def test_windows_that_jax_lacks_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"jax\.nn has"):
        sliding_window(dataclasses.replace(SEQUENCE, **change), "xla")  # type: ignore[arg-type]


@pytest.mark.parametrize("group", beside_cudnn.GROUPS)
def test_problems_are_legal_and_no_window_is_larger_than_its_layout(group: str) -> None:
    for benchmark in beside_cudnn.GROUPS[group].values():
        _, *arrays = jax.eval_shape(lambda benchmark=benchmark: peers.draw(benchmark))
        output = jax.eval_shape(IMPLEMENTATIONS["natten_jax"](benchmark), *arrays)
        assert output.shape == benchmark.shape
        assert benchmark.problem.is_causal[0] and not any(benchmark.problem.is_causal[1:])


def test_share_of_pairs_is_what_the_mask_leaves() -> None:
    figures = beside_cudnn.measure("video", VIDEO, "forward", 1, "xla")
    assert figures["share_of_pairs"] == pytest.approx((1 + 2 + 3 + 4) / 16)


def test_record_is_written_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside_cudnn, "GROUPS", GROUPS)
    monkeypatch.setattr(beside_cudnn, "PAUSE", 0.01)
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["beside_cudnn.py", "--library", "xla", "--turns", "1", "--json", str(path)])
    assert beside_cudnn.main() == 0
    assert "x" in capsys.readouterr().out
    record = json.loads(path.read_text())
    for group, names in GROUPS.items():
        (row,) = record["results"][group].values()
        for pass_ in ("forward", "backward"):
            assert row[pass_]["failures"] == {} and row[pass_]["speedup"] > 0
            peer = "xla-window" if group == "sliding" else "xla"
            assert set(row[pass_]["milliseconds"]) == {"natten_jax", peer}
        picture = tmp_path / f"{group}.svg"
        plot.DRAWINGS[group](record, picture)
        assert next(iter(names)).encode() in picture.read_bytes()


def test_what_did_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_cudnn, "PAUSE", 0.01)
    figures = beside_cudnn.measure("sliding", SEQUENCE, "forward", 1, "cudnn")
    assert set(figures["failures"]) == {"cudnn-window"} and "speedup" not in figures
    assert "cudnn-window did not run" in beside_cudnn.line("sequence", "forward", figures)
