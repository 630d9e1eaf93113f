"""The profiler's command line: flags, their checks and defaults."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from natten_jax import backends, element_types
from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.performance import KernelSchedule, MemoryUsagePreference, Performance, performance_of
from natten_jax.problem import Operator, problem_of
from natten_jax.profiler.baselines import BASELINES, can_be_split
from natten_jax.profiler.cli import PROGRAM, Parser, at_least, boolean, compute_capability, flag, print_warning
from natten_jax.profiler.options import PROBLEM_FLAGS, WINDOW_FLAGS, Options
from natten_jax.version import __version__
from natten_jax.windows import EDGES, WindowArguments

#: Short names of element types, as in reports -> full names, widest type first.
ELEMENT_TYPES = {
    each.short_name: each.name
    for each in sorted(element_types.ELEMENT_TYPES.values(), key=lambda each: each.bytes, reverse=True)
}

#: Flags of tile shapes.
TILE_FLAGS = ("q_tile", "kv_tile", "backward_q_tile", "backward_kv_tile")

_SHORT_NAMES = {
    **{f"{name}_shape": name for name in TILE_FLAGS},
    "run_persistent_kernel": "persistent",
    "kernel_schedule": "schedule",
}
#: Flags of the performance arguments -> names of the operators' arguments.
PERFORMANCE_FLAGS = {_SHORT_NAMES.get(field.name, field.name): field.name for field in dataclasses.fields(Performance)}

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


#: Flags of NATTEN's profilers without a meaning here -> what to do instead.
FOREIGN_FLAGS = {
    "--no-compile": "every program is compiled by XLA",
    "--torch-compile": "every program is compiled by XLA: leave it out",
    **dict.fromkeys(
        ("--fuse-add-kv", "--fuse-additional-kv", "--try-fuse-additional-kv"),
        "additional tokens go into the kernel wherever it takes them: leave it out, or name an --fmha-backend to keep "
        "them apart",
    ),
}

_EXAMPLES = """\
examples:
  # Neighborhood attention with a 2 x 4 x 3 window, forward and backward
  %(prog)s -i 8 16 24 -d 128 -w 2 4 3 --backprop

  # Tiles and predicted times on a Hopper GPU
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --dry-run --compute-capability 9.0

  # Search for the best tiles, schedules and backend, and save them for natten_jax.load_tuned
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --backprop --optimize --json tuned.json

a trace that JAX's profiler wrote is read by
  python -m natten_jax.profiler.trace PATH
"""


def _element_type(text: str) -> str:
    """Return the short name of an element type from its short or full name; return any other text unchanged."""
    known = element_types.ELEMENT_TYPES.get(text)
    return text if known is None else known.short_name


def profiler_parser() -> Parser:
    """Return the parser of the profiler's flags."""
    parser = Parser(
        prog=PROGRAM,
        description="Measure what neighborhood attention launches on this machine's default JAX device, list and\n"
        "search its configurations, or predict its time for a GPU that is not there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"natten_jax {__version__}")
    natural, positive = at_least(0), at_least(1)
    extents: dict[str, Any] = {"type": positive, "nargs": "+"}  # per dimension
    # fmt: off
    add = parser.add_argument_group("problem", "Windows: a value per dimension, or one for all.").add_argument
    add("-i", "--input-size", metavar="X", **extents, required=True,
        help="token layout, 1 to 3 integers: sequence length; height width; depth height width (required)")
    add("-b", "--batch-size", metavar="B", type=positive, help="batch size (default: 1)", default=1)
    add("-n", "--heads", metavar="H", type=positive, help="query heads (default: 1)", default=1)
    add("--heads-kv", metavar="H", type=positive, help="key/value heads, a divisor of --heads (default: --heads)")
    add("-d", "--dim", metavar="D", type=positive, help="head dim of query and key (default: 64)", default=64)
    add("--dim-value", metavar="D", type=positive, help="head dim of value and output (default: --dim)")
    add("-w", "--window-size", metavar="W", **extents, help="window size (default: the input size: self attention)")
    add("-s", "--stride", metavar="S", **extents, help="queries that share a window (default: 1)")
    add("--dilation", metavar="N", **extents, help="distance between neighboring tokens of a window (default: 1)")
    add("-c", "--causal", metavar="C", type=boolean, nargs="+", help="is causal: true, false, 1 or 0 (default: false)")
    add("--edges", metavar="E", nargs="+", choices=EDGES,
        help=f"what becomes of a window that reaches over the ends: {', '.join(EDGES)} (default: {EDGES[0]})")
    add("--dtype", metavar="TYPE", type=_element_type, default="fp16", choices=list(ELEMENT_TYPES),
        help=f"element type: {', '.join(ELEMENT_TYPES)}, or a full name such as float16 (default: fp16)")
    add("--backprop", action="store_true", help="profile forward and backward pass")
    add("--add-kv", metavar="N", type=natural, help="additional key/value tokens (default: 0)", default=0)

    add = parser.add_argument_group("backend and configuration").add_argument
    add("--backend", metavar="NAME",
        help=f"{', '.join(backends.names('fna'))}, or self attention by {', '.join(BASELINES)} (default: the best)")
    add("--fmha-backend", metavar="NAME",
        help=f"{', '.join(backends.names('fmha'))}, for self attention and additional tokens (default: the best)")
    for name, what in zip(TILE_FLAGS, ("query", "key/value") * 2, strict=True):
        pass_ = "backward" if name.startswith("backward") else "forward"
        add(flag(name), metavar="T", **extents,
            help=f"{what} tile shape of the {pass_} pass (default: the backend's choice)")
    add("--schedule", choices=[str(each) for each in KernelSchedule],
        help="kernel schedule, where the backend has several (default: the backend's choice)")
    add("--persistent", action=argparse.BooleanOptionalAction, default=True,
        help="persistent tile scheduling, where the backend has it (default: on)")
    add("--backward-kv-splits", metavar="N", **extents,
        help="key/value tiles of the backward pass that may run in parallel (default: the backend's choice)")
    add("--backward-use-xla-reduction", action="store_true", help="row sums of the backward pass by XLA")
    add("--backward-deterministic", action="store_true", help="gradients that are bitwise equal from run to run")
    add("--memory-usage-preference", choices=[str(each) for each in MemoryUsagePreference],
        default=str(MemoryUsagePreference.DEFAULT),
        help="scratch memory of the backward pass: 64 MiB, 1 GiB (default) or any, where the backend can trade it")
    add("--compile", action="store_true", default=argparse.SUPPRESS, help="no effect: XLA compiles every program")

    add = parser.add_argument_group("several devices").add_argument
    add("--devices", metavar="N", type=positive, default=1,
        help="split the problem over the first N devices, and report what they exchange (default: 1)")
    add("--split", metavar="WHAT", default="batch",
        help="split batch, heads, or tokens along T (sequence), H,W (image), T,H,W (video) (default: batch)")

    add = parser.add_argument_group("configurations and prediction, without a measurement").add_argument
    add("--dry-run", action="store_true", help="list the backends that can run the problem and their tiles, best first")
    add("--max-configs", metavar="N", type=natural, help="rows of each list; 0: all (default: 10)", default=10)
    add("--simulate", action="store_true", help="predict the time, explain it, and recommend a stride and a dilation")
    add("--compute-capability", metavar="X.Y", type=compute_capability,
        help="answer for an NVIDIA GPU of this compute capability (default: the device at hand)")
    add("--device", choices=list(TPU_CHIPS), help="answer for this kind of TPU; times are static, not measured")

    add = parser.add_argument_group("search").add_argument
    add("--optimize", action="store_true",
        help="search tiles, schedules and, if none is named, backends; then profile the best")
    add("--optimize-warmup-steps", metavar="N", type=natural, default=5,
        help="runs of the finalists before their measurement (default: 5)")

    add = parser.add_argument_group("measurement and output").add_argument
    add("--warmup-steps", metavar="N", type=natural, help="runs before the measurement (default: 10)", default=10)
    add("--iterations", metavar="N", type=positive, help="measured runs (default: 20)", default=20)
    add("--compare", metavar="NAME", help="also measure a baseline or another backend, and print the speedup")
    add("--verbose", action="store_true", help="show memory copies (GPU), and all rows of a long table")
    add("--json", metavar="PATH", type=Path, help="write the full results to a file")
    add("--csv", metavar="PATH", type=Path, help="write the table to a file")
    add("--plot", metavar="PATH", type=Path, help="draw the table as bars (needs matplotlib)")
    add("--trace-dir", metavar="PATH", type=Path, help="keep the trace, for XProf or Perfetto")
    # fmt: on
    return parser


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
        if options.problem.element.is_float8 and options.backprop:
            dtype = options.problem.element.short_name
            raise ValueError(f"--backprop does not go with --dtype {dtype}: arrays of 8 bits have no gradients")
        _check_split(options)
    except ValueError as error:
        parser.error(with_names_of_flags(str(error)))
    return options


def _options(given: argparse.Namespace) -> Options:
    values = vars(given)
    layout = tuple(values.pop("input_size"))
    rank = len(layout)
    if rank > 3:
        raise ValueError(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    values.pop("compile", None)  # XLA compiles every program
    for name in (*_REPEATED, *TILE_FLAGS):
        values[name] = _per_dimension(name, values[name], rank)
    windows = {field: values.pop(name) for name, field in zip(WINDOW_FLAGS, WindowArguments._fields, strict=True)}
    windows = {field: value for field, value in windows.items() if value is not None}
    sizes = {field: values.pop(name) for name, field in PROBLEM_FLAGS.items()}
    problem = problem_of(layout, **windows, dtype=ELEMENT_TYPES[values.pop("dtype")], **sizes)
    performance = performance_of(rank, **{field: values.pop(name) for name, field in PERFORMANCE_FLAGS.items()})
    if not given.backprop:
        for name, field in PERFORMANCE_FLAGS.items():
            if name.startswith("backward") and getattr(performance, field) != getattr(Performance(), field):
                raise ValueError(f"{flag(name)} is for the backward pass, which runs with --backprop only")
    values["fmha_backend"] = _SPELLINGS.get(given.fmha_backend, given.fmha_backend)
    return Options(**values, problem=problem, performance=performance)


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
    named: dict[str, Operator] = {"backend": "fna", "compare": "fna", "fmha_backend": "fmha"}
    for field, operator in named.items():
        option, name = flag(field), getattr(options, field)
        if name is None or name in BASELINES:
            continue
        if name in _FOREIGN_BASELINES and operator == "fna":
            raise ValueError(
                f"{option} {name} is a baseline of PyTorch; JAX's are cudnn (fused attention on NVIDIA GPUs), "
                f"pallas (on GPUs, too) and xla (anywhere): use {option} cudnn"
            )
        try:
            backends.find(name, operator)
        except ValueError as error:
            baselines = "" if operator == "fmha" else f", or a baseline: {', '.join(BASELINES)}"
            raise ValueError(f"{str(error).replace('backend=', f'{option} ')}{baselines}") from None


def _of_baseline(options: Options) -> Options:
    """Return the options of self attention. Additional tokens are an error; other flags are ignored with a warning."""
    name = str(options.backend)
    if options.problem.additional_kv:
        raise ValueError(f"--add-kv does not go with --backend {name}, which computes self attention only")
    baseline = dataclasses.replace(options.for_baseline(name), performance=Performance())
    if baseline != options:
        print_warning(f"--backend {name} computes self attention only: flags of windows and configurations are ignored")
    return baseline


def _check_split(options: Options) -> None:
    """Check that ``--split`` divides the problem by ``--devices``."""
    count = options.devices
    options.token_parts()
    if count == 1:
        return
    problem = options.problem
    name, extent = ("--batch-size", problem.batch) if options.split == "batch" else ("--heads", problem.heads)
    if extent % count and not options.splits_tokens:
        raise ValueError(
            f"{name} {extent} is not a multiple of --devices {count}: --split {options.split} shares it equally"
        )
    for each in ("dry_run", "optimize"):
        if getattr(options, each):
            raise ValueError(f"--devices {count} does not go with {flag(each)}, which is about one device")
    for option, other in (("--backend", options.backend), ("--compare", options.compare)):
        if other in BASELINES and not can_be_split(str(other), count, options.split, problem.heads_kv):
            raise ValueError(
                f"{option} {other} does not go with --devices {count} and --split {options.split}; use {option} xla"
            )
