"""Listing, predicting and comparing, of GPUs, TPUs and baselines."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from natten_jax import simulator
from natten_jax.cost_model.simulation import TPU_CHIPS, chip_of
from natten_jax.native import module as native
from natten_jax.plan.devices import Device
from natten_jax.problem import problem_of
from natten_jax.profiler import baselines, cli, parse, report, workload
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.__main__ import main
from natten_jax.profiler.capture import capture_in_turns
from natten_jax.profiler.measure import Comparison, profile
from natten_jax.profiler.predict import STATIC
from tests.support.traces import rows_by_module

# The profiler's other jobs: listing, predicting, comparing, and reading any trace.


needs_native = pytest.mark.skipif(native.path() is None, reason="the native module is not built")

FEW = "--warmup-steps 1 --iterations 2"

HOPPER = "--compute-capability 9.0"

VIDEO = "-i 30 48 80 -n 24 -d 128 -w 18 24 24"

#: The documentation's command lines, with layouts small enough for a CPU and without the names of GPU backends.
EXAMPLES = (
    "-i 4 6 8 -d 128",
    "-i 4 6 8 -d 128 -w 2 4 3",
    "--dry-run --dtype bf16 -i 16 16 16 -d 128",
    "--backprop -b 1 -n 2 -d 32 -i 6 8 10 -w 4 6 6 -s 2 2 2",
    "--backprop -b 1 -n 2 -d 32 -i 6 8 10 -w 4 6 6 -s 2 2 2 --optimize",
    "-d 128 -i 512",
    "-d 128 -i 512 -w 32",
    "-d 128 -i 512 -w 32 -s 4",
    "-d 128 -i 512 -w 32 -s 32",
    "-n 2 -d 128 -i 24 24",
    "--q-tile 16 8 --kv-tile 16 8 -n 2 -d 128 -i 24 24 -w 8 8",
    "--q-tile 16 16 --kv-tile 16 8 -n 2 -d 128 -i 24 24 -w 8 8",
    "--q-tile 16 8 --kv-tile 16 8 -n 2 -d 128 -i 24 24 -w 8 8 -s 4 4",
    "-n 2 -d 128 -i 6 8 8",
    "--q-tile 2 8 8 --kv-tile 2 8 8 -n 2 -d 128 -i 6 8 8 -w 4 4 4",
    "--q-tile 4 8 8 --kv-tile 2 8 8 -n 2 -d 128 -i 6 8 8 -w 4 4 4 -s 4 2 2",
)


@pytest.mark.parametrize("line", EXAMPLES)
def test_documented_command_lines(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((line if "--dry-run" in line else f"{line} {FEW}").split()) == 0
    output = capsys.readouterr().out
    assert all(len(row) <= 100 for row in output.splitlines())
    assert "\x1b" not in output
    if "--dry-run" in line:
        assert "Use case is compatible with backend cpu-fmha." in output
        assert "Forward pass configurations" in output
    else:
        assert "Profiler results" in output
        assert ("Fna" if " -w " in line else "Fmha") + "Forward" in output or native.path() is None
        assert ("Backward" in output) == ("--backprop" in line)
    assert ("Best configuration" in output) == ("--optimize" in line)


@pytest.mark.parametrize(
    ("backend", "flag", "reason"),
    [
        ("blackwell-fna", "--compute-capability 10.0", "compute capability 10.0"),
        ("hopper-fna", "--compute-capability 9.0", "compute capability 9.0"),
        ("cutlass-fna", "--compute-capability 8.0", "compute capability 8.0"),
        ("tpu-fna", "--device v4", "runs on platform tpu only, and this is cpu"),
    ],
)
def test_a_backend_for_another_device_says_so_and_shows_the_dry_run(
    backend: str, flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"--backend {backend} -n 24 -d 128 -i 256 256 -w 80 80 --max-configs 2".split()) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"natten-jax-profiler: error: {backend} ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err
    assert f"A dry run with {flag} shows:" in captured.out
    assert reason in captured.out or f"compatible with backend {backend}" in captured.out
    assert "Use case is compatible with backend flex-fna." in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--backend blackwell-fna --compute-capability 9.0",
            "runs on NVIDIA GPUs of compute capability 10.0 or 10.3 only, and this is cuda (compute capability 9.0)\n",
        ),
        ("--backend hopper-fna --compute-capability 10.0", "runs on NVIDIA GPUs of compute capability 9.0 only"),
    ],
)
def test_a_dry_run_of_a_backend_for_another_gpu(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"-d 128 -i 32768 -w 2048 --dry-run {arguments}".split()) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Use case is compatible with backend cutlass-fna." in captured.out


@pytest.mark.parametrize(
    "command",
    [
        "--backend blackwell-fna -d 128 -i 32768 -w 2048",
        "--backend blackwell-fna -d 128 -i 32768 -w 2048 -s 2048 --no-persistent",
        "--backend blackwell-fna -n 24 -d 128 -i 256 256 -w 80 80 -s 16 16",
        "--backend blackwell-fna -n 24 -d 128 -i 30 48 80 -w 18 24 24",
        "--backend blackwell-fna -n 24 -d 128 -i 30 48 80 -w 18 24 24 -s 16 8 8 --backprop",
        "--fmha-backend blackwell-fmha -d 128 -i 4096",
    ],
)
@pytest.mark.parametrize("mode", ["--dry-run", "--simulate"])
def test_times_that_nobody_measured_say_so(command: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{command} {mode} --compute-capability 10.0".split()) == 0
    output = capsys.readouterr().out
    assert "Predicted times of blackwell-*: from arithmetic, not measured." in output
    assert ("Backend: blackwell-f" in output) == (mode == "--dry-run")


def test_the_tiles_that_natten_recommends_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--backend blackwell-fna --q-tile 16 16 --kv-tile 16 8 -n 24 -d 128 -i 256 256 -w 80 80 -s 16 16"
    assert main(f"{command} --simulate --compute-capability 10.0".split()) == 0
    assert "the mask is fully block-sparse" in capsys.readouterr().out


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0", "10.0", "12.1"])
def test_a_dry_run_for_any_gpu(capability: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"-n 24 -d 128 -i 256 256 -w 80 80 --backprop --dry-run --compute-capability {capability}".split()) == 0
    output = capsys.readouterr().out
    assert f"(compute capability {capability})" in output
    version = tuple(map(int, capability.split(".")))
    runs = {"hopper": version == (9, 0), "cutlass": version >= (8, 0), "flex": True, "cpu": False}
    for family, is_compatible in runs.items():
        line = f"Use case is {'' if is_compatible else 'not '}compatible with backend {family}-fna"
        assert line in output
    assert all(len(line) <= 100 for line in output.splitlines())


def test_a_dry_run_says_which_schedule_is_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-d", "128", "-i", "4096", "-w", "256", "--dry-run", "--compute-capability", "9.0"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for value, name in (
        ("pp", "WarpSpecializedPingpong"),
        ("coop", "WarpSpecializedCooperative"),
        ("non", "NonPersistent"),
    ):
        assert f"{value} is KernelSchedule.{name}" in words


# Listing.
def test_dry_run_lists_tiles_best_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dry.json"
    assert main(f"{VIDEO} --dry-run --compute-capability 9.0 --max-configs 3 --json {path}".split()) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 100 for line in output.splitlines())
    for part in ("q_tile_shape", "kv_tile_shape", "kernel_schedule", "no mask", "waste", "predicted", "pp, coop, non"):
        assert part in output
    assert "Use case is not compatible with backend cpu-fna: it runs on platform cpu only" in output
    found = json.loads(path.read_text())
    hopper = [each for each in found["configurations"] if each["backend"] == "hopper-fna" and each["pass"] == "forward"]
    assert len(hopper) > 100
    seconds = [each["predicted_seconds"] for each in hopper]
    assert seconds == sorted(seconds)
    first = report.format_time(seconds[0])
    rows = [line for line in output.splitlines() if first in line]
    assert rows
    listed = output[output.index("Backend: hopper-fna") :].split("Use case")[0]
    assert listed.count("pp, coop, non") == 3
    assert "..." in listed


def test_dry_run_of_self_attention_lists_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"-i 16 16 -d 128 --dtype bf16 --dry-run --max-configs 0 {HOPPER}".split()) == 0
    output = capsys.readouterr().out
    assert "Use case is compatible with backend hopper-fmha." in output
    assert "q_tile_size" in output
    assert "..." not in output


@pytest.mark.parametrize("layout", ["4096", "64 64", "16 16 16"])
@pytest.mark.parametrize("backend", ["hopper-fna", "cutlass-fna", "flex-fna", None])
def test_dry_run_of_self_attention_lists_tiles_of_windows_too(
    layout: str, backend: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dry.json"
    chosen = "" if backend is None else f"--backend {backend}"
    assert main(f"-i {layout} -d 128 --dtype bf16 --dry-run {chosen} {HOPPER} --json {path}".split()) == 0
    output = capsys.readouterr().out
    for family in [backend.removesuffix("-fna")] if backend else ["hopper", "cutlass", "flex"]:
        assert f"Use case is compatible with backend {family}-fmha." in output
        assert f"Use case is compatible with backend {family}-fna." in output
    assert "q_tile_size" in output and "q_tile_shape" in output and "(-w)" in output
    ranks = {
        each["backend"].partition("-")[2]: len(each["q_tile_shape"])
        for each in json.loads(path.read_text(encoding="utf-8"))["configurations"]
    }
    assert ranks == {"fmha": 1, "fna": len(layout.split())}


def test_dry_run_of_an_attention_backend_lists_its_tiles_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("flex-fmha", "flex-fna"):  # as NATTEN's documents call it
        assert main(f"-i 16 16 --dry-run --fmha-backend {name}".split()) == 0
        output = capsys.readouterr().out
        assert "compatible with backend flex-fmha." in output and "-fna" not in output


def test_dry_run_without_any_backend_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"-i 64 -w 8 -d 260 --backend hopper-fna --dry-run {HOPPER}".split()) == 1
    assert "not compatible with backend hopper-fna: head_dim must be at most 256" in capsys.readouterr().out


# Predicting.
def test_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "simulated.json"
    assert main(f"{VIDEO} --simulate --compute-capability 9.0 --json {path}".split()) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 100 for line in output.splitlines())
    for part in ("predicted time", "GFLOP executed", "share computed; of that, full", "11.1X", "fully block-sparse"):
        assert part in output
    found = json.loads(path.read_text())
    forward, advice = found["passes"]["forward"], found["recommendation"]
    assert forward["backend"] == "hopper-fna"
    assert forward["predicted_seconds"] > advice["predicted_seconds"] > 0
    assert advice["counts"]["full"] == advice["counts"]["inner"] > 0
    stride = " ".join(map(str, advice["stride"]))
    assert f"-s {stride};" in output
    assert main(f"{VIDEO} -s {stride} --simulate --compute-capability 9.0".split()) == 0
    assert "the mask is fully block-sparse." in capsys.readouterr().out


def test_simulation_with_tiles_of_both_passes_without_a_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    tiles = "--q-tile 4 4 --kv-tile 4 4 --backward-q-tile 8 4 --backward-kv-tile 4 8"
    assert main(f"-i 32 32 -w 8 8 --backend flex-fna --backprop --simulate {tiles}".split()) == 0
    output = capsys.readouterr().out
    for part in ("backward", "(8, 4)", "(4, 8)", "not calibrated"):
        assert part in output


# Comparing, and files.
@needs_native
def test_comparison_and_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = {flag: tmp_path / f"result.{flag}" for flag in ("json", "csv")}
    arguments = " ".join(f"--{flag} {path}" for flag, path in files.items())
    arguments += f" --plot {tmp_path / 'result.png'} --trace-dir {tmp_path / 'trace'}"
    assert main(f"-i 16 16 -d 32 -w 4 4 --dtype bf16 --compare xla {FEW} {arguments}".split()) == 0
    output = capsys.readouterr().out
    assert "Baseline: xla" in output
    assert "FLOP-wise speedup (upper bound) with 93.75% sparsity: 16X" in output
    found = json.loads(files["json"].read_text())
    assert found["flop_bound"] == 16
    ratios = [b / a for a, b in zip(found["iteration_times"], found["baseline"]["iteration_times"], strict=True)]
    assert found["speedup"] == pytest.approx(float(np.median(ratios)))
    rows = list(csv.DictReader(files["csv"].open()))
    assert {row["table"] for row in rows} == {"result", "xla"}
    medians = {row["operation"]: row["runtime"] for row in found["rows"]}
    written = {row["operation"]: float(row["median"]) for row in rows if row["table"] == "result"}
    assert written == pytest.approx(medians)
    assert (tmp_path / "result.png").stat().st_size > 1000
    assert list((tmp_path / "trace").glob("**/*.xplane.pb"))

    # The trace that was kept, read without knowing what it is of.
    assert trace_program.main([str(tmp_path / "trace"), "--module", "jit_profiled_0"]) == 0
    output = capsys.readouterr().out
    assert "FnaForward" in output
    assert "natten_jax-cpu" in output
    modules = rows_by_module(tmp_path / "trace")
    assert set(modules) >= {"jit_profiled_0", "jit_profiled_1"}
    total = sum(row.runtime for row in modules["jit_profiled_0"])
    assert total == pytest.approx(sum(found["iteration_times"]), rel=1e-6)


def test_turns_are_told_apart() -> None:
    options = parse(["-i", "64", "-d", "8", "-w", "8", "--backend", "flex-fna", "--dtype", "fp32"])
    loads = [workload.compile_workload(options, f"turn_{i}") for i in range(3)]
    captured = capture_in_turns([each.launch for each in loads], 4, "cpu")
    assert [len(each) for each in captured] == [4, 4, 4]
    for each, of_load in zip(captured, loads, strict=True):
        names = {event.instruction for events in each for event in events}
        assert names <= set(of_load.program.instructions)


def test_speedup_is_the_median_of_the_turns() -> None:
    result = profile(parse(f"-i 32 -d 8 -w 4 --backend flex-fna {FEW}".split()))
    ours = dataclasses.replace(result, device_times={0: (1.0, 2.0, 4.0)}, busiest=0)
    theirs = dataclasses.replace(ours, options=result.options.for_baseline("xla"), device_times={0: (3.0, 2.0, 20.0)})
    comparison = Comparison(ours, theirs)
    assert (comparison.speedup, comparison.flop_bound) == (3.0, 8.0)


# Tables.
def test_tables_fit_with_and_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (("a" * 70, "x" * 30, "1"), ("[bold]b[/]", "y", "2"))
    table = report.Table("Title", ("First", "Second", "#"), rows, ("", "Total", "3"), folded=0)
    for has_rich in (True, False):
        if not has_rich:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        file = io.StringIO()
        report.print_table(table, file)
        text = file.getvalue()
        assert all(len(line) <= 100 for line in text.splitlines())
        assert "[bold]b[/]" in text
        assert "x" * 30 in text
        assert text.isascii() or has_rich


def test_tables_without_rich_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    file = io.StringIO()
    report.print_table(report.Table("Two\nlines", ("A", "Name"), (("long", "b"), ("c", "d")), ("", "Total")), file)
    assert file.getvalue().splitlines() == ["Two", "lines", "A     Name", "long  b", "c     d", "      Total"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_shown_on_terminals(
    stream: type[io.StringIO], is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    with cli.progress(2) as update:
        update("trying backends", more_steps=1, done=1)
    assert ("trying backends" in shown.getvalue()) == is_shown


def test_lines_are_wrapped() -> None:
    file = io.StringIO()
    report.print_lines(["word " * 40, "", "natten-jax"], file)
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[-2:] == ["", "natten-jax"]


# Configurations and static times of TPUs, on a machine without a TPU.


IMAGE = ["-i", "32", "32", "-w", "7", "-d", "64", "--dtype", "bf16", "--max-configs", "2"]


@pytest.mark.parametrize("chip", TPU_CHIPS)
def test_configurations_of_a_chip_that_is_not_there(chip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*IMAGE, "--dry-run", "--device", chip]) == 0
    printed = capsys.readouterr().out
    assert f"Device: tpu ({TPU_CHIPS[chip].product})" in printed
    assert "compatible with backend tpu-fna" in printed and "compatible with backend flex-fna" in printed
    assert "not compatible with backend cpu-fna: it runs on platform cpu only" in printed
    # The sentence appears once per pass of the kernels; plain JAX lacks times.
    assert printed.count(STATIC) == 2


def test_a_static_time_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "simulated.json"
    arguments = [*IMAGE[:-2], "--simulate", "--device", "v5e", "--backprop", "--json", str(file)]
    assert main([*arguments, "--backend", "tpu-fna"]) == 0
    assert STATIC in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["is_static"] and found["simulated_device"]["product"] == "TPU v5 lite"
    assert 0 < found["passes"]["forward"]["predicted_seconds"] < found["passes"]["backward"]["predicted_seconds"]
    # The default there is plain JAX, which lacks a time model.
    assert main(arguments) == 0
    assert STATIC not in capsys.readouterr().out
    assert not json.loads(file.read_text())["is_static"]


def test_the_static_model_is_the_slowest_of_products_softmax_and_memory() -> None:
    chip = TPU_CHIPS["v5e"]
    wide = problem_of((4096,), 512, heads=2, head_dim=256)
    found = simulator.simulate(wide, ((512,), (512,)))
    pairs = 2 * found.counts.executed_pairs
    assert chip.seconds(found) == pytest.approx(2 * pairs * 512 / 197e12)
    narrow = problem_of((4096,), 512, heads=2, head_dim=32)  # heads of 32 and of 128 take the same time
    found = simulator.simulate(narrow, ((512,), (512,)))
    assert chip.seconds(found) == pytest.approx(max(2 * pairs * 256 / 197e12, pairs / 1024 * 2.5 / 1.5e9))
    few = simulator.simulate(problem_of((4096,), 2, head_dim=128), ((16,), (16,)))
    assert chip.seconds(few) == pytest.approx(few.tile_bytes / 0.82e12)
    in_float32 = problem_of((4096,), 512, heads=2, head_dim=256, dtype="float32")
    assert chip.seconds(simulator.simulate(in_float32, ((512,), (512,)))) == pytest.approx(6 * 2 * pairs * 512 / 197e12)


def test_chips_are_known_by_what_jax_calls_them() -> None:
    assert chip_of(Device("tpu", product="TPU v6 lite")) is TPU_CHIPS["v6e"]
    assert chip_of(Device("tpu")) is None and chip_of(Device("cuda", product="TPU v4")) is None


# The profiler's baseline from tokamax, which tests do not install: a stand-in for the package.


SHAPE = (2, 4, 3, 6, 8)


def install(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    """Let ``import tokamax`` find a module with this attention."""
    module = types.ModuleType("tokamax")
    module.__dict__["dot_product_attention"] = attend
    monkeypatch.setitem(sys.modules, "tokamax", module)


def test_pallas_is_the_attention_of_tokamax_over_flat_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *, implementation: str) -> jax.Array:
        called.append(implementation)
        return jax.nn.dot_product_attention(query, key, value)

    install(monkeypatch, attend)
    query = jax.random.normal(jax.random.key(0), SHAPE)
    key, value = (jax.random.normal(jax.random.key(seed), (*SHAPE[:3], 2, SHAPE[4])) for seed in (1, 2))
    found = baselines.attend("pallas", query, key, value)
    assert called == ["mosaic"]
    np.testing.assert_allclose(found, baselines.attend("xla", query, key, value), atol=1e-6)


def test_pallas_says_which_package_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=r"needs the package tokamax, on Python 3\.12 or later"):
        baselines.attend("pallas", x, x, x)


def test_pallas_says_what_tokamax_has_no_kernel_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arrays: jax.Array, implementation: str) -> jax.Array:
        raise NotImplementedError("only NVIDIA GPUs of compute capability 9.0")

    install(monkeypatch, attend)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=r"tokamax has no Pallas kernel .*: only NVIDIA GPUs"):
        baselines.attend("pallas", x, x, x)
