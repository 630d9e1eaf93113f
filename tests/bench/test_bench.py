"""The benchmarks, on small problems of the host: measurements, records, predictions and pictures."""

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
import layouts
import numpy as np
import part_tiles
import peers
import plot
import scaling
import several_devices
from benchmarks import BENCHMARKS, Benchmark
from devices.predictions import relative_errors
from devices.problems import curves
from lib.implementations import IMPLEMENTATIONS, ours, sliding_window

from natten_jax.execution import custom_vjp
from natten_jax.halo import halos_of
from natten_jax.performance import PASSES
from natten_jax.plan.plan import Request
from tests.support.programs import output_of, run_command

IMAGE = Benchmark((8, 8), 2, 16, kernel_size=(3, 3), dtype="float32")

WHOLE = Benchmark((64,), 2, 16, dtype="float32")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE", "WARM_UP"):
        monkeypatch.setattr(f"lib.timing.{name}", 0.01)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_named_problems_are_legal(name: str) -> None:
    benchmark = BENCHMARKS[name]
    cotangent, *arrays = jax.eval_shape(lambda: peers.draw(benchmark))
    output = jax.eval_shape(IMPLEMENTATIONS["natten_jax"](benchmark), *arrays)
    assert output.shape == cotangent.shape == benchmark.shape


def test_dilated_problems_do_the_work_of_their_dense_partners() -> None:
    for name in ("2d-w40-d2", "2d-w16-d16"):
        dilated, dense = (BENCHMARKS[each].problem for each in (name, name.rpartition("-")[0]))
        assert peers.flops(dilated, "forward") == peers.flops(dense, "forward")


@pytest.mark.parametrize("is_causal", [False, True])
def test_implementations_of_attention_agree(is_causal: bool) -> None:
    benchmark = dataclasses.replace(WHOLE, is_causal=is_causal)
    _, *arrays = peers.draw(benchmark)
    ours, other = (IMPLEMENTATIONS[name](benchmark)(*arrays) for name in ("natten_jax", "xla"))
    np.testing.assert_allclose(ours, other, atol=2e-6)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_measures_every_side_and_says_which_did_not_run(pass_: str) -> None:
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


def test_element_types_take_turns() -> None:
    first, second = peers.measure(IMAGE, 1, dtypes=("float32", "bfloat16"), names=("natten_jax",))
    assert (first["dtype"], second["dtype"]) == ("float32", "bfloat16")
    assert "rate_over_float32" not in first["cold"]
    assert second["sustained"]["rate_over_float32"] > 0


def test_additional_tokens_fused_and_merged() -> None:
    (result,) = peers.measure(dataclasses.replace(IMAGE, additional_kv=5), turns=1)
    assert set(result["cold"]["milliseconds"]) == {"natten_jax", "natten_jax-merged"}
    assert result["failures"] == {}


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_record_of_other_implementations_is_drawn(suffix: str, tmp_path: Path) -> None:
    record = json.loads((Path(plot.__file__).parent / "results" / "h200" / "peers.json").read_text())
    picture = tmp_path / "pictures" / f"speed.{suffix}"
    plot.draw_peers(record, picture)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n" if suffix == "png" else b"<?xml")
    if suffix == "svg":  # 0.7918 ms of cuDNN against 0.0621 of natten_jax
        assert b"12.8x" in content and b"NVIDIA H200" in content


def test_command_line_saves_figures_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BENCHMARKS, "small", WHOLE)
    files = tmp_path / "results" / "small.json", tmp_path / "pictures" / "small.png"
    saved = record_of(peers, files[0], "--problems small --turns 1 --implementations natten_jax xla")
    assert "xla" in capsys.readouterr().out
    assert set(saved["environment"]) >= {"device", "versions", "commit", "command"}
    plot.draw_speedups(saved, files[1], "xla")
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match="cudnn"):
        plot.draw_speedups(saved, files[1])
    files[1].unlink()
    del saved["results"]["small"]["sustained"]
    plot.draw_speedups(saved, files[1], "xla")
    assert files[1].exists()


def test_exit_status_tells_that_natten_jax_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "small", WHOLE)
    monkeypatch.setattr(
        sys, "argv", ["peers.py", "--problems", "small", "--implementations", "natten_jax", "--backend", "hopper"]
    )
    assert peers.main() == 1


def record_of(program: ModuleType, file: Path, arguments: str) -> dict[str, Any]:
    """The record that a program writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *arguments.split(), "--json", str(file)])
        assert program.main() == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_several_devices_do_what_one_does_without_collectives(
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
    assert set(saved["environment"]) >= {"device", "versions", "commit", "command"}
    assert len(saved["results"]) == 2 * 2 + 2  # splits and passes; two ways to train
    for name, figures in saved["results"].items():
        assert name in output
        assert all(value > 0 for value in (*figures["milliseconds"].values(), figures["speedup"]))
        assert figures["difference"] < 1e-5
        if "width" in name:
            assert "halos first" in figures["milliseconds"]
            assert figures["exchange milliseconds"]["exchange"] > 0
        assert set(figures.get("collectives", {})) == ({"collective-permute"} if "width" in name else set())


def test_landscape_finds_the_point_that_stands_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = {landscape.Point(i, j): 2.0 for i in range(3) for j in range(4)}
    assert set(landscape.excesses(flat).values()) == {1.0}
    found = landscape.excesses({**flat, landscape.Point(1, 2): 2.5})
    assert [point for point, excess in found.items() if excess > landscape.MOST_EXCESS] == [landscape.Point(1, 2)]
    assert found[landscape.Point(1, 2)] == 1.25 and found[landscape.Point(0, 2)] < 1

    monkeypatch.setattr(landscape, "WINDOWS", {1: (5,)})
    layouts = [(16,), (24,)]
    problems = landscape.landscape(layouts, (1, 2), 8, "float32")
    rows = landscape.measure(problems, "cpu", "backward", turns=1)
    assert [(row["layout"], row["heads"]) for row in rows.values()] == [((16,), 1), ((16,), 2), ((24,), 1), ((24,), 2)]
    assert all(row["nanoseconds"] > 0 and row["excess"] > 0 for row in rows.values())
    landscape.print_landscape(rows, layouts, (1, 2))
    assert re.search(r"^16 +\d+\.\d\d", capsys.readouterr().out, re.MULTILINE)


def test_builds_are_compared_in_turns(tmp_path: Path) -> None:
    root = Path(peers.__file__).parents[1]
    record = tmp_path / "record.json"
    arguments = ["--small", "tiny 1-D", "no such row", "--turns", "2", "--json", str(record)]
    output = output_of(run_command([root / "bench" / "compare_builds.py", root, root, *arguments], os.environ))
    rows = json.loads(record.read_text())
    assert [row.get("pass") for row in rows] == ["forward", "backward", None]
    for row in rows[:2]:
        before, after = row["seconds"]
        assert len(before) == len(after) == 2 and min(*before, *after) > 0
        assert row["ratio"] == pytest.approx(np.median(np.divide(after, before)))
    assert rows[2]["error"] and "no such row" in output


def test_sides_of_layouts_agree() -> None:
    wrapped = layouts.Row("wrap", (9, 12), 1, 8, (3, 5), wraps=(1,))
    padded = layouts.Row("padded", (6, 8), 1, 8, (3, 3), batch=2, extents=((6, 8), (6, 8)))
    for row in (wrapped, padded):
        arrays = jax.random.normal(jax.random.key(0), (3, *row.shape))
        found = {name: side(*arrays) for name, side in row.sides().items()}
        first, second = ("wrap", "padded by hand") if row is wrapped else ("plain", "extents")
        np.testing.assert_allclose(found[first], found[second], atol=2e-6)
    for row in layouts.ROWS:
        assert row.real == 1 or 0.49 < row.real < 0.51


def test_kinds_of_records_are_drawn_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Path(plot.__file__).parent / "results"
    for number, arguments in enumerate((
        ["cpu", "cpu/kernels.json"],
        ["fp8", "cpu/fp8_accuracy.json"],
        ["halos", "h200x2/timeline.json"],
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


def test_what_did_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_cudnn, "PAUSE", 0.01)
    figures = beside_cudnn.measure("sliding", SEQUENCE, "forward", 1, "cudnn")
    assert set(figures["failures"]) == {"cudnn-window"} and "speedup" not in figures
    assert "cudnn-window did not run" in beside_cudnn.line("sequence", "forward", figures)


# The benchmark of 1, 2, 4, ... devices: what it records of the host's, what it predicts of GPUs, and its picture.


MEASURE = "--small --families cpu --turns 1 --calls 1 --seconds 0 --pause 0 --passes forward+backward"


def points(record: dict[str, Any], row: str) -> dict[int, dict[str, Any]]:
    return {point["devices"]: point for point in record["results"][row]["points"]}


def test_measures_every_number_of_devices_and_says_which_cannot_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = "--devices 16 --rows strong weak --splits width-s6x8x8 time-s1x1x1 heads"
    record = record_of(scaling, tmp_path / "figures.json", f"{MEASURE} {splits}")
    output = capsys.readouterr().out
    assert set(record["environment"]) >= {"device", "versions", "commit", "command"}
    prefix = "cpu forward+backward, "
    rows = "strong heads", "strong time-s1x1x1", "strong width-s6x8x8", "weak width-s6x8x8", "weak heads"
    assert list(record["results"]) == [prefix + row for row in rows]
    for row in record["results"]:
        assert row in output
        by_devices = points(record, row)
        assert list(by_devices) == [1, 2, 4, 8]  # sixteen there are not
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

    picture = tmp_path / "pictures" / "scaling.svg"
    plot.draw_scaling(record, picture)
    content = picture.read_text()
    assert all(text in content for text in ("strong scaling", "weak scaling", "width", "stride 6x8x8"))
    with pytest.raises(ValueError, match="no such figures"):
        plot.draw_scaling(record, picture, ["sequence"])


def test_measures_a_training_step(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("sklearn")
    record = record_of(scaling, tmp_path / "figures.json", f"{MEASURE} --devices 2 --rows training")
    by_devices = points(record, "training step, strong batch")
    assert list(by_devices) == [1, 2]
    assert all(point["measured"]["difference"] < 1e-5 for point in by_devices.values())


def test_predicts_without_measuring(tmp_path: Path) -> None:
    record = record_of(scaling, tmp_path / "figures.json", "--devices 16 --predict-only")
    assert len(record["results"]) == 2 * (11 + 5)  # passes, and splits of both kinds
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


def test_errors_of_predictions() -> None:
    predicted, measured = {"milliseconds": 12.0, "efficiency": 0.9}, {"milliseconds": 10.0, "efficiency": 1.0}
    assert relative_errors(predicted, measured) == pytest.approx({"milliseconds": 0.2, "efficiency": -0.1})


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["width-s1x1x1", "width-s6x8x8", "height-s16x8x8", "sequence"])
def test_a_part_alone_computes_what_it_would_among_others(name: str, devices: int) -> None:
    (curve,) = (each for each in curves("strong", is_small=True) if each.name == name)
    benchmark = curve.on_one.benchmark
    problem, parts = curve.share(devices), curve.parts(devices)
    halos = [halo.evened() for halo in halos_of(problem, parts)]
    operands, cotangent = part_tiles.draw(curve, halos)
    found = custom_vjp.run(custom_vjp.FORWARD, Request(problem, backend="cpu-fna", parts=parts), operands)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys]
    starts = [halo.parts // 2 * halo.part for halo in halos]
    lengths = [halo.part for halo in halos]
    expected = part_tiles.cut(ours(benchmark, "cpu")(*arrays[1:]), starts, lengths)
    assert part_tiles.difference(found.out, expected) < 1e-6
    assert (cotangent == part_tiles.cut(arrays[0], starts, lengths)).all()


def test_a_part_with_the_tiles_of_the_whole_is_not_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "--family cpu --splits width-s6x8x8 --devices 4"
    rows = record_of(part_tiles, tmp_path / "tiles.json", flags)["results"]
    assert list(rows) == [f"cpu {pass_}, width-s6x8x8 over 4" for pass_ in PASSES]
    output = capsys.readouterr().out
    for name, row in rows.items():
        assert name in output
        assert len({json.dumps(tiles) for tiles in row["tiles"].values()}) == 1 and "speedup" not in row
