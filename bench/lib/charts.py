"""Charts of both passes side by side, and how figures are written."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natten_jax.performance import PASSES, Pass
from natten_jax.profiler.cli.whole_files import write_bytes

COLORS = "#1f5f99", "#7fb2d9", "#c9d3df"

#: Values by label and row.
Bars = Mapping[str, Mapping[int, float]]


def passes_side_by_side(
    rows: Sequence[str], bars: Mapping[Pass, Bars], about: str, unit: str, height: float
) -> tuple[Figure, Sequence[Axes]]:
    """One bar for each label and row that has a value, in a panel for each pass, which have the same three labels.

    Args:
        rows: Names of the rows.
        bars: What is drawn.
        about: Stands below.
        unit: Follows the values.
        height: Of the figure, in inches.

    Returns:
        The figure and its panels.
    """
    figure = Figure(figsize=(10, height), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(PASSES), sharey=True)
    bar = 0.8 / len(COLORS)
    for axes, pass_ in zip(panels, PASSES, strict=True):
        for i, ((label, values), color) in enumerate(zip(bars[pass_].items(), COLORS, strict=True)):
            drawn = axes.barh(
                [row + (i - 1) * bar for row in values],
                list(values.values()),
                bar,
                color=color,
                label=label if pass_ == "forward" else None,
            )
            axes.bar_label(drawn, [f"{value:.1f}{unit}" for value in values.values()], padding=2, fontsize=7)
        axes.set_title(f"{pass_} pass", fontsize="medium")
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    figure.supxlabel(about, fontsize="small")
    figure.legend(loc="outside upper center", ncols=len(COLORS), frameon=False)
    return figure, panels


def save(figure: Figure, path: Path) -> None:
    """Write a figure; an SVG is the same whenever the same figure is written, and its text stays text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    with rc_context({"svg.hashsalt": "natten_jax", "svg.fonttype": "none", "font.family": "sans-serif"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(picture, format=path.suffix.lstrip(".") or "png", metadata=metadata)
    content = picture.getvalue()
    write_bytes(path, re.sub(rb"(\.\d\d)\d+", rb"\1", content) if path.suffix == ".svg" else content)
