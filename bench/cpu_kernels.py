"""Time the CPU kernels against the flex backend and dense masked attention in XLA, alternately in one process.

Example:
    python bench/run.py cpu_kernels --repeats 10 --json cpu_kernels.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lib import command
from lib.record import save

import natten_jax
from natten_jax import windows

Function = Callable[..., Any]
MATMUL_EXTENT = 2048


class Benchmark(NamedTuple):
    """A neighborhood attention problem with batch size 1."""

    layout: tuple[int, ...]
    kernel_size: tuple[int, ...]
    heads: int
    head_dim: int

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward pass: two matrix products over the visible query-key pairs."""
        return 4 * self.heads * self.head_dim * math.prod(self.layout) * math.prod(self.kernel_size)

    def describe(self) -> str:
        """Describe the problem in one line, for tables."""
        layout, window = ("x".join(map(str, values)) for values in (self.layout, self.kernel_size))
        return f"{len(self.layout)}-D {layout} h{self.heads} d{self.head_dim} w{window}"


BENCHMARKS = {
    "2d": Benchmark((64, 64), (13, 13), 4, 64),
    "3d": Benchmark((8, 32, 32), (3, 7, 7), 4, 32),
}


def dense_mask(benchmark: Benchmark) -> np.ndarray:
    """Return the boolean mask ``[queries, keys]`` over flattened tokens: True if the query attends to the key."""
    mask = np.ones((1, 1), bool)
    for extent, kernel_size in zip(benchmark.layout, benchmark.kernel_size, strict=True):
        start, end = windows.window_bounds(windows.Window(kernel_size), np.arange(extent)[:, None], extent)
        keys = np.arange(extent)[None, :]
        mask = np.kron(mask, (start <= keys) & (keys < end))
    return mask


def implementations(benchmark: Benchmark) -> dict[str, Function]:
    """Return the implementations, as functions of query, key and value, by name."""
    operator = {1: natten_jax.na1d, 2: natten_jax.na2d, 3: natten_jax.na3d}[len(benchmark.layout)]
    mask = jnp.asarray(dense_mask(benchmark))

    def fused(backend: str) -> Function:
        return lambda query, key, value: operator(query, key, value, benchmark.kernel_size, backend=backend)

    def dense(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        flat = [array.reshape(array.shape[0], -1, *array.shape[-2:]) for array in (query, key, value)]
        logits = jnp.einsum("bqhd,bkhd->bhqk", flat[0], flat[1]) * benchmark.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, flat[2]).reshape(query.shape)

    return {"cpu-fna": fused("cpu-fna"), "flex-fna": fused("flex-fna"), "dense XLA": dense}


def seconds(function: Function, *arguments: jax.Array) -> float:
    """Return the wall time of one call in seconds."""
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def measure(benchmark: Benchmark, dtype: str, repeats: int, names: list[str]) -> list[dict[str, Any]]:
    """Time every implementation and, as a reference, XLA's matrix product.

    All of them alternate for ``repeats`` rounds.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, *benchmark.layout, benchmark.heads, benchmark.head_dim)
    *inputs, cotangent = (jax.random.normal(key, shape, dtype) for key in keys)
    matrix = jax.random.normal(keys[0], (MATMUL_EXTENT, MATMUL_EXTENT), jnp.float32)
    matmul = jax.jit(lambda a: a @ a)

    candidates: dict[tuple[str, str], tuple[Function, tuple[jax.Array, ...]]] = {}
    for name, function in implementations(benchmark).items():
        if name not in names:
            continue

        def gradients(*arrays: jax.Array, function: Function = function) -> Any:
            out, vjp = jax.vjp(function, *arrays[:3])
            return out, vjp(arrays[3])

        candidates[name, "forward"] = jax.jit(function), tuple(inputs)
        candidates[name, "forward+backward"] = jax.jit(gradients), (*inputs, cotangent)

    for function, arguments in candidates.values():
        seconds(function, *arguments)
    seconds(matmul, matrix)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in candidates}
    matmul_times = []
    for _ in range(repeats):
        matmul_times.append(seconds(matmul, matrix))
        for key, (function, arguments) in candidates.items():
            times[key].append(seconds(function, *arguments))

    matmul_rate = 2 * MATMUL_EXTENT**3 / min(matmul_times)
    rows = []
    for (name, pass_), values in times.items():
        flops = benchmark.forward_flops * (1.0 if pass_ == "forward" else 3.5)
        ours = times.get(("cpu-fna", pass_), values)
        rows.append(
            {
                "problem": benchmark.describe(),
                "dtype": dtype,
                "implementation": name,
                "pass": pass_,
                "best_ms": 1e3 * min(values),
                "median_ms": 1e3 * statistics.median(values),
                "gflops": flops / min(values) / 1e9,
                "share_of_matmul": flops / min(values) / matmul_rate,
                "times_cpu_fna": statistics.median(a / b for a, b in zip(values, ours, strict=True)),
                "matmul_gflops": matmul_rate / 1e9,
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line per implementation and pass."""
    problem = None
    for row in rows:
        if row["problem"] != problem:
            problem = row["problem"]
            print(f"\n{problem}, {row['dtype']}; XLA's fp32 matmul: {row['matmul_gflops']:.0f} GFLOP/s")
            print(f"{'pass':<18}{'implementation':<16}{'best ms':>10}{'GFLOP/s':>10}{'of matmul':>11}{'x cpu-fna':>11}")
        print(
            f"{row['pass']:<18}{row['implementation']:<16}{row['best_ms']:>10.2f}{row['gflops']:>10.1f}"
            f"{row['share_of_matmul']:>10.1%}{row['times_cpu_fna']:>11.2f}"
        )


def main() -> None:
    """Run the benchmarks named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    names = ["cpu-fna", "flex-fna", "dense XLA"]
    parser.add_argument("--implementations", nargs="+", choices=names, default=names)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for name in arguments.problems:
        rows += measure(BENCHMARKS[name], arguments.dtype, arguments.repeats, arguments.implementations)
    print_table(rows)
    save(rows, arguments.json)


if __name__ == "__main__":
    command.run(main)
