"""The profiler's command line program."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence

import jax

from natten_jax import backends
from natten_jax.backends.base import Platform
from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.plan.devices import CPU, Device, NoDeviceError, default_device
from natten_jax.plan.plan import BackendId
from natten_jax.profiler import predict, report
from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.capture import CaptureError
from natten_jax.profiler.cli import PROGRAM, print_message, print_warning, run_program
from natten_jax.profiler.measure import compare, profile
from natten_jax.profiler.options import Options, parse, with_names_of_flags
from natten_jax.profiler.search import Optimum, best_table, optimize, search_json

#: Exceptions that end the program with a one-line message and exit status 1.
_EXPECTED = (ValueError, MemoryError, OSError, CaptureError, NoDeviceError, jax.errors.JaxRuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: success. 1: the problem cannot run on the device, or the measurement or a file access failed. 2: usage error.
    130: Ctrl-C.
    """
    options = parse(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print_warning(with_names_of_flags(str(message)))
        return run_program(PROGRAM, lambda: _run(options), _EXPECTED)


def _run(options: Options) -> int:
    is_measured = not (options.dry_run or options.simulate)
    device = default_device() if is_measured else _target_device(options)
    for name in filter(None, (options.backend, options.fmha_backend)):
        platform = None if name in BASELINES else backends.by_id(BackendId.parse(name)).capabilities.platform
        if platform is not None and not platform.has(device):
            print_message(f"error: {name} runs on {platform}, and this is {device}")
            shown = options if is_measured else dataclasses.replace(options, backend=None, fmha_backend=None)
            _show_where_it_runs(shown, platform)
            return 1
    return _measure(options) if is_measured else _predict(options, device)


def _target_device(options: Options) -> Device:
    if options.assumed_device is not None:
        return options.assumed_device
    try:
        return default_device()
    except NoDeviceError as error:
        print_warning(f"{error}. The answers are for the host; use --compute-capability X.Y for an NVIDIA GPU")
        return dataclasses.replace(CPU, is_present=False)


def _predict(options: Options, device: Device) -> int:
    """List the problem's configurations, or simulate the problem, without a measurement."""
    if options.dry_run:
        results, is_supported = predict.print_dry_run(options, device)
    else:
        results, is_supported = predict.print_simulation(options, device), True
    if options.json is not None:
        report.write_json(options.json, results)
    return 0 if is_supported else 1


def _measure(options: Options) -> int:
    optimum = optimize(options) if options.optimize else None
    if optimum is not None:
        options = optimum.options
        report.print_table(best_table(optimum))
    result, baseline = (profile(options), None) if options.compare is None else compare(options, options.compare)
    results, tables = report.to_json(result), {"result": result.rows}
    report.print_report(result)
    if baseline is not None:
        report.print_baseline(result, baseline)
        results |= report.comparison_json(result, baseline)
        tables[str(options.compare)] = baseline.rows
    if optimum is not None:
        report.print_lines(_search_lines(options, optimum))
        results |= search_json(optimum)
    if options.json is not None:
        report.write_json(options.json, results)
    if options.csv is not None:
        report.write_csv(options.csv, tables)
    if options.plot is not None:
        report.plot_rows(options.plot, tables, options.problem.describe())
    return 0


def _search_lines(options: Options, optimum: Optimum) -> Iterator[str]:
    compiling, searching = optimum.compile_seconds, optimum.wall_seconds - optimum.compile_seconds
    yield f"Search: {len(optimum.trials)} measurements in {searching:.1f} s, and {compiling:.1f} s of compilation."
    if optimum.default_seconds is not None:
        times = f"{report.format_time(optimum.default_seconds)} / {report.format_time(optimum.seconds)}"
        speedup = report.digits(optimum.default_seconds / optimum.seconds)
        yield f"Speedup over the default configuration: {speedup}X ({times}, measured alternately)."
    if optimum.failures:
        yield f"{len(optimum.failures)} measurement(s) failed, the first: {optimum.failures[0].error}"
    if options.json is not None:
        yield f"Use it: na{options.problem.rank}d(..., **natten_jax.load_tuned({str(options.json)!r}))"


def _show_where_it_runs(options: Options, platform: Platform) -> None:
    """Print a dry run for one kind of device on the platform. A device of this kind need not be present."""
    capability = platform.compute_capability
    chip = next(iter(TPU_CHIPS)) if capability is None else None
    anywhere = dataclasses.replace(options, compute_capability=capability, device=chip)
    flag = f"--device {chip}" if capability is None else f"--compute-capability {'.'.join(map(str, capability))}"
    report.print_lines([f"A dry run with {flag} shows:"])
    predict.print_dry_run(anywhere, _target_device(anywhere))


if __name__ == "__main__":
    sys.exit(main())
