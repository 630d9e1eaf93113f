"""Draws how many times as long as a copy of their bytes problems with small windows take, from a record of small.py.

Example:
    python bench/plot_small.py bench/results/h200/small.json docs/images/small_windows.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import passes_side_by_side, save

from natten_jax.performance import PASSES

#: Sides that are drawn, under the names that the picture has for them.
SIDES = {"natten_jax": "natten_jax", "cutlass-large": "its portable kernels for large windows", "cudnn": "cuDNN, dense"}


def draw(record: dict[str, Any], path: Path) -> None:
    """One bar for each side of each problem and pass."""
    names = list(dict.fromkeys(each["row"] for each in record["records"]))
    found = {(each["row"], each["pass"]): each["sides"] for each in record["records"]}
    times = {
        pass_: {
            label: {
                row: figures["times copy"]
                for row, name in enumerate(names)
                if isinstance(figures := found.get((name, pass_), {}).get(side), dict)
            }
            for side, label in SIDES.items()
        }
        for pass_ in PASSES
    }
    device = record["environment"]["device"]
    about = f"device time, in times of a copy of the same bytes ({device}, bfloat16)"
    figure, panels = passes_side_by_side(names, times, about, "", 1.4 + 0.42 * len(names))
    for axes in panels:
        axes.axvline(1, color="black", linewidth=0.8)
    save(figure, path)


def main() -> None:
    """Draw one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.picture)


if __name__ == "__main__":
    command.run(main)
