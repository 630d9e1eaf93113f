"""Run the tutorial's program, and draw the loss and the attention weights that it computes: ``make pictures``."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from lib.charts import BLUE, FAINT, INK, ORANGE, WIDTH, save, style
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
QUERY = 3, 4


def program_of(page: str) -> str:
    """Join all Python blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def main() -> None:
    """Run the tutorial's program, and draw the loss and the attention weights in the site's style."""
    os.environ["MPLBACKEND"] = "Agg"
    found: dict[str, Any] = {}
    with TemporaryDirectory() as folder, contextlib.chdir(folder):  # the tutorial saves its pictures there
        exec(compile(program_of("tutorial.md"), "tutorial.md", "exec"), found)
    with style():
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(np.asarray(found["losses"]), color=BLUE)
        axes.set(xlabel="step", ylabel="loss")
        save(figure, IMAGES / "tutorial_loss.svg")
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        image = found["image"]
        cells(left, image[..., 0] / 2 + 0.5, INK, "image")
        weights = np.asarray(found["weights"])
        cells(right, weights / weights.max(), BLUE, "weights of one query")
        right.add_patch(Rectangle((QUERY[1], QUERY[0]), 1, 1, fill=False, edgecolor=ORANGE, linewidth=2))
        save(figure, IMAGES / "tutorial_attention.svg")


def cells(axes: Any, values: np.ndarray, color: str, title: str) -> None:
    """Draw an array as squares whose opacities are the values. The squares are visible on light and on dark pages."""
    axes.add_patch(Rectangle((0, 0), 8, 8, facecolor=FAINT, edgecolor="none"))
    for (row, column), value in np.ndenumerate(values):
        if value > 0.01:
            alpha = round(float(value), 2)
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="none", alpha=alpha))
    axes.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xticks=[], yticks=[], title=title)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    main()
