"""Time a fixed list of problems with natten_jax and every other installed implementation on the current device.

``make board`` runs this program. All implementations of a problem alternate in one process. If an implementation
computes the same windows, its result is checked against natten_jax's. The other implementations compute dense attention
over the same tokens, and the output marks them as dense. The figures are written to a JSON file. An HTML page shows
these figures and every record in ``bench/results``.

Example:
    python bench/run.py board
    python bench/run.py board --json bench/results/h100/board.json --problems video image
    python bench/run.py board --page-only
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import Benchmark
from board_problems import problems_for
from lib import command
from lib.board_page import page
from lib.history import records
from lib.peers import OURS, PEERS
from lib.record import save
from lib.sides import Side, difference
from lib.timing import ratio
from peers import draw

from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import default_device

RESULTS = Path(__file__).parent / "results"
FOLDER = Path("build") / "board"
#: Seconds of pause before each turn on a GPU, so that the clock rate recovers.
PAUSE = 0.2
#: Largest allowed difference from natten_jax's result, relative to the largest entry of natten_jax's result, by element
#: type.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}


def prepare(
    benchmark: Benchmark, pass_: Pass, names: Sequence[str], platform: str
) -> tuple[dict[str, Side], dict[str, str]]:
    """Prepare a pass with each implementation for timing.

    Returns:
        Prepared passes, and error messages of the implementations that failed; both by the implementation's name.
    """
    cotangent, *arrays = draw(benchmark)
    sides: dict[str, Side] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            sides[name] = PEERS[name].make(benchmark, cotangent, arrays, pass_, platform)
        except Exception as error:  # peers raise different exceptions for unsupported problems
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            failures[name] = f"{kind}{' '.join(str(error).split())[:300]}"
    return sides, failures


def measure(benchmark: Benchmark, pass_: Pass, names: Sequence[str], turns: int, platform: str) -> dict[str, Any]:
    """Time a pass with each implementation.

    Returns:
        Milliseconds, ratios to natten_jax's time, differences from natten_jax's result, and error messages, by name.
    """
    sides, failures = prepare(benchmark, pass_, names, platform)
    differences = {}
    same = [name for name, side in sides.items() if name != OURS and side.is_same and OURS in sides]
    if same:
        expected = sides[OURS].result()
        for name in same:
            differences[name] = difference(expected, sides[name].result())
            if not differences[name] <= TOLERANCE[benchmark.dtype]:
                failures[name] = f"its result differs from natten_jax's by {differences[name]:.2g} of the largest entry"
                del sides[name]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            if platform == "cuda":
                time.sleep(PAUSE)
            times[name].append(statistics.median(side.seconds()))
    return {
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "times_ours": {name: ratio(values, times[OURS]) for name, values in times.items() if OURS in times},
        "computes_windows": {name: side.is_same for name, side in sides.items()},
        "differences": differences,
        "failures": failures,
    }


def print_rows(problem: str, pass_: Pass, figures: Mapping[str, Any]) -> None:
    """Print a line for each implementation of a pass."""
    for name, milliseconds in figures["milliseconds"].items():
        what = "" if figures["computes_windows"][name] else "  dense attention"
        times = figures["times_ours"].get(name)
        relative = "" if times is None else f"{times:9.2f}x"
        print(f"{problem:24}{pass_:10}{name:15}{milliseconds:11.4f} ms{relative}{what}", flush=True)
    for name, reason in figures["failures"].items():
        print(f"{problem:24}{pass_:10}{name:15}not measured: {reason}", flush=True)


def run(options: argparse.Namespace) -> bool:
    """Measure the selected problems, print and save the figures; return True if natten_jax ran every problem."""
    platform = default_device().platform
    problems = problems_for(platform)
    unknown = [name for name in options.problems if name not in problems]
    if unknown:
        raise SystemExit(f"no problem is called {unknown[0]!r} on {platform}; there are {', '.join(problems)}")
    absent = {name: PEERS[name].absence(platform) for name in PEERS}
    names = [name for name, reason in absent.items() if reason is None]
    peers = {
        name: {"about": peer.about, "version": peer.version, "absent": absent[name]} for name, peer in PEERS.items()
    }
    for name, reason in absent.items():
        if reason is not None:
            print(f"{name}: {reason}")
    rows: dict[str, Any] = {}
    for name in options.problems or problems:
        benchmark = problems[name]
        facts = {"problem": benchmark.problem.describe(), "dtype": benchmark.dtype, "shape": benchmark.shape}
        rows[name] = dict[str, Any](facts)
        for pass_ in options.passes:
            rows[name][pass_] = measure(benchmark, pass_, names, options.turns, platform)
            print_rows(name, pass_, rows[name][pass_])
            save({"peers": peers, "problems": rows}, options.json)
    return not any(OURS in row[pass_]["failures"] for row in rows.values() for pass_ in options.passes)


def main() -> int:
    """Measure the problems, write the record and the page; return 1 if natten_jax could not run a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--problems", nargs="+", default=[], metavar="NAME", help="problems of the device's list (default: all)"
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--turns", type=int, default=3, help="alternating measurements of each side")
    parser.add_argument("--json", type=Path, default=FOLDER / "board.json", help="path of the record")
    parser.add_argument("--page", type=Path, default=FOLDER / "index.html", help="path of the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of earlier records")
    parser.add_argument("--page-only", action="store_true", help="only write the page, from earlier records")
    options = parser.parse_args()
    # Leave GPU memory for PyTorch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    is_complete = options.page_only or run(options)
    own = [options.json] if options.json.exists() else []
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(records([*sorted(options.results.rglob("*.json")), *own])), encoding="utf-8")
    print(f"wrote {'' if options.page_only else f'{options.json} and '}{options.page}")
    return int(not is_complete)


if __name__ == "__main__":
    command.run(main)
