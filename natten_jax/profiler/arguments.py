"""The profiler's command line: its flags, and the checks that need nothing but the flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from natten_jax import backends
from natten_jax.backends.base import Platform
from natten_jax.performance import KernelSchedule
from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.options import DTYPES, Options
from natten_jax.profiler.outputs import chart_problem, folder_problem
from natten_jax.profiler.parser import Parser, at_least, boolean, compute_capability, flag
from natten_jax.version import __version__

#: Baselines of NATTEN's profiler that do not exist in JAX.
_FOREIGN_BASELINES = ("xformers", "fav2")

#: Backend families of NATTEN's profiler, and the GPUs that they are for: such a name is never a typing error.
KNOWN_FAMILIES: dict[str, Platform] = {
    "blackwell": Platform("cuda", (10, 0), is_exact=True),
    **{backend.family: backend.platform for backend in backends.registered() if backend.platform is not None},
}

_TILE_FLAGS = ("q_tile", "kv_tile", "backward_q_tile", "backward_kv_tile")
_OUTPUT_FILES = ("json", "csv", "plot")
#: What only a measurement can produce or use.
_MEASUREMENT_ONLY = ("compare", "csv", "plot", "trace_dir", "verbose")

_EXAMPLES = """\
examples:
  # Self attention over a video of 8 x 16 x 24 tokens, head dim 128
  %(prog)s -i 8 16 24 -d 128

  # Neighborhood attention with a 2 x 4 x 3 window, forward and backward
  %(prog)s -i 8 16 24 -d 128 -w 2 4 3 --backprop

  # Strided, causal in the first dimension, grouped query heads, beside cuDNN's self attention
  %(prog)s -i 16 32 32 -n 8 --heads-kv 2 -w 8 16 16 -s 2 4 4 -c 1 0 0 --compare cudnn

  # Which tiles does each backend offer on a Hopper GPU, and what do they come to?
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --dry-run --compute-capability 9.0

  # How fast would it be there, and which stride would make it faster?
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --simulate --compute-capability 9.0

  # Search for the best tiles, schedules and backend, and save them for natten_jax.load_tuned
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --backprop --optimize --json tuned.json

a trace that JAX's profiler wrote is read by
  python -m natten_jax.profiler.trace PATH
"""


def parse(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; a usage error prints one sentence and exits with status 2."""
    parser = _parser()
    given = parser.parse_args(argv)
    rank = len(given.input_size)
    if rank > 3:
        parser.error(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {rank}")
    for name in ("window_size", "stride", "dilation", *_TILE_FLAGS):
        value = getattr(given, name)
        if value is not None and len(value) != rank:
            _wrong_count(parser, name, value, given.input_size)
    _check_modes(parser, given)
    _check_backends(parser, given)
    if given.backend in BASELINES:
        _check_baseline(parser, given)

    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()
    }
    values["window_size"] = values["window_size"] or values["input_size"]
    values["stride"] = values["stride"] or (1,) * rank
    values["dilation"] = values["dilation"] or (1,) * rank
    values["heads_kv"] = values["heads_kv"] or given.heads
    values["dim_value"] = values["dim_value"] or given.dim
    causal = values["causal"] or (False,)
    if len(causal) not in (1, rank):
        _wrong_count(parser, "causal", causal, values["input_size"], "or one for all, ")
    values["causal"] = causal if len(causal) == rank else causal * rank
    options = Options(**values)
    _check_problem(parser, options)
    _check_tiles(parser, options)
    _check_outputs(parser, given)
    return options


def _check_modes(parser: Parser, given: argparse.Namespace) -> None:
    modes = [name for name in ("dry_run", "simulate", "optimize") if getattr(given, name)]
    if len(modes) > 1:
        parser.error(f"{' and '.join(map(flag, modes))} exclude each other: choose one")
    is_measurement = not (given.dry_run or given.simulate)
    if given.compute_capability is not None and is_measurement:
        parser.error("--compute-capability is for --dry-run and --simulate: a measurement runs on the device at hand")
    if not is_measurement:
        wrong = [flag(name) for name in _MEASUREMENT_ONLY if getattr(given, name)]
        if wrong:
            parser.error(f"{', '.join(wrong)} would need a measurement, but {flag(modes[0])} measures nothing")
    if modes and given.backend in BASELINES:
        parser.error(f"{flag(modes[0])} is about backends with tiles, which the baseline {given.backend} does not have")


def _check_backends(parser: Parser, given: argparse.Namespace) -> None:
    known = tuple(KNOWN_FAMILIES)
    fna = (*backends.names("fna"), *(f"{family}-fna" for family in known))
    fmha = (*backends.names("fmha"), *(f"{family}-fmha" for family in known))
    for option, name in (("--backend", given.backend), ("--compare", given.compare)):
        if name is None:
            continue
        if name in _FOREIGN_BASELINES:
            parser.error(
                f"{option} {name} is a baseline of PyTorch; JAX's are cudnn (fused attention on NVIDIA GPUs), "
                f"pallas (on GPUs, too) and xla (anywhere): use {option} cudnn"
            )
        if name in fmha:
            parser.error(f"{option} {name} is an attention backend: name it with --fmha-backend")
        if name not in (*fna, *BASELINES):
            parser.error(
                f"{option} {name} is unknown; choose one of {', '.join(backends.names('fna'))}, "
                f"or a baseline: {', '.join(BASELINES)}"
            )
    if given.compare is not None and given.compare == given.backend:
        parser.error(f"--compare {given.compare} is what --backend runs already")
    if given.fmha_backend is not None and given.fmha_backend not in fmha:
        choices = ", ".join(backends.names("fmha"))
        parser.error(f"--fmha-backend {given.fmha_backend} is unknown; choose one of {choices}")


def _check_baseline(parser: Parser, given: argparse.Namespace) -> None:
    if given.add_kv:
        parser.error(f"--add-kv does not go with --backend {given.backend}, which computes self attention only")
    ignored = ["window_size", "stride", "dilation", "causal", "fmha_backend", *_TILE_FLAGS, "schedule"]
    flags = [flag(name) for name in ignored if getattr(given, name) is not None]
    if flags:
        print(
            f"{parser.prog}: warning: --backend {given.backend} computes self attention only: "
            f"{', '.join(flags)} ignored",
            file=sys.stderr,
        )
    for name in ignored:
        setattr(given, name, None)


def _check_problem(parser: Parser, options: Options) -> None:
    inputs, windows = options.input_size, options.window_size
    if any(w > x for w, x in zip(windows, inputs, strict=True)):
        parser.error(f"window size {_text(windows)} exceeds input size {_text(inputs)}: each window must fit the input")
    if any(s > w for s, w in zip(options.stride, windows, strict=True)):
        parser.error(
            f"stride {_text(options.stride)} exceeds window size {_text(windows)}: "
            "each stride must be at most its window"
        )
    if any(d * w > x for d, w, x in zip(options.dilation, windows, inputs, strict=True)):
        parser.error(
            f"dilation {_text(options.dilation)} times window size {_text(windows)} exceeds input size "
            f"{_text(inputs)}: each dilated window must fit the input"
        )
    if options.heads % options.heads_kv:
        parser.error(f"--heads {options.heads} must be a multiple of --heads-kv {options.heads_kv}")


def _check_tiles(parser: Parser, options: Options) -> None:
    for prefix in ("", "backward_"):
        names = f"{prefix}q_tile", f"{prefix}kv_tile"
        given = [name for name in names if getattr(options, name) is not None]
        if len(given) == 1:
            (missing,) = set(names) - set(given)
            parser.error(f"{flag(given[0])} was given without {flag(missing)}: give both or neither")
        if given and prefix and not options.backprop:
            parser.error(f"{flag(given[0])} is for the backward pass, which runs with --backprop only")


def _check_outputs(parser: Parser, given: argparse.Namespace) -> None:
    """Check where results go, before they are worked out; a chart's format, too."""
    parser.check_files(given, _OUTPUT_FILES)
    problem = None if given.plot is None else chart_problem(given.plot)
    if problem is not None:
        parser.error(f"--plot: {problem}")
    problem = None if given.trace_dir is None else folder_problem(given.trace_dir)
    if problem is not None:
        parser.error(f"--trace-dir: {problem}")


def _wrong_count(
    parser: Parser, name: str, value: Sequence[object], inputs: Sequence[int], alternative: str = ""
) -> NoReturn:
    parser.error(
        f"{flag(name)} takes {len(inputs)} value(s), {alternative}one per dimension of the input size "
        f"{_text(inputs)}, got {len(value)}"
    )


def _text(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _parser() -> Parser:
    parser = Parser(
        prog="natten-jax-profiler",
        description="Measure what neighborhood attention launches on this machine's default JAX device, list and\n"
        "search its configurations, or predict its time for a GPU that is not there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"natten_jax {__version__}")
    _add_problem(parser.add_argument_group("problem"))
    _add_configuration(parser.add_argument_group("backend and configuration"))
    _add_modes(parser.add_argument_group("configurations and prediction, without a measurement"))
    _add_search(parser.add_argument_group("search"))
    _add_measurement(parser.add_argument_group("measurement and output"))
    return parser


# fmt: off
def _add_problem(group: Any) -> None:
    positive, natural = at_least(1), at_least(0)
    group.add_argument(
        "-i", "--input-size", nargs="+", type=positive, required=True, metavar="X",
        help="token layout, 1 to 3 integers: sequence length; height width; depth height width (required)",
    )
    group.add_argument("-b", "--batch-size", type=positive, default=1, metavar="B", help="batch size (default: 1)")
    group.add_argument("-n", "--heads", type=positive, default=1, metavar="H", help="query heads (default: 1)")
    group.add_argument(
        "--heads-kv", type=positive, metavar="H", help="key/value heads, a divisor of --heads (default: --heads)"
    )
    group.add_argument(
        "-d", "--dim", type=positive, default=64, metavar="D", help="head dim of query and key (default: 64)"
    )
    group.add_argument(
        "--dim-value", type=positive, metavar="D", help="head dim of value and output (default: --dim)"
    )
    group.add_argument(
        "-w", "--window-size", nargs="+", type=positive, metavar="W",
        help="window per dimension (default: the input size, which is self attention)",
    )
    group.add_argument(
        "-s", "--stride", nargs="+", type=positive, metavar="S",
        help="queries that share a window, per dimension (default: 1s)",
    )
    group.add_argument(
        "--dilation", nargs="+", type=positive, metavar="N",
        help="distance between neighboring tokens of a window, per dimension (default: 1s)",
    )
    group.add_argument(
        "-c", "--causal", nargs="+", type=boolean, metavar="C",
        help="true, false, 1 or 0 per dimension, or one for all (default: false)",
    )
    group.add_argument("--dtype", choices=tuple(DTYPES), default="fp16", help="element type (default: fp16)")
    group.add_argument("--backprop", action="store_true", help="profile forward and backward pass")
    group.add_argument(
        "--add-kv", type=natural, default=0, metavar="N", help="additional key/value tokens (default: 0)"
    )


def _add_configuration(group: Any) -> None:
    positive = at_least(1)
    group.add_argument(
        "--backend", metavar="NAME",
        help=f"{', '.join(backends.names('fna'))} (default: the best that runs the problem), or a baseline "
        f"that computes self attention: {', '.join(BASELINES)}",
    )
    group.add_argument(
        "--fmha-backend", metavar="NAME",
        help=f"{', '.join(backends.names('fmha'))}: runs self attention and additional key/value tokens",
    )
    for name, what in zip(_TILE_FLAGS, ("query", "key/value") * 2, strict=True):
        pass_ = "backward" if name.startswith("backward") else "forward"
        group.add_argument(
            flag(name), nargs="+", type=positive, metavar="T",
            help=f"{what} tile shape of the {pass_} pass (default: the backend's choice)",
        )
    group.add_argument(
        "--schedule", choices=[str(schedule) for schedule in KernelSchedule],
        help="kernel schedule, where the backend has several",
    )
    group.add_argument(
        "--persistent", action=argparse.BooleanOptionalAction, default=True,
        help="persistent tile scheduling, where the backend has it (default: on)",
    )


def _add_modes(group: Any) -> None:
    group.add_argument(
        "--dry-run", action="store_true", help="list the backends that can run the problem and their tiles, best first"
    )
    group.add_argument(
        "--max-configs", type=at_least(0), default=10, metavar="N", help="rows of each list; 0: all (default: 10)"
    )
    group.add_argument(
        "--simulate", action="store_true", help="predict the time, explain it, and recommend a stride"
    )
    group.add_argument(
        "--compute-capability", type=compute_capability, metavar="X.Y",
        help="answer for an NVIDIA GPU of this compute capability (default: the device at hand)",
    )


def _add_search(group: Any) -> None:
    group.add_argument(
        "--optimize", action="store_true",
        help="measure the most promising tiles, schedules and, if none is named, backends; then profile the best",
    )
    group.add_argument(
        "--optimize-warmup-steps", type=at_least(0), default=5, metavar="N",
        help="runs of the finalists before their measurement (default: 5)",
    )


def _add_measurement(group: Any) -> None:
    group.add_argument(
        "--warmup-steps", type=at_least(0), default=10, metavar="N", help="runs before the measurement (default: 10)"
    )
    group.add_argument(
        "--iterations", type=at_least(1), default=20, metavar="N", help="measured runs (default: 20)"
    )
    group.add_argument(
        "--compare", metavar="NAME",
        help="measure a baseline or another backend in turns with it and print the speedup",
    )
    group.add_argument(
        "--verbose", action="store_true", help="rows for filling and copying memory (GPU), and all rows of a long table"
    )
    group.add_argument("--json", type=Path, metavar="PATH", help="write the full results to a file")
    group.add_argument("--csv", type=Path, metavar="PATH", help="write the table to a file")
    group.add_argument("--plot", type=Path, metavar="PATH", help="draw the table as bars (needs matplotlib)")
    group.add_argument("--trace-dir", type=Path, metavar="PATH", help="keep the trace, for XProf or Perfetto")
# fmt: on
