"""Markdown tables of the figures of ``fmha_scaling.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fmha.ladder import Ladder
from fmha.results import LengthResult


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a Markdown table whose columns also line up as plain text."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    return [line(cells[0]), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, cells[1:])]


def speedup_text(speedup: float | None) -> str:
    """Format a speed-up; ``None`` gives "N/A"."""
    return "N/A" if speedup is None else f"{speedup:.2f}x"


def length_table(result: LengthResult) -> list[str]:
    """Format a table of the figures at one sequence length, with a row per step."""
    rows = (
        (
            step.step,
            step.name,
            f"{step.latency_ms:.3f}",
            f"{step.tflops:.2f}",
            "N/A" if step.tflops_nominal is None else f"{step.tflops_nominal:.2f}",
            speedup_text(step.speedup_vs_baseline),
        )
        for step in result.steps
    )
    return table(("Step", "Name", "Latency (ms)", "TFLOPS (exact)", "TFLOPS (nominal)", "Speedup"), rows)


def summary_table(ladder: Ladder, results: Sequence[LengthResult]) -> list[str]:
    """Format a table of the times of the baseline, the production kernel and other libraries, with a row per length."""
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
            row += [f"{found.latency_ms:.3f}", speedup_text(found.speedup_vs_baseline)] if found else ["N/A", "N/A"]
        rows.append(row)
    return table(header, rows)


def impact_table(ladder: Ladder, results: Sequence[LengthResult]) -> list[str]:
    """Format a table of the speed-ups of the ladder's steps over the baseline, with a row per length."""
    rows = []
    for result in results:
        speedups = [result.find(step.label) for step in ladder.rungs]
        cells = [speedup_text(found.speedup_vs_baseline) if found else "N/A" for found in speedups]
        best = result.best
        rows.append(
            (str(result.seq_len), *cells, f"{best.name} {speedup_text(best.speedup_vs_baseline)}" if best else "N/A")
        )
    return table(("Seq Len", *(step.name for step in ladder.rungs), "Best"), rows)
