"""The benchmarks, on small problems on the CPU: measurements, records, predictions and plots."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import beside_cudnn
import jax
import landscape
import numpy as np
import peers
import plot
import scaling
import several_devices
from benchmarks import BENCHMARKS, Benchmark
from lib.implementations import IMPLEMENTATIONS, sliding_window

from tests.support.programs import run_command

IMAGE = Benchmark((8, 8), 2, 16, kernel_size=(3, 3), dtype="float32")

WHOLE = Benchmark((64,), 2, 16, dtype="float32")

SEQUENCE = Benchmark((24,), 4, 16, (5,), is_causal=True, dtype="float32", heads_kv=2)

VIDEO = Benchmark((4, 3, 5), 2, 16, (4, 3, 5), causal=(True, False, False), dtype="float32")

GROUPS = {"sliding": {"sequence": SEQUENCE}, "video": {"video": VIDEO}}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE", "WARM_UP"):
        monkeypatch.setattr(f"lib.timing.{name}", 0.01)


ALL = BENCHMARKS | {name: each for group in beside_cudnn.GROUPS.values() for name, each in group.items()}


@pytest.mark.parametrize("name", ALL)
def test_named_problems_are_legal(name: str) -> None:
    cotangent, *arrays = jax.eval_shape(lambda: peers.draw(ALL[name]))
    output = jax.eval_shape(IMPLEMENTATIONS["natten_jax"](ALL[name]), *arrays)
    assert output.shape == cotangent.shape == ALL[name].shape


@pytest.mark.parametrize(
    ("benchmark", "peer"),
    [(WHOLE, "xla"), (dataclasses.replace(WHOLE, is_causal=True), "xla"), (SEQUENCE, "xla-window")],
)
def test_implementations_agree(benchmark: Benchmark, peer: str) -> None:
    _, *arrays = peers.draw(benchmark)
    ours, other = (IMPLEMENTATIONS[name](benchmark)(*arrays) for name in ("natten_jax", peer))
    np.testing.assert_allclose(ours, other, atol=2e-6)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_measures_every_implementation_and_reports_which_did_not_run(pass_: str) -> None:
    names = ("natten_jax", "xla", "cudnn")
    (result,) = peers.measure(WHOLE, turns=2, pass_=pass_, names=names)  # type: ignore[arg-type]
    assert list(result["failures"]) == ["cudnn"]
    for mode in ("cold", "sustained"):
        assert set(result[mode]["milliseconds"]) == {"natten_jax", "xla"}
        assert all(value > 0 for value in result[mode]["milliseconds"].values())
        assert set(result[mode]["speedup"]) == {"xla"}
        assert result[mode]["tflops"] > 0


def test_backward_pass_is_the_gradient_without_its_forward_pass() -> None:
    cotangent, *arrays = peers.draw(IMAGE)
    function = IMPLEMENTATIONS["natten_jax"](IMAGE)
    runner = peers.compile_backward(function, cotangent, *arrays)
    results = runner.compiled(*runner.arguments)
    for result, expected in zip(results, jax.vjp(function, *arrays)[1](cotangent), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-6)
    program = runner.compiled.as_text()
    assert program is not None and not re.search(r"natten_jax_\w+_forward", program)


def test_command_line_saves_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BENCHMARKS, "small", WHOLE)
    files = tmp_path / "results" / "small.json", tmp_path / "pictures" / "small.png"
    saved = record_of(peers, files[0], "--problems small --turns 1 --implementations natten_jax xla")
    assert "xla" in capsys.readouterr().out
    plot.draw_speedups(saved, files[1], "xla")
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match="cudnn"):
        plot.draw_speedups(saved, files[1])
    files[1].unlink()
    del saved["results"]["small"]["sustained"]
    plot.draw_speedups(saved, files[1], "xla")
    assert files[1].exists()


def record_of(program: ModuleType, file: Path, arguments: str) -> dict[str, Any]:
    """Run a benchmark program, and return the record that it writes to a JSON file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *arguments.split(), "--json", str(file)])
        assert program.main() == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found["environment"]) >= {"device", "versions", "commit", "command"}
    return found


def test_several_devices_match_one_device_without_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("sklearn")
    video: dict[str, Any] = {"layout": (2, 4, 4), "head_dim": 8, "kernel_size": (2, 2, 2), "stride": (1, 2, 2)}
    name = "3d-s16x8x8"
    monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], **video, dtype="float32"))
    step = "--tokens 2 4 4 --depth 1 --heads 2 --head-dim 8 --window 2 3 3 --batch-size 4"
    monkeypatch.setattr(several_devices, "STEP", step)
    flags = "--families cpu --turns 1 --calls 2 --seconds 0 --pause 0 --modes Auto --splits batch width-s1x1x1"
    saved = record_of(several_devices, tmp_path / "figures.json", f"{flags} --devices 2")
    output = capsys.readouterr().out
    assert len(saved["results"]) == 2 * 2 + 2  # two splits with two passes each, and two training runs
    for name, figures in saved["results"].items():
        assert name in output
        assert all(value > 0 for value in (*figures["milliseconds"].values(), figures["speedup"]))
        assert figures["difference"] < 1e-5
        if "width" in name:
            assert "halos first" in figures["milliseconds"]
            assert figures["exchange milliseconds"]["exchange"] > 0
        assert set(figures.get("collectives", {})) == ({"collective-permute"} if "width" in name else set())


def test_landscape_finds_the_outlier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flat = {landscape.Point(i, j): 2.0 for i in range(3) for j in range(4)}
    assert set(landscape.excesses(flat).values()) == {1.0}
    found = landscape.excesses({**flat, landscape.Point(1, 2): 2.5})
    assert [point for point, excess in found.items() if excess > landscape.MAX_EXCESS] == [landscape.Point(1, 2)]
    assert found[landscape.Point(1, 2)] == 1.25 and found[landscape.Point(0, 2)] < 1

    monkeypatch.setattr(landscape, "WINDOWS", {1: (5,)})
    layouts = [(16,), (24,)]
    problems = landscape.landscape(layouts, (1, 2), 8, "float32")
    rows = landscape.measure(problems, "cpu", "backward", turns=1)
    assert [(row["layout"], row["heads"]) for row in rows.values()] == [((16,), 1), ((16,), 2), ((24,), 1), ((24,), 2)]
    assert all(row["nanoseconds"] > 0 and row["excess"] > 0 for row in rows.values())
    landscape.print_landscape(rows, layouts, (1, 2))
    assert re.search(r"^16 +\d+\.\d\d", capsys.readouterr().out, re.MULTILINE)


def test_kinds_of_records_are_drawn_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Path(plot.__file__).parent / "results"
    for number, arguments in enumerate((
        ["cpu", "cpu/kernels.json"],
        ["fp8", "cpu/fp8_accuracy.json"],
        ["halos", "h200x2/timeline.json"],
        ["peers", "h200/peers.json"],
        ["small", "h200/small.json"],
        ["speedups", "h200/forward.json", "--baseline", "cudnn"],
        ["tpu-bundles", "tpu"],
        ["video", "h100/beside_cudnn.json"],
    )):  # fmt: skip
        kind, record, *options = arguments
        picture = tmp_path / f"{number}.svg"
        monkeypatch.setattr(sys, "argv", ["plot.py", kind, str(results / record), str(picture), *options])
        plot.main()
        assert picture.read_bytes().startswith(b"<?xml")


def test_the_runner_lists_its_suites_and_runs_one() -> None:
    root = Path(peers.__file__).parents[1]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command([root / "bench" / "run.py", *arguments], os.environ)

    listing = run().stdout
    for path in sorted((root / "bench").glob("*.py")):
        is_suite = path.stem not in {"run", "plot", "fmha_ladder"} and 'if __name__ == "__main__"' in path.read_text()
        assert (f"\n  {path.stem} " in listing) == is_suite, path.stem
    assert "--turns" in run("peers", "--help").stdout
    unknown = run("pears")
    assert unknown.returncode == 1
    assert "no suite 'pears'; the suites are peers" in unknown.stderr


@pytest.mark.parametrize(
    "change", [{"is_causal": False}, {"kernel_size": None}, {"stride": (2,)}, {"dilation": (2,)}, {"additional_kv": 3}]
)
def test_windows_that_jax_lacks_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"jax\.nn does not support"):
        sliding_window(dataclasses.replace(SEQUENCE, **change), "xla")  # type: ignore[arg-type]


def test_record_is_written_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside_cudnn, "GROUPS", GROUPS)
    monkeypatch.setattr(beside_cudnn, "PAUSE", 0.01)
    record = record_of(beside_cudnn, tmp_path / "record.json", "--library xla --turns 1")
    assert "x" in capsys.readouterr().out
    for group, names in GROUPS.items():
        (row,) = record["results"][group].values()
        for pass_ in ("forward", "backward"):
            assert row[pass_]["failures"] == {} and row[pass_]["speedup"] > 0
            peer = "xla-window" if group == "sliding" else "xla"
            assert set(row[pass_]["milliseconds"]) == {"natten_jax", peer}
        picture = tmp_path / f"{group}.svg"
        plot.DRAWINGS[group](record, picture)
        assert next(iter(names)).encode() in picture.read_bytes()


# The scaling benchmark on 1, 2, 4, ... devices: measurements on CPU devices, predictions for GPUs, and the plot.


MEASURE = "--small --families cpu --turns 1 --calls 1 --seconds 0 --pause 0 --passes forward+backward"


def points(record: dict[str, Any], row: str) -> dict[int, dict[str, Any]]:
    return {point["devices"]: point for point in record["results"][row]["points"]}


def test_measures_every_device_count_and_reports_which_cannot_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = "--devices 16 --rows strong weak --splits width-s6x8x8 time-s1x1x1 heads"
    record = record_of(scaling, tmp_path / "figures.json", f"{MEASURE} {splits}")
    output = capsys.readouterr().out
    prefix = "cpu forward+backward, "
    rows = "strong heads", "strong time-s1x1x1", "strong width-s6x8x8", "weak width-s6x8x8", "weak heads"
    assert list(record["results"]) == [prefix + row for row in rows]
    for row in record["results"]:
        assert row in output
        by_devices = points(record, row)
        assert list(by_devices) == [1, 2, 4, 8]  # only eight devices are available
        for devices, point in by_devices.items():
            if "time" in row and devices > 2:
                assert f"{devices} devices cannot share" in point["skipped"] and "measured" not in point
                continue
            measured = point["measured"]
            assert point["predicted"] is None and "relative error" not in point
            assert measured["milliseconds"] > 0
            assert measured["efficiency"] == pytest.approx(measured["speedup"] / devices)
            assert measured["difference"] < 1e-5
            exchanges = devices > 1 and "heads" not in row
            assert bool(measured["collectives"]) == exchanges
        assert by_devices[1]["measured"]["speedup"] == 1
    weak = points(record, f"{prefix}weak width-s6x8x8")
    assert [weak[devices]["problem"].split()[1] for devices in weak] == ["2x8x16", "2x8x32", "2x8x64", "2x8x128"]


def test_predicts_without_measuring(tmp_path: Path) -> None:
    record = record_of(scaling, tmp_path / "figures.json", "--devices 16 --predict-only")
    assert len(record["results"]) == 2 * (11 + 5)  # two passes, each with 11 strong and 5 weak scaling curves
    for row in record["results"]:
        for devices, point in points(record, row).items():
            assert "measured" not in point
            if "skipped" not in point:
                predicted = point["predicted"]
                assert predicted["milliseconds"] > 0
                assert 0 < predicted["speedup"] < 1.2 * devices
                assert 0 <= predicted["exposed milliseconds"] < predicted["milliseconds"]
    heads = points(record, "hopper forward, strong heads")
    assert "skipped" in heads[16] and heads[8]["predicted"]["exposed milliseconds"] == 0
    assert points(record, "hopper forward, weak sequence")[8]["predicted"]["efficiency"] > 0.8
    picture = tmp_path / "scaling.svg"
    plot.draw_scaling(record, picture)
    assert "nothing was measured" in picture.read_text()
