"""The figures of :mod:`fmha_scaling`, and reading those of earlier runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Figures of one step at one length."""

    step: str
    name: str
    latency_ms: float
    tflops: float
    speedup_vs_baseline: float
    relative_error: float


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """Figures of one length, and why steps are missing."""

    seq_len: int
    steps: tuple[StepResult, ...]
    failures: dict[str, str]

    def find(self, label: str) -> StepResult | None:
        """The figures of a step."""
        return next((result for result in self.steps if result.step == label), None)

    @property
    def best(self) -> StepResult | None:
        """The fastest step."""
        return min(self.steps, key=lambda result: result.latency_ms, default=None)


def read(path: Path) -> tuple[dict[str, Any], list[LengthResult], float]:
    """Configuration, figures and rate of the matrix product of a run that was saved as JSON."""
    data = json.loads(path.read_text())
    results = [
        LengthResult(each["seq_len"], tuple(StepResult(**step) for step in each["steps"]), each["failures"])
        for each in data["results"]
    ]
    return data["config"], results, data["matrix_tflops"]
