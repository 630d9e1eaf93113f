"""Draws the errors of attention with 8-bit arrays from a record of fp8_accuracy.py.

Example:
    python bench/plot_fp8.py bench/results/cpu/fp8_accuracy.json docs/images/fp8.svg
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import BLUE, FONT_SIZE, GRAY, GREEN, ORANGE, RED, WIDTH, save, style
from matplotlib.figure import Figure

#: What is drawn of the record, and how.
_WAYS = {
    'fp8="e4m3"': (BLUE, "o"),
    "e4m3, a factor for each tensor": (ORANGE, "s"),
    "e4m3, for each block of keys": (GREEN, "^"),
    'fp8="e5m2"': (RED, "v"),
    "bfloat16": (GRAY, "D"),
}
_DATA = "normal", "outliers", "channels", "peaked rows"
_TICKS = 128, 1024, 8192
_ERRORS = 0.003, 0.01, 0.03, 0.1, 0.3


def draw(record: dict[str, Any], path: Path) -> None:
    """A panel for each kind of data, a line for each way to compute."""
    with style():
        save(_chart(record["results"]["errors"]), path)


def _chart(errors: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, data in zip(panels, _DATA, strict=True):
        for way, (color, marker) in _WAYS.items():
            found = {int(keys): each["relative_rmse"] for keys, each in errors[data][way].items()}
            label = way if data == _DATA[0] else None
            axes.plot(list(found), list(found.values()), color=color, marker=marker, markersize=4, label=label)
        axes.set_title(data)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(_TICKS, [f"{tick:,}" for tick in _TICKS])
        axes.set_yticks(_ERRORS, [f"{tick:.1%}" if tick < 0.01 else f"{tick:.0%}" for tick in _ERRORS])
        axes.minorticks_off()
    figure.supxlabel("keys that a query sees", fontsize=FONT_SIZE)
    figure.supylabel("relative error of the output", fontsize=FONT_SIZE)
    figure.legend(loc="outside upper center", ncols=2, columnspacing=1.2)
    return figure


def main() -> None:
    """Draw one record."""
    command.draw_record(__doc__, draw)


if __name__ == "__main__":
    command.run(main)
