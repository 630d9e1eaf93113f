"""Print a Markdown report of the figures of ``fmha_scaling.py``, or draw a plot of the figures.

Example:
    python bench/run.py fmha_report bench/results/h200/fmha_scaling/fmha_scaling_results.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmha.insights import insights, priorities
from fmha.ladder import CPU_LADDER, GPU_LADDER, Ladder
from fmha.platforms import measured_table, target_table, work_table
from fmha.results import LengthResult, read
from fmha.tables import impact_table, length_table, summary_table
from lib import command


def configuration_lines(configuration: dict[str, Any]) -> list[str]:
    """Format the configuration of the run."""
    values = {key: value for key, value in configuration.items() if value is not None}
    if "production" in values:
        production = values["production"]
        facts = [production["backend"], "tiles of {tile_m} x {tile_n}".format(**production)]
        facts += [
            f"{name} {production[name]}" for name in ("schedule", "occupancy") if production.get(name) is not None
        ]
        values["production"] = ", ".join(facts)
    return [f"- {key.replace('_', ' ')}: {value}" for key, value in values.items()]


def platform_lines(
    ladder: Ladder, configuration: dict[str, Any], results: Sequence[LengthResult], rate: float
) -> list[str]:
    """Format tables of the thread blocks and key tiles of each target, and of the production kernel's best rates."""
    return [
        "Thread blocks per target (a larger GPU needs more of them), and the length of their loops over keys (a longer",
        "loop hides more of the latency of copies):",
        "",
        *work_table(configuration),
        "",
        "Best rates of the production kernel, this run first:",
        "",
        *measured_table(ladder, configuration, results, rate),
    ]


def markdown(configuration: dict[str, Any], ladder: Ladder, results: Sequence[LengthResult], rate: float) -> str:
    """Format the whole report."""
    lines = ["# FMHA scaling", "", "## Configuration"]
    lines += configuration_lines(configuration)
    lines += [
        "",
        "## Targets",
        *target_table(),
        "",
        "## Platforms",
        "",
        *platform_lines(ladder, configuration, results, rate),
    ]
    lines += ["", "## Steps"]
    lines += [f"- {step.label}, {step.name}: {'; '.join(step.features)}" for step in ladder.steps]
    lines += ["", "## Summary", *summary_table(ladder, results), "", "## Optimisation impact"]
    lines += [*impact_table(ladder, results), "", "## Insights"]
    lines += [f"- {line}" for line in insights(ladder, results, rate)]
    lines += ["", "## What to optimise at which size"]
    lines += [f"- {line}" for line in priorities(ladder, results)]
    lines += ["", "## By length"]
    for result in results:
        lines += ["", f"### {result.seq_len} tokens", "", *length_table(result)]
        lines += [f"- step {label} failed: {reason}" for label, reason in result.failures.items()]
    return "\n".join(lines) + "\n"


def draw(title: str, ladder: Ladder, results: Sequence[LengthResult], rate: float, path: Path) -> None:
    """Plot TFLOP/s against the sequence length, with a line per step."""
    from lib.charts import BLUE, GRAY, GREEN, INK, LIGHT_BLUE, ORANGE, RED, WIDTH, save, style
    from matplotlib.figure import Figure

    colors = GRAY, LIGHT_BLUE, GREEN, RED, BLUE, ORANGE
    with style():
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.subplots()
        for step, color in zip(ladder.steps, colors, strict=False):
            points = [
                (result.seq_len, step_result.tflops) for result in results if (step_result := result.find(step.label))
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=f"{step.label} {step.name}",
                    marker="o",
                    color=color,
                    linestyle="-" if step.label.isdigit() else ":",
                    linewidth=2.6 if step.label == ladder.production else 1.4,
                )
        axes.axhline(rate, color=INK, linewidth=0.8, linestyle="--", label="matrix product")
        axes.set_xscale("log", base=2)
        lengths = [result.seq_len for result in results]
        axes.set_xticks(lengths, list(map(str, lengths)))
        axes.set_ylim(0, math.ceil(rate * 1.05 * 10) / 10)
        axes.set_xlabel("tokens")
        axes.set_ylabel("TFLOP/s: higher is better")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=2)
        save(figure, path)


def title_of(configuration: Mapping[str, Any]) -> str:
    """Return the chart title of a run."""
    title = "{device}: batch {batch}, {heads} heads of {head_dim}, {dtype}{causal}"
    return title.format(**{**configuration, "causal": ", causal" if configuration["causal"] else ""})


def main() -> int:
    """Print the report of a run from its JSON file, or draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="fmha_scaling_results.json")
    parser.add_argument("--plot", type=Path, help="draw a plot into this file instead of printing the report")
    options = parser.parse_args()
    configuration, results, rate = read(options.path)
    names = {step.name for result in results for step in result.steps}
    ladder = GPU_LADDER if names & {step.name for step in GPU_LADDER.steps} else CPU_LADDER
    if options.plot is not None:
        draw(title_of(configuration), ladder, results, rate, options.plot)
        return 0
    print(markdown(configuration, ladder, results, rate), end="")
    return 0


if __name__ == "__main__":
    command.run(main)
