"""Draws saved figures.

Example:
    python bench/plot.py bench/results/h200/forward.json speedups.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from timing import MODES

_COLORS = {"cold": "#7fb2d9", "sustained": "#1f5f99"}


def draw_speedups(results: Mapping[str, Mapping[str, Any]], baseline: str, path: Path) -> None:
    """One pair of bars per problem that both natten_jax and the baseline ran: speed-up cold and sustained."""
    speedups = {
        name: [result[mode]["speedup"][baseline] for mode in MODES]
        for name, result in results.items()
        if all(baseline in result.get(mode, {}).get("speedup", {}) for mode in MODES)
    }
    if not speedups:
        raise ValueError(f"no problem was run by both natten_jax and {baseline}")
    height = 0.4
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.4 * len(speedups)), layout="constrained")
    for i, mode in enumerate(MODES):
        values = [values[i] for values in speedups.values()]
        bars = axes.barh(
            [row + (i - 0.5) * height for row in range(len(values))], values, height, label=mode, color=_COLORS[mode]
        )
        axes.bar_label(bars, [f"{value:.2f}x" for value in values], padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(speedups)), list(speedups))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xticks(ticks := [0.5, 1, 2, 4, 8, 16], [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"speed-up over {baseline} self attention of the same layout")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Draw the figures of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--baseline", default="cudnn")
    options = parser.parse_args()
    draw_speedups(json.loads(options.results.read_text())["results"], options.baseline, options.picture)


if __name__ == "__main__":
    main()
