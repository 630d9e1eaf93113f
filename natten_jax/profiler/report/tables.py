"""Tables on a terminal: with rich where it is installed, else in plain characters; never wider than 100 columns."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TextIO

from natten_jax.profiler.cli.printable import encoding_of, printable

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
    table = _printable(table, file)
    try:
        _print_rich(table, file)
    except ImportError:
        print(plain(table), file=file)


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines, those that are too long in parts."""
    file = sys.stdout if file is None else file
    for line in lines:
        text = printable(line, file)
        for part in textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [""]:
            print(part, file=file)


def _printable(table: Table, file: TextIO) -> Table:
    def row(cells: Row) -> Row:
        return tuple(printable(cell, file) for cell in cells)

    return dataclasses.replace(
        table,
        title=printable(table.title, file),
        columns=row(table.columns),
        rows=tuple(map(row, table.rows)),
        footer=row(table.footer),
    )


def plain(table: Table) -> str:
    """The table without any library."""
    every_row = [table.columns, *table.rows, *([table.footer] if table.footer else [])]
    widths = [max(len(row[i]) for row in every_row) for i in range(len(table.columns))]
    others = sum(widths) - widths[table.folded] + 3 * len(widths) + 1
    widths[table.folded] = max(1, min(widths[table.folded], WIDTH - others))

    def rule(fill: str) -> str:
        return "+" + "+".join(fill * (width + 2) for width in widths) + "+"

    def lines(row: Sequence[str]) -> Iterator[str]:
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, folded))):
            parts = [part[i] if i < len(part) else "" for part in folded]
            yield "|" + "|".join(f" {part:^{width}} " for part, width in zip(parts, widths, strict=True)) + "|"

    text = [table.title.center(len(rule("="))).rstrip(), rule("="), *lines(table.columns), rule("=")]
    text += [line for row in table.rows for line in lines(row)]
    if table.footer:
        text += [rule("="), *lines(table.footer)]
    return "\n".join([*text, rule("=")])


def _print_rich(table: Table, file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(title=Text(table.title))
    # rich has borders in ASCII, too.
    is_unicode = encoding_of(file).lower().startswith("utf")
    for i, column in enumerate(table.columns):
        is_folded = i == table.folded
        overflow: Literal["fold", "ellipsis", "crop"] = "fold" if is_folded else "ellipsis" if is_unicode else "crop"
        rich_table.add_column(column, justify="center", overflow=overflow)
        rich_table.columns[-1].no_wrap = not is_folded
    for row in table.rows:
        rich_table.add_row(*map(Text, row))  # plain text: symbols may hold what rich takes for markup
    if table.footer:
        rich_table.add_section()
        rich_table.add_row(*(Text(cell, style="bold") for cell in table.footer))
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.width = min(console.width, WIDTH)
    console.print(rich_table)


def _fold(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)] or [""]
