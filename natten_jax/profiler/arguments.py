"""The profiler's command line: parse the flags, check them, fill in defaults and warn about ignored flags."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from natten_jax import backends
from natten_jax.backends.names import closest
from natten_jax.backends.select import ignored, resolve
from natten_jax.ops.sub_calls import KeySet
from natten_jax.performance import Performance, performance_of
from natten_jax.plan.devices import Device
from natten_jax.problem import Operator
from natten_jax.profiler.baselines import BASELINES, refusal_to_split
from natten_jax.profiler.cli import Parser, cannot_write, flag, print_warning
from natten_jax.profiler.options import (
    PERFORMANCE_FLAGS,
    TILE_FLAGS,
    WINDOW_FLAGS,
    Options,
    default_of,
    profiler_parser,
    whole_windows,
)
from natten_jax.profiler.workload import (
    flags_per_device,
    passes,
    request_of,
    splits_tokens,
    sub_calls_of,
    sub_calls_of_device,
    token_parts,
)
from natten_jax.windows import WindowArguments

#: Flags that take one value per dimension, or one for all dimensions.
_REPEATED = (*WINDOW_FLAGS, "backward_kv_splits")

#: Baselines of NATTEN's profiler that do not exist in JAX.
_FOREIGN_BASELINES = ("xformers", "fav2")

#: Other names of --fmha-backend in NATTEN's documents -> the backend's name.
_SPELLINGS = {"flex-fna": "flex-fmha"}

_OUTPUT_FILES = ("json", "csv", "plot")
#: Flags that need a measurement.
_MEASUREMENT_ONLY = ("compare", "csv", "plot", "trace_dir", "verbose")

#: Names of arguments in the operators' errors (regular expressions) -> the flags that set them.
_FLAGS_IN_ERRORS = (
    *((rf"\b{argument}\b", flag(name)) for argument, name in zip(WindowArguments._fields, WINDOW_FLAGS, strict=True)),
    (r"\bkernel_schedule\b", "--schedule"),
    (r"\bthe token layout\b", "--input-size"),
    (r"\bquery has (\d+) heads, which is\b", r"--heads \1 is"),
    (r"\bthe (\d+) heads of key and value\b", r"--heads-kv \1"),
    *((rf"\b{name}_(shape|size)\b", flag(name)) for name in TILE_FLAGS),
)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line. A usage error prints one sentence and exits with status 2."""
    parser = profiler_parser()
    given = parser.parse_args(argv)
    rank = len(given.input_size)
    if rank > 3:
        parser.error(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    for name in (*_REPEATED, *TILE_FLAGS):
        setattr(given, name, _per_dimension(parser, given, name))
    _check_modes(parser, given)
    _check_backends(parser, given)
    if given.backend in BASELINES:
        _reset_ignored_by_baseline(parser, given)
    layout = tuple(given.input_size)
    values: dict[str, Any] = {**vars(given), "input_size": layout}
    values.pop("compile", None)  # XLA compiles every program
    values["heads_kv"] = given.heads_kv or given.heads
    values["dim_value"] = given.dim_value or given.dim
    whole = zip(WINDOW_FLAGS, whole_windows(layout), strict=True)
    values["window"] = WindowArguments._make(values.pop(name) or default for name, default in whole)
    arguments = {field: values.pop(name) for name, field in PERFORMANCE_FLAGS.items()}
    try:
        options = Options(**values, performance=performance_of(rank, **arguments))
        problem = request_of(options).problem
    except ValueError as error:
        parser.error(_with_names_of_flags(str(error)))
    if problem.element.is_float8 and options.backprop:
        parser.error(f"--backprop does not go with --dtype {options.dtype}: arrays of 8 bits have no gradients")
    if not options.backprop:
        for name in _changed_performance(options.performance):
            if name.startswith("backward"):
                parser.error(f"{flag(name)} is for the backward pass, which runs with --backprop only")
    _check_split(parser, options)
    parser.check_files(given, _OUTPUT_FILES)
    for name, problem_with in (("plot", chart_problem), ("trace_dir", folder_problem)):
        path = getattr(given, name)
        if path is not None and (reason := problem_with(path)):
            parser.error(f"{flag(name)}: {reason}")
    return options


def _per_dimension(parser: Parser, given: argparse.Namespace, name: str) -> tuple[Any, ...] | None:
    """Return the values of a flag, one per dimension; ``None`` if the flag is not given."""
    values = getattr(given, name)
    if values is None:
        return None
    rank = len(given.input_size)
    if len(values) == 1 and name in _REPEATED:
        return tuple(values) * rank
    if len(values) != rank:
        alternative = "or one for all, " if name in _REPEATED else ""
        parser.error(
            f"{flag(name)} takes {rank} value(s), {alternative}one per dimension of the input size "
            f"{' '.join(map(str, given.input_size))}, got {len(values)}"
        )
    return tuple(values)


def _with_names_of_flags(message: str) -> str:
    for pattern, replacement in _FLAGS_IN_ERRORS:
        message = re.sub(pattern, replacement, message)
    return message


def _changed_performance(performance: Performance) -> list[str]:
    """Return the performance flags whose values are not the default."""
    default = Performance()
    return [name for name, field in PERFORMANCE_FLAGS.items() if getattr(performance, field) != getattr(default, field)]


def _check_modes(parser: Parser, given: argparse.Namespace) -> None:
    """Check that the flags that choose what the program does go together."""
    modes = [name for name in ("dry_run", "simulate", "optimize") if getattr(given, name)]
    if len(modes) > 1:
        parser.error(f"{' and '.join(map(flag, modes))} exclude each other: choose one")
    is_measurement = not (given.dry_run or given.simulate)
    for name in ("compute_capability", "device"):
        if getattr(given, name) is not None and is_measurement:
            parser.error(f"{flag(name)} is for --dry-run and --simulate: a measurement runs on the device at hand")
    if given.device is not None and given.compute_capability is not None:
        parser.error("--device and --compute-capability exclude each other: the one is a TPU, the other an NVIDIA GPU")
    if not is_measurement:
        wrong = [flag(name) for name in _MEASUREMENT_ONLY if getattr(given, name)]
        if wrong:
            parser.error(f"{', '.join(wrong)} would need a measurement, but {flag(modes[0])} measures nothing")
    if modes and given.backend in BASELINES:
        parser.error(f"{flag(modes[0])} is about backends with tiles, which the baseline {given.backend} does not have")


def _check_backends(parser: Parser, given: argparse.Namespace) -> None:
    """Check the names of backends and baselines."""
    for option, name in (("--backend", given.backend), ("--compare", given.compare)):
        if name is not None:
            _check_backend(parser, option, name)
    if given.compare is not None and given.compare == given.backend:
        parser.error(f"--compare {given.compare} is what --backend runs already")
    name = given.fmha_backend = _SPELLINGS.get(given.fmha_backend, given.fmha_backend)
    if name is None or name in backends.names("fmha"):
        return
    if name in backends.names("fna"):
        parser.error(
            f"--fmha-backend {name} is a backend of neighborhood attention: name it with --backend, or the attention "
            f"backend {name.removesuffix('-fna')}-fmha here"
        )
    parser.error(
        f"--fmha-backend {name} is unknown{_meant(name, 'fmha')}; choose one of {', '.join(backends.names('fmha'))}"
    )


def _check_backend(parser: Parser, option: str, name: str) -> None:
    if name in _FOREIGN_BASELINES:
        parser.error(
            f"{option} {name} is a baseline of PyTorch; JAX's are cudnn (fused attention on NVIDIA GPUs), "
            f"pallas (on GPUs, too) and xla (anywhere): use {option} cudnn"
        )
    if name in backends.names("fmha"):
        parser.error(f"{option} {name} is an attention backend: name it with --fmha-backend")
    if name not in (*backends.names("fna"), *BASELINES):
        parser.error(
            f"{option} {name} is unknown{_meant(name, 'fna')}; choose one of {', '.join(backends.names('fna'))}, "
            f"or a baseline: {', '.join(BASELINES)}"
        )


def _meant(name: str, operator: Operator) -> str:
    meant = closest(name, operator, backends.registered())
    return "" if meant is None else f" (did you mean {meant}?)"


def _reset_ignored_by_baseline(parser: Parser, given: argparse.Namespace) -> None:
    """Reset flags that a baseline ignores, with a warning. Additional tokens are an error."""
    if given.add_kv:
        parser.error(f"--add-kv does not go with --backend {given.backend}, which computes self attention only")
    without_effect = [*WINDOW_FLAGS, "fmha_backend", *PERFORMANCE_FLAGS]
    changed = [name for name in without_effect if getattr(given, name) != parser.get_default(name)]
    if changed:
        flags = ", ".join(f"--no-{name}" if getattr(given, name) is False else flag(name) for name in changed)
        print_warning(f"--backend {given.backend} computes self attention only: {flags} ignored")
    for name in without_effect:
        setattr(given, name, parser.get_default(name))


def _check_split(parser: Parser, options: Options) -> None:
    """Check that ``--split`` divides the problem by ``--devices``."""
    count = options.devices
    try:
        token_parts(options)
    except ValueError as error:
        parser.error(str(error))
    if count == 1:
        return
    name, extent = ("--batch-size", options.batch_size) if options.split == "batch" else ("--heads", options.heads)
    if extent % count and not splits_tokens(options):
        parser.error(
            f"{name} {extent} is not a multiple of --devices {count}: --split {options.split} shares it equally"
        )
    for each in ("dry_run", "optimize"):
        if getattr(options, each):
            parser.error(
                f"--devices {count} does not go with {flag(each)}, which is about one device: ask it about what each "
                f"device gets here, {flags_per_device(options)}"
            )
    for option, other in (("--backend", options.backend), ("--compare", options.compare)):
        if other in BASELINES and (refusal := refusal_to_split(str(other), count, options.split, options.heads_kv)):
            parser.error(f"{option} {other} does not go with --devices {count}: {refusal}; use {option} xla")


def chart_problem(path: Path) -> str | None:
    """Return the reason why a chart cannot be drawn into a file of this name, or ``None``."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return "it needs matplotlib: pip install matplotlib"
    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.lstrip(".").lower()
    if suffix and suffix not in formats:
        return f"{str(path)!r} is of no known format; choose one of {', '.join(sorted(formats))}"
    return None


def folder_problem(path: Path) -> str | None:
    """Return the reason why a folder cannot be made or filled, or ``None``. The file system stays as it is."""
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not existing.is_dir():
            return f"{str(existing)!r} is a file, not a folder"
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except OSError as error:
        return cannot_write(path, error)
    return None


def warn_about_ignored_flags(options: Options, device: Device) -> None:
    """Print a warning per flag without an effect."""
    for given, reason in _ignored_flags(options, device):
        print_warning(f"{given} changes nothing: {reason}")


def _ignored_flags(options: Options, device: Device) -> Iterator[tuple[str, str]]:
    """Yield each flag without an effect, with its value, and the reason."""
    is_measured = not (options.dry_run or options.simulate)
    measures_nothing = f"{'--dry-run' if options.dry_run else '--simulate'} measures nothing"
    for name, is_used, reason in (
        ("max_configs", options.dry_run, "only --dry-run lists configurations"),
        ("warmup_steps", is_measured, measures_nothing),
        ("iterations", is_measured, measures_nothing),
        ("optimize_warmup_steps", options.optimize, "only --optimize has finalists"),
        ("split", options.devices > 1, "--devices says over how many devices, and it is 1"),
    ):
        value = getattr(options, name)
        if not is_used and value != default_of(name):
            yield f"{flag(name)} {value}", reason
    if options.is_baseline:
        return  # parse() has warned
    if options.fmha_backend is not None and all(call.kind is KeySet.WINDOWS for call in sub_calls_of(options)):
        reason = "no attention backend runs: windows are smaller than the layout, and there are no additional tokens"
        yield f"--fmha-backend {options.fmha_backend}", reason
    if is_measured:
        reasons = _reasons_of_backends(options, device)
    elif options.dry_run:
        reasons = dict.fromkeys(PERFORMANCE_FLAGS.values(), "--dry-run lists all configurations")
    else:
        others = (field for name, field in PERFORMANCE_FLAGS.items() if name not in TILE_FLAGS)
        reasons = dict.fromkeys(others, "--simulate predicts by tiles alone")
    for name in _changed_performance(options.performance):
        field = PERFORMANCE_FLAGS[name]
        if field in reasons:
            value = getattr(options.performance, field)
            if isinstance(value, bool):
                given = flag(name) if value else f"--no-{name}"
            else:
                given = f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            yield given, reasons[field]


def _reasons_of_backends(options: Options, device: Device) -> dict[str, str]:
    """Return the performance arguments that the chosen backends ignore, and the reasons."""
    reasons: dict[str, str] = {}
    for call in sub_calls_of_device(options):
        for pass_ in passes(options):
            try:
                plan = resolve(call.request, device, pass_)
            except ValueError:
                continue  # the run raises it
            reasons |= ignored(plan, call.request.performance)
    return reasons
