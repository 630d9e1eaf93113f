"""Compare a pass with dense self attention over the same layout, by cuDNN and by JAX, on an NVIDIA GPU.

Each time is the device time of all kernels that an operator launches, from profiler traces. All implementations
alternate in one process, because a GPU's clock rate falls under load. In each turn, every implementation is timed once.
A speed-up is the ratio of another implementation's time to natten_jax's time in the same turn, as the median over
turns. Each program is timed in two modes: with a pause before each measurement, and with the device kept busy. If
several element types are given, they alternate as well.

Example:
    python bench/run.py peers --problems 2d 2d-s16 --json results.json --plot results.png
    python bench/run.py peers --problems 2d --dtypes bfloat16 float16 --implementations natten_jax
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from benchmarks import BENCHMARKS, Benchmark
from lib import command
from lib.implementations import ELEMENT_TYPES, IMPLEMENTATIONS, default_names, ours
from lib.record import save
from lib.timing import MODES, Runner, compile_backward, compile_runner, ratio, take_turns

from natten_jax.cost_model.tiles import flops
from natten_jax.performance import PASSES, Pass

OURS = "natten_jax"


def draw(benchmark: Benchmark) -> list[jax.Array]:
    """Draw the output's cotangent, query, key, value, and the additional keys and values, if the problem has them.

    The values are random, because kernels run faster on trivial data.
    """
    shapes = (
        [benchmark.shape] * 2
        + [benchmark.kv_shape] * 2
        + [benchmark.additional_shape] * (2 if benchmark.additional_kv else 0)
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, benchmark.dtype) for key, shape in zip(keys, shapes, strict=True)]


def prepare(benchmark: Benchmark, names: Sequence[str], pass_: Pass, family: str | None) -> dict[str, Runner | str]:
    """Compile a pass with each implementation; return an error message instead of a pass that fails.

    Passes fail because not every implementation supports every problem.
    """
    drawn: dict[str, list[jax.Array]] = {}
    runners: dict[str, Runner | str] = {}
    for name in names:
        dtype = ELEMENT_TYPES.get(name, benchmark.dtype)
        if dtype not in drawn:
            drawn[dtype] = draw(dataclasses.replace(benchmark, dtype=dtype))
        cotangent, *arrays = drawn[dtype]
        try:
            function = ours(benchmark, family) if name == OURS else IMPLEMENTATIONS[name](benchmark)
            if pass_ == "backward":
                runners[name] = compile_backward(function, cotangent, *arrays)
            else:
                runners[name] = compile_runner(function, *arrays)
        except Exception as error:
            runners[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return runners


def measure(
    benchmark: Benchmark,
    turns: int,
    pass_: Pass = "forward",
    dtypes: Sequence[str] = (),
    names: Sequence[str] = (),
    family: str | None = None,
    modes: Sequence[str] = MODES,
) -> list[dict[str, Any]]:
    """Time a pass of a problem with each implementation; return the figures of each element type.

    Args:
        benchmark: The problem.
        turns: Number of turns of each implementation in each mode.
        pass_: The pass.
        dtypes: Element types. If empty, the element type of ``benchmark``.
        names: Names of implementations. If empty, the default implementations for ``benchmark``.
        family: Backend family of natten_jax; ``None`` selects the default backend.
        modes: Modes to measure.
    """
    benchmarks = [dataclasses.replace(benchmark, dtype=dtype) for dtype in dtypes or (benchmark.dtype,)]
    results: list[dict[str, Any]] = []
    runners: dict[tuple[str, str], Runner] = {}
    for each in benchmarks:
        prepared = prepare(each, names or default_names(each), pass_, family)
        runners |= {(each.dtype, name): runner for name, runner in prepared.items() if isinstance(runner, Runner)}
        failures = {name: reason for name, reason in prepared.items() if isinstance(reason, str)}
        results.append({"problem": each.problem.describe(), "pass": pass_, "dtype": each.dtype, "failures": failures})
    for mode in modes if runners else ():
        times = take_turns(runners, turns, mode)
        for each, result in zip(benchmarks, results, strict=True):
            dtype_times = {name: values for (dtype, name), values in times.items() if dtype == each.dtype}
            result[mode] = {
                "milliseconds": {name: 1e3 * statistics.median(values) for name, values in dtype_times.items()}
            }
            if OURS not in dtype_times:
                continue
            own = dtype_times.pop(OURS)
            result[mode]["tflops"] = flops(each.problem, pass_) / statistics.median(own) / 1e12
            result[mode]["speedup"] = {name: ratio(values, own) for name, values in dtype_times.items()}
            first = times.get((benchmarks[0].dtype, OURS))
            if each is not benchmarks[0] and first is not None:
                result[mode][f"rate_over_{benchmarks[0].dtype}"] = ratio(first, own)
    return results


def print_row(name: str, result: dict[str, Any]) -> None:
    """Print a line per mode, then a line for each implementation that failed."""
    for mode in MODES:
        figures = result.get(mode)
        if figures is None or "tflops" not in figures:
            continue
        cells = f"{figures['milliseconds'][OURS]:11.4f}{figures['tflops']:9.0f}"
        cells += "".join(f"  {value:6.2f}x {other}" for other, value in figures["speedup"].items())
        cells += "".join(f"  {value:6.3f} {key}" for key, value in figures.items() if key.startswith("rate_over"))
        print(f"{name:18}{result['dtype']:10}{mode:10}{cells}", flush=True)
    for other, reason in result["failures"].items():
        print(f"{name:18}{result['dtype']:10}{other} did not run: {reason}", flush=True)


def main() -> int:
    """Measure the problems, print a table and save the figures; return 1 if natten_jax could not run a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--pass", dest="pass_", choices=PASSES, default="forward")
    parser.add_argument(
        "--dtypes", nargs="+", default=[], metavar="DTYPE", help="element types (default: the problem's)"
    )
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=[])
    parser.add_argument("--backend", metavar="FAMILY", help="backend family of natten_jax, such as hopper")
    parser.add_argument("--turns", type=int, default=3, help="alternating measurements of each side and mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the speed-ups over cuDNN into this picture")
    options = parser.parse_args()
    results = {}
    print(f"{'problem':18}{'dtype':10}{'mode':10}{'ms':>11}{'TFLOP/s':>9}  speed-up over")
    for name in options.problems:
        rows = measure(
            BENCHMARKS[name],
            options.turns,
            options.pass_,
            options.dtypes,
            options.implementations,
            options.backend,
            options.modes,
        )
        for row in rows:
            results[name if len(rows) == 1 else f"{name}/{row['dtype']}"] = row
            print_row(name, row)
        save(results, options.json)
    if options.plot:
        from plot import draw_speedups

        draw_speedups({"results": results}, options.plot)
    return int(any(OURS in result["failures"] for result in results.values()))


if __name__ == "__main__":
    command.run(main)
