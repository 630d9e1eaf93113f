"""Draws speed-ups over one device against the number of devices, measured and predicted, from a record of scaling.py.

Example:
    python bench/plot_scaling.py bench/results/h100x8/scaling.json docs/images/scaling.svg
    python bench/plot_scaling.py scaling.json scaling.svg --splits heads width-s16x8x8 height-s16x8x8 sequence
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib import command
from lib.charts import BLUE, FAINT, GRAY, GREEN, INK, LIGHT_BLUE, ORANGE, RED, WIDTH, save, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_COLUMNS = 2

#: Colors by what is split, which the name of a split begins with, and by the stride that it may end with.
COLORS = {
    "time": RED,
    "height": LIGHT_BLUE,
    "width": BLUE,
    "heads": GREEN,
    "sequence": ORANGE,
    "batch": GRAY,
}
MARKERS = "os^Dv"


def draw(record: dict[str, Any], path: Path, splits: Sequence[str] | None = None) -> None:
    """A panel for each kind of scaling, family and pass; a curve for each split, or for those of the given names.

    Raises:
        ValueError: The record has none of them.
    """
    rows = [row for row in record["results"].values() if splits is None or row["split"] in splits]
    rows = [row for row in rows if _speedups(row, "measured") or _speedups(row, "predicted")]
    if not rows:
        raise ValueError("the record has no such figures")
    is_measured = any(_speedups(row, "measured") for row in rows)
    about = f"devices ({record['environment']['device']})" if is_measured else "devices (nothing was measured)"
    with style():
        save(_chart(rows, about), path)


def _chart(rows: Sequence[dict[str, Any]], about: str) -> Figure:
    panels = list(dict.fromkeys(map(_title, rows)))
    strides = list(dict.fromkeys(_stride(row) for row in rows))
    markers = {stride: MARKERS[i % len(MARKERS)] for i, stride in enumerate(strides)}
    height = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(WIDTH, 1.4 + 2.4 * height), layout="constrained")
    places: list[Axes] = list(figure.subplots(height, _COLUMNS, squeeze=False).flat)
    for axes, title in zip(places, panels, strict=False):
        _draw_panel(axes, [row for row in rows if _title(row) == title], markers)
        axes.set_title(title.replace(", ", ",\n"))
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(about, fontsize="medium")
    figure.supylabel("times as fast as one device", fontsize="medium")
    figure.legend(handles=_legend(rows, markers), loc="outside upper center", ncols=3)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[dict[str, Any]], markers: Mapping[str, str]) -> None:
    counts = sorted({point["devices"] for row in rows for point in row["points"]})
    axes.plot(counts, counts, color=FAINT, linewidth=0.8)
    for row in rows:
        color = COLORS[_dimension(row)]
        for side, line, face in (("measured", "-", color), ("predicted", "--", "none")):
            speedups = _speedups(row, side)
            axes.plot(
                list(speedups),
                list(speedups.values()),
                line,
                color=color,
                marker=markers[_stride(row)],
                markerfacecolor=face,
                markersize=4,
                linewidth=1.2,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, list(map(str, counts)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _legend(rows: Sequence[dict[str, Any]], markers: Mapping[str, str]) -> list[Line2D]:
    dimensions = dict.fromkeys(_dimension(row) for row in rows)
    handles = [Line2D([], [], color=COLORS[each], label=each) for each in dimensions]
    for stride, marker in markers.items():
        if stride:
            handles.append(Line2D([], [], color=INK, linestyle="", marker=marker, label=f"stride {stride}"))
    return [
        *handles,
        Line2D([], [], color=INK, marker="o", markersize=4, label="measured"),
        Line2D([], [], color=INK, linestyle="--", marker="o", markersize=4, markerfacecolor="none", label="predicted"),
    ]


def _speedups(row: dict[str, Any], side: str) -> dict[int, float]:
    """By number of devices, as far as there are any."""
    return {point["devices"]: point[side]["speedup"] for point in row["points"] if point.get(side)}


def _title(row: dict[str, Any]) -> str:
    """Title of the panel that shows a row."""
    return f"{row['scaling']} scaling, {' '.join(filter(None, (row['family'], row['pass'])))}"


def _dimension(row: dict[str, Any]) -> str:
    return str(row["split"]).partition("-")[0]


def _stride(row: dict[str, Any]) -> str:
    return str(row["split"]).partition("-s")[2]


def main() -> None:
    """Draw one record."""
    parser = command.record_parser(__doc__)
    parser.add_argument("--splits", nargs="+", help="that are drawn; all if none are named")
    options = parser.parse_args()
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.picture, options.splits)


if __name__ == "__main__":
    command.run(main)
