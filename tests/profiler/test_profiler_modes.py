"""Modes of the profiler: listing configurations, predicting times, comparing with baselines, and reading traces."""

from __future__ import annotations

import csv
import dataclasses
import io
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
from natten_jax.profiler import baselines, cli, parse, report
from natten_jax.profiler import trace as trace_program
from natten_jax.profiler.measure import profile
from natten_jax.profiler.predict import STATIC
from tests.support.native_programs import needs_native
from tests.support.traces import rows_by_module

from .conftest import Profiler

# Command lines for the CPU and for simulated GPUs.

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
def test_documented_command_lines(line: str, profiler: Profiler) -> None:
    output = profiler(line if "--dry-run" in line else f"{line} {FEW}").out
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
def test_a_backend_for_another_device_is_reported_with_a_dry_run(
    backend: str, flag: str, reason: str, profiler: Profiler
) -> None:
    output, error, _ = profiler(f"--backend {backend} -n 24 -d 128 -i 256 256 -w 80 80 --max-configs 2", status=1)
    assert error.startswith(f"natten-jax-profiler: error: {backend} ")
    assert error.count("\n") == 1 and reason in error
    assert f"A dry run with {flag} shows:" in output
    assert reason in output or f"compatible with backend {backend}" in output
    assert "flex-fna" not in output


@pytest.mark.parametrize(
    ("backend", "needed", "given"), [("blackwell-fna", "10.0 or 10.3", "9.0"), ("hopper-fna", "9.0", "10.0")]
)
def test_a_dry_run_of_a_backend_for_another_gpu(backend: str, needed: str, given: str, profiler: Profiler) -> None:
    flags = f"--dry-run --backend {backend} --compute-capability {given}"
    output, error, _ = profiler(f"-d 128 -i 32768 -w 2048 {flags}", status=1)
    assert f"NVIDIA GPUs of compute capability {needed} only, and this is cuda (compute capability {given})\n" in error
    assert "Use case is compatible with backend cutlass-fna." in output


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
def test_static_times_are_labelled(command: str, mode: str, profiler: Profiler) -> None:
    output = profiler(f"{command} {mode} --compute-capability 10.0").out
    assert "Predicted times of blackwell-*: from arithmetic, not measured." in output
    assert ("Backend: blackwell-f" in output) == (mode == "--dry-run")


def test_the_tiles_that_natten_recommends_are_simulated(profiler: Profiler) -> None:
    command = "--backend blackwell-fna --q-tile 16 16 --kv-tile 16 8 -n 24 -d 128 -i 256 256 -w 80 80 -s 16 16"
    assert "the mask is fully block-sparse" in profiler(f"{command} --simulate --compute-capability 10.0").out


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "9.0", "10.0", "12.1"])
def test_a_dry_run_for_any_gpu(capability: str, profiler: Profiler) -> None:
    output = profiler(f"-n 24 -d 128 -i 256 256 -w 80 80 --backprop --dry-run --compute-capability {capability}").out
    assert f"(compute capability {capability})" in output
    version = tuple(map(int, capability.split(".")))
    runs = {"hopper": version == (9, 0), "cutlass": version >= (8, 0), "flex": True, "cpu": False}
    for family, is_compatible in runs.items():
        assert f"Use case is {'' if is_compatible else 'not '}compatible with backend {family}-fna" in output


def test_a_dry_run_names_the_schedules(profiler: Profiler) -> None:
    words = " ".join(profiler(f"-d 128 -i 4096 -w 256 --dry-run {HOPPER}").out.split())
    names = {"pp": "WarpSpecializedPingpong", "coop": "WarpSpecializedCooperative", "non": "NonPersistent"}
    assert all(f"{value} is KernelSchedule.{name}" in words for value, name in names.items())


# Listing.
def test_dry_run_lists_tiles_best_first(profiler: Profiler) -> None:
    output, _, found = profiler(f"{VIDEO} --dry-run {HOPPER} --max-configs 3")
    for part in ("q_tile_shape", "kv_tile_shape", "kernel_schedule", "no mask", "waste", "predicted", "pp, coop, non"):
        assert part in output
    assert "Use case is not compatible with backend cpu-fna: it runs on platform cpu only" in output
    hopper = [each for each in found["configurations"] if each["backend"] == "hopper-fna" and each["pass"] == "forward"]
    assert len(hopper) > 100
    seconds = [each["predicted_seconds"] for each in hopper]
    assert seconds == sorted(seconds)
    assert report.format_time(seconds[0]) in output
    listed = output[output.index("Backend: hopper-fna") :].split("Use case")[0]
    assert listed.count("pp, coop, non") == 3
    assert "..." in listed


@pytest.mark.parametrize("layout", ["4096", "64 64", "16 16 16"])
@pytest.mark.parametrize("backend", ["hopper-fna", "cutlass-fna", "flex-fna", None])
def test_dry_run_of_self_attention_also_lists_tiles_of_windows(
    layout: str, backend: str | None, profiler: Profiler
) -> None:
    chosen = "" if backend is None else f"--backend {backend}"
    output, _, found = profiler(f"-i {layout} -d 128 --dtype bf16 --dry-run --max-configs 0 {chosen} {HOPPER}")
    for family in [backend.removesuffix("-fna")] if backend else ["hopper", "cutlass", "flex"]:
        assert f"Use case is compatible with backend {family}-fmha." in output
        assert f"Use case is compatible with backend {family}-fna." in output
    assert "q_tile_size" in output and "q_tile_shape" in output and "(-w)" in output and "..." not in output
    ranks = {each["backend"].partition("-")[2]: len(each["q_tile_shape"]) for each in found["configurations"]}
    assert ranks == {"fmha": 1, "fna": len(layout.split())}


def test_dry_run_of_an_attention_backend_lists_only_its_tiles(profiler: Profiler) -> None:
    for name in ("flex-fmha", "flex-fna"):  # NATTEN's documentation passes both kinds of names to --fmha-backend
        output = profiler(f"-i 16 16 --dry-run --fmha-backend {name}").out
        assert "compatible with backend flex-fmha." in output and "-fna" not in output


def test_dry_run_without_any_backend_fails(profiler: Profiler) -> None:
    output = profiler(f"-i 64 -w 8 -d 260 --backend hopper-fna --dry-run {HOPPER}", status=1).out
    assert "not compatible with backend hopper-fna: head_dim must be at most 256" in output


# Predicting.
def test_simulation(profiler: Profiler) -> None:
    output, _, found = profiler(f"{VIDEO} --simulate {HOPPER}")
    for part in ("predicted time", "GFLOP executed", "share computed; of that, full", "11.1X", "fully block-sparse"):
        assert part in output
    forward, advice = found["passes"]["forward"], found["recommendation"]
    assert forward["backend"] == "hopper-fna"
    assert forward["predicted_seconds"] > advice["predicted_seconds"] > 0
    assert advice["counts"]["full"] == advice["counts"]["inner"] > 0
    stride = " ".join(map(str, advice["stride"]))
    assert f"-s {stride};" in output
    assert "the mask is fully block-sparse." in profiler(f"{VIDEO} -s {stride} --simulate {HOPPER}").out


def test_simulation_with_tiles_of_both_passes_without_a_calibration(profiler: Profiler) -> None:
    tiles = "--q-tile 4 4 --kv-tile 4 4 --backward-q-tile 8 4 --backward-kv-tile 4 8"
    output = profiler(f"-i 32 32 -w 8 8 --backend flex-fna --backprop --simulate {tiles}").out
    for part in ("backward", "(8, 4)", "(4, 8)", "not calibrated"):
        assert part in output


# Comparing with baselines, and output files.
@needs_native
def test_comparison_and_every_file(tmp_path: Path, profiler: Profiler, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = f"--csv {tmp_path / 'result.csv'} --plot {tmp_path / 'result.png'} --trace-dir {tmp_path / 'trace'}"
    output, _, found = profiler(f"-i 16 16 -d 32 -w 4 4 --dtype bf16 --compare xla {FEW} {files}")
    assert "Baseline: xla" in output
    assert "FLOP-wise speedup (upper bound) with 93.75% sparsity: 16X" in output
    assert found["flop_bound"] == 16
    ratios = [b / a for a, b in zip(found["iteration_times"], found["baseline"]["iteration_times"], strict=True)]
    assert found["speedup"] == pytest.approx(float(np.median(ratios)))
    rows = list(csv.DictReader((tmp_path / "result.csv").open()))
    assert {row["table"] for row in rows} == {"result", "xla"}
    medians = {row["operation"]: row["runtime"] for row in found["rows"]}
    written = {row["operation"]: float(row["median"]) for row in rows if row["table"] == "result"}
    assert written == pytest.approx(medians)
    assert (tmp_path / "result.png").stat().st_size > 1000
    assert list((tmp_path / "trace").glob("**/*.xplane.pb"))

    # Read the kept trace with the trace command. This command reads nothing but the trace.
    assert trace_program.main([str(tmp_path / "trace"), "--module", "jit_profiled_0"]) == 0
    output = capsys.readouterr().out
    assert "FnaForward" in output
    assert "natten_jax-cpu" in output
    modules = rows_by_module(tmp_path / "trace")
    assert set(modules) >= {"jit_profiled_0", "jit_profiled_1"}
    total = sum(row.runtime for row in modules["jit_profiled_0"])
    assert total == pytest.approx(sum(found["iteration_times"]), rel=1e-6)


def test_speedup_is_the_median_of_the_turns() -> None:
    result = profile(parse(f"-i 32 -d 8 -w 4 --backend flex-fna {FEW}".split()))
    ours = dataclasses.replace(result, device_times={0: (1.0, 2.0, 4.0)}, busiest=0)
    theirs = dataclasses.replace(ours, options=result.options.with_baseline("xla"), device_times={0: (3.0, 2.0, 20.0)})
    assert (ours.speedup_over(theirs), ours.flop_bound_over(theirs)) == (3.0, 8.0)


# Tables.
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


# Configurations and static times of TPUs, on a machine without a TPU.


IMAGE = "-i 32 32 -w 7 -d 64 --dtype bf16"


@pytest.mark.parametrize("chip", TPU_CHIPS)
def test_configurations_of_a_chip_that_is_not_there(chip: str, profiler: Profiler) -> None:
    printed = profiler(f"{IMAGE} --max-configs 2 --dry-run --device {chip}").out
    assert f"Device: tpu ({TPU_CHIPS[chip].product})" in printed
    assert "compatible with backend tpu-fna" in printed and "compatible with backend flex-fna" in printed
    assert "not compatible with backend cpu-fna: it runs on platform cpu only" in printed
    # The TPU kernels are listed once per pass, each time with the sentence about static times. Plain JAX has no times.
    assert printed.count(STATIC) == 2


def test_a_static_time_is_labelled(profiler: Profiler) -> None:
    arguments = f"{IMAGE} --simulate --device v5e --backprop"
    output, _, found = profiler(f"{arguments} --backend tpu-fna")
    assert STATIC in output
    assert found["is_static"] and found["simulated_device"]["product"] == "TPU v5 lite"
    assert 0 < found["passes"]["forward"]["predicted_seconds"] < found["passes"]["backward"]["predicted_seconds"]
    # The default backend on a TPU is plain JAX, which has no time model.
    output, _, found = profiler(arguments)
    assert STATIC not in output and not found["is_static"]


def test_the_static_model_is_the_slowest_of_products_softmax_and_memory() -> None:
    chip = TPU_CHIPS["v5e"]
    wide = problem_of((4096,), 512, heads=2, head_dim=256)
    found = simulator.simulate(wide, ((512,), (512,)))
    pairs = 2 * found.counts.executed_pairs
    assert chip.seconds(found) == pytest.approx(2 * pairs * 512 / 197e12)
    narrow = problem_of((4096,), 512, heads=2, head_dim=32)  # a product over 32 features takes as long as over 128
    found = simulator.simulate(narrow, ((512,), (512,)))
    assert chip.seconds(found) == pytest.approx(max(2 * pairs * 256 / 197e12, pairs / 1024 * 2.5 / 1.5e9))
    few = simulator.simulate(problem_of((4096,), 2, head_dim=128), ((16,), (16,)))
    assert chip.seconds(few) == pytest.approx(few.tile_bytes / 0.82e12)
    in_float32 = problem_of((4096,), 512, heads=2, head_dim=256, dtype="float32")
    assert chip.seconds(simulator.simulate(in_float32, ((512,), (512,)))) == pytest.approx(6 * 2 * pairs * 512 / 197e12)


def test_chips_are_identified_by_their_jax_names() -> None:
    assert chip_of(Device("tpu", product="TPU v6 lite")) is TPU_CHIPS["v6e"]
    assert chip_of(Device("tpu")) is None and chip_of(Device("cuda", product="TPU v4")) is None


# The profiler's tokamax baseline. Tests do not install tokamax, and replace it by a simulated module.


SHAPE = (2, 4, 3, 6, 8)


def install(monkeypatch: pytest.MonkeyPatch, attend: Any) -> None:
    """Let ``import tokamax`` return a module with the attention function ``attend``, or fail if it is ``None``."""
    module = types.SimpleNamespace(dot_product_attention=attend) if attend else None
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


def refuse(*_: jax.Array, implementation: str) -> jax.Array:
    raise NotImplementedError("only NVIDIA GPUs of compute capability 9.0")


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (None, r"needs the package tokamax, on Python 3\.12 or later"),
        (refuse, r"tokamax has no Pallas kernel .*: only NVIDIA GPUs"),
    ],
)
def test_the_pallas_baseline_reports_missing_features(
    attend: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, attend)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match=message):
        baselines.attend("pallas", x, x, x)
