"""Options of the profiler: a problem, its split over devices, and how to measure it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax

from natten_jax.autotuning.tables import table_for, without_configuration
from natten_jax.cost_model.simulation import TPU_CHIPS
from natten_jax.halo import bytes_received
from natten_jax.ops.sub_calls import SubCall, split_call
from natten_jax.performance import Pass, Performance
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Request
from natten_jax.problem import Problem, Shape
from natten_jax.profiler.baselines import BASELINES
from natten_jax.sharding.auto import HeadSplit
from natten_jax.windows import Axis, WindowArguments

#: Flags of a problem -> names of its fields.
PROBLEM_FLAGS = {
    "batch_size": "batch",
    "heads": "heads",
    "heads_kv": "heads_kv",
    "dim": "head_dim",
    "dim_value": "head_dim_v",
    "add_kv": "additional_kv",
}

_NATTEN_NAMES = {"kernel_size": "window_size", "is_causal": "causal"}
#: Flags of the window arguments, in the order of :class:`WindowArguments`.
WINDOW_FLAGS = tuple(_NATTEN_NAMES.get(name, name) for name in WindowArguments._fields)

#: Values of --split that divide whole problems, and names of token dimensions by rank.
SHARES = ("batch", "heads")
DIMENSIONS = {1: ("T",), 2: ("H", "W"), 3: ("T", "H", "W")}


@dataclasses.dataclass(frozen=True)
class Options:
    """A problem and how to profile it, checked and with defaults filled in.

    Attributes:
        problem: The problem. Windows as large as the layout are self attention.
        backprop: Run the backward pass after the forward pass.
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
        """Return the values by names of flags."""
        problem, values = self.problem, dataclasses.asdict(self)
        del values["problem"]
        values |= {"input_size": problem.query_layout, "dtype": problem.element.short_name}
        values |= {name: getattr(problem, field) for name, field in PROBLEM_FLAGS.items()}
        return values | dict(zip(WINDOW_FLAGS, problem.windows, strict=True))

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Passes to profile."""
        return ("forward", "backward") if self.backprop else ("forward",)

    @property
    def attention_kwargs(self) -> dict[str, Any] | None:
        """The operators' argument of this name."""
        return None if self.fmha_backend is None else {"backend": self.fmha_backend}

    @property
    def sub_calls(self) -> tuple[SubCall, ...]:
        """Attention calls that the operator makes, the one over the tokens first."""
        backend = None if self.is_baseline else self.backend
        request = Request(self.problem, self.performance, backend, tuned=table_for())
        return split_call(request, self.attention_kwargs)

    @property
    def main_request(self) -> Request:
        """Request of the attention call over the tokens."""
        return self.sub_calls[0].request

    # Devices and backends.

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
        problem, performance = self.problem, without_configuration(self.performance)
        if name in BASELINES:
            whole = tuple(Axis(extent, extent, extent) for extent in problem.query_layout)
            problem = dataclasses.replace(problem, axes=whole, additional_kv=0)
        return dataclasses.replace(self, problem=problem, backend=name, fmha_backend=None, performance=performance)

    # Several devices.

    @property
    def splits_tokens(self) -> bool:
        """Token dimensions are split."""
        return self.split not in SHARES

    def token_parts(self) -> Shape:
        """Return the number of parts per token dimension, such that a device receives the fewest bytes.

        Raises:
            ValueError: ``--split`` has an unknown name, or the dimensions cannot be cut into equal parts.
        """
        problem = self.problem
        if not self.splits_tokens:
            return (1,) * problem.rank
        names, wanted = DIMENSIONS[problem.rank], self.split.split(",")
        if not set(wanted) <= set(names) or len(set(wanted)) < len(wanted):
            known = ", ".join((*SHARES, *names))
            several = f", or token dimensions with commas, as {','.join(names)}" if problem.rank > 1 else ""
            raise ValueError(f"--split takes {known}{several}; got {self.split}")
        counts = [
            [n for n in range(1, self.devices + 1) if extent % n == self.devices % n == 0] if name in wanted else [1]
            for name, extent in zip(names, problem.query_layout, strict=True)
        ]
        every = [parts for parts in itertools.product(*counts) if math.prod(parts) == self.devices]
        if not every:
            size = " ".join(map(str, problem.query_layout))
            raise ValueError(
                f"--devices {self.devices} cannot share the tokens equally that --split {self.split} names: "
                f"the input size is {size}"
            )
        return min(every, key=lambda parts: bytes_received(problem, parts))

    def per_device(self) -> Problem:
        """Return one device's share of the batch, or of the query heads with their key/value heads.

        If tokens are split, this is the whole problem.
        """
        problem = self.problem
        if self.split == "batch":
            return dataclasses.replace(problem, batch=problem.batch // self.devices)
        if self.split == "heads":
            heads_kv = HeadSplit.of(problem.heads, problem.heads_kv, self.devices, 1).needed.shape[1]
            return dataclasses.replace(problem, heads=problem.heads // self.devices, heads_kv=heads_kv)
        return problem

    def sub_calls_per_device(self) -> tuple[SubCall, ...]:
        """Return the attention calls of each device, on its share of the problem."""
        one = self.per_device()
        return tuple(
            each._replace(request=each.request.of_part(one.batch, one.heads, one.heads_kv)) for each in self.sub_calls
        )

    def describe_split(self) -> str:
        """Return text such as ``8 devices, split over batch``."""
        text = f"{self.devices} devices, split over {self.split}"
        if self.splits_tokens:
            parts = zip(DIMENSIONS[self.problem.rank], self.token_parts(), strict=True)
            return f"{text} ({', '.join(f'{name} in {count}' for name, count in parts)})"
        is_whole = self.split == "batch" or self.problem.heads_kv % self.devices == 0
        return text if is_whole else f"{text} (key/value heads on every device)"


def arrays_of(problem: Problem) -> contextlib.AbstractContextManager[object]:
    """Enable 64-bit arrays in JAX if the problem has them."""
    return jax.enable_x64(True) if problem.dtype == "float64" else contextlib.nullcontext()
