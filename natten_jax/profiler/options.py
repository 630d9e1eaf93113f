"""Options of the profiler, and the command line that sets them.

The options are a problem, the split of the problem over devices, and the work to do: a measurement, a list of
configurations, a simulation or a search.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from natten_jax import backends, element_types
from natten_jax.arguments.static import hashable
from natten_jax.autotuning.tables import table_for, without_configuration
from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.halo import bytes_received
from natten_jax.ops.sub_calls import SubCall, split_call
from natten_jax.performance import (
    ATTENTION_NAMES,
    PASSES,
    KernelSchedule,
    MemoryUsagePreference,
    Pass,
    Performance,
    performance_of,
    tile_names,
)
from natten_jax.plan.devices import ComputeCapability, Device, compute_capability_of
from natten_jax.plan.plan import Request
from natten_jax.problem import Operator, Problem, Shape, problem_of
from natten_jax.profiler.baselines import BASELINES, can_be_split
from natten_jax.profiler.cli import PROGRAM, Parser, at_least, boolean, print_warning
from natten_jax.sharding.auto import HeadSplit
from natten_jax.version import __version__
from natten_jax.windows import EDGES, Axis, WindowArguments

#: Fields of a problem that have an option of the same name. Options with other names set the layout, the windows and
#: the element type.
SIZES = ("batch", "heads", "heads_kv", "head_dim", "head_dim_v", "additional_kv")

#: Short name of an element type, as in reports -> full name. Types with more bytes are first.
ELEMENT_TYPES = {
    each.short_name: each.name
    for each in sorted(element_types.ELEMENT_TYPES.values(), key=lambda each: each.bytes, reverse=True)
}

#: ``SHARES``: values of --split that do not split tokens. ``DIMENSIONS``: number of token dimensions -> names of the
#: dimensions in --split.
SHARES = ("batch", "heads")
DIMENSIONS = {1: ("T",), 2: ("H", "W"), 3: ("T", "H", "W")}


@dataclasses.dataclass(frozen=True)
class Options:
    """A problem and the way to profile it. Values are checked, and defaults are filled in.

    Attributes:
        problem: The problem. It is self attention if the windows are as large as the layout.
        backprop: Profile the backward pass as well.
        backend: Name of a backend or baseline. Default: the operator chooses a backend.
        fmha_backend: Name of the backend for self attention and for additional tokens. Default: the operator chooses.
        devices: Number of devices over which the problem is split.
        split: Dimensions to split: ``"batch"``, ``"heads"``, or token dimensions such as ``"W"`` or ``"T,W"``.
        performance: Performance arguments of the operators.
        warmup_steps: Number of runs before the measurement.
        iterations: Number of measured runs.
        compare: Baseline or backend to compare the operator with, in alternating runs. Default: no comparison.
        dry_run: List the configurations of the problem instead of measuring it.
        max_configs: Maximum number of rows of each list of configurations. 0 means all.
        simulate: Predict the time of the problem instead of measuring it.
        compute_capability: Compute capability of the GPU that ``dry_run`` and ``simulate`` assume. Default: the default
            device.
        device: TPU that ``dry_run`` and ``simulate`` assume, such as ``"v5e"``. Default: the default device.
        optimize: Search for the best configuration, and measure that configuration.
        optimize_warmup_steps: Number of warm-up runs per configuration in the second round of a search and in the
            comparison with the default configuration.
        verbose: Show memory fills and copies (GPU), and all rows of a long table.
        json: File for the full results.
        csv: File for the table.
        plot: File for a bar chart of the table.
        trace_dir: Folder to which the trace is written. Default: the trace is deleted.
    """

    problem: Problem
    backprop: bool
    backend: str | None
    fmha_backend: str | None
    devices: int
    split: str
    performance: Performance
    warmup_steps: int
    iterations: int
    compare: str | None
    dry_run: bool
    max_configs: int
    simulate: bool
    compute_capability: ComputeCapability | None
    device: str | None
    optimize: bool
    optimize_warmup_steps: int
    verbose: bool
    json: Path | None
    csv: Path | None
    plot: Path | None
    trace_dir: Path | None

    def as_given(self) -> dict[str, Any]:
        """Return the values of the options. Each key is the name of a flag, with underscores instead of hyphens."""
        problem = self.problem
        values = {**dataclasses.asdict(self), "layout": problem.query_layout, "dtype": problem.element.short_name}
        del values["problem"]
        values |= {**{name: getattr(problem, name) for name in SIZES}, **problem.windows._asdict()}
        flags = {name: flag.removeprefix("--").replace("-", "_") for name, flag in flags_of_arguments().items()}
        return {flags.get(name, name): value for name, value in values.items()}

    @property
    def passes(self) -> tuple[Pass, ...]:
        return ("forward", "backward") if self.backprop else ("forward",)

    @property
    def attention_kwargs(self) -> dict[str, Any] | None:
        """Value of the operators' argument ``attention_kwargs``."""
        return None if self.fmha_backend is None else {"backend": self.fmha_backend}

    @property
    def sub_calls(self) -> tuple[SubCall, ...]:
        """Attention calls that the operator makes. The first call is over the layout's tokens."""
        backend = None if self.is_baseline else self.backend
        request = Request(self.problem, self.performance, backend, tuned=table_for())
        return split_call(request, self.attention_kwargs)

    @property
    def main_request(self) -> Request:
        """Request of the attention call over the layout's tokens."""
        return self.sub_calls[0].request

    # Devices and backends.

    @property
    def assumed_device(self) -> Device | None:
        """Device, present or not, that ``dry_run`` and ``simulate`` assume. ``None`` means the default device."""
        if self.device is not None:
            return TPU_CHIPS[self.device].device
        if self.compute_capability is not None:
            return Device("cuda", self.compute_capability, is_present=False)
        return None

    @property
    def is_baseline(self) -> bool:
        """True if the options profile a baseline instead of an operator of this package."""
        return self.backend in BASELINES

    def with_baseline(self, name: str) -> Options:
        """Return options that run a baseline or another backend on the same arrays. A baseline is self attention."""
        # Tiles and the backend of sub-calls were chosen for ``self.backend``. The backend ``name`` uses its defaults.
        problem, performance = self.problem, without_configuration(self.performance)
        if name in BASELINES:
            whole = tuple(Axis(extent, extent, extent) for extent in problem.query_layout)
            problem = dataclasses.replace(problem, axes=whole, additional_kv=0)
        return dataclasses.replace(self, problem=problem, backend=name, fmha_backend=None, performance=performance)

    # Several devices.

    @property
    def splits_tokens(self) -> bool:
        return self.split not in SHARES

    def token_parts(self) -> Shape:
        """Return the number of parts of each token dimension.

        Of all splits with one part per device, this is the split in which a device receives the fewest bytes.

        Raises:
            ValueError: ``--split`` has an unknown name, or the named dimensions cannot be cut into equal parts.
        """
        problem = self.problem
        if not self.splits_tokens:
            return (1,) * problem.rank
        names, wanted = DIMENSIONS[problem.rank], self.split.split(",")
        if not set(wanted) <= set(names) or len(set(wanted)) < len(wanted):
            raise ValueError(f"--split takes {', '.join(SHARES)}, or some of {','.join(names)}; got {self.split}")
        counts = [
            [n for n in range(1, self.devices + 1) if extent % n == self.devices % n == 0] if name in wanted else [1]
            for name, extent in zip(names, problem.query_layout, strict=True)
        ]
        every = [parts for parts in itertools.product(*counts) if math.prod(parts) == self.devices]
        if not every:
            size = " ".join(map(str, problem.query_layout))
            raise ValueError(
                f"--devices {self.devices} cannot share the tokens of --split {self.split} equally: "
                f"the input size is {size}"
            )
        return min(every, key=lambda parts: bytes_received(problem, parts))

    def sub_calls_per_device(self) -> tuple[SubCall, ...]:
        """Return the attention calls of one device.

        If the batch or the heads are split, the calls have the device's share of them. If tokens are split, the calls
        still have all tokens.
        """
        problem = self.problem
        batch, heads, heads_kv = problem.batch, problem.heads, problem.heads_kv
        if self.split == "batch":
            batch //= self.devices
        elif self.split == "heads":
            heads_kv = HeadSplit.for_parts(heads, heads_kv, self.devices, 1).needed.shape[1]
            heads //= self.devices
        return tuple(each._replace(request=each.request.for_part(batch, heads, heads_kv)) for each in self.sub_calls)

    def describe_split(self) -> str:
        """Return text such as ``8 devices, split over batch``."""
        text = f"{self.devices} devices, split over {self.split}"
        if self.splits_tokens:
            parts = zip(DIMENSIONS[self.problem.rank], self.token_parts(), strict=True)
            return f"{text} ({', '.join(f'{name} in {count}' for name, count in parts)})"
        is_whole = self.split == "batch" or self.problem.heads_kv % self.devices == 0
        return text if is_whole else f"{text} (key/value heads on every device)"


def arrays_of(problem: Problem) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that enables 64-bit arrays in JAX if the problem's arrays are float64."""
    return jax.enable_x64(True) if problem.dtype == "float64" else contextlib.nullcontext()


# The command line.


#: Options that apply to measurements only.
_MEASUREMENT_ONLY = ("compare", "csv", "plot", "trace_dir", "verbose")

#: Arguments that have a flag and can occur in the operators' messages.
_NAMED = (*WindowArguments._fields, *ATTENTION_NAMES, *ATTENTION_NAMES.values(), "compute_capability", "heads_kv")
_NAME_IN_MESSAGE = re.compile(rf"(?<!-)\b({'|'.join(_NAMED)})\b")

#: Flag of NATTEN's profilers that this profiler does not support -> advice to the user.
FOREIGN_FLAGS = {
    "--no-compile": "XLA compiles every program",
    "--torch-compile": "XLA compiles every program: omit the flag",
    **dict.fromkeys(
        ("--fuse-add-kv", "--fuse-additional-kv", "--try-fuse-additional-kv"),
        "additional tokens are passed to the attention kernel if it supports them: omit the flag, or name an "
        "--fmha-backend to process them separately",
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


def profiler_parser() -> Parser:
    """Return the parser of the profiler's flags."""
    parser = Parser(
        prog=PROGRAM,
        description="Measure what neighborhood attention launches on this machine's default JAX device, list and\n"
        "search its configurations, or predict its time for an absent GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"natten_jax {__version__}")
    natural, positive = at_least(0), at_least(1)
    extents: dict[str, Any] = {"type": positive, "nargs": "+"}  # one per dimension
    # fmt: off
    add = parser.add_argument_group("problem", "Windows: one value, or one per dimension.").add_argument
    add("-i", "--input-size", dest="layout", metavar="X", **extents, required=True,
        help="token layout, 1 to 3 integers: sequence length; height width; depth height width (required)")
    add("-b", "--batch-size", dest="batch", metavar="B", type=positive, help="batch size (default: 1)", default=1)
    add("-n", "--heads", metavar="H", type=positive, help="query heads (default: 1)", default=1)
    add("--heads-kv", metavar="H", type=positive, help="key/value heads, a divisor of --heads (default: --heads)")
    add("-d", "--dim", dest="head_dim", metavar="D", type=positive, default=64,
        help="head dim of query and key (default: 64)")
    add("--dim-value", dest="head_dim_v", metavar="D", type=positive,
        help="head dim of value and output (default: --dim)")
    add("-w", "--window-size", dest="kernel_size", metavar="W", **extents,
        help="window size (default: the input size: self attention)")
    add("-s", "--stride", metavar="S", **extents, help="number of queries that share a window (default: 1)")
    add("--dilation", metavar="N", **extents, help="distance between neighboring tokens of a window (default: 1)")
    add("-c", "--causal", dest="is_causal", metavar="C", type=boolean, nargs="+",
        help="causal mask: true, false, 1 or 0 (default: false)")
    add("--edges", metavar="E", nargs="+", choices=EDGES,
        help=f"treatment of windows at the edges: {', '.join(EDGES)} (default: {EDGES[0]})")
    add("--dtype", metavar="TYPE", default="fp16", choices=[*ELEMENT_TYPES, *ELEMENT_TYPES.values()],
        help=f"element type: {', '.join(ELEMENT_TYPES)}, or a full name such as float16 (default: fp16)")
    add("--backprop", action="store_true", help="profile forward and backward pass")
    add("--add-kv", dest="additional_kv", metavar="N", type=natural, default=0,
        help="additional key/value tokens (default: 0)")

    add = parser.add_argument_group("backend and configuration").add_argument
    add("--backend", metavar="NAME",
        help=f"{', '.join(backends.names('fna'))}, or self attention by {', '.join(BASELINES)} (default: the best)")
    add("--fmha-backend", metavar="NAME",
        help=f"{', '.join(backends.names('fmha'))}, for self attention and additional tokens (default: the best)")
    for pass_ in PASSES:
        for name, what in zip(tile_names(pass_), ("query", "key/value"), strict=True):
            add(f"--{name.removesuffix('_shape').replace('_', '-')}", dest=name, metavar="T", **extents,
                help=f"{what} tile shape of the {pass_} pass (default: the backend's choice)")
    add("--schedule", dest="kernel_schedule", choices=[str(each) for each in KernelSchedule],
        help="kernel schedule, if the backend has several (default: the backend's choice)")
    add("--persistent", dest="run_persistent_kernel", action=argparse.BooleanOptionalAction, default=True,
        help="persistent tile scheduling, if the backend has it (default: on)")
    add("--backward-kv-splits", metavar="N", **extents,
        help="key/value tiles of the backward pass that may run in parallel (default: the backend's choice)")
    add("--backward-use-xla-reduction", action="store_true", help="compute the row sums of the backward pass with XLA")
    add("--backward-deterministic", action="store_true", help="compute bitwise reproducible gradients")
    add("--memory-usage-preference", choices=[str(each) for each in MemoryUsagePreference],
        default=str(MemoryUsagePreference.DEFAULT),
        help="scratch memory of the backward pass: at most 1 GiB (default), 64 MiB (strict), or unrestricted")
    add("--compile", action="store_true", default=argparse.SUPPRESS, help="no effect: XLA compiles every program")

    add = parser.add_argument_group("several devices").add_argument
    add("--devices", metavar="N", type=positive, default=1,
        help="split the problem over the first N devices, and report what they exchange (default: 1)")
    add("--split", metavar="WHAT", default="batch",
        help="split batch, heads, or tokens along T (sequence), H,W (image), T,H,W (video) (default: batch)")

    group = parser.add_argument_group("configurations and prediction, without a measurement")
    add = group.add_argument
    add("--dry-run", action="store_true", help="list the backends that can run the problem and their tiles, best first")
    add("--max-configs", metavar="N", type=natural, help="rows of each list; 0: all (default: 10)", default=10)
    add("--simulate", action="store_true", help="predict the time, explain it, and recommend a stride and a dilation")
    add = group.add_mutually_exclusive_group().add_argument
    add("--compute-capability", metavar="X.Y",
        help="compute capability of the NVIDIA GPU to predict for (default: this machine's device)")
    add("--device", choices=list(TPU_CHIPS), help="kind of TPU to predict for; times are static estimates")

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


@functools.cache
def flags_of_arguments() -> dict[str, str]:
    """Return the flag of each argument: name of the argument -> the long flag that sets it."""
    actions = profiler_parser()._actions
    return {each.dest: next(text for text in each.option_strings if text.startswith("--")) for each in actions}


def with_names_of_flags(message: str) -> str:
    """Replace each argument name in a message of the operators by the flag that sets the argument."""
    flags = flags_of_arguments()
    message = _NAME_IN_MESSAGE.sub(lambda match: flags[ATTENTION_NAMES.get(match[1], match[1])], message)
    return message.replace("the token layout", "--input-size")


def parse(argv: Sequence[str] | None = None) -> Options:
    """Parse the command line. After a usage error, print one sentence and exit with status 2."""
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
            options = _for_baseline(options)
        _check_split(options)
    except ValueError as error:
        parser.error(with_names_of_flags(str(error)))
    return options


def _options(given: argparse.Namespace) -> Options:
    values = {name: hashable(value) for name, value in vars(given).items()}
    for name in (*WindowArguments._fields, "backward_kv_splits"):
        if values[name] is not None and len(values[name]) == 1:
            (values[name],) = values[name]  # one value sets all dimensions
    layout = values.pop("layout")
    if len(layout) > 3:
        raise ValueError(f"-i/--input-size takes 1 to 3 integers, one per token dimension, got {len(layout)}")
    values.pop("compile", None)  # --compile has no effect, because XLA compiles every program
    windows = {name: value for name in WindowArguments._fields if (value := values.pop(name)) is not None}
    sizes = {name: values.pop(name) for name in SIZES}
    dtype = values.pop("dtype")
    problem = problem_of(layout, **windows, dtype=ELEMENT_TYPES.get(dtype, dtype), **sizes)
    defaults: dict[str, Any] = dataclasses.asdict(Performance())
    performance = performance_of(len(layout), **{name: values.pop(name) for name in defaults})
    for name, default in defaults.items():
        if name.startswith("backward") and not given.backprop and getattr(performance, name) != default:
            flag = flags_of_arguments()[name]
            raise ValueError(f"{flag} is for the backward pass, which runs with --backprop only")
    if given.fmha_backend == "flex-fna":  # NATTEN's documentation uses this name here
        values["fmha_backend"] = "flex-fmha"
    if given.compute_capability is not None:
        values["compute_capability"] = compute_capability_of(given.compute_capability)
    return Options(**values, problem=problem, performance=performance)


def _check_modes(given: argparse.Namespace) -> None:
    """Check flags that depend on the mode (measurement, ``--dry-run``, ``--simulate`` or ``--optimize``).

    At most one mode can be given, and the other flags must apply to it. The folders of output files must exist.
    """
    flags = flags_of_arguments()
    modes = [flags[name] for name in ("dry_run", "simulate", "optimize") if getattr(given, name)]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} exclude each other: choose one")
    if given.dry_run or given.simulate:
        if wrong := [flags[name] for name in _MEASUREMENT_ONLY if getattr(given, name)]:
            raise ValueError(f"{', '.join(wrong)} would need a measurement, but {modes[0]} does not measure")
    elif given.compute_capability or given.device:
        raise ValueError(
            "--compute-capability and --device are for --dry-run and --simulate: measurements run on this machine's "
            "device"
        )
    if modes and given.backend in BASELINES:
        raise ValueError(f"{modes[0]} is for backends with tiles, which the baseline {given.backend} does not have")
    for name in ("json", "csv", "plot"):
        path = getattr(given, name)
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{name}: the folder {str(path.parent)!r} does not exist")


def _check_backends(options: Options) -> None:
    named: dict[str, Operator] = {"backend": "fna", "compare": "fna", "fmha_backend": "fmha"}
    for field, operator in named.items():
        option, name = flags_of_arguments()[field], getattr(options, field)
        if name is None or name in BASELINES:
            continue
        try:
            backends.find(name, operator)
        except ValueError as error:
            baselines = "" if operator == "fmha" else f", or a baseline: {', '.join(BASELINES)}"
            raise ValueError(f"{str(error).replace('backend=', f'{option} ')}{baselines}") from None


def _for_baseline(options: Options) -> Options:
    """Return the options for a baseline, which computes self attention.

    Raise an error if the problem has additional tokens. If flags of windows or configurations were given, print a
    warning and ignore these flags.
    """
    name = str(options.backend)
    if options.problem.additional_kv:
        raise ValueError(f"--add-kv cannot be combined with --backend {name}, which computes self attention only")
    baseline = dataclasses.replace(options.with_baseline(name), performance=Performance())
    if baseline != options:
        print_warning(f"--backend {name} computes self attention only: flags of windows and configurations are ignored")
    return baseline


def _check_split(options: Options) -> None:
    """Check that ``--split`` cuts the problem into equal parts, and that the other flags support several devices."""
    count = options.devices
    options.token_parts()
    if count == 1:
        return
    problem = options.problem
    name, extent = ("--batch-size", problem.batch) if options.split == "batch" else ("--heads", problem.heads)
    if extent % count and not options.splits_tokens:
        raise ValueError(
            f"{name} {extent} is not a multiple of --devices {count}: --split {options.split} splits it equally"
        )
    if options.dry_run or options.optimize:
        mode = "--dry-run" if options.dry_run else "--optimize"
        raise ValueError(f"--devices {count} cannot be combined with {mode}, which is for one device")
    for option, other in (("--backend", options.backend), ("--compare", options.compare)):
        if other in BASELINES and not can_be_split(str(other), count, options.split, problem.heads_kv):
            raise ValueError(
                f"{option} {other} cannot be combined with --devices {count} and --split {options.split}; "
                f"use {option} xla"
            )
