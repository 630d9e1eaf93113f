"""Chart style: one palette, text legible on phones, and colours that follow the page's theme."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Series colors: natten_jax first, then the compared implementations.
COLORS = BLUE, ORANGE, GRAY = "#2f7fc1", "#e08a2c", "#8f9aa6"
LIGHT_BLUE, GREEN, RED = "#7fb2d9", "#4d9d5b", "#c9504a"
MARKERS = "o", "s", "D"

#: Colors of text and lines, of the background, and of faint lines. ``_ON_DARK`` maps them to the colors on dark pages.
INK, PAPER, FAINT = "#1f2933", "#ffffff", "#e4e8ed"
_ON_DARK = {INK: "#d7dde4", PAPER: "#131416", FAINT: "#2b323b"}

#: Width in inches, and font size in points. On a phone 400 pixels wide, a picture is 368 pixels wide, and its text is
#: more than 9 pixels high.
WIDTH, FONT_SIZE = 5.2, 9.6

#: Values of a panel: by label, then by row.
Points = Mapping[str, Mapping[int, float]]


def style() -> AbstractContextManager[None]:
    """Return a context for drawing and saving figures in this style.

    SVG files are reproducible. They contain text as characters, not as outlines.
    """
    sizes = ("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    colors = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {
        **dict.fromkeys(sizes, FONT_SIZE),
        **dict.fromkeys(colors, INK),
        "svg.hashsalt": "natten_jax",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    return rc_context(settings)


def dots(
    rows: Sequence[str],
    panels: Mapping[str, Points],
    about: str,
    ticks: Sequence[float],
    *,
    unit: str = "x",
    row_height: float = 0.42,
) -> Figure:
    """Draw a chart with a row for each name. In each panel, a row has a dot per label.

    The values of the first label are also printed.

    Args:
        rows: Row labels, of one or two lines.
        panels: Points by panel title. All panels have the same points, at most three, each with a label.
        about: Caption below the chart.
        ticks: Tick values of the logarithmic axis.
        unit: Suffix of the values.
        row_height: Height of a row in inches.
    """
    figure = Figure(figsize=(WIDTH, 1.25 + row_height * len(rows)), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, points) in zip(axes, panels.items(), strict=True):
        for (label, values), color, marker in zip(points.items(), COLORS, MARKERS, strict=False):
            name = label if ax is axes[0] else None
            top = 3 if color == COLORS[0] else 2
            places = list(values.values()), list(values)
            ax.plot(*places, marker, color=color, markersize=6, label=name, clip_on=False, zorder=top)
        first = next(iter(points.values()))
        largest = {row: max(values[row] for values in points.values() if row in values) for row in first}
        for row, value in first.items():
            ax.annotate(
                f"{value:.{2 if value < 2 else 1 if value < 100 else 0}f}{unit}",
                (largest[row], row),
                (6, 0),
                textcoords="offset points",
                va="center",
                color=COLORS[0],
                annotation_clip=False,
            )
        ax.set_title(title)
        ax.set_xscale("log")
        ax.set_xlim(0.85 * ticks[0], 2.6 * ticks[-1] if len(panels) > 1 else 1.5 * ticks[-1])
        ax.set_xticks(ticks, [f"{tick:g}{unit}" for tick in ticks])
        ax.minorticks_off()
        ax.axvline(1, color=INK, linewidth=0.8)
        ax.hlines(range(len(rows)), 0.85 * ticks[0], ticks[-1], color=FAINT, linewidth=0.8, zorder=0)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    axes[0].set_yticks(range(len(rows)), rows)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.supxlabel(about, fontsize=FONT_SIZE)
    figure.legend(loc="outside upper center", ncols=len(COLORS), handletextpad=0.1, columnspacing=1.2)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Save a figure without a background; the text color of an SVG follows the page's theme."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    with style():
        is_svg = path.suffix == ".svg"
        metadata = {"Date": None} if is_svg else None
        figure.savefig(picture, dpi=150, format=path.suffix.lstrip(".") or "png", metadata=metadata)
    content = picture.getvalue()
    path.write_bytes(_themed(content.decode("utf-8")).encode("utf-8") if is_svg else content)


def _themed(svg: str) -> str:
    """Replace the theme's colors in an SVG by CSS variables, and cut numbers after two decimals."""
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)
    names = {color: f"--c{number}" for number, color in enumerate(_ON_DARK)}
    for color, name in names.items():
        svg = svg.replace(color, f"var({name})")
    light, dark = (
        "".join(f"{names[color]}:{shown};" for color, shown in theme.items())
        for theme in ({color: color for color in _ON_DARK}, _ON_DARK)
    )
    rules = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}text{{fill:var({names[INK]})}}"
    return re.sub(r"(<svg\b[^>]*>)", rf"\1\n <style>{rules}</style>", svg, count=1)
