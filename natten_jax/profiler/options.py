"""Options of the profiler, and the flags that set them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from natten_jax import backends, element_types
from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.performance import KernelSchedule, MemoryUsagePreference, Performance
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.problem import Shape
from natten_jax.profiler.baselines import BASELINES
from natten_jax.profiler.cli import PROGRAM, Parser, at_least, boolean, compute_capability, flag
from natten_jax.version import __version__
from natten_jax.windows import EDGES, WindowArguments

_NATTEN_NAMES = {"kernel_size": "window_size", "is_causal": "causal"}
#: Flags of the window arguments, in the order of :class:`WindowArguments`.
WINDOW_FLAGS = tuple(_NATTEN_NAMES.get(name, name) for name in WindowArguments._fields)

#: Flags of tile shapes.
TILE_FLAGS = ("q_tile", "kv_tile", "backward_q_tile", "backward_kv_tile")

_SHORT_NAMES = {
    **{f"{name}_shape": name for name in TILE_FLAGS},
    "run_persistent_kernel": "persistent",
    "kernel_schedule": "schedule",
}
#: Flags of the performance arguments -> names of the operators' arguments.
PERFORMANCE_FLAGS = {_SHORT_NAMES.get(field.name, field.name): field.name for field in dataclasses.fields(Performance)}

#: Short names of element types, as in reports -> full names, widest type first.
ELEMENT_TYPES = {
    each.short_name: each.name
    for each in sorted(element_types.ELEMENT_TYPES.values(), key=lambda each: each.bytes, reverse=True)
}

_natural, _positive = at_least(0), at_least(1)


@dataclasses.dataclass(frozen=True)
class Options:
    """A problem and how to profile it, checked and with defaults filled in.

    Attributes:
        input_size: Token layout.
        batch_size: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads.
        dim: Head dim of query and key.
        dim_value: Head dim of value and output.
        window: Window arguments, per dimension. Windows as large as the layout are self attention.
        dtype: Short name of the element type.
        backprop: Run the backward pass after the forward pass.
        add_kv: Additional key/value tokens.
        backend: Backend or baseline. Default: the operator's choice.
        fmha_backend: Backend of the attention sub-calls. Default: the operator's choice.
        devices: Devices that the problem is split over.
        split: ``"batch"``, ``"heads"`` or token dimensions such as ``"W"`` or ``"T,W"``.
        performance: Performance arguments of the operators.
        warmup_steps: Runs before the measurement.
        iterations: Measured runs.
        compare: Baseline or backend to measure in alternation. Default: only the operator.
        dry_run: List configurations instead of measuring.
        max_configs: Rows of each list; 0 for all.
        simulate: Predict instead of measuring.
        compute_capability: GPU to list or predict for. Default: the default device.
        device: TPU to list or predict for, such as ``"v5e"``. Default: the default device.
        optimize: Search for the best configuration first.
        optimize_warmup_steps: Runs of each configuration before its measurement.
        verbose: Show fills and copies of memory, and all rows of a long table.
        json: File for the full results.
        csv: File for the table.
        plot: File for a bar chart of the table.
        trace_dir: Folder for the trace.
    """

    input_size: Shape
    batch_size: int
    heads: int
    heads_kv: int
    dim: int
    dim_value: int
    window: WindowArguments
    dtype: str
    backprop: bool
    add_kv: int
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

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.input_size)

    def as_given(self) -> dict[str, Any]:
        """Return the values by names of flags."""
        values = dataclasses.asdict(self)
        return {**values, **dict(zip(WINDOW_FLAGS, values.pop("window"), strict=True))}

    @property
    def asked_about(self) -> Device | None:
        """Device to list or predict for, present or not; ``None`` for the default device."""
        if self.device is not None:
            return TPU_CHIPS[self.device].device
        if self.compute_capability is not None:
            return Device("cuda", self.compute_capability, is_present=False)
        return None

    @property
    def is_baseline(self) -> bool:
        """Profile a baseline instead of an operator of this package."""
        return self.backend in BASELINES

    def for_baseline(self, name: str) -> Options:
        """Return options that run a baseline (self attention) or another backend on the same arrays."""
        # Tiles and backends were chosen for one backend; another one has its own.
        performance = self.performance.with_tiles("forward", None).with_tiles("backward", None)
        performance = dataclasses.replace(performance, kernel_schedule=None)
        other = dataclasses.replace(self, backend=name, fmha_backend=None, performance=performance)
        if name not in BASELINES:
            return other
        return dataclasses.replace(other, add_kv=0, window=whole_windows(self.input_size))


def whole_windows(layout: Shape) -> WindowArguments:
    """Return windows as large as the layout, which are self attention."""
    return WindowArguments(layout).checked(len(layout))


def element_type(text: str) -> str:
    """Return the short name of an element type from its short or full name; return any other text unchanged."""
    known = element_types.ELEMENT_TYPES.get(text)
    return text if known is None else known.short_name


def arrays_of(short_name: str) -> contextlib.AbstractContextManager[object]:
    """Enable 64-bit arrays in JAX if the element type is ``"fp64"``."""
    return jax.enable_x64(True) if short_name == "fp64" else contextlib.nullcontext()


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
    _add_problem(parser.add_argument_group("problem"))
    _add_configuration(parser.add_argument_group("backend and configuration"))
    _add_split(parser.add_argument_group("several devices"))
    _add_modes(parser.add_argument_group("configurations and prediction, without a measurement"))
    _add_search(parser.add_argument_group("search"))
    _add_measurement(parser.add_argument_group("measurement and output"))
    return parser


def _value(group: Any, names: str, metavar: str, kind: Callable[[str], Any] | None, text: str, **options: Any) -> None:
    """Add a flag with a value."""
    group.add_argument(*names.split(), metavar=metavar, type=kind, help=text, **options)


def _per_dimension(group: Any, names: str, metavar: str, kind: Callable[[str], Any], text: str, **options: Any) -> None:
    """Add a flag with a value per token dimension."""
    _value(group, names, metavar, kind, text, nargs="+", **options)


def _switch(group: Any, name: str, text: str, **options: Any) -> None:
    """Add a flag without a value."""
    group.add_argument(name, help=text, **{"action": "store_true", **options})


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
    _per_dimension(group, "--edges", "E", str, choices=EDGES,
        text=f"what becomes of a window that reaches over the ends: {', '.join(EDGES)}, per dimension or one for all "
        f"(default: {EDGES[0]})")
    _value(group, "--dtype", "TYPE", element_type, default="fp16", choices=list(ELEMENT_TYPES),
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
    group.add_argument("--schedule", choices=[str(each) for each in KernelSchedule], default=None,
        help="kernel schedule, where the backend has several (default: the backend's choice)")
    _switch(group, "--persistent", action=argparse.BooleanOptionalAction, default=True,
        text="persistent tile scheduling, where the backend has it (default: on)")
    _per_dimension(group, "--backward-kv-splits", "N", _positive,
        "key/value tiles of the backward pass that may run in parallel (default: the backend's choice)")
    _switch(group, "--backward-use-xla-reduction", "row sums of the backward pass by XLA")
    _switch(group, "--backward-deterministic", "gradients that are bitwise equal from run to run")
    group.add_argument("--memory-usage-preference", choices=[str(each) for each in MemoryUsagePreference],
        default=str(MemoryUsagePreference.DEFAULT),
        help="scratch memory of the backward pass: 64 MiB, 1 GiB (default) or any, where the backend can trade it")
    _switch(group, "--compile", default=argparse.SUPPRESS,
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
