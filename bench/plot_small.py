"""Draws how many times as long as a copy of their bytes problems with small windows take, from a record of small.py.

Example:
    python bench/plot_small.py bench/results/h200/small.json docs/images/small_windows.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pictures import save

from natten_jax.passes import PASSES

#: Sides that are drawn, under the names that the picture has for them.
SIDES = {"natten_jax": "natten_jax", "cutlass-large": "its portable kernels for large windows", "cudnn": "cuDNN, dense"}
_COLORS = "#1f5f99", "#7fb2d9", "#c9d3df"


def draw(record: dict[str, Any], path: Path) -> None:
    """One bar for each side of each problem and pass."""
    names = list(dict.fromkeys(each["row"] for each in record["records"]))
    found = {(each["row"], each["pass"]): each["sides"] for each in record["records"]}
    figure = Figure(figsize=(10, 1.4 + 0.42 * len(names)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(SIDES)
    for axes, pass_ in zip(panels, PASSES, strict=True):
        for i, ((side, label), color) in enumerate(zip(SIDES.items(), _COLORS, strict=True)):
            times = {
                row: sides["times copy"]
                for row, name in enumerate(names)
                if isinstance(sides := found.get((name, pass_), {}).get(side), dict)
            }
            bars = axes.barh(
                [row + (i - 1) * height for row in times],
                list(times.values()),
                height,
                color=color,
                label=label if pass_ == "forward" else None,
            )
            axes.bar_label(bars, [f"{each:.1f}" for each in times.values()], padding=2, fontsize=7)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(f"{pass_} pass", fontsize="medium")
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.supxlabel(
        f"device time, in times of a copy of the same bytes ({record['environment']['device']}, bfloat16)",
        fontsize="small",
    )
    figure.legend(loc="outside upper center", ncols=len(SIDES), frameon=False)
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
