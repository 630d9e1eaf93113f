"""Measure the device times of compiled functions that alternate, from profiler traces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from natten_jax.plan.devices import default_device
from natten_jax.profiler.capture import capture
from natten_jax.profiler.program import Program, compile_for_trace

PAUSE = 1.0  # Seconds of pause before a turn, so that the device cools down.
WARM_UP = 0.5  # Seconds of load before measurements in mode "sustained".
LAUNCHES = 3  # Number of timed launches per turn.
MODES = ("cold", "sustained")


_Name = TypeVar("_Name", str, tuple[str, str])


class Runner(NamedTuple):
    """A compiled function with its arguments, ready for timing."""

    compiled: jax.stages.Compiled
    program: Program
    arguments: tuple[Any, ...]

    def seconds(self, launches: int = LAUNCHES) -> list[float]:
        """Return the device time of each of several launches, in seconds; it includes all kernels and copies."""
        platform = default_device().platform
        iterations = capture(lambda: self.compiled(*self.arguments), launches, self.program, platform)
        return [sum(event.duration for event in events) / 1e9 for events in iterations]

    def launch(self, launches: int) -> None:
        """Run the function several times."""
        for _ in range(launches):
            jax.block_until_ready(self.compiled(*self.arguments))

    def load(self, seconds: float) -> None:
        """Keep the device busy for some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            jax.block_until_ready([self.compiled(*self.arguments) for _ in range(4)])


def compile_runner(function: Callable[..., Any], *arguments: Any, name: str | None = None) -> Runner:
    """Compile a function of arrays or pytrees, and run it once.

    Args:
        function: Function to compile.
        arguments: Arguments of the function.
        name: Name of the program. Programs that alternate within one capture need different names.
    """

    def named(*inputs: Any) -> Any:
        return function(*inputs)

    named.__name__ = name or function.__name__
    compiled = compile_for_trace(named, *arguments)
    jax.block_until_ready(compiled(*arguments))
    return Runner(compiled, Program.from_compiled(compiled), arguments)


def compile_backward(
    function: Callable[..., Any], cotangent: jax.Array, *arrays: jax.Array, name: str | None = None
) -> Runner:
    """Compile only the backward pass of a function; the compiled program takes the forward pass's residuals."""
    _, vjp = jax.jit(lambda *inputs: jax.vjp(function, *inputs))(*arrays)
    return compile_runner(lambda residuals, upstream: residuals(upstream), vjp, cotangent, name=name)


def take_turns(
    runners: Mapping[_Name, Runner], turns: int, mode: str, pause: float | None = None
) -> dict[_Name, list[float]]:
    """Run functions alternately; return the median seconds of each function in each of its turns.

    Args:
        runners: Functions by name.
        turns: Number of turns of each function.
        mode: ``"cold"`` pauses before each turn, ``"sustained"`` keeps the device busy.
        pause: Seconds of pause before each turn; ``None`` uses :data:`PAUSE`.
    """
    times: dict[_Name, list[float]] = {name: [] for name in runners}
    if mode == "sustained":
        next(iter(runners.values())).load(WARM_UP)
    for _ in range(turns):
        for name, runner in runners.items():
            if mode == "cold":
                time.sleep(PAUSE if pause is None else pause)
            else:
                runner.load(WARM_UP / 10)
            times[name].append(statistics.median(runner.seconds()))
    return times


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """Return the median over turns of the ratio of two programs' times.

    Times of the same turn are compared, because the clock rate of a GPU varies less within a turn than between turns.
    """
    return statistics.median(top / bottom for top, bottom in zip(numerators, denominators, strict=True))
