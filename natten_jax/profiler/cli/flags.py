"""The flags of the profiler's command line."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from natten_jax import backends
from natten_jax.cost.tpu_chips import TPU_CHIPS
from natten_jax.performance import KernelSchedule, MemoryUsagePreference, Performance
from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.cli.parser import Parser, at_least, boolean, compute_capability, flag, one_of
from natten_jax.profiler.element_types import ELEMENT_TYPES, element_type
from natten_jax.profiler.messages import PROGRAM
from natten_jax.version import __version__
from natten_jax.windows import DOCUMENTATION, OPTION_DEFAULTS, WORDS

_natural, _positive = at_least(0), at_least(1)

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


def _value(group: Any, names: str, metavar: str, kind: Callable[[str], Any] | None, text: str, **options: Any) -> None:
    """Add a flag that takes a value, or several."""
    group.add_argument(*names.split(), metavar=metavar, type=kind, help=text, **options)


def _per_dimension(group: Any, names: str, metavar: str, kind: Callable[[str], Any], text: str, **options: Any) -> None:
    """Add a flag that takes a value for each token dimension."""
    _value(group, names, metavar, kind, text, nargs="+", **options)


def _window_option(group: Any, name: str, default: Any) -> None:
    """Add the flag of a window argument that has no name but the operators'."""
    kinds: dict[type[Any], tuple[Callable[[str], Any], str]] = {
        bool: (boolean, "true, false, 1 or 0"),
        str: (one_of(WORDS.get(name, ())), ", ".join(WORDS.get(name, ()))),
        int: (_positive, "a number"),
    }
    kind, values = kinds[type(default)]
    meaning = re.split(r"[:;.]", DOCUMENTATION.get(name, name), maxsplit=1)[0]
    meaning = meaning[:1].lower() + meaning[1:]
    text = f"{meaning}: {values}, per dimension or one for all (default: {str(default).lower()})"
    _per_dimension(group, flag(name), name[0].upper(), kind, text.replace("``", ""))


def _switch(group: Any, name: str, text: str, **options: Any) -> None:
    """Add a flag that takes no value."""
    group.add_argument(name, help=text, **{"action": "store_true", **options})


def _choice(group: Any, name: str, kinds: type[enum.StrEnum], text: str, default: str | None = None) -> None:
    """Add a flag that takes one of some words."""
    group.add_argument(name, choices=[str(each) for each in kinds], default=default, help=text)


# fmt: off
def _add_problem(group: Any) -> None:
    _per_dimension(group, "-i --input-size", "X", _positive, required=True,
        text="token layout, 1 to 3 integers: sequence length; height width; depth height width (required)")
    _value(group, "-b --batch-size", "B", _positive, "batch size (default: 1)", default=1)
    _value(group, "-n --heads", "H", _positive, "query heads (default: 1)", default=1)
    _value(group, "--heads-kv", "H", _positive, "key/value heads, a divisor of --heads (default: --heads)")
    _value(group, "-d --dim", "D", _positive, "head dim of query and key (default: 64)", default=64)
    _value(group, "--dim-value", "D", _positive, "head dim of value and output (default: --dim)")
    _per_dimension(group, "-w --window-size", "W", _positive,
        "window per dimension, or one for all (default: the input size, which is self attention)")
    _per_dimension(group, "-s --stride", "S", _positive,
        "queries that share a window, per dimension or one for all (default: 1)")
    _per_dimension(group, "--dilation", "N", _positive,
        "distance between neighboring tokens of a window, per dimension or one for all (default: 1)")
    _per_dimension(group, "-c --causal", "C", boolean,
        "true, false, 1 or 0 per dimension, or one for all (default: false)")
    for name, default in OPTION_DEFAULTS.items():
        _window_option(group, name, default)
    _value(group, "--dtype", "TYPE", element_type, default="fp16",
        text=f"element type, {', '.join(ELEMENT_TYPES)} or its full name such as float16; those of 8 bits have a "
        "forward pass alone (default: fp16)")
    _switch(group, "--backprop", "profile forward and backward pass")
    _value(group, "--add-kv", "N", _natural, "additional key/value tokens (default: 0)", default=0)


def _add_configuration(group: Any) -> None:
    _value(group, "--backend", "NAME", None,
        f"{', '.join(backends.names('fna'))} (default: the best that runs the problem), or a baseline "
        f"that computes self attention: {', '.join(BASELINES)}")
    _value(group, "--fmha-backend", "NAME", None,
        f"{', '.join(backends.names('fmha'))}: runs self attention and additional key/value tokens (default: the "
        "best that runs the problem)")
    for name, what in zip(TILE_FLAGS, ("query", "key/value") * 2, strict=True):
        pass_ = "backward" if name.startswith("backward") else "forward"
        _per_dimension(group, flag(name), "T", _positive,
            f"{what} tile shape of the {pass_} pass (default: the backend's choice)")
    _choice(group, "--schedule", KernelSchedule,
        "kernel schedule, where the backend has several (default: the backend's choice)")
    _switch(group, "--persistent", action=argparse.BooleanOptionalAction, default=True,
        text="persistent tile scheduling, where the backend has it (default: on)")
    _per_dimension(group, "--backward-kv-splits", "N", _positive,
        "key/value tiles of the backward pass that may run in parallel (default: the backend's choice)")
    _switch(group, "--backward-use-xla-reduction", "row sums of the backward pass by XLA")
    _switch(group, "--backward-deterministic", "gradients that are bitwise equal from run to run")
    _choice(group, "--memory-usage-preference", MemoryUsagePreference, default=str(MemoryUsagePreference.DEFAULT),
        text="scratch memory of the backward pass: 64 MiB, 1 GiB (default) or any, where the backend can trade it")
    _switch(group, "--compile", action=_Ignored,
        text="taken for NATTEN's sake: XLA compiles every program, this flag or not")


def _add_split(group: Any) -> None:
    _value(group, "--devices", "N", _positive, default=1,
        text="split the problem over the first N devices, and report what they exchange (default: 1)")
    _value(group, "--split", "WHAT", None, default="batch",
        text="what each device gets a share of: batch, heads, or the tokens of T, H, W or of several, as in T,W; a "
        "sequence is T, an image H and W (default: batch)")


def _add_modes(group: Any) -> None:
    _switch(group, "--dry-run", "list the backends that can run the problem and their tiles, best first")
    _value(group, "--max-configs", "N", _natural, "rows of each list; 0: all (default: 10)", default=10)
    _switch(group, "--simulate", "predict the time, explain it, and recommend a stride and a dilation")
    _value(group, "--compute-capability", "X.Y", compute_capability,
        "answer for an NVIDIA GPU of this compute capability (default: the device at hand)")
    group.add_argument("--device", choices=list(TPU_CHIPS), default=None,
        help="answer for this kind of TPU; times are static, not measured")


def _add_search(group: Any) -> None:
    _switch(group, "--optimize",
        "measure the most promising tiles, schedules and, if none is named, backends; then profile the best")
    _value(group, "--optimize-warmup-steps", "N", _natural, default=5,
        text="runs of the finalists before their measurement (default: 5)")


def _add_measurement(group: Any) -> None:
    _value(group, "--warmup-steps", "N", _natural, "runs before the measurement (default: 10)", default=10)
    _value(group, "--iterations", "N", _positive, "measured runs (default: 20)", default=20)
    _value(group, "--compare", "NAME", None,
        "measure a baseline or another backend in turns with it and print the speedup")
    _switch(group, "--verbose", "rows for filling and copying memory (GPU), and all rows of a long table")
    _value(group, "--json", "PATH", Path, "write the full results to a file")
    _value(group, "--csv", "PATH", Path, "write the table to a file")
    _value(group, "--plot", "PATH", Path, "draw the table as bars (needs matplotlib)")
    _value(group, "--trace-dir", "PATH", Path, "keep the trace, for XProf or Perfetto")
# fmt: on
