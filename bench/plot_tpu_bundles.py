"""Draws how many bundles kernels for TPUs take beside what else computes the same, from records of tpu_bundles.py.

Example:
    python bench/plot_tpu_bundles.py bench/results/tpu docs/images/tpu_bundles.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import dots, save, style

#: What rows are called in the picture.
NAMES = {
    "1-D causal w2048": "sequence, causal,\nwindow 2048",
    "2-D 256x256 w80": "image 256x256,\nwindow 80x80",
    "HunyuanVideo": "HunyuanVideo,\nstride 16x8x8",
    "NAT s1": "NAT, stage 1",
    "64x64 k7": "image 64x64,\nwindow 7x7",
}
#: Sides of a record, what is counted of them, and what they are called.
_SIDES = ("splash", "bundles", "splash"), ("flex", "program", "plain JAX"), ("dense", "bundles", "dense")
_TICKS = 1, 2, 4, 8


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """How many times natten_jax's bundles others have in the forward pass, by problem, in a panel for each chip."""
    rows = [name for name in NAMES if all(name in record["results"] for record in records.values())]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for chip, record in records.items():
        sides = [record["results"][name]["forward"] for name in rows]
        panels[chip] = {
            label: {
                row: each[side][counted] / each["natten_jax"][counted]
                for row, each in enumerate(sides)
                if counted in each.get(side, {})
            }
            for side, counted, label in _SIDES
        }
    about = "bundles, in those of natten_jax: static schedule, not measured\nforward pass, bfloat16"
    with style():
        save(dots([NAMES[name] for name in rows], panels, about, _TICKS, row_height=0.5), path)


def main() -> None:
    """Draw the records of a folder, one for each chip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    paths = sorted(options.records.glob("*.json"))
    draw({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}, options.picture)


if __name__ == "__main__":
    command.run(main)
