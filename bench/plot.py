"""Draws saved figures.

Example:
    python bench/plot.py bench/results/h200/forward.json speedups.png
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from lib import command

from natten_jax.profiler.cli.whole_files import write_bytes

matplotlib.use("Agg")
from lib.timing import MODES
from matplotlib import pyplot as plt

_COLORS = {"cold": "#7fb2d9", "sustained": "#1f5f99"}


def draw_speedups(results: Mapping[str, Mapping[str, Any]], baseline: str, path: Path) -> None:
    """One bar for each mode of each problem that both natten_jax and the baseline ran in it."""
    speedups = {
        name: bars
        for name, result in results.items()
        if (
            bars := {
                mode: result[mode]["speedup"][baseline]
                for mode in MODES
                if baseline in result.get(mode, {}).get("speedup", {})
            }
        )
    }
    if not speedups:
        raise ValueError(f"no problem was run by both natten_jax and {baseline}")
    modes = [mode for mode in MODES if any(mode in bars for bars in speedups.values())]
    height = 0.8 / len(modes)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.4 * len(speedups)), layout="constrained")
    for i, mode in enumerate(modes):
        rows = [row for row, bars in enumerate(speedups.values()) if mode in bars]
        values = [bars[mode] for bars in speedups.values() if mode in bars]
        drawn = axes.barh(
            [row + (i - (len(modes) - 1) / 2) * height for row in rows], values, height, label=mode, color=_COLORS[mode]
        )
        axes.bar_label(drawn, [f"{value:.2f}x" for value in values], padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(speedups)), list(speedups))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xticks(ticks := [0.5, 1, 2, 4, 8, 16], [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"speed-up over {baseline} self attention of the same layout")
    figure.legend(loc="outside upper right", ncols=len(modes))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix.lstrip(".") or "png")
    write_bytes(path, picture.getvalue())
    plt.close(figure)


def main() -> None:
    """Draw the figures of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--baseline", default="cudnn")
    options = parser.parse_args()
    draw_speedups(json.loads(options.results.read_text(encoding="utf-8"))["results"], options.baseline, options.picture)


if __name__ == "__main__":
    command.run(main)
