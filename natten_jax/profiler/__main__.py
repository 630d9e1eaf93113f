"""The profiler's command line program."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.ops.calls import IgnoredArgumentWarning
from natten_jax.plan.devices import CPU, Device, NoDeviceError, default_device
from natten_jax.plan.plan import BackendId
from natten_jax.profiler.arguments import parse, warn_about_ignored_flags
from natten_jax.profiler.capture import CaptureError
from natten_jax.profiler.cli import INTERRUPTED, PROGRAM, print_error, print_warning, run_program
from natten_jax.profiler.options import Options
from natten_jax.profiler.report import dry_run, measurements, simulate
from natten_jax.profiler.report.plot import plot_rows
from natten_jax.profiler.report.tables import digits, format_time, print_lines, print_table
from natten_jax.profiler.run.measure import compare, profile
from natten_jax.profiler.run.workload import KNOWN_FAMILIES, UnavailableBackend, check_available, request_of
from natten_jax.profiler.search.optimize import optimize
from natten_jax.profiler.search.optimum import Optimum, best_table, configuration, search_json


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status.

    0: done. 1: the problem, the backend or the trace cannot be worked with here. 2: the command line is wrong. 130:
    interrupted.
    """
    options = parse(argv)
    with warnings.catch_warnings():
        # The profiler warns of the flags instead, before anything runs.
        warnings.simplefilter("ignore", IgnoredArgumentWarning)
        return run_program(PROGRAM, lambda: _run(options))


def _run(options: Options) -> int:
    try:
        return _answer(options) if options.dry_run or options.simulate else _measure(options)
    except UnavailableBackend as error:
        print_error(error)
        _show_where_it_runs(options)
    except (MemoryError, OverflowError) as error:
        print_error(_too_large(error))
    except jax.errors.JaxRuntimeError as error:
        print_error(_too_large(error) if "out of memory" in str(error).lower() else error)
    except (ValueError, CaptureError, OSError, NoDeviceError) as error:
        print_error(error)
    return 1


def _device_asked_about(options: Options) -> Device:
    """What nothing is to run on: the device at hand, or one that need not be."""
    if options.asked_about is not None:
        return options.asked_about
    try:
        return default_device()
    except NoDeviceError as error:
        print_warning(f"{error}. This is about the host; --compute-capability X.Y asks about an NVIDIA GPU")
        return dataclasses.replace(CPU, is_present=False)


def _too_large(error: Exception) -> str:
    reason = f": {error}" if str(error) else ""
    return f"the problem is too large for this machine{reason}"


def _answer(options: Options) -> int:
    """List configurations or predict: nothing is measured."""
    device = _device_asked_about(options)
    check_available(options, device)
    warn_about_ignored_flags(options, device)
    if options.dry_run:
        runs = dry_run.print_dry_run(options, device)
        _write(options.json, lambda: dry_run.to_json(options, device))
        return 0 if runs else 1
    simulated = simulate.simulate(options, device)
    simulate.print_simulation(simulated)
    _write(options.json, lambda: simulate.to_json(simulated))
    return 0


def _measure(options: Options) -> int:
    if not options.optimize:
        check_available(options, device := default_device())
        warn_about_ignored_flags(options, device)
        return _profile(options, None)
    optimum = optimize(options)
    options = dataclasses.replace(optimum.options, optimize=True)
    if not optimum.is_complete:
        return _keep_so_far(options, optimum)
    print_table(best_table(optimum))
    warn_about_ignored_flags(options, default_device())
    try:
        return _profile(options, optimum)
    except KeyboardInterrupt:
        return _keep_so_far(options, optimum)


def _keep_so_far(options: Options, optimum: Optimum) -> int:
    """What is left of a search after Ctrl-C: no profile, but the best configuration and every trial."""
    print(f"{PROGRAM}: interrupted; this is the best so far", file=sys.stderr)
    context = measurements.context(options, request_of(options).problem)
    _write(options.json, lambda: {**context, **_search_results(options, optimum)})
    print_table(best_table(optimum))
    print_lines(_search_lines(options, optimum))
    return INTERRUPTED


def _search_results(options: Options, optimum: Optimum) -> dict[str, Any]:
    return {"best_configuration": configuration(options), "search": search_json(optimum)}


def _profile(options: Options, optimum: Optimum | None) -> int:
    comparison = None if options.compare is None else compare(options, options.compare)
    result = profile(options) if comparison is None else comparison.result
    results, tables = measurements.to_json(result), {"result": result.rows}
    if comparison is not None:
        results |= measurements.baseline_json(comparison)
        tables[comparison.name] = comparison.baseline.rows
    if optimum is not None:
        results |= _search_results(options, optimum)
    # Files first: whoever reads the output may leave early.
    _write(options.json, lambda: results)
    if options.csv is not None:
        measurements.write_csv(options.csv, tables)
    measurements.print_report(result)
    if comparison is not None:
        measurements.print_baseline(comparison)
    if optimum is not None:
        print_lines(_search_lines(options, optimum))
    if options.plot is not None:
        plot_rows(options.plot, tables, result.problem.describe())
    return 0


def _search_lines(options: Options, optimum: Optimum) -> Iterator[str]:
    searching = optimum.wall_seconds - optimum.compile_seconds
    yield (
        f"Search: {len(optimum.trials)} measurements in {searching:.1f} s, and {optimum.compile_seconds:.1f} s of "
        "compilation."
    )
    if optimum.default_seconds is not None:
        yield (
            f"Speedup over the default configuration: {digits(optimum.default_seconds / optimum.seconds)}X "
            f"({format_time(optimum.default_seconds)} / {format_time(optimum.seconds)}, measured in turns)."
        )
    if optimum.failures:
        yield f"{len(optimum.failures)} measurement(s) failed, the first: {optimum.failures[0].error}"
    if options.json is not None:
        yield f"Use it: na{options.rank}d(..., **natten_jax.load_tuned({str(options.json)!r}))"


def _show_where_it_runs(options: Options) -> None:
    """A dry run for the devices that a backend is for, whatever is at hand."""
    family = BackendId.parse(str(options.backend or options.fmha_backend)).family
    capability = KNOWN_FAMILIES[family].compute_capability
    anywhere = dataclasses.replace(options, backend=None, fmha_backend=None)
    if capability is None:  # a TPU: the CPU is always at hand
        anywhere = dataclasses.replace(anywhere, device=next(iter(TPU_CHIPS)), compute_capability=None)
        asked = f"--device {anywhere.device}"
    else:
        anywhere = dataclasses.replace(anywhere, device=None, compute_capability=capability)
        asked = f"--compute-capability {capability[0]}.{capability[1]}"
    assert anywhere.asked_about is not None
    print_lines([f"A dry run with {asked} shows:"])
    dry_run.print_dry_run(anywhere, anywhere.asked_about)


def _write(path: Path | None, results: Callable[[], Any]) -> None:
    if path is not None:
        measurements.write_json(path, results())


def program() -> NoReturn:
    """The console script."""
    sys.exit(main())


if __name__ == "__main__":
    program()
