"""The benchmarks run where there is no GPU, too: on small problems, with what exists there."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[2] / "bench"))

import landscape
import layouts
import peers
import plot
from benchmarks import BENCHMARKS, Benchmark
from lib.implementations import IMPLEMENTATIONS

from tests.support.programs import output_of, run_python

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
    arguments = ["--problems", "small", "--turns", "1", "--implementations", "natten_jax", "xla"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--json", str(files[0])])
    assert peers.main() == 0
    assert "xla" in capsys.readouterr().out
    saved = json.loads(files[0].read_text())
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


SEVERAL_DEVICES = """
import dataclasses, sys
sys.path.append({bench!r})
import several_devices
from benchmarks import BENCHMARKS

video = BENCHMARKS["3d-s16x8x8"]
BENCHMARKS["3d-s16x8x8"] = dataclasses.replace(
    video, layout=(2, 4, 4), head_dim=8, kernel_size=(2, 2, 2), stride=(1, 2, 2), dtype="float32"
)
several_devices.STEP = "--tokens 2 4 4 --depth 1 --heads 2 --head-dim 8 --window 2 3 3 --batch-size 4"
flags = "--families cpu --turns 1 --calls 2 --seconds 0 --pause 0 --modes Auto --splits batch width-s1x1x1 --json"
sys.argv = ["several_devices.py", *flags.split(), {file!r}]
sys.exit(several_devices.main())
"""


def test_several_devices_do_what_one_does_without_collectives(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("sklearn")
    file = tmp_path / "figures.json"
    source = SEVERAL_DEVICES.format(bench=str(Path(peers.__file__).parent), file=str(file))
    output = output_of(run_python(source, devices=2))
    saved = json.loads(file.read_text())
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
    command = [sys.executable, str(root / "bench" / "compare_builds.py"), str(root), str(root), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(record.read_text())
    assert [row.get("pass") for row in rows] == ["forward", "backward", None]
    for row in rows[:2]:
        before, after = row["seconds"]
        assert len(before) == len(after) == 2 and min(*before, *after) > 0
        assert row["ratio"] == pytest.approx(np.median(np.divide(after, before)))
    assert rows[2]["error"] and "no such row" in result.stdout


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
    runner = [sys.executable, str(root / "bench" / "run.py")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*runner, *arguments], capture_output=True, text=True, timeout=300)

    listing = run().stdout
    for path in sorted((root / "bench").glob("*.py")):
        is_suite = path.stem not in {"run", "plot", "fmha_ladder"} and 'if __name__ == "__main__"' in path.read_text()
        assert (f"\n  {path.stem} " in listing) == is_suite, path.stem
    assert "--turns" in run("peers", "--help").stdout
    unknown = run("pears")
    assert unknown.returncode == 1
    assert "no suite 'pears'; the suites are peers" in unknown.stderr
