"""A side of a comparison: a pass of a problem by one implementation, ready for timing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lib.implementations import Function
from lib.timing import LAUNCHES, compile_backward, compile_runner
from natten_jax.performance import Pass

#: After this many seconds of measurement, no further call starts.
_MAX_SECONDS = 0.5

Arrays = list[np.ndarray[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Side:
    """A pass of a problem by one implementation.

    Attributes:
        seconds: Function that returns the seconds of each of a few launches: on a GPU the device time of all kernels,
            otherwise the wall time.
        result: Function that returns the output or, for a backward pass, the gradients of query, key and value.
        is_same: True if the implementation computes the problem's windows; False if it computes dense attention over
            the same tokens.
    """

    seconds: Callable[[], Sequence[float]]
    result: Callable[[], Arrays]
    is_same: bool


def jax_side(
    function: Function, cotangent: jax.Array, arrays: Sequence[jax.Array], pass_: Pass, platform: str, *, is_same: bool
) -> Side:
    """Compile a pass of a function of JAX arrays, and return the function's side of the comparison."""
    if pass_ == "backward":
        runner = compile_backward(function, cotangent, *arrays)
    else:
        runner = compile_runner(function, *arrays)

    def run() -> Any:
        return jax.block_until_ready(runner.compiled(*runner.arguments))

    return Side(
        runner.seconds if platform == "cuda" else lambda: wall_times(run),
        lambda: [np.asarray(each, np.float32) for each in jax.tree.leaves(run())],
        is_same,
    )


def wall_times(run: Callable[[], Any]) -> list[float]:
    """Return the wall times of a few synchronous calls, in seconds; slow functions are called fewer times."""
    times: list[float] = []
    while len(times) < LAUNCHES and sum(times) < _MAX_SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def difference(ours: Arrays, theirs: Arrays) -> float:
    """Return the largest difference between two results.

    The difference of two arrays is relative to the largest entry of the array in ``ours``.
    """
    return max(
        float(np.max(np.abs(a.ravel() - b.ravel())) / max(float(np.max(np.abs(a))), 1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )
