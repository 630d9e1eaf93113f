"""The scaling benchmark on the host: its ladder, its outputs, and that its insights come from the figures."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

pytest.importorskip("matplotlib")

import fmha_scaling
from benchmarks import Benchmark
from fmha import ladder as fmha_ladder
from fmha.insights import gains, insights, priorities
from fmha.ladder import (
    BOUNDS,
    CPU_LADDER,
    GPU_LADDER,
    Ladder,
    Step,
    error_of,
    lacks_kernels,
    tiles_of,
)
from fmha.platforms import measured_table, work_table
from fmha.results import LengthResult, StepResult, read
from fmha.tables import impact_table, summary_table
from fmha.targets import LADDER_TILES, TARGETS, target_of
from fmha_report import draw, markdown

from natten_jax.native import module as native
from natten_jax.plan.devices import Device
from tests.support.programs import output_of, run_command

BENCH = Path(__file__).parents[2] / "bench"
SMALL = Benchmark((96,), 2, 16, is_causal=True, dtype="float32")


def figures(latencies: dict[int, dict[str, float]], ladder: Ladder = GPU_LADDER) -> list[LengthResult]:
    """Results with these latencies, in milliseconds, by length and step."""
    names = {step.label: step.name for step in ladder.steps}
    return [
        LengthResult(
            length,
            tuple(
                StepResult(
                    label, names[label], latency, 100 / latency, steps["0"] / latency if "0" in steps else None, 1e-4
                )
                for label, latency in steps.items()
            ),
            {},
        )
        for length, steps in latencies.items()
    ]


def test_command_line_writes_every_output(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--seq-lens", "256", "512", "--iterations", "3", "--output-dir", str(folder)]
    finished = run_command([BENCH / "fmha_scaling.py", *arguments], os.environ)
    assert finished.returncode == 0, finished.stderr
    for text in (
        "Step | ",
        "Latency (ms)",
        "TFLOPS (exact)",
        "TFLOPS (nominal)",
        "GFLOP exact",
        "Speedup",
        "SCALING SUMMARY",
        "KEY INSIGHTS",
        "Tile M",
        "PLATFORMS",
        "WHICH SIZE",
    ):
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
    assert keys_of(data) == documented_keys()
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


def keys_of(data: dict[str, Any]) -> dict[str, set[str]]:
    """Keys of a run's JSON, by where they stand."""
    return {
        "": set(data),
        "config": set(data["config"]),
        "results": {key for each in data["results"] for key in each},
        "steps": {key for each in data["results"] for step in each["steps"] for key in step},
    }


def documented_keys() -> dict[str, set[str]]:
    """Those that the page of benchmarks lists."""
    found: dict[str, set[str]] = {"": set(), "config": set(), "results": set(), "steps": set()}
    page = (BENCH.parent / "docs" / "benchmarks.md").read_text()
    table = page[page.index("| in | key |") :].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, place, names, *_ = row.split("|")
        found[place.strip(" `")] |= set(re.findall(r"`(\w+)`", names))
    return found


def strictly(text: str) -> Any:
    """JSON without the numbers that Python adds to it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_baseline_that_fails_leaves_no_speed_ups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(benchmark: Benchmark) -> Any:
        if benchmark.tokens > 64:
            raise ValueError("too long for it")
        return CPU_LADDER.baseline.make(benchmark)

    baseline = dataclasses.replace(CPU_LADDER.baseline, make=refuse)
    ladder = Ladder((baseline, *CPU_LADDER.steps[1:]), CPU_LADDER.production, True)
    monkeypatch.setattr(fmha_scaling, "ladder_of", lambda device: ladder)
    command = ["fmha_scaling.py", "--heads", "1", "--dim", "16", "--iterations", "2", "--output-dir", str(tmp_path)]
    for lengths in (["64", "96"], ["96"]):
        monkeypatch.setattr(sys, "argv", [*command, "--seq-lens", *lengths])
        assert fmha_scaling.main() == 0
        printed = capsys.readouterr().out
        data = strictly((tmp_path / "fmha_scaling_results.json").read_text())
        last = data["results"][-1]
        assert last["failures"]["0"] == "ValueError: too long for it"
        assert {step["step"] for step in last["steps"]} == {"1", "2"}
        assert all(step["speedup_vs_baseline"] is None for step in last["steps"])
        assert last["best_step"] and last["best_speedup"] is None
        report = (tmp_path / "fmha_scaling_results.md").read_text()
        for text in (printed, report):
            assert "N/A" in text and not re.search(r"\bnan|None", text)
        if len(lengths) == 2:
            assert data["results"][0]["best_speedup"] > 0 and data["results"][0]["failures"] == {}


def test_every_element_type_runs_on_the_host() -> None:
    for dtype in BOUNDS:
        result = fmha_scaling.measure(dataclasses.replace(SMALL, dtype=dtype), CPU_LADDER, 1)
        assert [step.step for step in result.steps] == ["0", "1", "2"], result.failures


def test_iterations_are_all_launched() -> None:
    for iterations in (1, 2, 3, 4, 5, 60, 100):
        turns = fmha_scaling.launches_of_turns(iterations)
        assert sum(turns) == iterations and min(turns) >= 1 and max(turns) - min(turns) <= 1


def test_help_says_the_defaults() -> None:
    shown = " ".join(output_of(run_command([BENCH / "fmha_scaling.py", "--help"], os.environ)).split())
    assert "launches of each step at each length (default: 100)" in shown
    assert "(default: float16 on a GPU, float32 elsewhere)" in shown
    assert "1024 2048 4096 8192 16384" in shown


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_step_computes_attention(is_causal: bool) -> None:
    benchmark = dataclasses.replace(SMALL, is_causal=is_causal)
    result = fmha_scaling.measure(benchmark, CPU_LADDER, 3)
    assert {step.step for step in result.steps} | set(result.failures) == {"0", "1", "2"}
    assert {"0", "1"} <= {step.step for step in result.steps}
    for step in result.steps:
        # The FLOPs of a causal problem are those of its mask, about half.
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


def test_the_check_sees_a_single_wrong_head() -> None:
    arrays = fmha_scaling.draw_arrays(SMALL)
    result = CPU_LADDER.baseline.make(SMALL)(*arrays)
    assert error_of(result, arrays, True) < BOUNDS["float32"]
    assert error_of(result.at[0, :, 0].multiply(1.001), arrays, True) > BOUNDS["float32"]
    assert error_of(result, arrays, False) > 0.1
    assert not error_of(jnp.full_like(result, jnp.nan), arrays, True) < 1


def test_steps_of_the_gpu_ladder_fail_on_the_host_with_reasons() -> None:
    benchmark = dataclasses.replace(SMALL, head_dim=64, dtype="float16")
    result = fmha_scaling.measure(benchmark, GPU_LADDER, 1)
    assert {"0", "1", "2", "3"} <= set(result.failures)
    assert "needs an NVIDIA GPU" in result.failures["1"]


def test_a_build_without_the_kernels_of_the_ladder_says_which_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmha_ladder, "default_device", lambda: Device("cuda", (9, 0), False))
    monkeypatch.setattr(native, "missing", lambda target: f"there is no {target}")
    with pytest.raises(ValueError, match=r"natten_jax_bench_fmha_forward.*NATTEN_JAX_BENCH=1"):
        GPU_LADDER.rungs[0].make(SMALL)


def test_insights_follow_the_figures() -> None:
    latencies = {
        1024: {"0": 1.0, "1": 4.0, "2": 3.0, "3": 2.0, "4": 1.25},
        4096: {"0": 1.0, "1": 4.0, "2": 4.2, "3": 1.4, "4": 0.8},
    }
    first, second = figures(latencies)
    assert gains(GPU_LADDER, first)["+ Memory"] == pytest.approx(1.5)
    text = "\n".join(insights(GPU_LADDER, [first, second], 200.0))
    assert "Of all steps and lengths, '+ Memory' at 4096 tokens paid most: 3.00x" in text
    assert "At 1024 tokens, '+ Full (production)' paid most" in text
    assert "Slower than the step before: '+ Math' at 4096 tokens (0.95x)" in text
    assert "0.80x (1024 tokens) to 1.25x (4096 tokens)" in text
    assert "40% at 1024, 62% at 4096" in text
    assert "reaches 95% of its best rate (125 TFLOP/s) at 4096 tokens" in text
    turned = {length: {**steps, "2": 1.5} for length, steps in latencies.items()}
    assert "'+ Math' at 4096 tokens paid most: 2.67x" in "\n".join(insights(GPU_LADDER, figures(turned), 200.0))


def test_priorities_are_the_steps_by_what_they_paid_at_a_size() -> None:
    latencies = {
        512: {"1": 8.0, "2": 4.0, "3": 4.0, "4": 1.0},
        1024: {"1": 8.0, "2": 1.0, "3": 1.0, "4": 0.25},
        2048: {"1": 8.0, "2": 7.9, "3": 2.0, "4": 1.0},
    }
    assert priorities(GPU_LADDER, figures(latencies)) == [
        "Small (up to 1024 tokens): '+ Math' (4.00x), then '+ Full (production)' (4.00x). "
        "Not worth it: '+ Memory' (1.00x).",
        "Medium (up to 4096 tokens): '+ Memory' (3.95x), then '+ Full (production)' (2.00x). "
        "Not worth it: '+ Math' (1.01x).",
    ]


def test_the_recorded_run_has_every_section() -> None:
    configuration, results, rate = read(BENCH / "results" / "h100" / "fmha_scaling" / "fmha_scaling_results.json")
    assert configuration["platform"] == "Hopper (sm90)" and configuration["production"]["occupancy"] == 1
    text = markdown(configuration, GPU_LADDER, results, rate)
    for section in ("Configuration", "Targets", "Platforms", "Steps", "Insights", "What to optimise at which size"):
        assert f"\n## {section}\n" in text
    # At 16384 tokens: 4 * 32 sequences, of 128 and of 256 tiles of queries; 128 and 256 tiles of keys.
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in work_table(configuration) if "sm" in line}
    assert [int(cell) for cell in rows["Hopper (sm90)"]] == [1024, 16384, 8, 128]
    assert [int(cell) for cell in rows["Blackwell (sm120, sm121)"]] == [2048, 32768, 16, 256]
    best = max(step.tflops for result in results if (step := result.find("4")))
    measured, of_another_device = measured_table(GPU_LADDER, configuration, results, rate)[2:]
    assert f" {best:.3g} " in measured and f" {best / rate:.0%} " in measured
    assert "H200" in of_another_device
    # Runs of another device with the same problem stand beside it, those of another problem do not.
    assert len(measured_table(GPU_LADDER, {**configuration, "device": "other"}, results, rate)) == 5
    assert len(measured_table(GPU_LADDER, {**configuration, "device": "other", "batch": 1}, results, rate)) == 3


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [((8, 0), (128, 64)), ((8, 9), (128, 64)), ((9, 0), (128, 128)), ((10, 0), (128, 128)), ((12, 1), (64, 64))],
)
def test_the_gpu_selects_the_tiles_of_the_ladder(capability: tuple[int, int], tiles: tuple[int, int]) -> None:
    target = target_of(capability)
    assert target.tiles == tiles
    assert target.tiles in LADDER_TILES
    assert target in TARGETS and target.capability == capability[0]
    found = tiles_of(Benchmark((1024,), 2, 128, is_causal=True, dtype="float16"), Device("cuda", capability, False))
    assert (found["tile_m"], found["tile_n"], found["occupancy"]) == (*tiles, target.occupancy)
    assert found["platform"] == target.name
    production = found["production"]
    assert production["backend"].endswith("-fmha")
    # What is not known of a device is left open.
    is_known = capability == (9, 0)
    assert (production["occupancy"], production["schedule"]) == ((1, "pp") if is_known else (None, None))


def test_gpus_older_than_the_ladder_are_refused() -> None:
    with pytest.raises(ValueError, match="8\\.0 or higher"):
        target_of((7, 5))


def test_kernels_are_built_only_where_a_gpu_lacks_them() -> None:
    assert not lacks_kernels(Device("cpu"))
    assert lacks_kernels(Device("cuda", (9, 0), False)) == (native.missing("natten_jax_bench_fmha_forward") is not None)
    command = ["make", "--dry-run", "bench-scaling", "VENV=", f"PYTHON={sys.executable}"]
    plan = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"{sys.executable} bench/fmha_ladder.py || {sys.executable} -m pip install" in plan


def test_tables_show_missing_steps() -> None:
    results = figures({512: {"1": 2.0}, 1024: {"0": 1.0, "4": 0.5, "P": 0.8}})
    summary, impact = summary_table(GPU_LADDER, results), impact_table(GPU_LADDER, results)
    assert "N/A" in summary[2] and "2.00x" in summary[3] and "1.25x" in summary[3]
    assert "Basic N/A" in impact[2] and "2.00x" in impact[3] and impact[3].count("N/A") == 3
    assert len({len(line) for line in summary}) == 1


def test_no_figures_at_all_still_make_a_report(tmp_path: Path) -> None:
    empty = [LengthResult(256, (), {"0": "failed"})]
    assert insights(GPU_LADDER, empty, 100.0) == []
    draw("nothing", GPU_LADDER, empty, 100.0, tmp_path / "nothing.png")
    assert "N/A" in impact_table(GPU_LADDER, empty)[2]
