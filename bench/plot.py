"""Draws saved figures of run.py.

Example:
    python bench/plot.py bench/results/h200/forward.json speedups.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS
from lib import command
from lib.charts import dots, save, style
from lib.timing import MODES

_LABELS = {"cold": "after a pause", "sustained": "under sustained load"}
_NAMES = {"cudnn": "cuDNN", "xla": "XLA", "mosaic": "JAX's Mosaic kernel"}


def draw_speedups(results: Mapping[str, Mapping[str, Any]], baseline: str, path: Path) -> None:
    """One dot for each mode of each problem that both natten_jax and the baseline ran in it."""
    rows = [name for name, each in results.items() if any(_speedups(each, baseline))]
    if not rows:
        raise ValueError(f"no problem was run by both natten_jax and {baseline}")
    found = {
        label: {
            row: speedups[mode]
            for row, name in enumerate(rows)
            if mode in (speedups := _speedups(results[name], baseline))
        }
        for mode, label in _LABELS.items()
    }
    points = {label: values for label, values in found.items() if values}
    most = max(value for values in points.values() for value in values.values())
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32, 64) if tick == 0.5 or tick / 2 < most]
    if min(value for values in points.values() for value in values.values()) > 0.9:
        ticks = ticks[1:]
    about = f"times as fast as {_NAMES.get(baseline, baseline)} without a window: higher is better"
    names = [BENCHMARKS[name].label if name in BENCHMARKS else name for name in rows]
    with style():
        save(dots(names, {"": points}, about, ticks, row_height=0.38), path)


def _speedups(result: Mapping[str, Any], baseline: str) -> dict[str, float]:
    """Speedups of one problem, by mode."""
    found = {mode: result.get(mode, {}).get("speedup", {}).get(baseline) for mode in MODES}
    return {mode: speedup for mode, speedup in found.items() if speedup is not None}


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
