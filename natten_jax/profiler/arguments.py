"""The profiler's command line: parse the flags, check them and fill in defaults."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from natten_jax import backends
from natten_jax.performance import Performance, performance_of
from natten_jax.problem import Operator
from natten_jax.profiler.baselines import BASELINES, can_be_split
from natten_jax.profiler.cli import flag, print_warning
from natten_jax.profiler.options import (
    FOREIGN_FLAGS,
    PERFORMANCE_FLAGS,
    TILE_FLAGS,
    WINDOW_FLAGS,
    Options,
    profiler_parser,
    whole_windows,
)
from natten_jax.profiler.workload import request_of, splits_tokens, token_parts
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

#: Names of arguments in the operators' messages (regular expressions) -> the flags that set them.
_FLAGS_IN_MESSAGES = (
    *((rf"\b{argument}\b", flag(name)) for argument, name in zip(WindowArguments._fields, WINDOW_FLAGS, strict=True)),
    *((rf"(?<!-)\b{field}\b", flag(name)) for name, field in PERFORMANCE_FLAGS.items()),
    (r"\bthe token layout\b", "--input-size"),
    (r"\bquery has (\d+) heads, which is\b", r"--heads \1 is"),
    (r"\bthe (\d+) heads of key and value\b", r"--heads-kv \1"),
    *((rf"\b{name}_size\b", flag(name)) for name in TILE_FLAGS),
)


def with_names_of_flags(message: str) -> str:
    """Replace names of arguments in a message of the operators by the flags that set them."""
    for pattern, replacement in _FLAGS_IN_MESSAGES:
        message = re.sub(pattern, replacement, message)
    return message


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line. A usage error prints one sentence and exits with status 2."""
    parser = profiler_parser()
    argv = sys.argv[1:] if argv is None else argv
    for name in FOREIGN_FLAGS.keys() & set(argv):
        parser.error(f"{name} does not exist here: {FOREIGN_FLAGS[name]}")
    given = parser.parse_args(argv)
    try:
        _check_modes(given)
        options = _options(given)
        _check_backends(options)
        if options.is_baseline:
            options = _of_baseline(options)
        problem = request_of(options).problem
        if problem.element.is_float8 and options.backprop:
            raise ValueError(f"--backprop does not go with --dtype {options.dtype}: arrays of 8 bits have no gradients")
        _check_split(options)
    except ValueError as error:
        parser.error(with_names_of_flags(str(error)))
    return options


def _options(given: argparse.Namespace) -> Options:
    layout = tuple(given.input_size)
    rank = len(layout)
    if rank > 3:
        raise ValueError(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    values: dict[str, Any] = {**vars(given), "input_size": layout}
    values.pop("compile", None)  # XLA compiles every program
    for name in (*_REPEATED, *TILE_FLAGS):
        values[name] = _per_dimension(name, values[name], rank)
    values["heads_kv"] = given.heads_kv or given.heads
    values["dim_value"] = given.dim_value or given.dim
    values["fmha_backend"] = _SPELLINGS.get(given.fmha_backend, given.fmha_backend)
    whole = zip(WINDOW_FLAGS, whole_windows(layout), strict=True)
    window = WindowArguments._make(values.pop(name) or default for name, default in whole)
    performance = performance_of(rank, **{field: values.pop(name) for name, field in PERFORMANCE_FLAGS.items()})
    if not given.backprop:
        for name, field in PERFORMANCE_FLAGS.items():
            if name.startswith("backward") and getattr(performance, field) != getattr(Performance(), field):
                raise ValueError(f"{flag(name)} is for the backward pass, which runs with --backprop only")
    return Options(**values, window=window, performance=performance)


def _per_dimension(name: str, values: list[Any] | None, rank: int) -> tuple[Any, ...] | None:
    """Return the values of a flag, one per dimension; ``None`` if the flag is not given."""
    if values is None:
        return None
    if len(values) == 1 and name in _REPEATED:
        return tuple(values) * rank
    if len(values) != rank:
        alternative = "or one for all, " if name in _REPEATED else ""
        raise ValueError(f"{flag(name)} takes {rank} value(s), {alternative}one per dimension, got {len(values)}")
    return tuple(values)


def _check_modes(given: argparse.Namespace) -> None:
    """Check that the flags that choose what the program does go together."""
    modes = [flag(name) for name in ("dry_run", "simulate", "optimize") if getattr(given, name)]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} exclude each other: choose one")
    devices = [flag(name) for name in ("compute_capability", "device") if getattr(given, name) is not None]
    if len(devices) > 1:
        raise ValueError(f"{' and '.join(devices)} exclude each other: the one is an NVIDIA GPU, the other a TPU")
    if not (given.dry_run or given.simulate):
        if devices:
            raise ValueError(f"{devices[0]} is for --dry-run and --simulate: a measurement runs on the device at hand")
    elif wrong := [flag(name) for name in _MEASUREMENT_ONLY if getattr(given, name)]:
        raise ValueError(f"{', '.join(wrong)} would need a measurement, but {modes[0]} measures nothing")
    if modes and given.backend in BASELINES:
        raise ValueError(f"{modes[0]} is about backends with tiles, which the baseline {given.backend} does not have")
    for name in _OUTPUT_FILES:
        path = getattr(given, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag(name)}: the folder {str(path.parent)!r} does not exist")


def _check_backends(options: Options) -> None:
    """Check the names of backends and baselines."""
    if options.compare is not None and options.compare == options.backend:
        raise ValueError(f"--compare {options.compare} is what --backend runs already")
    for option, name in (("--backend", options.backend), ("--compare", options.compare)):
        if name in _FOREIGN_BASELINES:
            raise ValueError(
                f"{option} {name} is a baseline of PyTorch; JAX's are cudnn (fused attention on NVIDIA GPUs), "
                f"pallas (on GPUs, too) and xla (anywhere): use {option} cudnn"
            )
    named: tuple[tuple[str, str | None, Operator], ...] = (
        ("--backend", options.backend, "fna"),
        ("--compare", options.compare, "fna"),
        ("--fmha-backend", options.fmha_backend, "fmha"),
    )
    for option, name, operator in named:
        if name is not None and name not in BASELINES:
            try:
                backends.find(name, operator)
            except ValueError as error:
                baselines = "" if operator == "fmha" else f", or a baseline: {', '.join(BASELINES)}"
                raise ValueError(f"{str(error).replace('backend=', f'{option} ')}{baselines}") from None


def _of_baseline(options: Options) -> Options:
    """Return the options of self attention. Additional tokens are an error; other flags are ignored with a warning."""
    name = str(options.backend)
    if options.add_kv:
        raise ValueError(f"--add-kv does not go with --backend {name}, which computes self attention only")
    baseline = dataclasses.replace(options.for_baseline(name), performance=Performance())
    if baseline != options:
        print_warning(f"--backend {name} computes self attention only: flags of windows and configurations are ignored")
    return baseline


def _check_split(options: Options) -> None:
    """Check that ``--split`` divides the problem by ``--devices``."""
    count = options.devices
    token_parts(options)
    if count == 1:
        return
    name, extent = ("--batch-size", options.batch_size) if options.split == "batch" else ("--heads", options.heads)
    if extent % count and not splits_tokens(options):
        raise ValueError(
            f"{name} {extent} is not a multiple of --devices {count}: --split {options.split} shares it equally"
        )
    for each in ("dry_run", "optimize"):
        if getattr(options, each):
            raise ValueError(f"--devices {count} does not go with {flag(each)}, which is about one device")
    for option, other in (("--backend", options.backend), ("--compare", options.compare)):
        if other in BASELINES and not can_be_split(str(other), count, options.split, options.heads_kv):
            raise ValueError(
                f"{option} {other} does not go with --devices {count} and --split {options.split}; use {option} xla"
            )
