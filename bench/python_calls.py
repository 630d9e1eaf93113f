"""Count the calls of natten_jax's Python functions while JAX traces, lowers and compiles a program.

Each case runs in a separate process. These Python calls delay the first execution of a program, in addition to the time
that JAX and XLA need. The counts do not depend on machine load, but they depend on the Python version: since Python
3.12, a comprehension is not a call. The printed number of decisions counts how often a backend was chosen for a pass.

Example:
    python bench/run.py python_calls
    python bench/run.py python_calls --only "gradient over a mesh" --most 20
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import natten_jax
from natten_jax import na2d
from natten_jax.sharding import auto

PACKAGE = str(Path(natten_jax.__file__).parent)
#: Cases by name: the number of devices along height and along width. Cases with (1, 1) run without a mesh.
WAYS = {
    "forward": (1, 1),
    "gradient": (1, 1),
    "gradient over a mesh": (2, 1),
    "gradient over a mesh of 2 x 2": (2, 2),
}
STAGES = "trace", "lower", "compile"


class Calls:
    """Counts of the calls of natten_jax's functions: by stage, then by file and function name."""

    def __init__(self) -> None:
        self.by_stage: dict[str, collections.Counter[tuple[str, str]]] = {}
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def _count(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self._counts[code.co_filename.removeprefix(PACKAGE + os.sep), code.co_qualname] += 1

    def count(self, stage: str, function: Callable[[], Any]) -> Any:
        """Run a stage of the compilation, and count the calls."""
        self._counts = self.by_stage[stage] = collections.Counter()
        return self.in_thread(function)()

    def in_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that calls inside it are counted, whichever thread runs it.

        Python profiles each thread separately, and XLA's partitioner runs callbacks in its own threads.
        """

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(self._count)
            try:
                return function(*arguments, **options)
            finally:
                sys.setprofile(before)

        return run


def measure(way: str) -> Calls:
    """Count the calls of a case. The process must not have run another case."""
    height, width = WAYS[way]

    def forward(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return na2d(query, key, value, 13)

    def gradient(*arrays: jax.Array) -> Any:
        return jax.grad(lambda *some: forward(*some).sum(), argnums=(0, 1, 2))(*arrays)

    sharding = None
    if height * width > 1:
        mesh = jax.make_mesh((height, width), ("height", "width"), axis_types=(AxisType.Auto,) * 2)
        sharding = NamedSharding(mesh, PartitionSpec(None, "height", "width"))
    array = jax.ShapeDtypeStruct((1, 64, 64, 4, 64), jnp.float32, sharding=sharding)
    calls = Calls()
    for callback in ("_partition", "_run"):
        setattr(auto.Partitioned, callback, calls.in_thread(getattr(auto.Partitioned, callback)))
    jax.jit(lambda x: x + 1).lower(1.0).compile()  # load JAX's lazy modules first
    function = jax.jit(forward if way == "forward" else gradient)
    traced = calls.count("trace", lambda: function.trace(array, array, array))
    lowered = calls.count("lower", traced.lower)
    calls.count("compile", lowered.compile)
    return calls


def main() -> int:
    """Count and print the calls of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WAYS, help="run one case, in this process")
    parser.add_argument("--most", type=int, default=0, help="list this number of most-called functions")
    options = parser.parse_args()
    if options.only is None:
        devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices.strip()}
        for way in WAYS:
            command = [sys.executable, __file__, "--only", way, "--most", str(options.most)]
            subprocess.run(command, env=environment, check=True)
        return 0
    found = measure(options.only).by_stage
    total = sum(found.values(), collections.Counter())
    decisions = total[os.path.join("backends", "select.py"), "decided"]
    stages = ", ".join(f"{stage} {found[stage].total()}" for stage in STAGES)
    print(f"{options.only}: {stages}, all {total.total()}; {decisions} decisions")
    for (file, name), count in total.most_common(options.most):
        print(f"{count:8} {file} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
