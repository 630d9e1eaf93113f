"""The flags of the profiler's command line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any, NoReturn

from natten_jax import backends
from natten_jax.performance import KernelSchedule, MemoryUsagePreference, Performance
from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.cli.complaints import PROGRAM
from natten_jax.profiler.cli.parser import Parser, at_least, boolean, compute_capability, flag
from natten_jax.profiler.element_types import ELEMENT_TYPES, element_type
from natten_jax.version import __version__

#: By their names among the parsed arguments.
TILE_FLAGS = ("q_tile", "kv_tile", "backward_q_tile", "backward_kv_tile")

_SHORT_NAMES = {
    **{f"{name}_shape": name for name in TILE_FLAGS},
    "run_persistent_kernel": "persistent",
    "kernel_schedule": "schedule",
}
#: The performance arguments of the operators, by their names among the parsed arguments.
PERFORMANCE_FLAGS = {_SHORT_NAMES.get(field.name, field.name): field.name for field in dataclasses.fields(Performance)}

#: Flags of other versions of NATTEN's profiler that mean nothing here, and what to do instead.
_FOREIGN_FLAGS = {
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

  # And an image on 64 of them, if its tokens are split over height and width?
  %(prog)s -i 512 512 -w 64 --simulate --compute-capability 9.0 --devices 64 --split H,W

  # Search for the best tiles, schedules and backend, and save them for natten_jax.load_tuned
  %(prog)s -i 30 48 80 -n 24 -d 128 -w 18 24 24 --backprop --optimize --json tuned.json

a trace that JAX's profiler wrote is read by
  python -m natten_jax.profiler.trace PATH
"""


def profiler_parser() -> Parser:
    """The parser of the profiler's command line."""
    parser = Parser(
        prog=PROGRAM,
        description="Measure what neighborhood attention launches on this machine's default JAX device, list and\n"
        "search its configurations, or predict its time for a GPU that is not there.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"natten_jax {__version__}")
    _add_problem(parser.add_argument_group("problem"))
    _add_configuration(parser.add_argument_group("backend and configuration"))
    _add_split(parser.add_argument_group("several devices"))
    _add_modes(parser.add_argument_group("configurations and prediction, without a measurement"))
    _add_search(parser.add_argument_group("search"))
    _add_measurement(parser.add_argument_group("measurement and output"))
    for name, advice in _FOREIGN_FLAGS.items():
        parser.add_argument(name, action=RefusedFlag, help=argparse.SUPPRESS, advice=advice)
    return parser


@functools.cache
def default_of(name: str) -> Any:
    """What an argument is where its flag is left out."""
    return profiler_parser().get_default(name)


class _Ignored(argparse.Action):
    """A flag that changes nothing and leaves no trace among the parsed arguments."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Take the flag."""


class RefusedFlag(_Ignored):
    """A flag that does not exist here, which is said with what there is instead: its ``advice``."""

    def __init__(self, option_strings: list[str], dest: str, advice: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self.advice = advice

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> NoReturn:
        """Refuse the flag."""
        parser.error(f"{option_string} does not exist here: {self.advice}")


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
        help="window per dimension, or one for all (default: the input size, which is self attention)",
    )
    group.add_argument(
        "-s", "--stride", nargs="+", type=positive, metavar="S",
        help="queries that share a window, per dimension or one for all (default: 1)",
    )
    group.add_argument(
        "--dilation", nargs="+", type=positive, metavar="N",
        help="distance between neighboring tokens of a window, per dimension or one for all (default: 1)",
    )
    group.add_argument(
        "-c", "--causal", nargs="+", type=boolean, metavar="C",
        help="true, false, 1 or 0 per dimension, or one for all (default: false)",
    )
    group.add_argument(
        "--dtype", type=element_type, default="fp16", metavar="TYPE",
        help=f"element type, {', '.join(ELEMENT_TYPES)} or its full name such as float16 (default: fp16)",
    )
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
        help=f"{', '.join(backends.names('fmha'))}: runs self attention and additional key/value tokens (default: the "
        "best that runs the problem)",
    )
    for name, what in zip(TILE_FLAGS, ("query", "key/value") * 2, strict=True):
        pass_ = "backward" if name.startswith("backward") else "forward"
        group.add_argument(
            flag(name), nargs="+", type=positive, metavar="T",
            help=f"{what} tile shape of the {pass_} pass (default: the backend's choice)",
        )
    group.add_argument(
        "--schedule", choices=[str(schedule) for schedule in KernelSchedule],
        help="kernel schedule, where the backend has several (default: the backend's choice)",
    )
    group.add_argument(
        "--persistent", action=argparse.BooleanOptionalAction, default=True,
        help="persistent tile scheduling, where the backend has it (default: on)",
    )
    group.add_argument(
        "--backward-kv-splits", nargs="+", type=positive, metavar="N",
        help="key/value tiles of the backward pass that may run in parallel (default: the backend's choice)",
    )
    group.add_argument(
        "--backward-use-xla-reduction", action="store_true", help="row sums of the backward pass by XLA"
    )
    group.add_argument(
        "--backward-deterministic", action="store_true", help="gradients that are bitwise equal from run to run"
    )
    group.add_argument(
        "--memory-usage-preference", choices=[str(each) for each in MemoryUsagePreference],
        default=str(MemoryUsagePreference.DEFAULT),
        help="scratch memory of the backward pass: 64 MiB, 1 GiB (default) or any, where the backend can trade it",
    )

    group.add_argument(
        "--compile", action=_Ignored, help="taken for NATTEN's sake: XLA compiles every program, this flag or not"
    )


def _add_split(group: Any) -> None:
    group.add_argument(
        "--devices", type=at_least(1), default=1, metavar="N",
        help="split the problem over the first N devices, and report what they exchange (default: 1)",
    )
    group.add_argument(
        "--split", default="batch", metavar="WHAT",
        help="what each device gets a share of: batch, heads, or the tokens of T, H, W or of several, as in T,W; a "
        "sequence is T, an image H and W (default: batch)",
    )


def _add_modes(group: Any) -> None:
    group.add_argument(
        "--dry-run", action="store_true", help="list the backends that can run the problem and their tiles, best first"
    )
    group.add_argument(
        "--max-configs", type=at_least(0), default=10, metavar="N", help="rows of each list; 0: all (default: 10)"
    )
    group.add_argument(
        "--simulate", action="store_true", help="predict the time, explain it, and recommend a stride and a dilation"
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
