"""Time passes over a grid of layouts and head counts, and find points that are slower than their neighbours.

All points of a grid have the same number of dimensions, window and head width, so that the work per token and head is
constant. A point is an outlier if its time per token and head is too large compared with the mean of its neighbours.
The time model also predicts the times of all points. If a point is an outlier of both the measured and the predicted
times, the cause is the number of waves of tiles. Other outliers need investigation.

Example:
    python bench/run.py landscape --json bench/results/h100/landscape.json
    python bench/run.py landscape --ranks 2 --heads 4 8 --passes backward
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import Benchmark
from lib import command
from lib.implementations import ours
from lib.record import save
from lib.timing import Runner, compile_backward, compile_runner
from peers import draw

from natten_jax import backends
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import default_device

#: Window and layouts by rank. Each layout has 1.3 to 1.8 times as many tokens as the previous one.
WINDOWS = {1: (2048,), 2: (80, 80), 3: (8, 16, 16)}
LAYOUTS: Mapping[int, Sequence[tuple[int, ...]]] = {
    1: [(n,) for n in (3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)],
    2: [(n, n) for n in (96, 128, 160, 192, 224, 256, 320, 384, 448, 512)],
    3: [(16, 24, 24), (16, 32, 32), (16, 40, 40), (16, 48, 48), (24, 48, 48), (32, 48, 48), (32, 56, 56), (32, 64, 64),
        (48, 64, 64), (64, 64, 64)],
}  # fmt: skip
HEADS = tuple(range(1, 9))
#: A point is an outlier if the ratio of its time to the mean time of its neighbours exceeds this bound.
MAX_EXCESS = 1.12
#: Number of programs compiled in parallel. The arrays of a program stay on the device until the program is timed.
AT_ONCE = 8


class Point(NamedTuple):
    """A grid point: indices into the layouts and head counts of a run."""

    layout: int
    heads: int

    def neighbors(self) -> list[Point]:
        """Return the points with the previous or next layout, or the previous or next head count."""
        steps = ((-1, 0), (1, 0), (0, -1), (0, 1))
        return [Point(self.layout + by_layout, self.heads + by_heads) for by_layout, by_heads in steps]


def landscape(
    layouts: Sequence[tuple[int, ...]], heads: Sequence[int], head_dim: int, dtype: str
) -> dict[Point, Benchmark]:
    """Return the problems of a rank, by grid point."""
    window = WINDOWS[len(layouts[0])]
    return {
        Point(i, j): Benchmark(layout, layout_heads, head_dim, tuple(map(min, window, layout)), dtype=dtype)
        for (i, layout), (j, layout_heads) in itertools.product(enumerate(layouts), enumerate(heads))
    }


def excesses(figures: Mapping[Point, float]) -> dict[Point, float]:
    """Return the ratio of each point's figure to the mean of its neighbours' figures."""
    found = {}
    for point, figure in figures.items():
        near = [figures[each] for each in point.neighbors() if each in figures]
        found[point] = figure * len(near) / sum(near) if near else 1.0
    return found


def compiled(benchmark: Benchmark, family: str, pass_: Pass) -> Runner:
    """Compile a pass of the problem."""
    cotangent, *arrays = draw(benchmark)
    function = ours(benchmark, family)
    return compile_runner(function, *arrays) if pass_ == "forward" else compile_backward(function, cotangent, *arrays)


def measure(problems: Mapping[Point, Benchmark], family: str, pass_: Pass, turns: int) -> dict[Point, dict[str, Any]]:
    """Measure the nanoseconds per token and head of each problem, and predict them with the time model."""
    device = default_device()
    rows: dict[Point, dict[str, Any]] = {}
    backend = backends.find(f"{family}-fna", "fna")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for some in _groups(problems, AT_ONCE):
            runners = dict(
                zip(some, pool.map(lambda point: compiled(problems[point], family, pass_), some), strict=True)
            )
            seconds: dict[Point, float] = dict.fromkeys(some, math.inf)
            for turn in range(turns):
                for point in random.Random(turn).sample(some, len(some)):
                    seconds[point] = min(seconds[point], *runners[point].seconds())
            for point in some:
                benchmark = problems[point]
                predicted = backend.predicted_seconds(benchmark.problem, device, pass_)
                work = 1e9 / (benchmark.tokens * benchmark.heads)
                rows[point] = {
                    "layout": benchmark.layout,
                    "heads": benchmark.heads,
                    "nanoseconds": seconds[point] * work,
                    "predicted": None if predicted is None else predicted * work,
                }
    for name, excess in (("nanoseconds", "excess"), ("predicted", "predicted_excess")):
        if all(row[name] is not None for row in rows.values()):
            for point, value in excesses({point: row[name] for point, row in rows.items()}).items():
                rows[point][excess] = value
    return rows


def _groups(points: Iterable[Point], size: int) -> list[list[Point]]:
    points = list(points)
    return [points[first : first + size] for first in range(0, len(points), size)]


def print_landscape(rows: Mapping[Point, Mapping[str, Any]], layouts: Sequence[Any], heads: Sequence[int]) -> None:
    """Print a line for each layout, then a line for each outlier."""
    print(f"{'ns per token and head':22}" + "".join(f"{f'{n} heads':>9}" for n in heads))
    for i, layout in enumerate(layouts):
        figures = (rows[Point(i, j)] for j in range(len(heads)))
        cells = (f"{row['nanoseconds']:8.2f}{'!' if row['excess'] > MAX_EXCESS else ' '}" for row in figures)
        print(f"{'x'.join(map(str, layout)):22}" + "".join(cells))
    for row in rows.values():
        if row["excess"] > MAX_EXCESS:
            expected = row.get("predicted_excess")
            model = "" if expected is None else f", the time model expects {expected:.2f} times"
            print(f"  {row['layout']}, {row['heads']} heads: {row['excess']:.2f} times its neighbours{model}")


def main() -> int:
    """Measure the grids of the command line, print a table for each and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--layouts", type=int, default=10, help="layouts per rank, smallest first")
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--family", default="hopper", help="backend family")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--turns", type=int, default=3, help="measurements of each point; the fastest launch counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for rank, pass_ in itertools.product(options.ranks, options.passes):
        layouts = LAYOUTS[rank][: options.layouts]
        problems = landscape(layouts, options.heads, options.head_dim, options.dtype)
        rows = measure(problems, options.family, pass_, options.turns)
        print(f"\n{options.family} {pass_}, {rank}-D, window {WINDOWS[rank]}, heads of {options.head_dim}", flush=True)
        print_landscape(rows, layouts, options.heads)
        results[f"{rank}-D {pass_}"] = list(rows.values())
        save(results, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
