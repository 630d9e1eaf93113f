"""Ladders of attention implementations for ``fmha_scaling.py``, and a function that measures their errors.

A ladder is a list of attention implementations. Each implementation, or step, adds an optimisation to the previous one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import psutil
from benchmarks import Benchmark
from lib.implementations import Function, dot_product_attention, mosaic, ours

from fmha.targets import LADDER_TILES, target_of
from natten_jax.backends.select import resolve
from natten_jax.native import module as native
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import Request
from natten_jax.simulator import calibration_for

_BENCH_TARGET = "natten_jax_bench_fmha_forward"

#: Largest allowed ``||result - reference|| / ||reference||`` of a step, by element type.
BOUNDS: Mapping[str, float] = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}


@dataclasses.dataclass(frozen=True)
class Step:
    """One implementation of attention.

    Attributes:
        label: Label in tables: the step's number, or a letter if the step only serves as a reference.
        name: Display name.
        features: Optimisations that the step adds.
        make: Builds a function of query, key and value that computes a problem. Raises for unsupported problems.
    """

    label: str
    name: str
    features: tuple[str, ...]
    make: Callable[[Benchmark], Function]


@dataclasses.dataclass(frozen=True)
class Ladder:
    """A ladder of steps; the first step is the baseline.

    Attributes:
        steps: Steps in order.
        production: Label of the production kernel.
        starts_at_baseline: True if the second step improves on the baseline; False if the baseline is another library.
    """

    steps: tuple[Step, ...]
    production: str
    starts_at_baseline: bool

    @property
    def baseline(self) -> Step:
        """Step that speed-ups are relative to."""
        return self.steps[0]

    @property
    def production_step(self) -> Step:
        """Step that runs the production kernel."""
        return next(step for step in self.steps if step.label == self.production)

    @property
    def rungs(self) -> tuple[Step, ...]:
        """Numbered steps without the baseline if it is another library; each step improves on the previous one."""
        return tuple(step for step in self.steps[not self.starts_at_baseline :] if step.label.isdigit())


def _rung(rung: int) -> Callable[[Benchmark], Function]:
    def make(benchmark: Benchmark) -> Function:
        tiles = LADDER_TILES.index(target_of(default_device().compute_capability or (0, 0)).tiles)
        if reason := native.missing(_BENCH_TARGET):
            raise ValueError(f"{reason}; builds with NATTEN_JAX_BENCH=1 have it")

        def function(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            (out,) = native.call(
                _BENCH_TARGET,
                [native.ResultType(query.shape, query.dtype)],
                query,
                key,
                value,
                rung=rung,
                tiles=tiles,
                is_causal=int(benchmark.is_causal),
                scale=float(benchmark.head_dim**-0.5),
            )
            return out

        return function

    return make


def _dense(benchmark: Benchmark) -> Function:
    # Bytes of the logits and of the weights, both float32.
    needed = 2 * 4 * benchmark.batch * benchmark.heads * benchmark.tokens**2
    available = psutil.virtual_memory().available
    if needed > available // 2:
        raise ValueError(f"its logits need {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free")
    attend = dot_product_attention(benchmark, "xla")
    if benchmark.dtype != "float16":
        return attend
    # For float16, jax.nn requests a dot algorithm that XLA supports only on GPUs.
    return lambda *arrays: attend(*(array.astype("float32") for array in arrays)).astype("float16")


GPU_LADDER = Ladder(
    (
        Step(
            "0",
            "cuDNN baseline",
            ("jax.nn.dot_product_attention(implementation='cudnn')",),
            lambda benchmark: dot_product_attention(benchmark, "cudnn"),
        ),
        Step(
            "1",
            "Basic",
            ("matrix units", "natural exponentials", "keys stored transposed", "exact division", "nothing overlaps"),
            _rung(1),
        ),
        Step(
            "2",
            "+ Math",
            ("scale folded with log2(e)", "exp2, denormals flushed to zero", "scaled after the maximum",
             "approximate division"),
            _rung(2),
        ),
        Step(
            "3",
            "+ Memory",
            ("asynchronous copies one tile ahead", "keys transposed as the matrix units read them"),
            _rung(3),
        ),
        Step(
            "4",
            "+ Full (production)",
            ("the target's own matrix instructions and tiles", "warp specialisation, ping-pong, persistent blocks"),
            ours,
        ),
        Step("P", "Pallas Mosaic reference", ("jax.experimental.pallas.ops.gpu.attention_mgpu",), mosaic),
    ),
    production="4",
    starts_at_baseline=False,
)  # fmt: skip

CPU_LADDER = Ladder(
    (
        Step("0", "XLA dense baseline", ("all logits in memory", "float16 by way of float32"), _dense),
        Step(
            "1",
            "Blockwise (flex-fmha)",
            ("online softmax over blocks of keys, in plain JAX",),
            lambda benchmark: ours(benchmark, "flex"),
        ),
        Step(
            "2",
            "+ Native (cpu-fmha)",
            ("host kernels: vector instructions, tiles that fit the caches",),
            lambda benchmark: ours(benchmark, "cpu"),
        ),
    ),
    production="2",
    starts_at_baseline=True,
)


def ladder_of(device: Device) -> Ladder:
    """Return the ladder for a device."""
    return GPU_LADDER if device.platform == "cuda" else CPU_LADDER


def lacks_kernels(device: Device) -> bool:
    """Return True if this build of natten_jax lacks kernels that the device's ladder needs."""
    return device.platform == "cuda" and native.missing(_BENCH_TARGET) is not None


def tiles_of(benchmark: Benchmark, device: Device) -> dict[str, Any]:
    """Return the platform, the tiles and the production kernel's configuration, for reports.

    ``tile_m`` and ``tile_n`` are the tiles of steps 1 to 3 on NVIDIA GPUs, and the production kernel's tiles on other
    devices. ``num_ctas`` and ``occupancy`` are ``None`` on devices other than NVIDIA GPUs. The production kernel's
    ``occupancy`` is ``None`` if the simulator does not model the kernel.
    """
    plan = resolve(Request(benchmark.problem), device, "forward")
    pair = plan.tiles
    model = calibration_for(plan.backend.family, device.compute_capability)
    kernel = None if model is None else model.kernel(benchmark.problem, pair, "forward")
    production = {
        "backend": str(plan.backend),
        "tile_m": math.prod(pair[0]),
        "tile_n": math.prod(pair[1]),
        "schedule": None if plan.kernel_schedule is None else str(plan.kernel_schedule),
        "occupancy": None if kernel is None else kernel.side_by_side,
    }
    if device.platform != "cuda" or device.compute_capability is None:
        sizes = {name: production[name] for name in ("tile_m", "tile_n")}
        return {"platform": str(device), **sizes, "num_ctas": None, "occupancy": None, "production": production}
    target = target_of(device.compute_capability)
    return {
        "platform": target.name,
        "tile_m": target.tile_m,
        "tile_n": target.tile_n,
        "num_ctas": target.ctas,
        "occupancy": target.occupancy,
        "production": production,
    }


def error_of(result: Any, arrays: tuple[jax.Array, ...], is_causal: bool, rows: int = 48) -> float:
    """Return the relative error of an attention output, compared with dense attention in float64.

    The error is computed from some rows of at most three heads.
    """
    query, key, value = arrays
    batch, tokens, heads, head_dim = query.shape
    rng = np.random.default_rng(0)
    positions = np.unique([0, tokens // 2, tokens - 1, *rng.integers(0, tokens, rows)])
    difference = norm = 0.0
    for entry, head in {(0, 0), (batch - 1, heads - 1), (int(rng.integers(batch)), int(rng.integers(heads)))}:
        q, k, v = (np.asarray(array[entry, :, head], np.float64) for array in (query, key, value))
        logits = q[positions] @ k.T * head_dim**-0.5
        if is_causal:
            logits[np.arange(tokens) > positions[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = weights @ v / weights.sum(-1, keepdims=True)
        difference += np.sum((np.asarray(result[entry, :, head], np.float64)[positions] - expected) ** 2)
        norm += np.sum(expected**2)
    return float(np.sqrt(difference / norm))
