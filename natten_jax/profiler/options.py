"""What to profile and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from natten_jax.cost.tpu_chips import TPU_CHIPS
from natten_jax.performance import Performance
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.problem import Shape
from natten_jax.profiler.baselines import BASELINES
from natten_jax.windows import WindowArguments

_NATTEN_NAMES = {"kernel_size": "window_size", "is_causal": "causal"}
#: What the command line calls the window arguments of the operators, in the order of :class:`WindowArguments`.
WINDOW_FLAGS = tuple(_NATTEN_NAMES.get(name, name) for name in WindowArguments._fields)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to profile and how, checked and with every default filled in.

    Attributes:
        input_size: Token layout.
        batch_size: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads.
        dim: Head dim of query and key.
        dim_value: Head dim of value and output.
        window: The window arguments, with a value for each dimension; windows of the token layout are self attention.
        dtype: Element type as the command line spells it.
        backprop: Whether the backward pass is profiled, too.
        add_kv: Additional key/value tokens.
        backend: Backend or baseline; ``None`` is the operator's own choice.
        fmha_backend: Backend of attention, where that runs; ``None`` is the operator's own choice.
        devices: How many devices the problem is split over.
        split: What is split over them: ``"batch"``, ``"heads"`` or token dimensions, ``"W"`` or ``"T,W"``.
        performance: The performance arguments of the operators.
        warmup_steps: Runs before the measurement.
        iterations: Measured runs.
        compare: Baseline, or another backend, to measure beside; ``None`` for none.
        dry_run: Whether to list configurations instead of measuring.
        max_configs: Rows of each list; 0 is all of them.
        simulate: Whether to predict instead of measuring.
        compute_capability: Compute capability of the GPU to list or predict for; ``None`` is the device at hand.
        device: The TPU to list or predict for, ``"v5e"``, say; ``None`` likewise.
        optimize: Whether to search for the best configuration first.
        optimize_warmup_steps: Runs of each configuration before its measurement.
        verbose: Whether filling and copying memory have rows of their own.
        json: File for the full results.
        csv: File for the table.
        plot: File for a bar chart of the table.
        trace_dir: Folder that keeps the trace.
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
        """Every value by what the command line calls it."""
        values = dataclasses.asdict(self)
        return {**values, **dict(zip(WINDOW_FLAGS, values.pop("window"), strict=True))}

    @property
    def asked_about(self) -> Device | None:
        """The device to list or predict for, which need not be there; ``None`` is the one at hand."""
        if self.device is not None:
            return TPU_CHIPS[self.device].device
        if self.compute_capability is not None:
            return Device("cuda", self.compute_capability, is_present=False)
        return None

    @property
    def is_baseline(self) -> bool:
        """Whether a baseline of JAX is profiled instead of this package's operators."""
        return self.backend in BASELINES

    def of_baseline(self, name: str) -> Options:
        """The options of a baseline, which computes self attention, or of another backend, on the same arrays."""
        # Without the tiles and backends that one backend was given: they say nothing to another.
        performance = self.performance.with_tiles("forward", None).with_tiles("backward", None)
        performance = dataclasses.replace(performance, kernel_schedule=None)
        other = dataclasses.replace(self, backend=name, fmha_backend=None, performance=performance)
        if name not in BASELINES:
            return other
        return dataclasses.replace(other, add_kv=0, window=whole_windows(self.input_size))


def whole_windows(layout: Shape) -> WindowArguments:
    """Windows that are as large as the layout: self attention."""
    return WindowArguments(layout).checked(len(layout))
