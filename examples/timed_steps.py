"""Time steps of a model, and measure the share of attention in a step. The whole-model examples use this module."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from natten_jax.plan.devices import default_device
from natten_jax.profiler import capture
from natten_jax.profiler.program import Program, compile_for_trace
from natten_jax.profiler.report import format_time

LINES = 10  # maximum number of printed losses


class AttentionTime(NamedTuple):
    """Device times in seconds of natten_jax's forward passes, of its backward passes, and of the whole step."""

    forward: float
    backward: float
    total: float

    @property
    def share(self) -> float:
        """Share of attention in the device time of the step."""
        return (self.forward + self.backward) / self.total

    def __str__(self) -> str:
        forward, backward, total = map(format_time, self)
        return (
            f"Attention: {self.share:.1%} of a step's {total} of device time (forward {forward}, backward {backward})"
        )


class TimedSteps:
    """A model in training.

    Args:
        step: Function without side effects that maps a state and a batch to the next state and the loss.
        state: Initial state. Its buffers are donated.

    Attributes:
        state: Current state: parameters and the optimizer's state.
        losses: The losses of all steps so far.
        seconds: Wall-clock times of all steps so far; the first one includes compilation.
    """

    def __init__(self, step: Callable[..., tuple[Any, jax.Array]], state: Any) -> None:
        self._step = step
        self._run = jax.jit(step, donate_argnums=0)
        self.state = state
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, batch: Callable[[int], tuple[Any, ...]], count: int) -> None:
        """Train, and print mean losses at regular intervals. At the end, print the median time of a step.

        Args:
            batch: Function that maps the number of a step to the step's arguments, except for the state. The first
                step has the number 1.
            count: Number of steps.
        """
        print(f"{'step':>6} {'mean loss since the previous line':>36}")
        interval = -(-count // LINES)
        for number in range(1, count + 1):
            self._train_once(*batch(number))
            if number % interval == 0 or number == count:
                first = (number - 1) // interval * interval
                print(f"{number:>6} {statistics.mean(self.losses[first:]):>36.4f}", flush=True)
        print(f"Median step: {format_time(self.median_seconds)}")

    def repeat(self, count: int, *batch: Any) -> None:
        """Run the same step ``count`` times without printing."""
        for _ in range(count):
            self._train_once(*batch)

    def _train_once(self, *batch: Any) -> None:
        jax.block_until_ready(batch)  # type: ignore[no-untyped-call]  # the time excludes the preparation of the batch
        started = time.perf_counter()
        self.state, loss = jax.block_until_ready(self._run(self.state, *batch))  # type: ignore[no-untyped-call]
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(float(loss))

    @property
    def median_seconds(self) -> float:
        """Median time of a step in seconds. The first step is left out, because it includes compilation."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def profile(self, *batch: Any, iterations: int = 3) -> AttentionTime:
        """Measure the device time of a step, and of the attention in it. The measured steps do not change ``state``.

        The step is compiled a second time, so that the trace of JAX's profiler names the HLO instruction of each
        launch. HLO attributes identify the instructions of natten_jax's passes. A fusion is attributed to its last
        instruction.

        Args:
            batch: Arguments of the step, except for the state.
            iterations: Number of measured steps.

        Returns:
            Times of the measured step with the median total time.
        """
        compiled = compile_for_trace(self._step, self.state, *batch)
        program = Program.from_compiled(compiled)

        def run() -> Any:
            return compiled(self.state, *batch)

        jax.block_until_ready(run())  # type: ignore[no-untyped-call]
        times = []
        for events in capture.capture(run, iterations, program, default_device().platform):
            seconds = {"forward": 0.0, "backward": 0.0, "rest": 0.0}
            for event in events:
                plan = program.instruction(event.instruction).plan
                seconds["rest" if plan is None else plan.pass_] += event.duration / 1e9
            times.append(AttentionTime(seconds["forward"], seconds["backward"], sum(seconds.values())))
        return sorted(times, key=lambda each: each.total)[len(times) // 2]
