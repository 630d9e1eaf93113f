"""Times the forward pass against cuDNN's self attention of the same layout, on an NVIDIA GPU.

Times are the device time of everything that an operator launches, from profiler traces. The two sides run in turns
in one process, because a GPU's clock falls under load; the speed-up is the median of the turns' ratios. Two figures
are given: one after a pause before each turn, and one with the device kept busy.

Example:
    python bench/run.py --problems 2d 2d-s16 --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from environment import environment
from problems import BENCHMARKS, Benchmark

import natten_jax
from natten_jax.devices import default_device
from natten_jax.flops import flops
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import capture
from natten_jax.profiler.program import Program, compile_for_trace

Arrays = tuple[jax.Array, ...]
PAUSE = 1.0  # seconds, for the device to cool down
WARM_UP = 0.5  # seconds of load before sustained figures
LAUNCHES = 3  # a turn's


class Runner(NamedTuple):
    """A compiled function and how to time it."""

    compiled: jax.stages.Compiled
    program: Program
    arrays: Arrays

    def seconds(self) -> float:
        """Device time of one run, the median of a turn."""
        platform = default_device().platform
        iterations = capture(lambda: self.compiled(*self.arrays), LAUNCHES, self.program, platform)
        return statistics.median(sum(event.duration for event in events) / 1e9 for events in iterations)

    def load(self, seconds: float) -> None:
        """Keep the device busy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            jax.block_until_ready([self.compiled(*self.arrays) for _ in range(4)])


def compile_runner(function: Callable[..., Any], arrays: Arrays) -> Runner:
    compiled = compile_for_trace(function, *arrays)
    jax.block_until_ready(compiled(*arrays))
    return Runner(compiled, Program.of(compiled), arrays)


def ours(benchmark: Benchmark) -> Callable[..., Any]:
    problem = benchmark.problem
    if benchmark.kernel_size is None:
        return lambda q, k, v: natten_jax.attention(q, k, v, is_causal=benchmark.is_causal)
    operator = getattr(natten_jax, f"na{problem.rank}d")
    return lambda q, k, v: operator(q, k, v, problem.kernel_size, problem.stride, problem.dilation)


def theirs(benchmark: Benchmark) -> Callable[..., Any]:
    if benchmark.is_causal:
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return lambda q, k, v: baselines.attend("cudnn", q, k, v)


def measure(benchmark: Benchmark, turns: int) -> dict[str, Any]:
    """Figures of one problem."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = tuple(jax.random.normal(key, benchmark.shape, benchmark.dtype) for key in keys)
    sides = {"natten_jax": compile_runner(ours(benchmark), arrays), "cudnn": compile_runner(theirs(benchmark), arrays)}
    result: dict[str, Any] = {"problem": benchmark.problem.describe(), "dtype": benchmark.dtype}
    for mode in ("cold", "sustained"):
        times: dict[str, list[float]] = {side: [] for side in sides}
        if mode == "sustained":
            sides["cudnn"].load(WARM_UP)
        for _ in range(turns):
            for side, runner in sides.items():
                if mode == "cold":
                    time.sleep(PAUSE)
                else:
                    runner.load(WARM_UP / 10)
                times[side].append(runner.seconds())
        medians = {side: statistics.median(values) for side, values in times.items()}
        ratios = [their / our for our, their in zip(times["natten_jax"], times["cudnn"], strict=True)]
        result[mode] = {
            "milliseconds": {side: 1e3 * value for side, value in medians.items()},
            "tflops": flops(benchmark.problem, "forward") / medians["natten_jax"] / 1e12,
            "speedup": statistics.median(ratios),
        }
    return result


def main() -> None:
    """Measure, print a table, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--turns", type=int, default=3, help="of each side and mode")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    results = {}
    print(f"{'problem':18}{'cold ms':>10}{'TFLOP/s':>9}{'speedup':>9}{'busy ms':>10}{'TFLOP/s':>9}{'speedup':>9}")
    for name in options.problems:
        try:
            results[name] = measure(BENCHMARKS[name], options.turns)
        except Exception as error:
            # One side may lack a problem (cuDNN has no wide heads on some devices): the others are still wanted.
            print(f"{name:18}failed: {str(error).splitlines()[0]}", flush=True)
            continue
        cells = ""
        for mode in ("cold", "sustained"):
            figures = results[name][mode]
            cells += f"{figures['milliseconds']['natten_jax']:10.4f}{figures['tflops']:9.0f}{figures['speedup']:8.2f}x"
        print(f"{name:18}{cells}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
