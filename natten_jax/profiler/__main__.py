"""The profiler's command line program."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax

from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.ops.calls import IgnoredArgumentWarning
from natten_jax.plan.devices import CPU, Device, NoDeviceError, default_device
from natten_jax.plan.plan import BackendId
from natten_jax.profiler import predict, report
from natten_jax.profiler.arguments import parse, warn_about_ignored_flags
from natten_jax.profiler.capture import CaptureError
from natten_jax.profiler.cli import INTERRUPTED, PROGRAM, print_error, print_message, print_warning, run_program
from natten_jax.profiler.measure import compare, profile
from natten_jax.profiler.options import Options
from natten_jax.profiler.search import Optimum, best_table, optimize, search_json
from natten_jax.profiler.workload import KNOWN_FAMILIES, UnavailableBackend, check_available, request_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: success. 1: the problem, the backend or the trace fails on this machine. 2: usage error. 130: Ctrl-C.
    """
    options = parse(argv)
    with warnings.catch_warnings():
        # The profiler warns about flags instead, before anything runs.
        warnings.simplefilter("ignore", IgnoredArgumentWarning)
        return run_program(PROGRAM, lambda: _run(options))


def _run(options: Options) -> int:
    try:
        return _predict(options) if options.dry_run or options.simulate else _measure(options)
    except BrokenPipeError:
        raise
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


def _too_large(error: Exception) -> str:
    reason = f": {error}" if str(error) else ""
    return f"the problem is too large for this machine{reason}"


def _target_device(options: Options) -> Device:
    """Return the device to list or predict for."""
    if options.asked_about is not None:
        return options.asked_about
    try:
        return default_device()
    except NoDeviceError as error:
        print_warning(f"{error}. This is about the host; --compute-capability X.Y asks about an NVIDIA GPU")
        return dataclasses.replace(CPU, is_present=False)


def _predict(options: Options) -> int:
    """List configurations or predict, without a measurement."""
    device = _target_device(options)
    check_available(options, device)
    warn_about_ignored_flags(options, device)
    if options.dry_run:
        runs = predict.print_dry_run(options, device)
        if options.json is not None:
            report.write_json(options.json, predict.dry_run_json(options, device))
        return 0 if runs else 1
    simulated = predict.simulate(options, device)
    predict.print_simulation(simulated)
    if options.json is not None:
        report.write_json(options.json, predict.simulation_json(simulated))
    return 0


def _measure(options: Options) -> int:
    if not options.optimize:
        check_available(options, device := default_device())
        warn_about_ignored_flags(options, device)
        return _profile(options, None)
    optimum = optimize(options)
    options = dataclasses.replace(optimum.options, optimize=True)
    if not optimum.is_complete:
        return _report_interrupted(options, optimum)
    report.print_table(best_table(optimum))
    warn_about_ignored_flags(options, default_device())
    try:
        return _profile(options, optimum)
    except KeyboardInterrupt:
        return _report_interrupted(options, optimum)


def _profile(options: Options, optimum: Optimum | None) -> int:
    comparison = None if options.compare is None else compare(options, options.compare)
    if comparison is None:
        result = profile(options)
        results, tables = report.to_json(result), {"result": result.rows}
    else:
        result = comparison.result
        results = report.comparison_json(comparison)
        tables = {"result": result.rows, comparison.name: comparison.baseline.rows}
    if optimum is not None:
        results |= search_json(optimum)
    if options.json is not None:
        report.write_json(options.json, results)
    if options.csv is not None:
        report.write_csv(options.csv, tables)
    report.print_report(result)
    if comparison is not None:
        report.print_baseline(comparison)
    if optimum is not None:
        report.print_lines(_search_lines(options, optimum))
    if options.plot is not None:
        report.plot_rows(options.plot, tables, result.problem.describe())
    return 0


def _report_interrupted(options: Options, optimum: Optimum) -> int:
    """Report the best configuration and every trial of a search after Ctrl-C."""
    print_message("interrupted; this is the best so far")
    if options.json is not None:
        results: dict[str, Any] = report.context(options, request_of(options).problem)
        report.write_json(options.json, results | search_json(optimum))
    report.print_table(best_table(optimum))
    report.print_lines(_search_lines(options, optimum))
    return INTERRUPTED


def _search_lines(options: Options, optimum: Optimum) -> Iterator[str]:
    searching = optimum.wall_seconds - optimum.compile_seconds
    yield (
        f"Search: {len(optimum.trials)} measurements in {searching:.1f} s, and {optimum.compile_seconds:.1f} s of "
        "compilation."
    )
    if optimum.default_seconds is not None:
        times = f"{report.format_time(optimum.default_seconds)} / {report.format_time(optimum.seconds)}"
        speedup = report.digits(optimum.default_seconds / optimum.seconds)
        yield f"Speedup over the default configuration: {speedup}X ({times}, measured in turns)."
    if optimum.failures:
        yield f"{len(optimum.failures)} measurement(s) failed, the first: {optimum.failures[0].error}"
    if options.json is not None:
        yield f"Use it: na{options.rank}d(..., **natten_jax.load_tuned({str(options.json)!r}))"


def _show_where_it_runs(options: Options) -> None:
    """Print a dry run for a device that the named backend runs on."""
    family = BackendId.parse(str(options.backend or options.fmha_backend)).family
    capability = KNOWN_FAMILIES[family].compute_capability
    anywhere = dataclasses.replace(options, backend=None, fmha_backend=None)
    if capability is None:  # a backend for TPUs
        anywhere = dataclasses.replace(anywhere, device=next(iter(TPU_CHIPS)), compute_capability=None)
        asked = f"--device {anywhere.device}"
    else:
        anywhere = dataclasses.replace(anywhere, device=None, compute_capability=capability)
        asked = f"--compute-capability {capability[0]}.{capability[1]}"
    assert anywhere.asked_about is not None
    report.print_lines([f"A dry run with {asked} shows:"])
    predict.print_dry_run(anywhere, anywhere.asked_about)


def program() -> NoReturn:
    """Run the console script."""
    sys.exit(main())


if __name__ == "__main__":
    program()
