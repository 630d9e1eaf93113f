"""Draw the documentation's pictures of windows and halos. ``make pictures`` runs this, with ``bench`` in the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lib.charts import BLUE, FAINT, INK, LIGHT_BLUE, ORANGE, WIDTH, save, style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from natten_jax.halo import halos_of
from natten_jax.plot import _cells, plot_window, plot_windows
from natten_jax.problem import problem_of

IMAGES = Path(__file__).parent / "images"
#: Colors of other devices' tokens, of local tokens, of local tokens whose windows extend into a halo, and of halos.
PART_COLORS = FAINT, LIGHT_BLUE, BLUE, ORANGE
PART_NAMES = "on other devices", "local", "local, with windows that reach the halo", "halo"
Draw = Callable[[Any], Any]


def picture(
    name: str, height: float, *panels: Draw, in_a_column: bool = False, legend: Mapping[str, str] | None = None
) -> None:
    """Save a picture of up to three panels in a row or a column. ``height`` is in inches."""
    shape = (len(panels), 1) if in_a_column else (1, len(panels))
    with style():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(*shape, squeeze=False)
        for draw, ax in zip(panels, axes.flat, strict=True):
            draw(ax)
        if legend:
            handles = [Patch(color=color, label=label) for label, color in legend.items()]
            figure.legend(handles=handles, loc="outside upper center", ncols=2, columnspacing=1.2)
        save(figure, IMAGES / f"{name}.svg")


def window(title: str, query: tuple[int, ...] = (6, 6), layout: tuple[int, ...] = (13, 13), **facts: Any) -> Draw:
    """Draw the window of a query."""
    return lambda ax: plot_window(layout, query, ax=ax, title=title, **facts)


def windows(title: str, **facts: Any) -> Draw:
    """Draw the windows of all queries of a sequence."""
    return lambda ax: plot_windows(14, ax=ax, title=title, **facts)


def part(title: str, parts: tuple[int, int], place: tuple[int, int], **facts: Any) -> Draw:
    """Draw an image that is split over a grid of devices, with the local tokens and the halos of one device.

    Args:
        title: Title of the panel.
        parts: Extents of the grid of devices.
        place: Index of the drawn device in this grid.
        facts: Window arguments.
    """

    def draw(ax: Any) -> None:
        problem = problem_of((12, 32), **facts)
        owns, sees, holds = [], [], []
        for axis, halo, at in zip(problem.axes, halos_of(problem, parts), place, strict=True):
            tokens, first = np.arange(halo.extent), at * halo.part
            last = first + halo.part
            owns.append((first <= tokens) & (tokens < last))
            holds.append((first - halo.before <= tokens) & (tokens < last + halo.after))
            seeing = np.zeros(halo.extent, bool)
            for slab in halo.seen_slabs(axis):
                if slab.is_front and at > 0:
                    seeing |= tokens < first + slab.queries
                elif not slab.is_front and at < halo.parts - 1:
                    seeing |= tokens >= last - slab.queries
            sees.append(seeing)
        own, held = (np.ix_(*rows) for rows in (owns, holds))
        kinds = np.zeros((12, 32), int)
        kinds[held] = 3
        kinds[own] = np.where((sees[0][:, None] | sees[1])[own], 2, 1)
        rows, columns = kinds.shape
        for kind, color in enumerate(PART_COLORS):
            ax.add_patch(_cells(np.argwhere(kinds == kind) + 0.5, color))
        ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        for dimension, extent in ((0, 12), (1, 32)):
            for i in range(1, parts[dimension]):
                line = ax.axhline if dimension == 0 else ax.axvline
                line(i * extent / parts[dimension], color=INK, linewidth=1.2)
        ax.set(title=title, xticks=[], yticks=[])
        ax.spines[:].set_visible(False)

    return draw


def logo() -> None:
    """Draw the logo: a window of 3 x 3 tokens around a query, in a layout of 5 x 5 tokens.

    It is legible at a size of 16 pixels, on light and on dark pages.
    """
    cells = []
    for row, column in np.ndindex(5, 5):
        is_seen = 1 <= row <= 3 and 1 <= column <= 3
        color = "#e08a2c" if (row, column) == (2, 2) else "#3b86c6" if is_seen else "#9aa7b5"
        opacity = "" if is_seen else ' opacity="0.45"'
        cells.append(
            f'<rect x="{13 * column + 1}" y="{13 * row + 1}" width="10" height="10" rx="2" fill="{color}"{opacity}/>'
        )
    (IMAGES / "logo.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64">{"".join(cells)}</svg>\n'
    )


def badge() -> None:
    """Write the badge that links to Colab."""
    (IMAGES / "colab.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="118" height="22" viewBox="0 0 118 22">'
        '<rect width="118" height="22" rx="4" '
        'fill="#e08a2c"/><text x="59" y="15" text-anchor="middle" font-family="sans-serif" font-size="12" '
        'fill="#1f1300">Open in Colab</text></svg>\n'
    )


def main() -> None:
    """Draw all pictures."""
    logo()
    badge()
    picture(
        *("halos", 6.0),
        part("4 devices, kernel_size=5", (1, 4), (0, 1), kernel_size=5),
        part("4 devices, kernel_size=8, stride=4", (1, 4), (0, 1), kernel_size=8, stride=4),
        part("2x2 devices, kernel_size=5", (2, 2), (0, 1), kernel_size=5),
        in_a_column=True,
        legend=dict(zip(PART_NAMES, PART_COLORS, strict=True)),
    )
    picture(
        *("windows", 2.1),
        window("kernel_size=5", kernel_size=5),
        window("stride=3", kernel_size=5, stride=3),
        window("dilation=2", kernel_size=5, dilation=2),
    )
    picture(
        *("windows_edges", 2.1),
        window("query (6, 6)", kernel_size=5),
        window("query (1, 6)", (1, 6), kernel_size=5),
        window("query (0, 12)", (0, 12), kernel_size=5),
    )
    picture(
        *("windows_cut_wrap", 2.1),
        window('edges="shift"', (1, 11), kernel_size=5),
        window('edges="cut"', (1, 11), kernel_size=5, edges="cut"),
        window('edges="wrap"', (1, 11), kernel_size=5, edges="wrap"),
    )
    picture(
        *("windows_cut_wrap_1d", 2.4),
        windows("shift", kernel_size=5),
        windows("cut", kernel_size=5, edges="cut"),
        windows("wrap", kernel_size=5, edges="wrap"),
    )
    picture(
        *("windows_1d", 2.4),
        windows("kernel_size=5", kernel_size=5),
        windows("stride=3", kernel_size=5, stride=3),
        windows("is_causal=True", kernel_size=5, is_causal=True),
    )
    picture(
        *("windows_stride", 2.1),
        window("stride=1", kernel_size=4),
        window("stride=2", kernel_size=4, stride=2),
        window("stride=4: blocks", kernel_size=4, stride=4, layout=(12, 12)),
    )
    picture(
        *("windows_dilation", 2.3),
        window("dilation=1", kernel_size=5),
        window("dilation=2", kernel_size=5, dilation=2),
        window("dilation=(4, 1),\nkernel_size=(3, 5)", kernel_size=(3, 5), dilation=(4, 1)),
    )
    picture(
        *("windows_causal", 2.3),
        window("is_causal=\n(True, False)", kernel_size=5, is_causal=(True, False)),
        window("is_causal=True", kernel_size=5, is_causal=True),
        window("is_causal=True,\nstride=3", kernel_size=5, is_causal=True, stride=3),
    )
    picture(
        *("windows_3d", 1.7),
        window(
            "5 frames of a video: kernel_size=(3, 5, 5),\nis_causal=(True, False, False)",
            (3, 4, 4),
            (5, 9, 9),
            kernel_size=(3, 5, 5),
            is_causal=(True, False, False),
        ),
    )


if __name__ == "__main__":
    main()
