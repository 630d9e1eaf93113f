"""Reports of measurements: for people a table with a summary below it, for programs JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from natten_jax import simulator
from natten_jax.cost_model import small_windows
from natten_jax.cost_model.calibration import Calibration
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import NoDeviceError, default_jax_device
from natten_jax.plan.plan import BackendId
from natten_jax.problem import Problem
from natten_jax.profiler.options import Options
from natten_jax.profiler.report.tables import Table, digits, format_time, print_lines, print_table
from natten_jax.profiler.run import split
from natten_jax.profiler.run.measure import Comparison, Result, Row
from natten_jax.profiler.run.workload import sub_calls_of_device
from natten_jax.version import __version__

COLUMNS = ("Framework", "Kernel category", "Arch", "Operation", "# calls", "Runtime")
_MOST_ROWS = 20


def print_report(result: Result, file: TextIO | None = None) -> None:
    """Print the table and the lines below it."""
    print_table(result_table(result), file)
    print_lines(_summary(result), file)


def print_baseline(comparison: Comparison, file: TextIO | None = None) -> None:
    """Print the baseline's table, and the speedup next to its bound."""
    baseline, bound = comparison.baseline, comparison.flop_bound
    print_table(result_table(baseline, f"Baseline: {comparison.name}"), file)
    lines = [
        f"Speedup over {comparison.name}: {digits(comparison.speedup)}X (medians {format_time(baseline.median)} / "
        f"{format_time(comparison.result.median)}, measured in turns)"
    ]
    if baseline.options.is_baseline:
        lines.append(f"FLOP-wise speedup (upper bound) with {1 - 1 / bound:.2%} sparsity: {digits(bound)}X")
    print_lines(lines, file)


def _summary(result: Result) -> Iterator[str]:
    """The lines below the table."""
    yield problem_line(result.options, result.problem)
    yield f"Backend: {_backends(result.backends)}, on {_devices(result.options)}"
    yield from _tile_lines(result)
    yield from _device_lines(result)
    iterations = len(result.totals)
    yield (
        f"Device time: median {format_time(result.median)}, min {format_time(min(result.totals))}, "
        f"max {format_time(max(result.totals))} ({iterations} iteration{'s' if iterations > 1 else ''}, "
        f"{result.options.warmup_steps} before them)"
    )
    yield f"{digits(result.tflops)} TFLOP/s ({digits(sum(result.flops.values()) / 1e9)} GFLOP that the mask leaves)"


def problem_line(options: Options, problem: Problem) -> str:
    """What is computed."""
    heads = f"{problem.heads}" if problem.heads == problem.heads_kv else f"{problem.heads}/{problem.heads_kv}"
    dims = f"{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        dims += f"/{problem.head_dim_v}"
    name = "self attention" if problem.kernel_size == problem.query_layout else "neighborhood attention"
    return f"Problem: {name}, {problem.describe()}, batch {problem.batch}, heads {heads}, head dim {dims}, " + (
        f"{options.dtype}, {'forward and backward' if options.backprop else 'forward'}"
    )


def _devices(options: Options) -> str:
    return _device_name() if options.devices == 1 else f"{_device_name()}: {split.describe(options)}"


def _device_lines(result: Result) -> Iterator[str]:
    if result.options.devices == 1:
        return
    medians = [statistics.median(times) for times in result.device_times.values()]
    shared = ", which share the processor" if result.device.platform == "cpu" else ""
    yield (
        f"Devices: medians of {format_time(min(medians))} to {format_time(max(medians))}{shared}; the table and the "
        f"device time are of device {result.busiest}, which was busy longest"
    )
    collective = [row.runtime for row in result.rows if row.name.category == "collective"]
    if collective:
        yield f"Collectives: {format_time(sum(collective))}, the wait for slower devices included"
    else:
        yield "Collectives: none"


def _tiled_passes(result: Result) -> Iterator[tuple[Pass, TilePair, Problem, Calibration | None]]:
    """The passes of a backend with tiles: these, what each device computes, and the time model of its kernels."""
    for pass_, pair in result.tiles.items():
        family = BackendId.parse(result.backends[pass_]).family
        calibration = simulator.calibration_for(family, result.device.compute_capability)
        yield pass_, pair, sub_calls_of_device(result.options)[0].request.problem, calibration


def _tile_lines(result: Result) -> Iterator[str]:
    for pass_, pair, problem, calibration in _tiled_passes(result):
        simulation = simulator.simulate(problem, pair, pass_, calibration=calibration)
        counts = simulation.counts
        visits = "KV tiles per query tile" if pass_ == "forward" else "query tiles per KV tile"
        line = (
            f"Tiles ({pass_}): query ({', '.join(map(str, pair[0]))}), key/value ({', '.join(map(str, pair[1]))}); "
            f"{digits(counts.inner_per_outer)} {visits}, {counts.full_share:.0%} without a mask"
        )
        if simulation.seconds is not None:
            line += f"; {format_time(simulation.seconds)} predicted"
        yield line


def result_table(result: Result, title: str = "Profiler results") -> Table:
    """The measured kernels as a table; of many, the rows that take most of the time."""
    count = result.options.devices
    which = "" if count == 1 else f" of device {result.busiest}, the busiest of {count}"
    return rows_table(result.rows, title + which, cut=not result.options.verbose)


def rows_table(every_row: tuple[Row, ...], title: str, *, cut: bool) -> Table:
    """Rows as a table; ``cut`` keeps those that take most of the time."""
    rows, rest = _cut(every_row) if cut else (list(every_row), [])
    cells = [(*dataclasses.astuple(row.name), str(row.calls), format_time(row.runtime)) for row in rows]
    if rest:
        calls, runtime = sum(row.calls for row in rest), sum(row.runtime for row in rest)
        cells.append((*_names_of_rest(rest), str(calls), format_time(runtime)))
    total = format_time(sum(row.runtime for row in every_row))
    return Table(title, COLUMNS, tuple(cells), ("", "", "", "", "Total", total), COLUMNS.index("Operation"))


def shares_table(every_row: tuple[Row, ...], title: str, *, cut: bool, steps: int | None) -> Table:
    """Rows of a trace, with their share of the time; averages of a step, not sums, where steps are counted."""
    rows, rest = _cut(every_row) if cut else (list(every_row), [])
    total = sum(row.runtime for row in every_row)

    def figures(part: Sequence[Row]) -> tuple[str, ...]:
        calls, runtime = sum(row.calls for row in part), sum(row.runtime for row in part)
        share = f"{runtime / total:.1%}" if total else "-"
        return f"{calls / (steps or 1):g}", format_time(runtime / (steps or 1)), share

    cells = [(*dataclasses.astuple(row.name), *figures([row])) for row in rows]
    if rest:
        cells.append((*_names_of_rest(rest), *figures(rest)))
    columns = (*COLUMNS[:-2], *(COLUMNS[-2:] if steps is None else ("# a step", "Per step")), "Share")
    footer = ("", "", "", "", "Total", *figures(every_row)[1:])
    return Table(title, columns, tuple(cells), footer, columns.index("Operation"))


def _names_of_rest(rest: Sequence[Row]) -> tuple[str, ...]:
    return "-", "-", "-", f"{len(rest)} other operations"


def _cut(every_row: tuple[Row, ...]) -> tuple[list[Row], list[Row]]:
    """The rows that take most of the time, and the rest."""
    rows = list(every_row)
    rest: list[Row] = []
    if len(rows) > _MOST_ROWS:
        # Programs of many small steps: the table is for reading, and JSON has every row. What devices exchange stays.
        smallest = sorted(rows, key=lambda row: (row.name.category == "collective", row.runtime))
        rest = smallest[: len(rows) - _MOST_ROWS + 1]
        rows = [row for row in rows if row not in rest]
    return rows, rest


def to_json(result: Result) -> dict[str, Any]:
    """Everything that was measured, in seconds, as JSON values."""
    times = result.totals
    return {
        **context(result.options, result.problem),
        **({"devices": _devices_json(result)} if result.options.devices > 1 else {}),
        "backends": result.backends,
        "tiles": {each[0]: _tiles_json(*each) for each in _tiled_passes(result)},
        "rows": rows_json(result.rows),
        "iteration_times": times,
        "totals": {"rows": result.rows_total, "median": result.median, "min": min(times), "max": max(times)},
        "flops": {**result.flops, "total": sum(result.flops.values())},
        "tflops": result.tflops,
    }


def _devices_json(result: Result) -> dict[str, Any]:
    """Over how many devices what is split, each one's times, and whose the rows and the other times are."""
    return {
        "count": result.options.devices,
        "split": result.options.split,
        "busiest": result.busiest,
        "iteration_times": {str(device): times for device, times in result.device_times.items()},
    }


def _tiles_json(pass_: Pass, pair: TilePair, problem: Problem, model: Calibration | None) -> dict[str, Any]:
    """Tile shapes, their sizes, and how many thread blocks share a multiprocessor, where that is known."""
    is_known = model is not None and not small_windows.is_for(model, problem, pass_, pair)
    kernel = model.kernel(problem, pair, pass_) if model is not None and is_known else None
    return {
        "query": pair[0],
        "key_value": pair[1],
        "tile_m": math.prod(pair[0]),
        "tile_n": math.prod(pair[1]),
        "occupancy": None if kernel is None else kernel.side_by_side,
    }


def baseline_json(comparison: Comparison) -> dict[str, Any]:
    """What a comparison adds to its result."""
    return {
        "baseline": to_json(comparison.baseline),
        "speedup": comparison.speedup,
        "flop_bound": comparison.flop_bound,
    }


def context(options: Options, problem: Problem) -> dict[str, Any]:
    """What every result file says: the problem, the command line, the versions and the device."""
    arguments = options.as_given()
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return {
        "problem": dataclasses.asdict(problem),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
        "versions": {"natten_jax": __version__, **versions, "python": platform.python_version()},
        **_device_json(),
    }


def _device_json() -> dict[str, Any]:
    """The default device, with its architecture such as ``NVIDIA H200 (sm90)``; ``None`` where JAX has none."""
    try:
        device = default_jax_device()
    except NoDeviceError:
        return {"platform": None, "device": None}
    capability = getattr(device, "compute_capability", None)
    described = {
        "platform": "cuda" if device.platform == "gpu" else device.platform,
        "name": _device_name(),
        "compute_capability": capability,
    }
    architecture = "" if capability is None else f" (sm{capability.replace('.', '')})"
    return {"platform": f"{device.device_kind}{architecture}", "device": described}


def rows_json(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """The rows as JSON values."""
    return [
        {
            **dataclasses.asdict(row.name),
            "calls": row.calls,
            "runtime": row.runtime,
            "runtimes": row.runtimes,
            "symbols": row.symbols,
        }
        for row in rows
    ]


def write_csv(path: Path, tables: dict[str, tuple[Row, ...]]) -> None:
    """Write rows, with seconds, as comma-separated values; ``tables`` maps a name to its rows."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["table", "framework", "category", "arch", "operation", "calls", "median", "min", "max"])
    for name, rows in tables.items():
        for row in rows:
            times = row.runtime, min(row.runtimes), max(row.runtimes)
            writer.writerow([name, *dataclasses.astuple(row.name), row.calls, *times])
    write_file(path, text.getvalue())


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file as a whole: readers find the old content or the new content. Text is encoded as UTF-8."""
    encoded = content.encode() if isinstance(content, str) else content
    if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout, a pipe
        path.write_bytes(encoded)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(encoded)
    os.replace(temporary, path)


def write_json(path: Path, results: Any) -> None:
    """Write results as JSON, in ASCII."""
    write_file(path, json.dumps(results, indent=2) + "\n")


def _backends(chosen: dict[str, str]) -> str:
    texts = []
    for part, suffix in (("", ""), ("additional_kv_", " for the additional KV")):
        names = {pass_: chosen[part + pass_] for pass_ in PASSES if part + pass_ in chosen}
        if len(set(names.values())) == 1:
            texts.append(f"{names['forward']}{suffix}")
        elif names:
            texts.append(" and ".join(f"{name} ({pass_})" for pass_, name in names.items()) + suffix)
    return ", ".join(texts)


def _device_name() -> str:
    """The default device, as its vendor calls it."""
    device = default_jax_device()
    return device.device_kind if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"
