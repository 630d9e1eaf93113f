"""The scaling benchmark on the CPU: its ladder (a list of attention implementations), its outputs and its report."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import fmha_scaling
from benchmarks import Benchmark
from fmha.ladder import BOUNDS, CPU_LADDER, GPU_LADDER, Ladder, Step, lacks_kernels
from fmha.platforms import measured_table, work_table
from fmha.results import read
from fmha_report import markdown

from natten_jax.native import module as native
from natten_jax.plan.devices import Device
from tests.support.programs import run_command

BENCH = Path(__file__).parents[2] / "bench"
SMALL = Benchmark((96,), 2, 16, is_causal=True, dtype="float32")


def test_command_line_writes_every_output(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--seq-lens", "256", "512", "--iterations", "3", "--output-dir", str(folder)]
    finished = run_command([BENCH / "fmha_scaling.py", *arguments], os.environ)
    assert finished.returncode == 0, finished.stderr
    columns = "Step | ", "Latency (ms)", "TFLOPS (exact)", "TFLOPS (nominal)", "GFLOP exact", "Speedup", "Tile M"
    for text in (*columns, "SCALING SUMMARY", "KEY INSIGHTS", "PLATFORMS", "WHICH SIZE"):
        assert text in finished.stdout
    log = (folder / "fmha_scaling_log.txt").read_text()
    assert log.strip() in finished.stdout
    data = json.loads((folder / "fmha_scaling_results.json").read_text())
    assert [result["seq_len"] for result in data["results"]] == [256, 512]
    config = data["config"]
    assert config["causal"] is True
    assert config["platform"] == "cpu"
    assert config["tile_m"] == config["production"]["tile_m"] > 0 and config["tile_n"] > 0
    assert (config["num_ctas"], config["occupancy"]) == (None, None)
    assert config["production"]["backend"] == "cpu-fmha" and config["production"]["occupancy"] is None
    assert (config["iterations"], config["warm_up"]) == (3, 10)
    assert [line.split()[0] for line in data["priorities"]] == ["Small"]
    assert data["matrix_tflops"] > 0
    for result in data["results"]:
        assert {step["step"] for step in result["steps"]} | set(result["failures"]) == {"0", "1", "2"}
        assert all(step["relative_error"] <= BOUNDS["float32"] for step in result["steps"])
    markdown = (folder / "fmha_scaling_results.md").read_text()
    assert all(line in markdown for line in data["insights"] + data["priorities"])
    assert "## Platforms" in markdown
    again = run_command([BENCH / "fmha_report.py", folder / "fmha_scaling_results.json"], os.environ)
    assert (again.returncode, again.stdout) == (0, markdown), again.stderr
    assert (folder / "fmha_scaling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_step_computes_attention(is_causal: bool) -> None:
    benchmark = dataclasses.replace(SMALL, is_causal=is_causal)
    result = fmha_scaling.measure(benchmark, CPU_LADDER, 3)
    assert {step.step for step in result.steps} | set(result.failures) == {"0", "1", "2"}
    assert {"0", "1"} <= {step.step for step in result.steps}
    for step in result.steps:
        # Exact FLOPs count the visible pairs of the mask. Nominal FLOPs of a causal problem count half of all pairs.
        pairs = 96 * 97 // 2 if is_causal else 96**2
        assert step.tflops * step.latency_ms == pytest.approx(4 * 2 * 16 * pairs / 1e9)
        half = 0.5 if is_causal else 1.0
        assert step.tflops_nominal is not None
        assert step.tflops_nominal * step.latency_ms == pytest.approx(4 * 2 * 16 * 96**2 * half / 1e9)


def test_a_step_that_is_wrong_or_fails_is_left_out() -> None:
    def refuse(benchmark: Benchmark) -> None:
        raise RuntimeError("not here")

    wrong = Step("1", "Wrong", (), lambda benchmark: lambda query, key, value: value)
    missing = Step("2", "Missing", (), refuse)  # type: ignore[arg-type]
    ladder = Ladder((CPU_LADDER.baseline, wrong, missing), "2", True)
    result = fmha_scaling.measure(SMALL, ladder, 3)
    assert [step.step for step in result.steps] == ["0"]
    assert "relative error" in result.failures["1"]
    assert "not here" in result.failures["2"]


def test_the_recorded_run_has_every_section() -> None:
    configuration, results, rate = read(BENCH / "results" / "h100" / "fmha_scaling" / "fmha_scaling_results.json")
    assert configuration["platform"] == "Hopper (sm90)" and configuration["production"]["occupancy"] == 1
    text = markdown(configuration, GPU_LADDER, results, rate)
    for section in ("Configuration", "Targets", "Platforms", "Steps", "Insights", "What to optimise at which size"):
        assert f"\n## {section}\n" in text
    # There are 4 * 32 sequences of 16384 tokens. Each has 128 query tiles and 128 key tiles on Hopper, and 256 query
    # tiles and 256 key tiles on Blackwell.
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in work_table(configuration) if "sm" in line}
    assert [int(cell) for cell in rows["Hopper (sm90)"]] == [1024, 16384, 8, 128]
    assert [int(cell) for cell in rows["Blackwell (sm120, sm121)"]] == [2048, 32768, 16, 256]
    best = max(step.tflops for result in results if (step := result.find("4")))
    measured, foreign_result = measured_table(GPU_LADDER, configuration, results, rate)[2:]
    assert f" {best:.3g} " in measured and f" {best / rate:.0%} " in measured
    assert "H200" in foreign_result
    # The table also has the recorded results of other devices for the same problem, but not for other problems.
    assert len(measured_table(GPU_LADDER, {**configuration, "device": "other"}, results, rate)) == 5
    assert len(measured_table(GPU_LADDER, {**configuration, "device": "other", "batch": 1}, results, rate)) == 3


def test_kernels_are_built_only_if_a_gpu_lacks_them() -> None:
    assert not lacks_kernels(Device("cpu"))
    assert lacks_kernels(Device("cuda", (9, 0), False)) == (native.missing("natten_jax_bench_fmha_forward") is not None)
    command = ["make", "--dry-run", "bench-scaling", "VENV=", f"PYTHON={sys.executable}"]
    plan = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"{sys.executable} bench/fmha_ladder.py || {sys.executable} -m pip install" in plan
