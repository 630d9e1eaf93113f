"""Readable names for a trace that JAX's profiler wrote: ``python -m natten_jax.profiler.trace PATH``.

Every trace of a JAX program is supported. If a program ran on several devices, the table shows the device with the most
device time. Names of instructions come from the compiled programs, which JAX includes in a trace by default. Names of
kernels come from their symbols.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from natten_jax.plan.devices import NoDeviceError
from natten_jax.profiler import capture, report
from natten_jax.profiler.capture import CaptureError, Event
from natten_jax.profiler.cli import Parser, at_least, run_program
from natten_jax.profiler.measure import NamedEvent, Row, named, rows_of
from natten_jax.profiler.program import Program, programs_in_trace
from natten_jax.profiler.report import format_time, print_lines, print_table

#: Maximum number of programs that are listed below the table.
_MAX_MODULES = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Read a trace, and print its launches as a table. Return the exit status."""
    parser = Parser(prog="python -m natten_jax.profiler.trace", description=__doc__, allow_abbrev=False)
    # fmt: off
    add = parser.add_argument
    add("path", type=Path, help="a *.xplane.pb file, or a folder in which the newest one is read")
    add("--module", metavar="NAME", help="only this program, such as jit_step")
    add("--steps", type=at_least(1), metavar="N", help="average over N steps (default: the runs of a single program)")
    add("--memory", action="store_true", help="also count memory fills and copies on GPUs")
    add("--all", action="store_true", help="all rows of a long table")
    add("--json", type=Path, metavar="PATH", help="write the rows to a file")
    add("--csv", type=Path, metavar="PATH", help="write the rows to a file")
    # fmt: on
    options = parser.parse_args(argv)
    return run_program(parser.prog, lambda: _run(options), (CaptureError, OSError, NoDeviceError))


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """Launches of a program in a trace, on the device with the most device time.

    Attributes:
        launches: The launches with their readable names.
    """

    launches: list[NamedEvent]

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows of a table, one per launch name. Calls and times are sums over all runs of the program."""
        return rows_of([self.launches])

    @property
    def seconds(self) -> float:
        return sum(row.runtime for row in self.rows)

    @property
    def runs(self) -> int | None:
        """Number of runs of the program. ``None`` if the events do not identify their run, as on GPUs."""
        runs = {None if event.run is None else (event.number, event.run) for _, event in self.launches}
        return None if None in runs else len(runs)


def _run(options: argparse.Namespace) -> None:
    hosts = hosts_of(options.path, with_memory=options.memory, module=options.module)
    file, modules = next(iter(hosts.items()), (options.path, {}))
    if not modules:
        raise CaptureError(f"{str(options.path)!r} holds no device events{' of that program' * bool(options.module)}")
    tables = {name: each.rows for name, each in modules.items()}
    runs = {name: each.runs for name, each in modules.items()}
    (steps,) = runs.values() if options.steps is None and len(runs) == 1 else [options.steps]
    if options.json is not None:
        rows = {name: report.rows_json(each) for name, each in tables.items()}
        report.write_json(options.json, {"modules": rows, "runs": runs, "steps": steps})
    if options.csv is not None:
        report.write_csv(options.csv, tables)
    merged = rows_of([[launch for each in modules.values() for launch in each.launches]])
    columns = ("# calls", "Runtime", "Share") if steps is None else ("# a step", "Per step", "Share")
    print_table(report.rows_table(merged, "Trace", cut=not options.all, columns=columns, steps=steps or 1))
    total = sum(each.seconds for each in modules.values())
    longest = sorted(modules.items(), key=lambda item: -item[1].seconds)[:_MAX_MODULES]
    for name, each in longest:
        count, line = each.runs, f"{name}: {format_time(each.seconds)}, {each.seconds / total:.1%}"
        if count is not None:
            line += f"; {count} run{'s' * (count > 1)} of {format_time(each.seconds / count)}"
        print_lines([line])
    if len(hosts) > 1:
        busiest = f"this is {file.name}, with the most device time"
        print_lines([f"{len(hosts)} hosts: {busiest}. Name a file to read another."])


def hosts_of(
    path: Path, *, with_memory: bool = False, module: str | None = None
) -> dict[Path, dict[str, TracedProgram]]:
    """Return the programs of each host in the newest profiler run that has device events.

    The outer key is a host's trace file, the inner key a program's name. The host with the most device time is first.

    Args:
        path: A ``*.xplane.pb`` file, or a folder that contains one.
        with_memory: Include memory fills and copies on GPUs.
        module: Name of the only program to return. ``None`` returns all programs.

    Raises:
        CaptureError: No trace was found.
    """
    for run in capture.traced_runs(path):
        by_file = {}
        for file in run:
            programs = _programs_in_file(file, with_memory)
            by_file[file] = {name: each for name, each in programs.items() if module in (None, name)}
        busy = {file: programs for file, programs in by_file.items() if programs}
        if busy:
            return dict(sorted(busy.items(), key=lambda host: -sum(each.seconds for each in host[1].values())))
    return {}


def _programs_in_file(file: Path, with_memory: bool) -> dict[str, TracedProgram]:
    """Return the programs in a trace file by name, with the launches of one platform.

    The platform is the first of GPU, TPU and CPU that has events.
    """
    profile, content = capture.read_trace(file)
    programs = programs_in_trace(content)
    for platform in ("cuda", "tpu", "cpu"):
        if events := capture.device_events(profile, platform, with_memory):
            break
    launches = defaultdict[str, list[NamedEvent]](list)
    groups = capture.grouped(events, lambda each: ((each.module or "-").partition("(")[0], each.number))
    for (module, number), module_events in groups.items():
        program = _program_of(module_events, module, number, programs)
        if platform == "cpu":
            runs = capture.grouped(module_events, lambda each: (each.device, each.run)).values()
            module_events = [event for run in runs for event in capture.without_overlap(run, program.is_container)]
        busiest = max(capture.by_device(module_events).values(), key=lambda each: sum(event.duration for event in each))
        launches[module] += named(busiest, program, "fna", platform)
    return {module: TracedProgram(module_events) for module, module_events in launches.items()}


def _program_of(launched: Sequence[Event], module: str, number: int | None, programs: Mapping[int, Program]) -> Program:
    """Return the compiled program that launched these events.

    Of the programs with the module's name, it is the program that contains the most instructions of the events. Program
    numbers only break ties, because CPU events and compiled programs in a trace are numbered differently.
    """
    names = {event.instruction for event in launched}
    named = [each for each in programs.items() if each[1].is_module(module)]
    best = max(named, key=lambda each: (len(names & each[1].instructions.keys()), each[0] == number), default=None)
    return Program(module, {}) if best is None else best[1]


if __name__ == "__main__":
    sys.exit(main())
