"""Figures of ``fmha_scaling.py``, and a function that reads the figures of earlier runs.

Operations are counted in two ways. The *exact* count includes only the query-key pairs that the mask keeps. The
*nominal* count includes all pairs, or half of all pairs for causal attention, as in most benchmarks. For causal
attention over N tokens, the exact count includes N * (N + 1) / 2 pairs, and the nominal count includes N * N / 2 pairs.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks import Benchmark

from natten_jax.cost_model.tiles import flops


def exact_flops(benchmark: Benchmark) -> int:
    """Return the operations of the matrix products over the pairs that the mask keeps."""
    return flops(benchmark.problem, "forward")


def nominal_flops(benchmark: Benchmark) -> int:
    """Return the operations of the matrix products over all pairs, or over half of the pairs for causal attention."""
    pairs = benchmark.tokens**2 // (2 if benchmark.is_causal else 1)
    return 4 * benchmark.batch * benchmark.heads * benchmark.head_dim * pairs


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Figures of one step at one length.

    Attributes:
        step: Label of the step.
        name: Display name.
        latency_ms: Median device time of a launch.
        tflops: TFLOP/s, from the exact count of operations.
        speedup_vs_baseline: Baseline time divided by this step's time, median over turns; ``None`` if the baseline
            failed.
        relative_error: Relative error compared with float64 attention.
        tflops_nominal: TFLOP/s, from the nominal count of operations; ``None`` if the record does not contain it.
    """

    step: str
    name: str
    latency_ms: float
    tflops: float
    speedup_vs_baseline: float | None
    relative_error: float
    tflops_nominal: float | None = None


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """Figures of all steps at one sequence length.

    Attributes:
        seq_len: Number of tokens of the sequence.
        steps: Steps that ran.
        failures: Error messages of failed steps, by label.
    """

    seq_len: int
    steps: tuple[StepResult, ...]
    failures: dict[str, str]

    def find(self, label: str) -> StepResult | None:
        """Return the figures of a step, or ``None`` if the step failed."""
        return next((result for result in self.steps if result.step == label), None)

    @property
    def best(self) -> StepResult | None:
        """The fastest step."""
        return min(self.steps, key=lambda result: result.latency_ms, default=None)


def read(path: Path) -> tuple[dict[str, Any], list[LengthResult], float]:
    """Read a run from JSON: its configuration, its figures, and the TFLOP/s of a matrix product."""
    data = json.loads(path.read_text(encoding="utf-8"))
    results = [
        LengthResult(each["seq_len"], tuple(StepResult(**step) for step in each["steps"]), each["failures"])
        for each in data["results"]
    ]
    return data["config"], results, data["matrix_tflops"]
