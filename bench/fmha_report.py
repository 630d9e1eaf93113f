"""What ``fmha_scaling.py`` makes of its figures: the report in Markdown, and a plot.

Example:
    python bench/fmha_report.py bench/results/h200/fmha_scaling/fmha_scaling_results.json
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fmha.insights import insights, priorities
from fmha.ladder import CPU_LADDER, GPU_LADDER, Ladder
from fmha.platforms import measured_table, target_table, work_table
from fmha.results import LengthResult, read
from fmha.tables import impact_table, length_table, summary_table
from lib import command

from natten_jax.profiler.cli.whole_files import write_bytes


def configuration_lines(configuration: dict[str, Any]) -> list[str]:
    """What was run, on what."""
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
    """What tiles come to on each platform, and what was measured."""
    return [
        "The targets' tiles make so many thread blocks, which a larger GPU needs more of, and so long loops over keys,",
        "which copies have to hide behind:",
        "",
        *work_table(configuration),
        "",
        "The production kernel at its best, this run first:",
        "",
        *measured_table(ladder, configuration, results, rate),
    ]


def markdown(configuration: dict[str, Any], ladder: Ladder, results: Sequence[LengthResult], rate: float) -> str:
    """The whole report."""
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
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_bytes(path, picture.getvalue())
    plt.close(figure)


def main() -> int:
    """Print the report of a run that was saved as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="fmha_scaling_results.json")
    configuration, results, rate = read(parser.parse_args().path)
    names = {step.name for result in results for step in result.steps}
    ladder = GPU_LADDER if names & {step.name for step in GPU_LADDER.steps} else CPU_LADDER
    print(markdown(configuration, ladder, results, rate), end="")
    return 0


if __name__ == "__main__":
    command.run(main)
