"""The report for people, a table with the measurement below it, and the one for programs, JSON."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, TextIO

import jax

from natten_jax.profiler.measure import Result, Row
from natten_jax.version import __version__

_WIDTH = 100
_TITLE = "Profiler results"
_COLUMNS = ("Framework", "Kernel category", "Arch", "Operation", "# calls", "Runtime")
_OPERATION = _COLUMNS.index("Operation")
_MOST_ROWS = 20


def format_time(seconds: float) -> str:
    """``1.234s``, ``1.234ms`` or ``1.234us``, whichever unit fits."""
    # The unit is chosen for the rounded value: nothing prints as 1000.000us or 1000.000ms.
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if round(seconds * scale, 3) < 1000:
            return f"{seconds * scale:.3f}{unit}"
    return f"{seconds:.3f}s"


def print_report(result: Result, file: TextIO | None = None) -> None:
    """Print the table and the lines below it."""
    file = sys.stdout if file is None else file
    cells = _cells(result)
    try:
        _print_rich(cells, file)
    except ImportError:
        print(ascii_table(cells), file=file)
    for line in summary(result):
        print(line, file=file)


def summary(result: Result) -> Iterator[str]:
    """The lines below the table."""
    options, problem = result.options, result.problem
    heads = f"{problem.heads}" if problem.heads == problem.heads_kv else f"{problem.heads}/{problem.heads_kv}"
    dims = f"{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        dims += f"/{problem.head_dim_v}"
    name = "self attention" if problem.kernel_size == problem.query_layout else "neighborhood attention"
    yield f"Problem: {name}, {problem.describe()}, batch {problem.batch}, heads {heads}, head dim {dims}, " + (
        f"{options.dtype}, {'forward and backward' if options.backprop else 'forward'}"
    )
    yield f"Backend: {_backends(result.backends)}, on {_device_name()}"
    iterations = len(result.totals)
    yield (
        f"Device time per iteration: median {format_time(result.median)}, min {format_time(min(result.totals))}, "
        f"max {format_time(max(result.totals))} ({iterations} iteration{'s' if iterations > 1 else ''}, "
        f"{options.warmup_steps} before them)"
    )
    yield f"{_digits(result.tflops)} TFLOP/s ({_digits(sum(result.flops.values()) / 1e9)} GFLOP that the mask leaves)"


def to_json(result: Result) -> dict[str, Any]:
    """Everything that was measured, in seconds, as JSON values."""
    arguments = dataclasses.asdict(result.options)
    arguments["json"] = None if result.options.json is None else str(result.options.json)
    return {
        "problem": dataclasses.asdict(result.problem),
        "arguments": arguments,
        "versions": {
            "natten_jax": __version__,
            "jax": metadata.version("jax"),
            "jaxlib": metadata.version("jaxlib"),
            "python": platform.python_version(),
        },
        "device": {
            "platform": result.device.platform,
            "name": _device_name(),
            "compute_capability": result.device.compute_capability,
        },
        "backends": result.backends,
        "rows": [
            {
                **dataclasses.asdict(row.name),
                "calls": row.calls,
                "runtime": row.runtime,
                "runtimes": row.runtimes,
                "symbols": row.symbols,
            }
            for row in result.rows
        ],
        "iteration_times": result.totals,
        "totals": {
            "rows": result.rows_total,
            "median": result.median,
            "min": min(result.totals),
            "max": max(result.totals),
        },
        "flops": {**result.flops, "total": sum(result.flops.values())},
        "tflops": result.tflops,
    }


def ascii_table(cells: Sequence[Sequence[str]], title: str = _TITLE) -> str:
    """A table of the header, the rows and, set apart, the last row, without any library."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    others = sum(widths) - widths[_OPERATION] + 3 * len(widths) + 1
    widths[_OPERATION] = min(widths[_OPERATION], _WIDTH - others)

    def line(fill: str) -> str:
        return "+" + "+".join(fill * (width + 2) for width in widths) + "+"

    def lines(row: Sequence[str]) -> Iterator[str]:
        wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = [part[i] if i < len(part) else "" for part in wrapped]
            yield "|" + "|".join(f" {part:^{width}} " for part, width in zip(parts, widths, strict=True)) + "|"

    header, *rows, total = cells
    body = [text for row in rows for text in lines(row)]
    inner = len(line("="))
    table = [title.center(inner).rstrip(), line("="), *lines(header), line("="), *body, line("="), *lines(total)]
    return "\n".join([*table, line("=")])


def _cells(result: Result) -> list[tuple[str, ...]]:
    rows = list(result.rows)
    rest: list[Row] = []
    if len(rows) > _MOST_ROWS:
        # Programs of many small steps: the table is for reading, and JSON has every row.
        rest = sorted(rows, key=lambda row: row.runtime)[: len(rows) - _MOST_ROWS + 1]
        rows = [row for row in rows if row not in rest]
    cells: list[tuple[str, ...]] = [_COLUMNS]
    cells += [(*dataclasses.astuple(row.name), str(row.calls), format_time(row.runtime)) for row in rows]
    if rest:
        calls, runtime = sum(row.calls for row in rest), sum(row.runtime for row in rest)
        cells.append(("-", "-", "-", f"{len(rest)} other operations", str(calls), format_time(runtime)))
    return [*cells, ("", "", "", "", "Total", format_time(result.rows_total))]


def _print_rich(cells: Sequence[Sequence[str]], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, *rows, total = cells
    table = Table(title=_TITLE)
    for i, column in enumerate(header):
        if i == _OPERATION:
            table.add_column(column, justify="center", overflow="fold")
        else:
            table.add_column(column, justify="center", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: symbols may hold what rich takes for markup
    table.add_section()
    table.add_row(*(Text(cell, style="bold") for cell in total))
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.width = min(console.width, _WIDTH)
    console.print(table)


def _wrap(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)] or [""]


def _backends(chosen: dict[str, str]) -> str:
    texts = []
    for part, suffix in (("", ""), ("additional_kv_", " for the additional KV")):
        names = {which: chosen[part + which] for which in ("forward", "backward") if part + which in chosen}
        if len(set(names.values())) == 1:
            texts.append(f"{names['forward']}{suffix}")
        elif names:
            texts.append(" and ".join(f"{name} ({which})" for which, name in names.items()) + suffix)
    return ", ".join(texts)


def _device_name() -> str:
    device = jax.devices()[0]
    return device.device_kind if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent where that is readable."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
