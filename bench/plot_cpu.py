"""Draws the speed of kernels for hosts beside plain JAX and dense attention from a record of cpu_kernels.py.

Example:
    python bench/plot_cpu.py bench/results/cpu/kernels.json docs/images/cpu.svg
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import KINDS
from lib import command
from lib.charts import dots, save, style

BASELINE = "dense XLA"
_IMPLEMENTATIONS = {"cpu-fna": "kernels (cpu-fna)", "flex-fna": "plain JAX (flex-fna)"}
_PASSES = {"forward": "forward pass", "forward+backward": "forward and backward"}
_TICKS = 1, 4, 16, 64


def draw(record: dict[str, Any], path: Path) -> None:
    """One dot for each implementation, problem and pass: how much faster it is than dense attention."""
    problems = list(dict.fromkeys(each["problem"] for each in record["results"]))
    times = {
        (each["problem"], each["pass"], each["implementation"]): each["times_cpu_fna"] for each in record["results"]
    }
    speedups = {
        title: {
            label: {
                row: times[problem, pass_, BASELINE] / times[problem, pass_, name]
                for row, problem in enumerate(problems)
            }
            for name, label in _IMPLEMENTATIONS.items()
        }
        for pass_, title in _PASSES.items()
    }
    types = "/".join(dict.fromkeys(each["dtype"] for each in record["results"]))
    about = f"times as fast as dense attention in XLA, with a mask: higher is better\n{_processor(record)}, {types}"
    with style():
        save(dots(list(map(_label, problems)), speedups, about, _TICKS, row_height=0.6), path)


def _label(problem: str) -> str:
    """What the chart calls a problem of the record, such as ``2-D 64x64 h4 d64 w13x13``."""
    rank, layout, *_, window = problem.split()
    return f"{KINDS[int(rank[0])]} {layout},\n{re.sub('^w', 'window ', window)}"


def _processor(record: dict[str, Any]) -> str:
    environment = record["environment"]
    return f"{environment['processor']}, {environment['native']['host_isa']}"


def main() -> None:
    """Draw one record."""
    command.draw_record(__doc__, draw)


if __name__ == "__main__":
    command.run(main)
