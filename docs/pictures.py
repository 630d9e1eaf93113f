"""Draws the pictures of windows in the documentation: ``make pictures``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from natten_jax.plot import plot_window, plot_windows

IMAGES = Path(__file__).parent / "images"
Draw = Callable[[Any], Any]


def picture(name: str, width: float, height: float, *panels: Draw) -> None:
    """Save panels in a row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for draw, ax in zip(panels, axes[0], strict=True):
        draw(ax)
    path = IMAGES / f"{name}.svg"
    with rc_context({"svg.hashsalt": "natten_jax", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None})  # the same bytes each time, and text that a browser sets
    # A hundredth of a point is enough, and half of the file.
    path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", path.read_text()))


def window(title: str, query: tuple[int, ...] = (6, 6), layout: tuple[int, ...] = (13, 13), **facts: Any) -> Draw:
    """One query's window."""
    return lambda ax: plot_window(layout, query, ax=ax, title=title, **facts)


def windows(title: str, **facts: Any) -> Draw:
    """All windows of a line of tokens."""
    return lambda ax: plot_windows(14, ax=ax, title=title, **facts)


def main() -> None:
    """Draw all pictures."""
    picture(
        *("windows", 13, 2.9),
        window("kernel_size=5", kernel_size=5),
        window("at an edge: shifted", (0, 12), kernel_size=5),
        window("kernel_size=5, stride=3", kernel_size=5, stride=3),
        window("kernel_size=5, dilation=2", kernel_size=5, dilation=2),
        window("kernel_size=5, is_causal=True", kernel_size=5, is_causal=True),
    )
    picture(
        *("windows_edges", 8, 2.9),
        window("query (6, 6)", kernel_size=5),
        window("query (1, 6)", (1, 6), kernel_size=5),
        window("query (0, 12)", (0, 12), kernel_size=5),
    )
    picture(
        *("windows_1d", 13, 3.7),
        windows("kernel_size=5", kernel_size=5),
        windows("kernel_size=5, stride=3", kernel_size=5, stride=3),
        windows("kernel_size=5, dilation=2", kernel_size=5, dilation=2),
        windows("kernel_size=5, is_causal=True", kernel_size=5, is_causal=True),
    )
    picture(
        *("windows_stride", 8, 2.9),
        window("stride=1", kernel_size=4),
        window("stride=2", kernel_size=4, stride=2),
        window("stride=4: blocks", kernel_size=4, stride=4, layout=(12, 12)),
    )
    picture(
        *("windows_dilation", 8, 2.9),
        window("dilation=1", kernel_size=5),
        window("dilation=2", kernel_size=5, dilation=2),
        window("kernel_size=(3, 5), dilation=(4, 1)", kernel_size=(3, 5), dilation=(4, 1)),
    )
    picture(
        *("windows_causal", 8, 2.9),
        window("is_causal=(True, False)", kernel_size=5, is_causal=(True, False)),
        window("is_causal=True", kernel_size=5, is_causal=True),
        window("is_causal=True, stride=3", kernel_size=5, is_causal=True, stride=3),
    )
    picture(
        *("windows_3d", 11, 2.0),
        window(
            "a video of 5 frames: kernel_size=(3, 5, 5), is_causal=(True, False, False)",
            (3, 4, 4),
            (5, 9, 9),
            kernel_size=(3, 5, 5),
            is_causal=(True, False, False),
        ),
    )


if __name__ == "__main__":
    main()
