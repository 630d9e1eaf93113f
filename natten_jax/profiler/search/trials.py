"""Measuring configurations: compiled, warmed up, and run in turns; what fails is a result, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from natten_jax.profiler import capture
from natten_jax.profiler.cli import Progress
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import Workload, compile_workload
from natten_jax.profiler.search.optimum import Trial


class Trials:
    """Measurements of one search.

    Attributes:
        done: Every measurement, in order.
        compile_seconds: Seconds of compilation.
    """

    def __init__(self, platform: str, progress: Progress) -> None:
        self.done: list[Trial] = []
        self.compile_seconds = 0.0
        self._platform = platform
        self._progress = progress
        self._arguments: dict[bool, tuple[jax.Array, ...]] = {}
        self._number = 0

    def measure(self, every: Sequence[Options], runs: int, warmup_steps: int) -> list[Trial]:
        """A trial of each, measured in turns; what fails alone fails alone."""
        self._progress.expect(len(every) * (1 + warmup_steps + runs))
        prepared = [self._warm(each, warmup_steps) for each in every]
        alive = [each for each in prepared if isinstance(each, Workload)]
        times: list[float | str]
        try:
            times = self._captured(alive, runs)
        except Exception:  # one of them spoils the trace of all
            alone = [self._guarded(self._captured, [each], runs) for each in alive]
            times = [each if isinstance(each, str) else each[0] for each in alone]
        in_order = iter(times)
        outcomes = [next(in_order) if isinstance(each, Workload) else each for each in prepared]
        trials = [
            Trial(options, None, outcome) if isinstance(outcome, str) else Trial(options, outcome)
            for options, outcome in zip(every, outcomes, strict=True)
        ]
        self.done += trials
        return trials

    def _captured(self, workloads: Sequence[Workload], runs: int) -> list[float | str]:
        """Seconds of device time of each, median of the runs."""
        if not workloads:
            return []

        launches = [each.launch.after(self._progress.advance) for each in workloads]
        iterations = capture.capture_in_turns(launches, runs, self._platform)
        return [
            statistics.median(sum(event.duration for event in events) / 1e9 for events in of_workload)
            for of_workload in iterations
        ]

    def _warm(self, options: Options, warmup_steps: int) -> Workload | str:
        """A workload that was compiled and has run, or why it could not."""
        workload = self.compile(options)
        self._progress.advance()
        return workload if isinstance(workload, str) else self._guarded(self._run, workload, max(warmup_steps, 1))

    def _run(self, workload: Workload, runs: int) -> Workload:
        for _ in range(runs):
            jax.block_until_ready(workload.run())  # type: ignore[no-untyped-call]
            self._progress.advance()
        return workload

    def compile(self, options: Options) -> Workload | str:
        """The compiled program of a configuration, or why there is none."""
        start = time.perf_counter()
        self._number += 1
        again = self._arguments.get(options.backprop)
        workload = self._guarded(compile_workload, options, f"candidate_{self._number}", again)
        self.compile_seconds += time.perf_counter() - start
        if isinstance(workload, Workload):
            self._arguments[options.backprop] = workload.arguments
        return workload

    def _guarded(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """The step's result, or its error as one line: no configuration ends the search."""
        try:
            return step(*arguments)
        except Exception as error:
            return " ".join(str(error).split()) or type(error).__name__


def fastest_first(trials: Sequence[Trial]) -> list[tuple[float, Options]]:
    """The seconds and options of the trials that ran, the fastest first."""
    ran = [(trial.seconds, trial.options) for trial in trials if trial.seconds is not None]
    return sorted(ran, key=lambda each: each[0])
