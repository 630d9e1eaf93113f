"""``--dry-run``: the backends that can run a problem, and their configurations, best first."""

from __future__ import annotations

import dataclasses
from typing import Any, TextIO

from natten_jax.performance import KernelSchedule, TilePair
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem
from natten_jax.profiler.options import Options
from natten_jax.profiler.report.measurements import context, problem_line
from natten_jax.profiler.report.tables import Table, digits, format_time, print_lines, print_table
from natten_jax.profiler.run.workload import request_of
from natten_jax.profiler.search.configurations import (
    Listing,
    listings,
    main_sub_call,
    rejections,
    remarks,
    tile_text,
    windows_problem,
)
from natten_jax.simulator import Simulation

#: What is said of times that were not measured.
STATIC = "Times are static, from what the maker publishes of the chip: nothing was measured on a TPU."


def print_dry_run(options: Options, device: Device, file: TextIO | None = None) -> bool:
    """Print the tables; return whether any backend can run the problem."""
    print_lines([problem_line(options, request_of(options).problem), f"Device: {device}"], file)
    runs = _print_tables(options, main_sub_call(options).request.problem, device, file)
    windows = windows_problem(options)
    if windows is not None:
        line = "Windows (-w) smaller than the input have tiles with shapes, here in their order for windows as large:"
        print_lines(["", line], file)
        _print_tables(options, windows, device, file)
    return runs


def _print_tables(options: Options, problem: Problem, device: Device, file: TextIO | None) -> bool:
    found = list(listings(options, problem, device))
    for name in dict.fromkeys(each.backend for each in found):
        print_lines(["", f"Use case is compatible with backend {name}."], file)
        for each in found:
            if each.backend == name:
                print_table(_table(each, options, device), file)
                if each.static_chip(device):
                    print_lines([STATIC], file)
                print_lines(remarks(each.calibration(device)), file)
                if each.schedules:  # what the words in their column are
                    names = (f"{name} is KernelSchedule.{KernelSchedule(name).natten_name}" for name in each.schedules)
                    print_lines([f"kernel_schedule: {', '.join(names)}"], file)
    if rejected := rejections(options, problem, device):
        lines = (f"Use case is not compatible with backend {name}: {why}." for name, why in rejected.items())
        print_lines(["", *lines], file)
    return bool(found)


def to_json(options: Options, device: Device) -> dict[str, Any]:
    """Every configuration, with what the simulator says about it."""
    windows = windows_problem(options)
    problems = [main_sub_call(options).request.problem, *([] if windows is None else [windows])]
    return {
        **context(options, request_of(options).problem),
        "dry_run_device": dataclasses.asdict(device),
        "configurations": [
            {
                "backend": str(each.backend),
                "pass": each.pass_,
                "q_tile_shape": pair[0],
                "kv_tile_shape": pair[1],
                "kernel_schedules": each.schedules,
                **_figures(each.simulate(pair, device)),
                "is_static": each.static_chip(device) is not None,
            }
            for problem in problems
            for each in listings(options, problem, device)
            for pair in each.pairs
        ],
        "rejections": {
            str(name): why for problem in problems for name, why in rejections(options, problem, device).items()
        },
    }


def _figures(simulation: Simulation) -> dict[str, Any]:
    shares = ("full_share", "masked_share", "padding_share", "wasted_share")
    return {
        "inner_tiles_per_outer_tile": simulation.counts.inner_per_outer,
        **{name: getattr(simulation.counts, name) for name in shares},
        "predicted_seconds": simulation.seconds,
    }


def _table(listing: Listing, options: Options, device: Device) -> Table:
    prefix, inner = ("", "KV/Q tile") if listing.pass_ == "forward" else ("backward_", "Q/KV tile")
    suffix = "size" if listing.problem.operator == "fmha" else "shape"
    schedule = ("kernel_schedule",) if listing.schedules else ()
    columns = (f"{prefix}q_tile_{suffix}", f"{prefix}kv_tile_{suffix}", *schedule)
    columns += (inner, "no mask", "waste", "predicted")

    def row(pair: TilePair) -> tuple[str, ...]:
        simulation = listing.simulate(pair, device)
        counts, schedules = simulation.counts, [", ".join(listing.schedules)] if listing.schedules else []
        shares = digits(counts.inner_per_outer), f"{counts.full_share:.0%}", f"{counts.wasted_share:.0%}"
        time = "-" if simulation.seconds is None else format_time(simulation.seconds)
        return (*map(tile_text, pair), *schedules, *shares, time)

    rows = [row(pair) for pair in listing.pairs[: options.max_configs or None]]
    if len(rows) < len(listing.pairs):
        rows.append(("...",) * len(columns))
    title = f"Backend: {listing.backend}\n{listing.pass_.capitalize()} pass configurations"
    return Table(title, columns, tuple(rows))
