"""The scaling benchmark on the host: its ladder, its outputs, and that its insights come from the figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("matplotlib")
BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))

import fmha_scaling  # noqa: E402
from benchmarks import Benchmark  # noqa: E402
from fmha_ladder import BOUNDS, CPU_LADDER, GPU_LADDER, Ladder, Step, error_of  # noqa: E402
from fmha_report import LengthResult, StepResult, draw, gains, impact_table, insights, summary_table  # noqa: E402

SMALL = Benchmark((96,), 2, 16, is_causal=True, dtype="float32")


def figures(latencies: dict[int, dict[str, float]], ladder: Ladder = GPU_LADDER) -> list[LengthResult]:
    """Results with these latencies, in milliseconds, by length and step."""
    names = {step.label: step.name for step in ladder.steps}
    return [
        LengthResult(
            length,
            tuple(
                StepResult(label, names[label], latency, 100 / latency, steps.get("0", latency) / latency, 1e-4)
                for label, latency in steps.items()
            ),
            {},
        )
        for length, steps in latencies.items()
    ]


def test_command_line_writes_every_output(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    arguments = ["--seq-lens", "256", "512", "--iterations", "3", "--output-dir", str(folder)]
    finished = subprocess.run(
        [sys.executable, str(BENCH / "fmha_scaling.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert finished.returncode == 0, finished.stderr
    for text in ("Step | ", "Latency (ms)", "TFLOPS", "Speedup", "SCALING SUMMARY", "KEY INSIGHTS", "Tile M"):
        assert text in finished.stdout
    log = (folder / "fmha_scaling_log.txt").read_text()
    assert log.strip() in finished.stdout
    data = json.loads((folder / "fmha_scaling_results.json").read_text())
    assert [result["seq_len"] for result in data["results"]] == [256, 512]
    assert data["config"]["causal"] is True
    assert data["matrix_tflops"] > 0
    for result in data["results"]:
        assert {step["step"] for step in result["steps"]} | set(result["failures"]) == {"0", "1", "2"}
        assert all(step["relative_error"] <= BOUNDS["float32"] for step in result["steps"])
    markdown = (folder / "fmha_scaling_results.md").read_text()
    assert all(line in markdown for line in data["insights"])
    assert (folder / "fmha_scaling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    benchmark = dataclasses.replace(SMALL, head_dim=64, dtype="float16")
    result = fmha_scaling.measure(benchmark, GPU_LADDER, 1)
    assert {"0", "1", "2", "3"} <= set(result.failures)
    assert "NATTEN_JAX_BENCH=1" in result.failures["1"]


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


def test_tables_show_missing_steps() -> None:
    results = figures({512: {"1": 2.0}, 1024: {"0": 1.0, "4": 0.5, "P": 0.8}})
    summary, impact = summary_table(GPU_LADDER, results), impact_table(GPU_LADDER, results)
    assert "N/A" in summary[2] and "2.00x" in summary[3] and "1.25x" in summary[3]
    assert "1.00x" in impact[2] and impact[3].count("N/A") == 3
    assert len({len(line) for line in summary}) == 1


def test_no_figures_at_all_still_make_a_report(tmp_path: Path) -> None:
    empty = [LengthResult(256, (), {"0": "failed"})]
    assert insights(GPU_LADDER, empty, 100.0) == []
    draw("nothing", GPU_LADDER, empty, 100.0, tmp_path / "nothing.png")
    assert "N/A" in impact_table(GPU_LADDER, empty)[2]
