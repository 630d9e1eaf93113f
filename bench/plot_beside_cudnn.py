"""Draws one group of a record of beside_cudnn.py: sliding windows, or videos that are causal in time.

Example:
    python bench/plot_beside_cudnn.py bench/results/h100/beside_cudnn.json video docs/images/frame_causal.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beside_cudnn import GROUPS
from lib import command
from lib.charts import Points, dots, save, style

from natten_jax.performance import PASSES

_ABOUT = {
    "sliding": "times as fast as cuDNN's own sliding window: higher is better",
    "video": "times as fast as cuDNN's attention without a mask: higher is better",
}
_TICKS = {"sliding": (0.5, 1, 2), "video": (1, 2, 4)}


def draw(record: Mapping[str, Any], group: str, path: Path) -> None:
    """A dot for each problem and pass; for videos, another one for how many times fewer pairs are computed."""
    rows = record["results"][group]
    panels = {f"{pass_} pass": _points(rows, pass_, group) for pass_ in PASSES}
    environment = record["environment"]
    about = f"{_ABOUT[group]}\n{environment['device']}, bfloat16"
    with style():
        save(dots(list(rows), panels, about, _TICKS[group], row_height=0.6), path)


def _points(rows: Mapping[str, Any], pass_: str, group: str) -> Points:
    found = {number: row[pass_] for number, row in enumerate(rows.values()) if "speedup" in row.get(pass_, {})}
    points = {"natten_jax": {number: each["speedup"] for number, each in found.items()}}
    if group == "video":
        points["times fewer pairs"] = {number: 1 / each["share_of_pairs"] for number, each in found.items()}
    return points


def main() -> None:
    """Draw one group of one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.group, options.picture)


if __name__ == "__main__":
    command.run(main)
