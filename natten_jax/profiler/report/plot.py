"""A bar chart of a profiler's table."""

from __future__ import annotations

import io
from pathlib import Path

from natten_jax.profiler.report.measurements import write_file
from natten_jax.profiler.report.tables import format_time
from natten_jax.profiler.run.measure import Row

#: Rows that take less of the whole share one colour.
_SMALL = 0.01


def plot_rows(path: Path, tables: dict[str, tuple[Row, ...]], title: str) -> None:
    """Draw runtimes as bars: per table, one bar stacked of its rows.

    Args:
        path: Image file; its suffix says in which format.
        tables: Rows by what they are from.
        title: Line above the chart.

    Raises:
        ValueError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(10, 2.0 + 0.9 * len(tables)), layout="constrained")
    axes = figure.subplots()
    colors: dict[str, str] = {}
    for position, (name, rows) in enumerate(tables.items()):
        left, total = 0.0, sum(row.runtime for row in rows)
        shown = [(f"{row.name.operation} ({row.name.framework})", row.runtime) for row in rows]
        small = [runtime for _, runtime in shown if runtime < _SMALL * total]
        shown = [each for each in shown if each[1] >= _SMALL * total] + [("others", sum(small))]
        for label, runtime in shown:
            is_new = label not in colors and runtime > 0
            color = colors.setdefault(label, f"C{len(colors) % 10}") if runtime > 0 else "none"
            label = _drawable(label)
            axes.barh(position, 1e3 * runtime, left=1e3 * left, color=color, label=label if is_new else None)
            left += runtime
        axes.text(1e3 * left, position, f" {_drawable(name)}: {format_time(left)}", va="center")
    axes.set_yticks([])
    axes.set_xlabel("milliseconds")
    axes.set_title(_drawable(title), fontsize="medium")
    axes.margins(x=0.25)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    format_ = path.suffix.lstrip(".") or rcParams["savefig.format"]
    if not path.suffix.lstrip("."):
        path = path.with_name(f"{path.name.rstrip('.')}.{format_}")  # as Matplotlib names it
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=format_)
    except ValueError as error:
        raise ValueError(f"--plot {str(path)!r}: {error}") from None
    write_file(path, picture.getvalue())


def _drawable(text: str) -> str:
    """Return text that Matplotlib does not parse as a formula."""
    return text.replace("$", r"\$")
