"""Tables on a terminal: with rich where it is installed, else in aligned columns; never wider than 100 columns."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

WIDTH = 100

Row = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        title: Line above the table.
        columns: Their names.
        rows: A cell for every column.
        footer: A last row, set apart; empty for none.
        folded: Number of the column that gives way where the table would be too wide.
    """

    title: str
    columns: Row
    rows: tuple[Row, ...]
    footer: Row = ()
    folded: int = 0


def format_time(seconds: float) -> str:
    """``1.234s``, ``1.234ms`` or ``1.234us``, whichever unit fits."""
    # The unit is chosen for the rounded value: nothing prints as 1000.000us or 1000.000ms.
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if round(seconds * scale, 3) < 1000:
            return f"{seconds * scale:.3f}{unit}"
    return f"{seconds:.3f}s"


def digits(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Print a table, without colours where the output is not a terminal."""
    file = sys.stdout if file is None else file
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print_lines(_aligned(table), file)
        return

    def cell(text: str, style: str = "") -> Text:
        return Text(text, style)  # plain text: symbols may hold what rich takes for markup

    rich_table = RichTable(title=cell(table.title))
    for i, column in enumerate(table.columns):
        is_folded = i == table.folded
        rich_table.add_column(
            cell(column), justify="center", overflow="fold" if is_folded else "ellipsis", no_wrap=not is_folded
        )
    for row in table.rows:
        rich_table.add_row(*map(cell, row))
    if table.footer:
        rich_table.add_section()
        rich_table.add_row(*(cell(text, "bold") for text in table.footer))
    console = Console(file=file, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(rich_table)


def _aligned(table: Table) -> Iterator[str]:
    """The lines of a table without any library."""
    rows = [row for row in (table.columns, *table.rows, table.footer) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from table.title.splitlines()
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines, those that are too long in parts."""
    file = sys.stdout if file is None else file
    for line in lines:
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [""]:
            print(part, file=file)
