"""What :mod:`fmha_scaling` makes of its figures: tables, insights, Markdown and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fmha_ladder import TARGETS, Ladder, Step

#: A curve has saturated where it reaches this share of its best rate.
SATURATED = 0.95


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


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, the columns of which line up as text, too."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    return [line(cells[0]), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, cells[1:])]


def length_table(result: LengthResult) -> list[str]:
    """The steps of one length."""
    rows = (
        (step.step, step.name, f"{step.latency_ms:.3f}", f"{step.tflops:.2f}", f"{step.speedup_vs_baseline:.2f}x")
        for step in result.steps
    )
    return table(("Step", "Name", "Latency (ms)", "TFLOPS", "Speedup"), rows)


def target_table() -> list[str]:
    """The target configurations."""
    rows = (
        (target.name, *map(str, (target.tile_m, target.tile_n, target.ctas, target.occupancy))) for target in TARGETS
    )
    return table(("Target", "Tile M", "Tile N", "CTAs", "Occupancy"), rows)


def summary_table(ladder: Ladder, results: Sequence[LengthResult]) -> list[str]:
    """The baseline, the production kernel and the references, by length."""
    others = [step for step in ladder.steps[1:] if step.label == ladder.production or not step.label.isdigit()]
    header = ["Seq Len", f"{ladder.baseline.name} (ms)"]
    for step in others:
        header += [f"{step.name} (ms)", "Speedup"]
    rows = []
    for result in results:
        baseline = result.find(ladder.baseline.label)
        row = [str(result.seq_len), f"{baseline.latency_ms:.3f}" if baseline else "N/A"]
        for step in others:
            found = result.find(step.label)
            row += [f"{found.latency_ms:.3f}", f"{found.speedup_vs_baseline:.2f}x"] if found else ["N/A", "N/A"]
        rows.append(row)
    return table(header, rows)


def impact_table(ladder: Ladder, results: Sequence[LengthResult]) -> list[str]:
    """The speed-up of every rung over the baseline, by length."""
    rows = []
    for result in results:
        speedups = [result.find(step.label) for step in ladder.rungs]
        cells = [f"{found.speedup_vs_baseline:.2f}x" if found else "N/A" for found in speedups]
        best = result.best
        rows.append((str(result.seq_len), *cells, f"{best.name} {best.speedup_vs_baseline:.2f}x" if best else "N/A"))
    return table(("Seq Len", *(step.name for step in ladder.rungs), "Best"), rows)


def gains(ladder: Ladder, result: LengthResult) -> dict[str, float]:
    """How many times faster each rung is than the one below it, by its name."""
    found = {}
    for lower, upper in zip(ladder.rungs, ladder.rungs[1:], strict=False):
        before, after = result.find(lower.label), result.find(upper.label)
        if before and after:
            found[upper.name] = before.latency_ms / after.latency_ms
    return found


def insights(ladder: Ladder, results: Sequence[LengthResult], matrix_tflops: float) -> list[str]:
    """What this run's figures say."""
    lines = []
    by_length = {result.seq_len: gains(ladder, result) for result in results}
    for length, found in by_length.items():
        if found:
            name = max(found, key=lambda each: found[each])
            others = ", ".join(f"{each} {gain:.2f}x" for each, gain in found.items())
            lines.append(f"At {length} tokens, '{name}' paid most (each step over the one before: {others}).")
    every = [(gain, name, length) for length, found in by_length.items() for name, gain in found.items()]
    if every:
        gain, name, length = max(every)
        lines.append(f"Of all steps and lengths, '{name}' at {length} tokens paid most: {gain:.2f}x.")
    for name in {name: None for _, name, _ in every}:
        curve = [(length, found[name]) for length, found in by_length.items() if name in found]
        if len(curve) > 1:
            (shortest, first), (longest, last) = curve[0], curve[-1]
            trend = (
                "grows with" if last > 1.02 * first else "falls with" if last < 0.98 * first else "hardly depends on"
            )
            lines.append(
                f"What '{name}' pays {trend} the length: {first:.2f}x at {shortest} tokens, {last:.2f}x at {longest}."
            )
    slower = [f"'{name}' at {length} tokens ({gain:.2f}x)" for gain, name, length in every if gain < 1]
    if slower:
        lines.append(f"Slower than the step before: {', '.join(slower)}.")
    for step in (ladder.baseline, _production(ladder)):
        rates = [(result.seq_len, step_result.tflops) for result in results if (step_result := result.find(step.label))]
        if not rates:
            continue
        best = max(rate for _, rate in rates)
        length = next(length for length, rate in rates if rate >= SATURATED * best)
        shares = ", ".join(f"{rate / matrix_tflops:.0%} at {length}" for length, rate in rates)
        lines.append(
            f"'{step.name}' reaches {SATURATED:.0%} of its best rate ({best:.3g} TFLOP/s) at {length} tokens; of the "
            f"{matrix_tflops:.3g} TFLOP/s that a matrix product runs at here, it has {shares}."
        )
    speedups = [
        (own.speedup_vs_baseline, result.seq_len) for result in results if (own := result.find(ladder.production))
    ]
    if speedups:
        (low, low_length), (high, high_length) = min(speedups), max(speedups)
        lines.append(
            f"'{_production(ladder).name}' runs at {low:.2f}x ({low_length} tokens) to {high:.2f}x ({high_length} "
            f"tokens) of '{ladder.baseline.name}'."
        )
    return lines


def _production(ladder: Ladder) -> Step:
    return next(step for step in ladder.steps if step.label == ladder.production)


def markdown(configuration: dict[str, Any], ladder: Ladder, results: Sequence[LengthResult], rate: float) -> str:
    """The whole report."""
    lines = ["# FMHA scaling", "", "## Configuration"]
    lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in configuration.items()]
    lines += ["", "## Targets", *target_table(), "", "## Steps"]
    lines += [f"- {step.label}, {step.name}: {'; '.join(step.features)}" for step in ladder.steps]
    lines += ["", "## Summary", *summary_table(ladder, results), "", "## Optimisation impact"]
    lines += [*impact_table(ladder, results), "", "## Insights"]
    lines += [f"- {line}" for line in insights(ladder, results, rate)]
    lines += ["", "## By length"]
    for result in results:
        lines += ["", f"### {result.seq_len} tokens", "", *length_table(result)]
        lines += [f"- step {label} failed: {reason}" for label, reason in result.failures.items()]
    return "\n".join(lines) + "\n"


def draw(title: str, ladder: Ladder, results: Sequence[LengthResult], rate: float, path: Path) -> None:
    """TFLOP/s against the length, a line per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 5.2), layout="constrained")
    for step in ladder.steps:
        points = [
            (result.seq_len, step_result.tflops) for result in results if (step_result := result.find(step.label))
        ]
        if points:
            style: Any = {"linewidth": 2.4} if step.label == ladder.production else {"linewidth": 1.3}
            axes.plot(
                *zip(*points, strict=True),
                label=f"{step.label} {step.name}",
                marker="o",
                linestyle="-" if step.label.isdigit() else ":",
                **style,
            )
    axes.axhline(rate, color="black", linewidth=0.8, linestyle="--", label="matrix product")
    axes.set_xscale("log", base=2)
    lengths = [result.seq_len for result in results]
    axes.set_xticks(lengths, list(map(str, lengths)))
    axes.set_ylim(0, math.ceil(rate * 1.05 * 10) / 10)
    axes.set_xlabel("tokens")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
