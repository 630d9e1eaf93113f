"""Check the profiler's device times against the wall clock.

A program repeats a problem n times. The program is timed in three ways:

- from its trace, as the profiler does;
- by the wall clock, while it is traced;
- by the wall clock in replays, which are not traced. A pause precedes the replays, because a GPU that is kept busy runs
  slower.

Two programs with different values of n are timed. The time per repetition is the difference of the two programs' times,
divided by the difference of their values of n, so that the cost of launching and synchronizing cancels.

Between two dependent launches, the device is idle for a few microseconds. Kernel times do not include these gaps. The
span of the trace, from the start of the first kernel to the end of the last kernel, includes them.

Example:
    python bench/run.py profiler_agreement --json bench/results/h200/profiler_agreement.json
"""

from __future__ import annotations

import argparse
import collections
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from lib import command
from lib.record import save

import natten_jax
from natten_jax.plan.devices import default_device
from natten_jax.profiler import baselines, capture, parse
from natten_jax.profiler.capture import Event, Launch
from natten_jax.profiler.measure import make_inputs
from natten_jax.profiler.options import Options
from natten_jax.profiler.program import Program, compile_for_trace

PROBLEMS = (
    "-i 32768 -d 128 -w 2048",
    "-i 32768 -d 128 -w 2048 -s 256",
    "-i 8192 -n 16 -d 64 -w 1024",
    "-i 128 128 -n 8 -d 128 -w 33 33",
    "-i 16 32 32 -n 16 -d 128 -w 8 9 11",
    "-i 32768 -d 128",
    "-i 256 256 -n 24 -d 128 -w 80 80 -s 16 16",
    "-i 32768 -d 128 --backend cudnn",
)
#: Number of repetitions in the shorter program, and in the longer program.
RUNS = 10, 50
LONG_RUNS = 3, 9  # for problems that take more than 2 milliseconds per repetition
ITERATIONS = 2
ROUNDS = 5
PAUSE = 0.2  # seconds


def repeated(options: Options, runs: int, name: str) -> Callable[..., Any]:
    """Return a function that repeats the problem ``runs`` times. Each run starts after the previous one has ended."""

    def function(query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.Array]:
        outputs: list[jax.Array] = []
        for _ in range(runs):
            if outputs:
                query, outputs[-1] = jax.lax.optimization_barrier((query, outputs[-1]))
            outputs.append(attend(options, query, key, value))
        return outputs

    function.__name__ = name
    return function


def attend(options: Options, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute the attention of a problem with the function that the profiler measures for ``options``."""
    if options.is_baseline:
        return baselines.attend(str(options.backend), query, key, value)
    operator = getattr(natten_jax, f"na{options.problem.rank}d")
    return operator(query, key, value, **options.problem.windows._asdict())


def wall_seconds(function: Callable[..., Any], arrays: tuple[jax.Array, ...]) -> float:
    """Return the wall time of one call in seconds."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    return time.perf_counter() - start


def measure(line: str) -> dict[str, Any]:
    """Measure the time per repetition of a problem in each way, in microseconds."""
    options = parse([*line.split(), "--dtype", "bf16"])
    arrays = make_inputs(options)
    platform = default_device().platform
    once = jax.jit(functools.partial(attend, options))
    jax.block_until_ready(once(*arrays))
    runs = LONG_RUNS if min(wall_seconds(once, arrays) for _ in range(3)) > 2e-3 else RUNS
    replayed = [jax.jit(repeated(options, n, f"replayed_{n}")) for n in runs]
    traced = [compile_for_trace(repeated(options, n, f"traced_{n}"), *arrays) for n in runs]
    functions: list[Callable[..., Any]] = [*replayed, *traced]
    for function in functions:
        wall_seconds(function, arrays)
    while_traced: list[list[float]] = [[], []]

    def timed(number: int) -> None:
        while_traced[number].append(wall_seconds(traced[number], arrays))

    launches = [
        Launch(functools.partial(timed, number), Program.from_compiled(each)) for number, each in enumerate(traced)
    ]
    times: dict[str, list[float]] = collections.defaultdict(list)

    def add(name: str, short: Iterable[float], long: Iterable[float]) -> None:
        times[name].append((statistics.mean(long) - statistics.mean(short)) / (runs[1] - runs[0]))

    for _ in range(ROUNDS):
        captured = capture.capture_interleaved(launches, ITERATIONS, platform)
        for name, seconds_of in (("trace", busy_seconds), ("span", span_seconds)):
            add(name, *(map(seconds_of, iterations) for iterations in captured))
        add("wall clock of it", *(each[-ITERATIONS:] for each in while_traced))
        time.sleep(PAUSE)
        turns = [[wall_seconds(each, arrays) for each in replayed] for _ in range(ITERATIONS)]
        add("replay", *zip(*turns, strict=True))
    return {"problem": line, **{name: 1e6 * statistics.median(values) for name, values in times.items()}}


def busy_seconds(events: Sequence[Event]) -> float:
    """Return the total kernel time in seconds."""
    return sum(event.duration for event in events) / 1e9


def span_seconds(events: Sequence[Event]) -> float:
    """Return the seconds from the start of the first kernel to the end of the last kernel."""
    return (max(event.start + event.duration for event in events) - min(event.start for event in events)) / 1e9


def main() -> None:
    """Measure the problems, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    results = []
    columns = "trace", "span", "wall clock of it", "replay", "trace / replay", "span / wall clock of it"
    widths = {name: max(len(name) + 3, 11) for name in columns}
    print(f"{'microseconds':46}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for line in PROBLEMS:
        found = measure(line)
        found["trace / replay"] = found["trace"] / found["replay"]
        found["span / wall clock of it"] = found["span"] / found["wall clock of it"]
        results.append(found)
        texts = (f"{found[name]:{width}.{3 if '/' in name else 2}f}" for name, width in widths.items())
        print(f"{line:46}" + "".join(texts), flush=True)
    save(results, options.json)


if __name__ == "__main__":
    command.run(main)
