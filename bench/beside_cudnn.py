"""Compare natten_jax with cuDNN on an NVIDIA GPU: sliding windows over sequences, and causal windows over videos.

The sequence windows are causal, and both libraries compute the same function. The video windows are causal in time: a
token attends to all tokens of its own frame and of earlier frames. In one of the problems, a token attends to at most 8
frames. cuDNN does not support masks that are causal in time, so it computes dense attention over the same tokens. The
two libraries alternate in one process, with a short pause before each turn. Each time is the device time of all kernels
that a call launches.

Example:
    python bench/run.py beside_cudnn --json bench/results/h100/beside_cudnn.json
    python bench/run.py beside_cudnn --groups video --passes forward
    python bench/plot.py sliding bench/results/h100/beside_cudnn.json docs/images/sliding.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import Benchmark
from lib import command
from lib.record import save
from lib.timing import Runner, ratio, take_turns
from peers import OURS, prepare

from natten_jax.cost_model.tiles import flops
from natten_jax.performance import PASSES, Pass

#: Seconds of pause before each turn. A short pause is enough: the programs take milliseconds and do not heat the GPU.
PAUSE = 0.2


def _sequence(tokens: int, heads: int, window: int, head_dim: int = 128, **facts: Any) -> Benchmark:
    return Benchmark((tokens,), heads, head_dim, (window,), is_causal=True, **facts)


def _video(layout: tuple[int, int, int], heads: int, frames: int | None = None) -> Benchmark:
    """Return a problem that is causal in time.

    A token attends to its own frame and the ``frames - 1`` frames before it, or to all earlier frames if ``frames`` is
    ``None``.
    """
    return Benchmark(layout, heads, 128, (frames or layout[0], *layout[1:]), causal=(True, False, False))


#: Problems by group. In "sliding", the other library computes the same windows as natten_jax. In "video", the other
#: library computes dense attention.
GROUPS: Mapping[str, Mapping[str, Benchmark]] = {
    "sliding": {
        "2 x 16384 tokens,\n16 heads of 128, window 1024": _sequence(16384, 16, 1024, batch=2),
        "32768 tokens, 32 heads,\n8 of keys, window 4096": _sequence(32768, 32, 4096, heads_kv=8),
        "2 x 16384 tokens,\n16 heads of 64, window 128": _sequence(16384, 16, 128, 64, batch=2),
        "4 x 8192 tokens, 32 heads,\n8 of keys, window 512": _sequence(8192, 32, 512, batch=4, heads_kv=8),
        "131072 tokens,\n8 heads of 128, window 4096": _sequence(131072, 8, 4096),
    },
    "video": {
        "30x32x32, 24 heads,\nall earlier frames": _video((30, 32, 32), 24),
        "16x64x64, 24 heads,\nall earlier frames": _video((16, 64, 64), 24),
        "21x30x52, 12 heads,\nall earlier frames": _video((21, 30, 52), 12),
        "30x48x80, 24 heads,\n8 frames": _video((30, 48, 80), 24, 8),
    },
}
PEERS = {("sliding", "cudnn"): "cudnn-window", ("sliding", "xla"): "xla-window"}


def without_mask(benchmark: Benchmark) -> Benchmark:
    """Return the problem as dense attention over the whole layout, without a window or a causal mask."""
    return dataclasses.replace(benchmark, kernel_size=None, is_causal=False, causal=None)


def compiled(group: str, benchmark: Benchmark, pass_: Pass, library: str) -> dict[str, Runner | str]:
    """Compile a pass with each library; if a library fails, return its error message instead of the compiled pass."""
    peer = PEERS.get((group, library), library)
    whole = benchmark if group == "sliding" else without_mask(benchmark)
    return prepare(benchmark, [OURS], pass_, None) | prepare(whole, [peer], pass_, None)


def measure(group: str, benchmark: Benchmark, pass_: Pass, turns: int, library: str) -> dict[str, Any]:
    """Time a pass with both libraries.

    Returns:
        Times, error messages, natten_jax's speed-up, and the fraction of all query-key pairs that are not masked out.
    """
    sides = compiled(group, benchmark, pass_, library)
    runners = {name: side for name, side in sides.items() if isinstance(side, Runner)}
    times = take_turns(runners, turns, "cold", PAUSE)
    figures: dict[str, Any] = {
        "milliseconds": {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
        "failures": {name: side for name, side in sides.items() if isinstance(side, str)},
        "share_of_pairs": flops(benchmark.problem, pass_) / flops(without_mask(benchmark).problem, pass_),
    }
    if len(times) == len(sides):
        own, other = times[OURS], times[next(name for name in times if name != OURS)]
        figures["speedup"] = ratio(other, own)
    return figures


def line(name: str, pass_: Pass, figures: Mapping[str, Any]) -> str:
    """Format a line of the printed table."""
    times = "  ".join(f"{side} {value:.4f} ms" for side, value in figures["milliseconds"].items())
    gain = f"  {figures['speedup']:.2f}x" if "speedup" in figures else ""
    missing = "".join(f"  {side} did not run: {reason}" for side, reason in figures["failures"].items())
    return f"{name.replace(chr(10), ' '):58}{pass_:10}{times}{gain}{missing}"


def main() -> int:
    """Measure the problems, print a table and save the figures; return 1 if natten_jax could not run a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--turns", type=int, default=3, help="alternating measurements of each side")
    parser.add_argument("--library", choices=("cudnn", "xla"), default="cudnn", help="library to compare with")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    passes: Sequence[Pass] = options.passes
    results: dict[str, dict[str, Any]] = {}
    for group in options.groups:
        for name, benchmark in GROUPS[group].items():
            facts = {"problem": benchmark.problem.describe(), "dtype": benchmark.dtype, "library": options.library}
            row = results.setdefault(group, {})[name] = dict[str, Any](facts)
            for pass_ in passes:
                row[pass_] = measure(group, benchmark, pass_, options.turns, options.library)
                print(line(name, pass_, row[pass_]), flush=True)
                save(results, options.json)
    return int(
        any(OURS in row[pass_]["failures"] for rows in results.values() for row in rows.values() for pass_ in passes)
    )


if __name__ == "__main__":
    command.run(main)
