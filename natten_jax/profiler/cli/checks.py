"""The checks of the profiler's command line that need nothing but the command line."""

from __future__ import annotations

import argparse
import re
from typing import Unpack

from natten_jax import backends
from natten_jax.backends.names import closest
from natten_jax.performance import Performance, PerformanceArguments, performance_of
from natten_jax.problem import Operator
from natten_jax.profiler.baselines import BASELINES, refusal_to_split
from natten_jax.profiler.cli.flags import PERFORMANCE_FLAGS, TILE_FLAGS
from natten_jax.profiler.cli.outputs import chart_problem, folder_problem
from natten_jax.profiler.cli.parser import Parser, flag
from natten_jax.profiler.messages import warn
from natten_jax.profiler.options import WINDOW_FLAGS, Options
from natten_jax.profiler.run.split import share, splits_tokens, token_parts
from natten_jax.profiler.run.workload import request_of
from natten_jax.windows import WindowArguments

#: Baselines of NATTEN's profiler that do not exist in JAX.
_FOREIGN_BASELINES = ("xformers", "fav2")

#: Other names of --fmha-backend in NATTEN's documents -> the backend's name.
_SPELLINGS = {"flex-fna": "flex-fmha"}

_OUTPUT_FILES = ("json", "csv", "plot")
#: Flags that only a measurement can serve.
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


def check_modes(parser: Parser, given: argparse.Namespace) -> None:
    """Check that the flags that say what to do go together."""
    modes = [name for name in ("dry_run", "simulate", "optimize") if getattr(given, name)]
    if len(modes) > 1:
        parser.error(f"{' and '.join(map(flag, modes))} exclude each other: choose one")
    is_measurement = not (given.dry_run or given.simulate)
    if given.compute_capability is not None and is_measurement:
        parser.error("--compute-capability is for --dry-run and --simulate: a measurement runs on the device at hand")
    if given.device is not None and is_measurement:
        parser.error("--device is for --dry-run and --simulate: a measurement runs on the device at hand")
    if given.device is not None and given.compute_capability is not None:
        parser.error("--device and --compute-capability exclude each other: the one is a TPU, the other an NVIDIA GPU")
    if not is_measurement:
        wrong = [flag(name) for name in _MEASUREMENT_ONLY if getattr(given, name)]
        if wrong:
            parser.error(f"{', '.join(wrong)} would need a measurement, but {flag(modes[0])} measures nothing")
    if modes and given.backend in BASELINES:
        parser.error(f"{flag(modes[0])} is about backends with tiles, which the baseline {given.backend} does not have")


def check_backends(parser: Parser, given: argparse.Namespace) -> None:
    """Check that the names of backends and baselines are names of such."""
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


def check_baseline(parser: Parser, given: argparse.Namespace) -> None:
    """Take away what a baseline cannot do, with a warning; additional tokens are refused."""
    if given.add_kv:
        parser.error(f"--add-kv does not go with --backend {given.backend}, which computes self attention only")
    ignored = [*WINDOW_FLAGS, "fmha_backend", *PERFORMANCE_FLAGS]
    flags = [
        f"--no-{name}" if getattr(given, name) is False else flag(name)
        for name in ignored
        if getattr(given, name) != parser.get_default(name)
    ]
    if flags:
        warn(f"--backend {given.backend} computes self attention only: {', '.join(flags)} ignored")
    for name in ignored:
        setattr(given, name, parser.get_default(name))


def check_problem(parser: Parser, options: Options) -> None:
    """Check that the operators take the problem and its tiles: what they say of it, said of the flags."""
    try:
        request = request_of(options)
    except ValueError as error:
        parser.error(_of_flags(str(error)))
    if request.problem.element.is_float8 and options.backprop:
        parser.error(f"--backprop does not go with --dtype {options.dtype}: arrays of 8 bits have no gradients")
    if not options.backprop:
        chosen, default = options.performance, Performance()
        for name, field in PERFORMANCE_FLAGS.items():
            if name.startswith("backward") and getattr(chosen, field) != getattr(default, field):
                parser.error(f"{flag(name)} is for the backward pass, which runs with --backprop only")


def check_split(parser: Parser, options: Options) -> None:
    """Check that the problem can be split over as many devices; whether there are so many is seen when it runs."""
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
                f"device gets here, {share(options)}"
            )
    for option, other in (("--backend", options.backend), ("--compare", options.compare)):
        if other in BASELINES and (refusal := refusal_to_split(str(other), count, options.split, options.heads_kv)):
            parser.error(f"{option} {other} does not go with --devices {count}: {refusal}; use {option} xla")


def checked_performance(parser: Parser, rank: int, **arguments: Unpack[PerformanceArguments]) -> Performance:
    """The performance arguments, by the rules of the operators."""
    try:
        return performance_of(rank, **arguments)
    except ValueError as error:
        parser.error(_of_flags(str(error)))


def _of_flags(message: str) -> str:
    for pattern, replacement in _FLAGS_IN_ERRORS:
        message = re.sub(pattern, replacement, message)
    return message


def check_outputs(parser: Parser, given: argparse.Namespace) -> None:
    """Check where results go, before they are worked out; a chart's format, too."""
    parser.check_files(given, _OUTPUT_FILES)
    for name, problem_of in (("plot", chart_problem), ("trace_dir", folder_problem)):
        path = getattr(given, name)
        if path is not None and (problem := problem_of(path)):
            parser.error(f"{flag(name)}: {problem}")
