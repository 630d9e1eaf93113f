"""Measure the host time of first calls: tracing and compiling operators for new shapes on a CPU.

    python bench/run.py first_call

This command prints medians over several processes as JSON. Each process compiles an operator only once per shape, as in
a model whose layers all have different shapes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lib import command

PROCESSES = 5
LAYOUTS = (16, 20, 24, 28, 32, 36)


def measure() -> dict[str, float]:
    """Measure the seconds of import, compilation and tracing in this process."""
    start = time.perf_counter()
    import jax
    import jax.numpy as jnp

    import natten_jax

    found = {"import": time.perf_counter() - start}
    array = jnp.zeros((1, 8, 8, 1, 8))
    natten_jax.na2d(array, array, array, 3).block_until_ready()  # so that later times exclude JAX's start-up

    def loss(array: jax.Array, window: int) -> jax.Array:
        return natten_jax.na2d(array, array, array, window).sum()

    start = time.perf_counter()
    for extent in LAYOUTS:
        shape = jax.ShapeDtypeStruct((1, extent, extent, 2, 16), jnp.float32)
        jax.jit(loss, static_argnums=1).lower(shape, 7).compile()
    found["six layouts"] = time.perf_counter() - start
    start = time.perf_counter()
    for extent in LAYOUTS:
        shape = jax.ShapeDtypeStruct((1, extent + 1, extent + 1, 2, 16), jnp.float32)
        jax.jit(jax.grad(loss), static_argnums=1).lower(shape, 7).compile()
    found["six gradients"] = time.perf_counter() - start
    shape = jax.ShapeDtypeStruct((1, 64, 64, 4, 32), jnp.float32)
    start = time.perf_counter()
    jax.jit(jax.grad(loss), static_argnums=1).trace(shape, 13)
    found["trace of a gradient"] = time.perf_counter() - start
    return found


def main() -> None:
    """Run the processes and print the medians."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import first_call, json; print(json.dumps(first_call.measure()))"]
    runs = [
        json.loads(
            subprocess.run(
                command, cwd=Path(__file__).parent, env=environment, check=True, capture_output=True, encoding="utf-8"
            ).stdout
        )
        for _ in range(PROCESSES)
    ]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(json.dumps({"seconds": medians, "processes": PROCESSES}, indent=1))


if __name__ == "__main__":
    command.run(main)
