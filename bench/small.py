"""Time passes with small windows, relative to a copy of the same number of bytes, on an NVIDIA GPU.

The time of the copy is a lower bound of a pass's time, because a pass must read its inputs and write its results at
least once. The programs of a problem alternate in one process. The L2 cache is overwritten before each launch. Each
time is the device time of all kernels that a program launches, from profiler traces.

Example:
    python bench/run.py small --json bench/results/h200/small.json
    python bench/run.py small --only "NAT s[34]" --passes forward --families none cutlass
    python bench/plot.py small bench/results/h200/small.json docs/images/small_windows.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lib import command
from lib.environment import environment
from lib.timing import Runner, compile_backward, compile_runner

import natten_jax
from natten_jax.native import module as native
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import default_device
from natten_jax.profiler import baselines
from natten_jax.profiler.capture import Launch, capture_interleaved

#: Bytes that are enough to overwrite the L2 cache of every current GPU.
CACHE_BYTES = 256 << 20

#: Backends to measure: the default backend (``"none"``), the portable kernels, the portable kernels for large windows
#: only, and the Hopper kernels.
FAMILIES = ("none", "cutlass", "cutlass-large", "hopper")


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem.

    Attributes:
        name: Name of the row.
        batch: Batch size.
        layout: Number of tokens along each dimension.
        heads: Number of heads.
        head_dim: Number of elements per head.
        kernel_size: Size of the window.
        dilation: Dilation of the window.
        is_causal: Mask out later keys.
        peers: Implementations of dense attention over the whole layout that are also timed.
    """

    name: str
    batch: int
    layout: tuple[int, ...]
    heads: int
    head_dim: int
    kernel_size: int | tuple[int, ...]
    dilation: int = 1
    is_causal: bool = False
    peers: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each array."""
        return (self.batch, *self.layout, self.heads, self.head_dim)

    def bytes_moved(self, pass_: Pass) -> int:
        """Return the number of bytes of query, key, value and output, plus their gradients in a backward pass."""
        return 2 * math.prod(self.shape) * (4 if pass_ == "forward" else 8)

    def function(self, family: str) -> Callable[..., jax.Array]:
        """Build the operator for the default backend (``"none"``) or for a family."""
        operator = getattr(natten_jax, f"na{len(self.layout)}d")
        window = {"kernel_size": self.kernel_size, "dilation": self.dilation, "is_causal": self.is_causal}
        if family == "cutlass-large":
            family = "cutlass"
            tiles = self._large_tiles(window)
        else:
            tiles = {}
        backend = None if family == "none" else f"{family}-fna"
        return lambda q, k, v, **terms: operator(q, k, v, **window, **tiles, backend=backend, **terms)

    def _large_tiles(self, window: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return, for each pass, the best-ranked tiles that belong to the portable kernels for large windows.

        These tiles have more tokens than any tile of the portable kernels for small windows.
        """
        array = jax.ShapeDtypeStruct(self.shape, jnp.bfloat16)
        small = native.limits("small")["row_tokens"]
        result: dict[str, tuple[int, ...]] = {}
        for prefix, query in (
            ("", natten_jax.get_configs_for_cutlass_fna),
            ("backward_", natten_jax.get_bwd_configs_for_cutlass_fna),
        ):
            pairs = query(array, array, array, **window)
            large = [pair for pair in pairs if min(map(math.prod, pair)) > small]
            if not large:
                raise ValueError("the portable kernels do not run on this device")
            q_tile, kv_tile = large[0]
            result |= {f"{prefix}q_tile_shape": q_tile, f"{prefix}kv_tile_shape": kv_tile}
        return result


DENSE = ("cudnn", "xla")
ROWS = (
    Row("NAT s1", 64, (56, 56), 2, 32, 7),
    Row("NAT s2", 64, (28, 28), 4, 32, 7),
    Row("NAT s3", 64, (14, 14), 8, 32, 7, peers=DENSE),
    Row("NAT s4", 64, (7, 7), 16, 32, 7, peers=DENSE),
    Row("DiNAT s1", 64, (56, 56), 2, 32, 7, dilation=8),
    Row("HDiT 64", 32, (64, 64), 2, 64, 7),
    Row("HDiT 256", 4, (256, 256), 2, 64, 7),
    Row("k3", 64, (56, 56), 4, 32, 3),
    Row("k13 D64", 8, (128, 128), 8, 64, 13),
    Row("k13 D32", 4, (160, 160), 8, 32, 13),
    Row("clips", 4, (8, 56, 56), 3, 32, (8, 7, 7)),
    Row("volume", 1, (64, 64, 64), 4, 32, 5),
    Row("1-D causal", 2, (16384,), 16, 64, 128, is_causal=True),
    Row("tiny 1-D", 1, (256,), 1, 32, 32),
    Row("tiny 2-D", 1, (16, 16), 1, 32, 5),
)


def copy_runner(moved: int) -> Runner:
    """Compile a copy of ``moved / 2`` bytes. Its reads and writes are ``moved`` bytes in total."""
    return compile_runner(lambda x: ~x, jnp.zeros((moved // 8,), jnp.uint32), name="copy")


def sides_of(row: Row, pass_: Pass, families: list[str]) -> dict[str, Runner | str]:
    """Compile the copy, and a pass with each implementation; return an error message instead of a pass that fails."""
    arrays = [jax.random.normal(jax.random.key(i), row.shape, jnp.bfloat16) for i in range(4)]
    cotangent, *inputs = arrays
    names = {family.replace("none", "natten_jax"): family for family in families}
    sides: dict[str, Runner | str] = {"copy": copy_runner(row.bytes_moved(pass_))}
    for name in (*names, *row.peers):
        try:
            function = row.function(names[name]) if name in names else functools.partial(baselines.attend, name)
            if pass_ == "forward":
                sides[name] = compile_runner(function, *inputs, name=f"{name}_side")
            else:
                sides[name] = compile_backward(function, cotangent, *inputs, name=f"{name}_side")
        except Exception as error:
            sides[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return sides


def measure(row: Row, pass_: Pass, families: list[str], turns: int) -> dict[str, Any]:
    """Measure each program's time in microseconds, and the ratio of its time to the copy's time."""
    figures = figures_of(sides_of(row, pass_, families), turns)
    copied = figures["copy"]["us"]
    for side in figures.values():
        if isinstance(side, dict):
            side["times copy"] = side["us"] / copied
    return {"row": row.name, "pass": pass_, "bytes": row.bytes_moved(pass_), "sides": figures}


def figures_of(sides: Mapping[str, Runner | str], turns: int) -> dict[str, Any]:
    """Measure each program's time in microseconds: the median and the range over turns.

    The L2 cache is overwritten before each launch.
    """
    filler = jnp.zeros((CACHE_BYTES // 4,), jnp.uint32)

    @jax.jit
    def fill(x: jax.Array) -> jax.Array:
        return ~x

    def launch(runner: Runner) -> Launch:
        def run() -> Any:
            jax.block_until_ready(fill(filler))
            return runner.compiled(*runner.arguments)

        return Launch(run, runner.program)

    runners = {name: side for name, side in sides.items() if isinstance(side, Runner)}
    found = capture_interleaved([launch(runner) for runner in runners.values()], turns, default_device().platform)
    figures: dict[str, Any] = {name: side for name, side in sides.items() if isinstance(side, str)}
    for name, iterations in zip(runners, found, strict=True):
        times = [sum(event.duration for event in events) / 1e3 for events in iterations]
        figures[name] = {"us": statistics.median(times), "range": [min(times), max(times)]}
    return figures


def shown(sides: Mapping[str, Any], base: str) -> str:
    """Format each program's time and the ratio of this time to the time of ``base``, or the program's error message."""
    return ", ".join(
        f"{name} {side['us']:.1f} us ({side[f'times {base}']:.2f})" if isinstance(side, dict) else f"{name}: {side}"
        for name, side in sides.items()
    )


def main() -> None:
    """Measure the selected rows, print a line per row and pass, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="select rows whose names match")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="none: the default backend"
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records, run_environment = [], environment()
    for row in ROWS:
        if not re.search(options.only, row.name):
            continue
        for pass_ in options.passes:
            record = measure(row, pass_, options.families, options.turns)
            records.append(record)
            print(f"{row.name:12} {pass_:8} {shown(record['sides'], 'copy')}", flush=True)
            if options.json is not None:
                # Write after each row, so that an interrupted run keeps its measurements.
                content = {"environment": run_environment, "records": records}
                options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command.run(main)
