"""Time calls with biases or sinks against plain calls, mostly with small windows, on an NVIDIA GPU.

The variants of a problem (``--sides``) alternate in one process. The L2 cache is overwritten before each launch. Each
time is the device time of all kernels that a variant launches, from profiler traces. Backward passes also compute the
gradients of biases and sinks.

Example:
    python bench/run.py biases --json bench/results/h200/biases.json
    python bench/run.py biases --only "NAT s[34]" --passes forward --sides plain relative_bias
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lib import command
from lib.bias_features import by_features
from lib.record import save
from lib.timing import Runner, compile_backward, compile_runner
from small import ROWS as SMALL
from small import Row, figures_of, shown

from natten_jax.performance import PASSES, Pass
from natten_jax.problem import problem_of

#: Problems with small windows, and problems whose ``head_dim`` or window is too large for kernels that support a
#: relative bias.
ROWS = (
    *SMALL,
    Row("wide heads", 8, (64, 64), 4, 128, 7),
    Row("wide windows", 2, (128, 128), 4, 64, 41),
    Row("image", 1, (256, 256), 24, 128, 80),
    Row("image D64", 1, (256, 256), 24, 64, 80),
    Row("video", 1, (30, 48, 80), 24, 128, (18, 24, 24)),
    Row("sequence", 1, (32768,), 16, 128, 4096, is_causal=True),
)

#: Variants of a call. "plain" passes only query, key and value. The others also pass a bias or sinks. "features"
#: emulates a relative bias by additional head dimensions, without kernel support.
SIDES = ("plain", "relative_bias", "key_bias", "sinks", "features")


def term_of(row: Row, side: str) -> list[jax.Array]:
    """Return a list with the bias or the sinks of a variant, or an empty list for a plain call."""
    rank = len(row.layout)
    window = (row.kernel_size,) * rank if isinstance(row.kernel_size, int) else row.kernel_size
    shapes = {
        "relative_bias": (row.heads, *(2 * k - 1 for k in window)),
        "key_bias": (row.batch, *row.layout),
        "sinks": (row.heads,),
    }
    shapes["features"] = shapes["relative_bias"]
    return [] if side == "plain" else [jax.random.normal(jax.random.key(5), shapes[side], jnp.float32)]


def runner_of(row: Row, pass_: Pass, side: str, family: str = "none") -> Runner | str:
    """Compile a variant for the default backend (``"none"``) or a named family; return the error text if that fails."""
    arrays = [jax.random.normal(jax.random.key(i), row.shape, jnp.bfloat16) for i in range(4)]
    cotangent, *inputs = arrays
    plain: Callable[..., jax.Array] = row.function(family)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *terms: jax.Array) -> jax.Array:
        return plain(query, key, value, **({side: terms[0]} if terms else {}))

    inputs += term_of(row, side)
    window: dict[str, Any] = {"dilation": row.dilation, "is_causal": row.is_causal}
    by = by_features(plain, problem_of(row.layout, row.kernel_size, **window)) if side == "features" else attend
    try:
        if pass_ == "forward":
            return compile_runner(by, *inputs, name=f"{side}_side")
        return compile_backward(by, cotangent, *inputs, name=f"{side}_side")
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def measure(row: Row, pass_: Pass, sides: list[str], turns: int, family: str = "none") -> dict[str, Any]:
    """Measure each variant's time in microseconds, and the ratio of its time to the plain call's time."""
    figures = figures_of({side: runner_of(row, pass_, side, family) for side in sides}, turns)
    for name in sides:
        if isinstance(figures[name], dict):
            figures[name]["times plain"] = figures[name]["us"] / figures["plain"]["us"]
    return {"row": row.name, "pass": pass_, "sides": figures}


def main() -> None:
    """Measure the selected rows, print a line per row and pass, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="select rows whose names match")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:-1]))
    families = "none", "cutlass", "cutlass-large", "hopper"
    parser.add_argument("--family", choices=families, default="none", help="backend family; none: the default backend")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for row in ROWS:
        if not re.search(options.only, row.name):
            continue
        for pass_ in options.passes:
            results.append(measure(row, pass_, options.sides, options.turns, options.family))
            print(f"{row.name:12} {pass_:8} {shown(results[-1]['sides'], 'plain')}", flush=True)
            save(results, options.json)


if __name__ == "__main__":
    command.run(main)
