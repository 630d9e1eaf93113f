"""Draws the speed beside other implementations from its record.

Example:
    python bench/plot_peers.py bench/results/h200/peers.json docs/images/speed.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import label
from lib import command
from lib.charts import dots, save, style

from natten_jax.performance import PASSES

BASELINE = "cuDNN"
_IMPLEMENTATIONS = "natten_jax", "NATTEN", "FlexAttention"
_TICKS = 1, 2, 4, 8, 16


def draw(record: dict[str, Any], path: Path) -> None:
    """One dot for each implementation, problem and pass: how much faster it is than the baseline."""
    problems = record["problems"].values()
    speedups = {
        f"{pass_} pass": {
            name: {row: each[pass_][BASELINE] / each[pass_][name] for row, each in enumerate(problems)}
            for name in _IMPLEMENTATIONS
        }
        for pass_ in PASSES
    }
    names = [label(each["layout"], each["kernel_size"], each["stride"]) for each in problems]
    about = f"times as fast as {BASELINE} without a window: higher is better\n"
    about += f"{record['device']}, {record['dtype']}, heads of {record['head_dim']}, {record['date']}"
    with style():
        save(dots(names, speedups, about, _TICKS), path)


def main() -> None:
    """Draw one record."""
    command.draw_record(__doc__, draw)


if __name__ == "__main__":
    command.run(main)
