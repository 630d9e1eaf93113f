"""Time wrapping windows and padded batches against their alternatives, on an NVIDIA GPU.

Wrapping windows are compared with two alternatives:

- "plain" shifts the windows at the edges of the layout. The number of query-key pairs is the same.
- "padded by hand" pads the arrays by half a window on each side and crops the output.

In padded batches, half of the tokens are padding. The variant "extents" excludes the padding, and "plain" treats it as
tokens.

The variants of a problem alternate in one process. The L2 cache is overwritten before each launch. Each time is the
device time of all kernels that a variant launches, from profiler traces. The kernels that clear padding overlap with
other kernels, but their full time is counted. Padded batches are therefore also timed by the host's clock: a sequence
of calls is timed as a whole, and its time is divided by the number of calls.

Example:
    python bench/run.py layouts --json bench/results/h200/layouts.json
    python bench/run.py layouts --only "padded" --passes forward
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lib import command
from lib.record import save
from lib.timing import Runner, compile_backward, compile_runner
from small import figures_of

import natten_jax
from natten_jax.performance import PASSES, Pass

Shape = tuple[int, ...]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem.

    Attributes:
        name: Name of the row.
        layout: Number of tokens in each dimension.
        heads: Heads.
        head_dim: Width of a head.
        kernel_size: Window; ``None`` for dense attention.
        wraps: Dimensions in which windows wrap.
        extents: Valid extents of each batch entry; empty if the batch has no padding.
    """

    name: str
    layout: Shape
    heads: int
    head_dim: int
    kernel_size: Shape | None
    batch: int = 1
    wraps: Shape = ()
    extents: tuple[Shape, ...] = ()

    @property
    def shape(self) -> Shape:
        """Shape of each array."""
        return (self.batch, *self.layout, self.heads, self.head_dim)

    @property
    def real(self) -> float:
        """Fraction of the tokens that are not padding."""
        return sum(map(math.prod, self.extents)) / (self.batch * math.prod(self.layout)) if self.extents else 1.0

    def sides(self) -> dict[str, Attend]:
        """Return the function of each variant, by name."""
        if self.kernel_size is None:
            lengths = jnp.asarray([length for (length,) in self.extents], jnp.int32)
            return {
                "plain": natten_jax.attention,
                "extents": lambda q, k, v: natten_jax.attention(q, k, v, query_lengths=lengths, kv_lengths=lengths),
            }
        operator = getattr(natten_jax, f"na{len(self.layout)}d")
        size = self.kernel_size

        def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return operator(q, k, v, size)

        if self.extents:
            extents = jnp.asarray(self.extents, jnp.int32)
            return {"plain": plain, "extents": lambda q, k, v: operator(q, k, v, size, extents=extents)}
        edges = tuple("wrap" if i in self.wraps else "shift" for i in range(len(self.layout)))
        return {
            "plain": plain,
            "wrap": lambda q, k, v: operator(q, k, v, size, edges=edges),
            "padded by hand": lambda q, k, v: self._cropped(plain(*map(self._padded, (q, k, v)))),
        }

    def _margins(self) -> list[int]:
        assert self.kernel_size is not None
        return [size // 2 if i in self.wraps else 0 for i, size in enumerate(self.kernel_size)]

    def _padded(self, array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, 0), *((n, n) for n in self._margins()), (0, 0), (0, 0)], mode="wrap")

    def _cropped(self, array: jax.Array) -> jax.Array:
        inside = (slice(n, n + extent) for n, extent in zip(self._margins(), self.layout, strict=True))
        return array[(slice(None), *inside)]


ROWS = (
    Row("wrap, image", (256, 256), 24, 128, (80, 80), wraps=(0, 1)),
    Row("wrap, video", (30, 48, 80), 24, 128, (18, 24, 24), wraps=(0, 1, 2)),
    Row("wrap, small windows", (256, 256), 2, 64, (7, 7), batch=4, wraps=(0, 1)),
    Row("wrap, globe", (181, 360), 16, 64, (9, 33), wraps=(1,)),
    Row(
        "padded, images",
        (128, 128),
        16,
        128,
        (40, 40),
        batch=4,
        extents=((128, 128), (64, 128), (76, 76), (49, 50)),
    ),
    Row(
        "padded, images of small windows",
        (256, 256),
        2,
        64,
        (7, 7),
        batch=4,
        extents=((256, 256), (128, 256), (152, 152), (98, 100)),
    ),
    Row(
        "padded, NAT s1",
        (56, 56),
        2,
        32,
        (7, 7),
        batch=64,
        extents=((56, 56), (28, 56), (33, 33), (22, 22)) * 16,
    ),
    Row("padded, sequences", (8192,), 16, 128, (1024,), batch=4, extents=((8192,), (4096,), (3072,), (1024,))),
    Row("padded, attention", (8192,), 16, 128, None, batch=4, extents=((8192,), (4096,), (3072,), (1024,))),
)


#: Number of dependent calls that ``elapsed`` times together.
_CALLS = 16


def elapsed(
    sides: Mapping[str, Attend], pass_: Pass, cotangent: jax.Array, inputs: list[jax.Array], turns: int
) -> dict[str, float]:
    """Time sequences of dependent calls by the host's clock; return each variant's median microseconds per call."""

    def forward(attend: Attend, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        for _ in range(_CALLS):
            query = attend(query, key, value)
        return query

    def backward(attend: Attend, cotangent: jax.Array, *inputs: jax.Array) -> Any:
        found = cotangent, *inputs[1:]
        _, pullback = jax.vjp(attend, *inputs)
        for _ in range(_CALLS):
            found = pullback(found[0])
        return found

    chain, arguments = (forward, inputs) if pass_ == "forward" else (backward, [cotangent, *inputs])
    compiled = {
        name: jax.jit(chain, static_argnums=0).lower(side, *arguments).compile() for name, side in sides.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns + 1):
        for name, run in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times[name].append((time.perf_counter() - began) / _CALLS * 1e6)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def measure(row: Row, pass_: Pass, turns: int) -> dict[str, Any]:
    """Measure each variant's time in microseconds, and the ratio of its time to the plain call's time."""
    cotangent, *inputs = (jax.random.normal(jax.random.key(i), row.shape, jnp.bfloat16) for i in range(4))
    runners: dict[str, Runner] = {}
    for number, (name, side) in enumerate(row.sides().items()):
        label = f"side_{number}"
        runners[name] = (
            compile_runner(side, *inputs, name=label)
            if pass_ == "forward"
            else compile_backward(side, cotangent, *inputs, name=label)
        )
    figures = figures_of(runners, turns)
    for figure in figures.values():
        figure["times plain"] = figure["us"] / figures["plain"]["us"]
    if row.extents:
        elapsed_times = elapsed(row.sides(), pass_, cotangent, inputs, turns)
        for name, microseconds in elapsed_times.items():
            figures[name]["elapsed us"] = microseconds
            figures[name]["elapsed times plain"] = microseconds / elapsed_times["plain"]
    return {"row": row.name, "pass": pass_, "real": row.real, "sides": figures}


def main() -> None:
    """Measure the selected rows, print the figures of each row and pass, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="select rows whose names match")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for row in ROWS:
        if not re.search(options.only, row.name):
            continue
        for pass_ in options.passes:
            found = measure(row, pass_, options.turns)
            results.append(found)
            shown = [f"{name} {side['us']:.1f} us ({side['times plain']:.3f})" for name, side in found["sides"].items()]
            print(f"{row.name}, {pass_}: {', '.join(shown)}; real {found['real']:.3f}", flush=True)
            if row.extents:
                each = [
                    f"{name} {side['elapsed us']:.1f} us ({side['elapsed times plain']:.3f})"
                    for name, side in found["sides"].items()
                ]
                print(f"    in a row of calls: {', '.join(each)}", flush=True)
            save(results, options.json)


if __name__ == "__main__":
    command.run(main)
