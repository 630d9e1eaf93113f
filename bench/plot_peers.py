"""Draws the speed beside other implementations from its record.

Example:
    python bench/plot_peers.py bench/results/h200/peers.json docs/images/speed.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pictures import save

BASELINE = "cuDNN"
_COLORS = {"natten_jax": "#1f5f99", "NATTEN": "#7fb2d9", "FlexAttention": "#c9d3df"}
_PASSES = "forward", "backward"


def draw(record: dict[str, Any], path: Path) -> None:
    """One bar for each implementation, problem and pass: how much faster it is than the baseline."""
    problems = record["problems"]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(_COLORS)
    for axes, pass_ in zip(panels, _PASSES, strict=True):
        for i, (name, color) in enumerate(_COLORS.items()):
            speedups = [each[pass_][BASELINE] / each[pass_][name] for each in problems.values()]
            rows = [row + (i - 1) * height for row in range(len(problems))]
            bars = axes.barh(rows, speedups, height, color=color, label=name if pass_ == "forward" else None)
            axes.bar_label(bars, [f"{speedup:.1f}x" for speedup in speedups], padding=2, fontsize=7)
        axes.set_title(f"{pass_} pass", fontsize="medium")
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(problems)), list(problems))
    panels[0].invert_yaxis()
    about = f"{record['device']}, {record['dtype']}, head dimension {record['head_dim']}, {record['date']}"
    figure.supxlabel(f"speed-up over {BASELINE}'s self attention of the same layout ({about})", fontsize="small")
    figure.legend(loc="outside upper center", ncols=len(_COLORS), frameon=False)
    save(figure, path)


def main() -> None:
    """Draw one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text()), options.picture)


if __name__ == "__main__":
    main()
