"""Readable names for a trace that JAX's profiler wrote: ``python -m natten_jax.profiler.trace PATH``.

The trace may be of any program; of one that ran on several devices, the rows are those of the device that was busy
longest. Instructions are named after the compiled programs inside the trace, where JAX put
them (it does by default), and kernels after their symbols.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from natten_jax.profiler.cli import Parser, at_least, run_program
from natten_jax.profiler.report import measurements
from natten_jax.profiler.report.tables import format_time, print_lines, print_table
from natten_jax.profiler.run import measure
from natten_jax.profiler.run.measure import Row
from natten_jax.profiler.traces import attribution, events, trace_files, xspace
from natten_jax.profiler.traces.events import Event, Interval
from natten_jax.profiler.traces.program import Program
from natten_jax.profiler.traces.symbols import Name, order
from natten_jax.profiler.traces.trace_files import CaptureError, DamagedTrace

#: How many programs the lines below the table name.
_MOST_MODULES = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Read the trace and print its table; return the exit status."""
    parser = Parser(prog="python -m natten_jax.profiler.trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", type=Path, help="a *.xplane.pb file, or a folder in which the newest one is read")
    parser.add_argument("--module", metavar="NAME", help="only this program, such as jit_step")
    parser.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help="how many steps the averages are of; by default the runs of the program, where there is one and the trace "
        "says how often it ran, as traces of CPUs do",
    )
    parser.add_argument("--memory", action="store_true", help="count filling and copying memory on GPUs, too")
    parser.add_argument("--all", action="store_true", help="all rows of a long table")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows to a file")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the rows to a file")
    options = parser.parse_args(argv)
    parser.check_files(options, ("json", "csv"))
    return run_program(parser.prog, lambda: _run(parser.prog, options))


@dataclasses.dataclass(frozen=True)
class TracedProgram:
    """What a trace says of a program.

    Attributes:
        rows: Launches by name, on the device that was busy longest; times are those of all runs.
        runs: How often the program ran; ``None`` where the trace does not say, as those of GPUs.
    """

    rows: tuple[Row, ...]
    runs: int | None

    @property
    def seconds(self) -> float:
        """Device time."""
        return sum(row.runtime for row in self.rows)


def _run(program: str, options: argparse.Namespace) -> int:
    try:
        modules = programs_of(options.path, with_memory=options.memory)
        if options.module is not None:
            modules = {name: each for name, each in modules.items() if name == options.module}
        if not modules:
            raise CaptureError(
                f"{str(options.path)!r} holds no device events{' of that program' * bool(options.module)}"
            )
        rows = merged(each.rows for each in modules.values())
        steps = options.steps
        if steps is None and len(modules) == 1:
            steps = next(iter(modules.values())).runs
        if options.json is not None:
            found = {
                "modules": {name: measurements.rows_json(each.rows) for name, each in modules.items()},
                "runs": {name: each.runs for name, each in modules.items()},
                "steps": steps,
            }
            measurements.write_json(options.json, found)
        if options.csv is not None:
            measurements.write_csv(options.csv, {name: each.rows for name, each in modules.items()})
    except (CaptureError, OSError) as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print_table(measurements.shares_table(rows, "Trace", cut=not options.all, steps=steps))
    total = sum(each.seconds for each in modules.values())
    longest = sorted(modules.items(), key=lambda item: -item[1].seconds)[:_MOST_MODULES]
    print_lines(_module_line(name, each, total) for name, each in longest)
    return 0


def _module_line(name: str, traced: TracedProgram, total: float) -> str:
    line = f"{name}: {format_time(traced.seconds)}"
    if total:
        line += f", {traced.seconds / total:.1%}"
    if traced.runs is None:
        return line
    return f"{line}; {traced.runs} run{'s' * (traced.runs > 1)} of {format_time(traced.seconds / traced.runs)}"


def rows_by_module(path: Path, *, with_memory: bool = False) -> dict[str, tuple[Row, ...]]:
    """The rows alone of :func:`programs_of`."""
    return {name: each.rows for name, each in programs_of(path, with_memory=with_memory).items()}


def programs_of(path: Path, *, with_memory: bool = False) -> dict[str, TracedProgram]:
    """What a trace recorded on the GPUs or TPUs, or without any on the CPU, by the name of the program.

    Args:
        path: A ``*.xplane.pb`` file, or a folder that holds one.
        with_memory: Whether a GPU's filling and copying of memory counts.

    Raises:
        CaptureError: There is no trace.
        DamagedTrace: It is truncated or corrupt.
    """
    file = trace_files.trace_file(path)
    programs = xspace.programs(file)
    profile = trace_files.read(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # see capture._intervals
        try:
            for platform in ("cuda", "tpu", "cpu"):
                if intervals := events.device_intervals(profile, platform, with_memory):
                    break
        except UnicodeDecodeError as error:
            raise DamagedTrace(file, str(error)) from error
    found: dict[str, list[TracedProgram]] = defaultdict(list)
    groups = attribution.grouped(intervals, lambda each: ((each.module or "-").partition("(")[0], each.number))
    for (module, number), of_module in groups.items():
        program = _program_of([interval.event for interval in of_module], module, number, programs)
        devices = {
            device: [_events_of_device(of_device, program, platform)]
            for device, of_device in attribution.by_device(of_module).items()
        }
        busiest = attribution.busiest(devices)
        rows = measure.summarize(devices[busiest], program, "fna", platform)
        found[module].append(TracedProgram(rows, _runs(of_module, busiest)))
    return {module: _together(parts) for module, parts in found.items()}


def _runs(intervals: Sequence[Interval], device: int) -> int | None:
    """How often a program ran on a device, where its events say so."""
    runs = {interval.run for interval in intervals if interval.device == device}
    return None if None in runs else len(runs)


def _together(parts: Sequence[TracedProgram]) -> TracedProgram:
    """Programs of one name as one."""
    runs = [part.runs for part in parts if part.runs is not None]
    return TracedProgram(merged(part.rows for part in parts), sum(runs) if len(runs) == len(parts) else None)


def _events_of_device(intervals: Sequence[Interval], program: Program, platform: str) -> list[Event]:
    if platform != "cpu":
        return [interval.event for interval in intervals]
    runs = attribution.grouped(intervals, lambda each: each.run).values()
    return [event for run in runs for event in attribution.exclusive([each.event for each in run], program)]


def _program_of(launched: Sequence[Event], module: str, number: int | None, programs: Mapping[int, Program]) -> Program:
    """The program that launched events: of those with the module's name the one that has most of their instructions.

    Numbers only decide between equals: on a CPU, events count programs in another way than the trace does.
    """
    names = {event.instruction for event in launched}
    named = [each for each in programs.items() if each[1].is_module(module)]
    best = max(named, key=lambda each: (len(names & each[1].instructions.keys()), each[0] == number), default=None)
    return Program(module, {}) if best is None else best[1]


def merged(tables: Iterable[tuple[Row, ...]]) -> tuple[Row, ...]:
    """Rows of one name as one row."""
    by_name: dict[Name, Row] = {}
    for rows in tables:
        for row in rows:
            other = by_name.get(row.name)
            if other is not None:
                row = dataclasses.replace(
                    row,
                    calls=row.calls + other.calls,
                    runtimes=(row.runtime + other.runtime,),
                    symbols=tuple(dict.fromkeys((*other.symbols, *row.symbols))),
                )
            by_name[row.name] = row
    return tuple(sorted(by_name.values(), key=lambda row: (order(row.name), -row.runtime)))


if __name__ == "__main__":
    sys.exit(main())
