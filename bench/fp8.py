"""Time attention with 8-bit arrays on Hopper against bfloat16, and against cuDNN if it supports the problem.

All programs of a problem alternate in one process. Each time is the device time of all kernels that a program launches.
The programs are:

- "bfloat16" runs the kernel for 16-bit arrays.
- "e4m3" runs the 8-bit kernel on arrays that were quantised in advance, with a scale factor per head.
- "unordered" is "e4m3" with ``kernel_schedule="coop"``.
- "switch" passes bfloat16 arrays with ``fp8="e4m3"``, so each call quantises its arrays.
- "cudnn" is cuDNN's 8-bit attention. It is dense, with one scale factor per array and an 8-bit output.

Example:
    python bench/run.py fp8 --json bench/results/h200/fp8.json
    python bench/run.py fp8 --problems "dense 1x32768" --modes cold --sides bfloat16 cudnn
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from benchmarks import Benchmark
from lib import command, cudnn_fp8
from lib.record import save
from lib.timing import MODES, Runner, compile_runner, ratio, take_turns

import natten_jax
from natten_jax.cost_model.tiles import flops
from natten_jax.fp8 import Quantized, quantize

PAUSE = 0.2  # seconds of pause before each turn
HUNYUAN = Benchmark((30, 48, 80), 24, 128, (18, 24, 24))

#: Programs that "e4m3" is compared with.
OTHERS = ("bfloat16", "unordered", "switch", "cudnn")

PROBLEMS: Mapping[str, Benchmark] = {
    "dense 1x32768": Benchmark((32768,), 8, 128),
    "dense 2x16384": Benchmark((16384,), 16, 128, batch=2),
    "dense 1x32768, heads of 64": Benchmark((32768,), 16, 64),
    "dense 1x32768, heads of 256": Benchmark((32768,), 4, 256),
    "HunyuanVideo, stride 16x8x8": dataclasses.replace(HUNYUAN, stride=(16, 8, 8)),
    "HunyuanVideo": HUNYUAN,
    "256x256, window 80, stride 16": Benchmark((256, 256), 24, 128, (80, 80), (16, 16)),
}


def _call(benchmark: Benchmark, **arguments: Any) -> Callable[..., Any]:
    if benchmark.kernel_size is None:
        return functools.partial(natten_jax.attention, backend="hopper-fmha", **arguments)
    operator = getattr(natten_jax, f"na{len(benchmark.layout)}d")
    windows = {"kernel_size": benchmark.kernel_size, "stride": benchmark.stride or 1}
    return functools.partial(operator, backend="hopper-fna", **windows, **arguments)


def _sides(benchmark: Benchmark, others: Collection[str]) -> dict[str, Runner]:
    """Compile "e4m3" and the programs in ``others`` that support the problem; return them by name."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, benchmark.shape, jnp.bfloat16) for key in keys]
    small: list[Quantized] = [jax.jit(quantize)(array) for array in arrays]

    def by_name(*small: Quantized, **arguments: Any) -> Any:
        factors = zip(("query_scale", "key_scale", "value_scale"), (each.scale for each in small), strict=True)
        return _call(benchmark, **dict(factors), **arguments)(*(each.array for each in small))

    eights = [each.array for each in small]
    calls: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "bfloat16": (_call(benchmark), arrays),
        "e4m3": (by_name, small),
        "unordered": (functools.partial(by_name, kernel_schedule="coop"), small),
        "switch": (_call(benchmark, fp8="e4m3"), arrays),
    }
    if benchmark.kernel_size is None and benchmark.head_dim == 128:
        calls["cudnn"] = cudnn_fp8.attention, eights
    return {
        name: compile_runner(call, *operands, name=name)
        for name, (call, operands) in calls.items()
        if name == "e4m3" or name in others
    }


def measure(benchmark: Benchmark, turns: int, modes: list[str], others: Collection[str] = OTHERS) -> dict[str, Any]:
    """Measure the milliseconds and TFLOP/s of each program, and the speed-up of "e4m3" over the others, by mode."""
    sides, work = _sides(benchmark, others), flops(benchmark.problem, "forward")
    found: dict[str, Any] = {}
    for mode in modes:
        times = take_turns(sides, turns, mode, PAUSE)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        found[mode] = {
            "milliseconds": {name: 1e3 * seconds for name, seconds in medians.items()},
            "tflops": {name: work / seconds / 1e12 for name, seconds in medians.items()},
            "faster_than": {name: ratio(times[name], times["e4m3"]) for name in times if name != "e4m3"},
        }
    return found


def main() -> None:
    """Measure the selected problems, print a line per problem and mode, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sides", nargs="+", choices=OTHERS, default=list(OTHERS), help="sides to compare e4m3 with")
    parser.add_argument("--turns", type=int, default=5, help="alternating measurements of each side")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.problems:
        results[name] = measure(PROBLEMS[name], options.turns, options.modes, options.sides)
        for mode, figures in results[name].items():
            texts = (
                f"{side} {figures['milliseconds'][side]:.3f} ms {tflops:.0f}"
                for side, tflops in figures["tflops"].items()
            )
            print(f"{name:32}{mode:10}{'  '.join(texts)}", flush=True)
        save(results, options.json)


if __name__ == "__main__":
    command.run(main)
