"""Reports of measurements: tables and lines on a terminal, JSON, CSV and bar charts."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import platform
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import jax

from natten_jax import simulator
from natten_jax.cost_model import small_windows
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import NoDeviceError, default_jax_device
from natten_jax.profiler.measure import Result, Row
from natten_jax.profiler.options import Options
from natten_jax.version import __version__

Cells = tuple[str, ...]

#: Maximum width of tables and lines, in characters.
WIDTH = 100

#: Column titles of a table of rows: ``_NAMES`` for the parts of a row's name, ``_COLUMNS`` for the row's measurements.
_NAMES, _COLUMNS = ("Framework", "Kernel category", "Arch", "Operation"), ("# calls", "Runtime")

#: Maximum number of rows of a table, unless all rows are requested.
_MAX_ROWS = 20

#: Share of the total time below which a row is gray in a chart, and absent from the legend.
_MIN_SHARE = 0.01


# Tables and lines.


@dataclasses.dataclass(frozen=True)
class Table:
    """Text in rows and columns.

    Attributes:
        title: Line above the table.
        columns: Names of the columns.
        rows: Rows of the table. Each has one cell per column.
        footer: Cells of a final row, such as the total. Default: no footer.
        folded: Index of the column whose text is wrapped if the table is too wide.
    """

    title: str
    columns: Cells
    rows: tuple[Cells, ...]
    footer: Cells = ()
    folded: int = 0


def format_time(seconds: float) -> str:
    """Return text such as ``1.234s``, ``1.234ms`` or ``1.234us``."""
    # The rounded value determines the unit. Otherwise, 999.9999us would be printed as 1000.000us, not as 1.000ms.
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if round(seconds * scale, 3) < 1000:
            return f"{seconds * scale:.3f}{unit}"
    return f"{seconds:.3f}s"


def digits(value: float) -> str:
    """Return a number with three significant digits. Numbers of at least 1000 are rounded to an integer."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Print a table with rich, or in aligned columns if rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print_lines(_aligned(table), file)
        return
    # rich parses brackets in strings as markup, and symbols can contain brackets. rich does not parse Text objects.
    rich_table = RichTable(title=Text(table.title))
    for i, column in enumerate(table.columns):
        excess: dict[str, Any] = {"overflow": "fold"} if i == table.folded else {"no_wrap": True}
        rich_table.add_column(Text(column), justify="center", **excess)
    for row in table.rows:
        rich_table.add_row(*map(Text, row))
    if table.footer:
        rich_table.add_section()
        rich_table.add_row(*(Text(text, "bold") for text in table.footer))
    console = Console(file=file, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(rich_table)


def _aligned(table: Table) -> Iterator[str]:
    rows = [row for row in (table.columns, *table.rows, table.footer) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from table.title.splitlines()
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines, wrapped if they are too long."""
    for line in lines:
        for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) or [""]:
            print(part, file=file)


# Results of measurements on a terminal.


def print_report(result: Result, file: TextIO | None = None) -> None:
    """Print the table of a measurement, and the summary below the table."""
    print_table(result_table(result), file)
    print_lines(_summary(result), file)


def print_baseline(result: Result, baseline: Result) -> None:
    """Print the table of ``baseline``, a baseline or another backend, and the speedup over ``baseline``.

    For a baseline, also print the upper bound of the speedup.
    """
    name, bound = baseline.options.backend, result.flop_bound_over(baseline)
    print_table(result_table(baseline, f"Baseline: {name}"))
    lines = [
        f"Speedup over {name}: {digits(result.speedup_over(baseline))}X (medians {format_time(baseline.median)} / "
        f"{format_time(result.median)}, measured alternately)"
    ]
    if baseline.options.is_baseline:
        lines.append(f"FLOP-wise speedup (upper bound) with {1 - 1 / bound:.2%} sparsity: {digits(bound)}X")
        if result.speedup_over(baseline) > bound:
            rates = f"{digits(baseline.tflops)} against {digits(result.tflops)} TFLOP/s"
            lines.append(f"The bound is for equal rates; {name} computes fewer operations per second ({rates}).")
    print_lines(lines)


def result_table(result: Result, title: str = "Profiler results") -> Table:
    count = result.options.devices
    which = "" if count == 1 else f" of device {result.busiest}, the busiest of {count}"
    return rows_table(result.rows, title + which, cut=not result.options.verbose)


def rows_table(rows: Sequence[Row], title: str, *, cut: bool, columns: Cells = _COLUMNS, steps: int = 1) -> Table:
    """Return a table of measured rows.

    Args:
        rows: The rows.
        title: Line above the table.
        cut: If there are more than ``_MAX_ROWS`` rows, merge the rows with the least time into one row.
        columns: Titles of the columns for the number of calls, the time, and (optional) the share of the total time.
        steps: Divisor of calls and times, for averages per step.
    """
    total = sum(row.runtime for row in rows)

    def figures(part: Sequence[Row]) -> Cells:
        calls, runtime = sum(row.calls for row in part), sum(row.runtime for row in part)
        share = f"{runtime / total:.1%}" if total else "-"
        return (f"{calls / steps:g}", format_time(runtime / steps), share)[: len(columns)]

    kept, rest = list(rows), list[Row]()
    if cut and len(kept) > _MAX_ROWS:
        # Rows of collectives are merged only after all other rows. JSON output always has every row.
        smallest = sorted(kept, key=lambda row: (row.name.category == "collective", row.runtime))
        rest = smallest[: len(kept) - _MAX_ROWS + 1]
        kept = [row for row in kept if row not in rest]
    cells = [(*dataclasses.astuple(row.name), *figures([row])) for row in kept]
    if rest:
        cells.append(("-", "-", "-", f"{len(rest)} other operations", *figures(rest)))
    footer = ("", "", "", "", "Total", *figures(rows)[1:])
    return Table(title, (*_NAMES, *columns), tuple(cells), footer, _NAMES.index("Operation"))


def _summary(result: Result) -> Iterator[str]:
    """Yield the lines that follow the table of a measurement."""
    options = result.options
    yield problem_line(options)
    devices = _name(default_jax_device()) + (f": {options.describe_split()}" if options.devices > 1 else "")
    yield f"Backend: {_backends(result.backends)}, on {devices}"
    for pass_, pair in result.tiles.items():
        problem = result.plans[pass_].problem
        simulation = simulator.simulate(problem, pair, pass_, calibration=result.calibration(pass_))
        visits = "KV tiles per query tile" if pass_ == "forward" else "query tiles per KV tile"
        predicted = "" if simulation.seconds is None else f"; {format_time(simulation.seconds)} predicted"
        yield (
            f"Tiles ({pass_}): query ({', '.join(map(str, pair[0]))}), key/value ({', '.join(map(str, pair[1]))}); "
            f"{digits(simulation.counts.inner_per_outer)} {visits}, {simulation.counts.full_share:.0%} without a mask"
            f"{predicted}"
        )
    if options.devices > 1:
        medians = [statistics.median(times) for times in result.device_times.values()]
        shared = " (all devices are on one CPU)" if result.device.platform == "cpu" else ""
        yield (
            f"Devices: medians of {format_time(min(medians))} to {format_time(max(medians))}{shared}; the table and "
            f"the device time are of device {result.busiest}, the busiest"
        )
        collective = [row.runtime for row in result.rows if row.name.category == "collective"]
        waiting = f"{format_time(sum(collective))}, including the wait for slower devices"
        yield f"Collectives: {waiting if collective else 'none'}"
    iterations = len(result.totals)
    yield (
        f"Device time: median {format_time(result.median)}, min {format_time(min(result.totals))}, "
        f"max {format_time(max(result.totals))} ({iterations} iteration{'s' if iterations > 1 else ''}, "
        f"{options.warmup_steps} warmup steps)"
    )
    yield f"{digits(result.tflops)} TFLOP/s ({digits(sum(result.flops.values()) / 1e9)} GFLOP of unmasked pairs)"


def problem_line(options: Options) -> str:
    """Return a line that describes the profiled problem."""
    problem = options.problem
    heads = "/".join(map(str, dict.fromkeys((problem.heads, problem.heads_kv))))
    dims = "/".join(map(str, dict.fromkeys((problem.head_dim, problem.head_dim_v))))
    name = "self attention" if problem.kernel_size == problem.query_layout else "neighborhood attention"
    return (
        f"Problem: {name}, {problem.describe()}, batch {problem.batch}, heads {heads}, head dim {dims}, "
        f"{problem.element.short_name}, {' and '.join(options.passes)}"
    )


def _backends(chosen: dict[str, str]) -> str:
    texts = []
    for part, suffix in (("", ""), ("additional_kv_", " for the additional KV")):
        names = {pass_: chosen[part + pass_] for pass_ in PASSES if part + pass_ in chosen}
        if len(set(names.values())) == 1:
            texts.append(f"{names['forward']}{suffix}")
        elif names:
            texts.append(" and ".join(f"{name} ({pass_})" for pass_, name in names.items()) + suffix)
    return ", ".join(texts)


# Files.


def write_json(path: Path, results: Any) -> None:
    """Write results to a JSON file in ASCII. Paths become strings."""
    path.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")


def write_csv(path: Path, tables: dict[str, tuple[Row, ...]]) -> None:
    """Write the rows of all tables to one CSV file, with times in seconds. ``tables`` maps table names to rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["table", "framework", "category", "arch", "operation", "calls", "median", "min", "max"])
        for name, rows in tables.items():
            for row in rows:
                times = row.runtime, min(row.runtimes), max(row.runtimes)
                writer.writerow([name, *dataclasses.astuple(row.name), row.calls, *times])


def to_json(result: Result) -> dict[str, Any]:
    """Return a measurement as JSON values. Times are in seconds."""
    times, options, rows = result.totals, result.options, sum(row.runtime for row in result.rows)
    devices: dict[str, Any] = {"count": options.devices, "split": options.split, "busiest": result.busiest}
    devices["iteration_times"] = result.device_times
    return {
        **context(options),
        **({"devices": devices} if options.devices > 1 else {}),
        "backends": result.backends,
        "tiles": {pass_: _tiles_json(result, pass_, pair) for pass_, pair in result.tiles.items()},
        "rows": rows_json(result.rows),
        "iteration_times": times,
        "totals": {"rows": rows, "median": result.median, "min": min(times), "max": max(times)},
        "flops": {**result.flops, "total": sum(result.flops.values())},
        "tflops": result.tflops,
    }


def _tiles_json(result: Result, pass_: Pass, pair: TilePair) -> dict[str, Any]:
    """Return JSON values about a pass's tiles: shapes, tokens per tile, and thread blocks per SM (None if unknown)."""
    occupancy, model, problem = None, result.calibration(pass_), result.plans[pass_].problem
    if model is not None and not small_windows.is_for(model, problem, pass_, pair):
        kernel = model.kernel(problem, pair, pass_)
        occupancy = None if kernel is None else kernel.side_by_side
    q_tile, kv_tile = pair
    sizes = {"tile_m": math.prod(q_tile), "tile_n": math.prod(kv_tile)}
    return {"query": q_tile, "key_value": kv_tile, **sizes, "occupancy": occupancy}


def comparison_json(result: Result, baseline: Result) -> dict[str, Any]:
    """Return JSON values: the baseline's measurement, the speedup over the baseline, and the speedup's upper bound."""
    speedup, bound = result.speedup_over(baseline), result.flop_bound_over(baseline)
    return {"baseline": to_json(baseline), "speedup": speedup, "flop_bound": bound}


def rows_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    names = ("calls", "runtime", "runtimes", "symbols")
    return [{**dataclasses.asdict(row.name), **{name: getattr(row, name) for name in names}} for row in rows]


def context(options: Options) -> dict[str, Any]:
    """Return the JSON values that all result files contain: problem, flags, versions and device."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return {
        "problem": dataclasses.asdict(options.problem),
        "arguments": options.as_given(),
        "versions": {"natten_jax": __version__, **versions, "python": platform.python_version()},
        **_device_json(),
    }


def _device_json() -> dict[str, Any]:
    """Return JSON values about the default device. ``platform`` is text such as ``NVIDIA H200 (sm90)``."""
    try:
        device = default_jax_device()
    except NoDeviceError:
        return {"platform": None, "device": None}
    capability = getattr(device, "compute_capability", None)
    architecture = "" if capability is None else f" (sm{capability.replace('.', '')})"
    name = "cuda" if device.platform == "gpu" else device.platform
    described = {"platform": name, "name": _name(device), "compute_capability": capability}
    return {"platform": f"{device.device_kind}{architecture}", "device": described}


def _name(device: jax.Device) -> str:
    """Return the product name of a device, followed by the platform in parentheses unless it is a CPU."""
    return device.device_kind if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"


def plot_rows(path: Path, tables: dict[str, tuple[Row, ...]], title: str) -> None:
    """Draw a bar chart with one bar per table. Each row of the table is a segment of the bar.

    Args:
        path: Image file. The suffix selects the format.
        tables: Name of a table -> its rows.
        title: Line above the chart.

    Raises:
        ValueError: matplotlib is not installed, or it does not support the format of the file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(10, 2.0 + 0.9 * len(tables)), layout="constrained")
    axes = figure.subplots()
    colors: dict[str, str] = {}
    for position, (name, rows) in enumerate(tables.items()):
        left, total = 0.0, sum(row.runtime for row in rows)
        for row in rows:
            label, color = None, "gray"
            if row.runtime >= _MIN_SHARE * total:
                operation = _without_formulas(f"{row.name.operation} ({row.name.framework})")
                label = None if operation in colors else operation
                color = colors.setdefault(operation, f"C{len(colors) % 10}")
            axes.barh(position, 1e3 * row.runtime, left=1e3 * left, color=color, label=label)
            left += row.runtime
        axes.text(1e3 * left, position, f" {_without_formulas(name)}: {format_time(left)}", va="center")
    axes.set_yticks([])
    axes.set_xlabel("milliseconds")
    axes.set_title(_without_formulas(title), fontsize="medium")
    axes.margins(x=0.25)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path)


def _without_formulas(text: str) -> str:
    return text.replace("$", r"\$")
