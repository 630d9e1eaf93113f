"""How drawn figures are written."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure; an SVG is the same whenever the same figure is written, and its text stays text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "natten_jax", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        path.write_text(re.sub(r"(\.\d\d)\d+", r"\1", path.read_text()))
