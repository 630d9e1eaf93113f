"""Draws the speed beside other implementations from its record.

Example:
    python bench/plot_peers.py bench/results/h200/peers.json docs/images/speed.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import passes_side_by_side, save

from natten_jax.performance import PASSES

BASELINE = "cuDNN"
_IMPLEMENTATIONS = "natten_jax", "NATTEN", "FlexAttention"


def draw(record: dict[str, Any], path: Path) -> None:
    """One bar for each implementation, problem and pass: how much faster it is than the baseline."""
    problems = record["problems"]
    speedups = {
        pass_: {
            name: {row: each[pass_][BASELINE] / each[pass_][name] for row, each in enumerate(problems.values())}
            for name in _IMPLEMENTATIONS
        }
        for pass_ in PASSES
    }
    about = f"{record['device']}, {record['dtype']}, head dimension {record['head_dim']}, {record['date']}"
    about = f"speed-up over {BASELINE}'s self attention of the same layout ({about})"
    figure, _ = passes_side_by_side(list(problems), speedups, about, "x", 4.6)
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
