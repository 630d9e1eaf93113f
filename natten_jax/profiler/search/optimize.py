"""``--optimize``: measure the configurations that the simulator ranks best, and keep the fastest.

Passes are kernels of their own, so the forward pass is searched first, and the backward pass with the best forward
pass in place. Each search measures many configurations briefly, all in one trace and in turns, and then the best few
of them for longer. A backend is chosen by its best forward and backward pass together.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from natten_jax import backends
from natten_jax.backends.select import resolve
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import BackendId
from natten_jax.profiler.cli import Progress
from natten_jax.profiler.options import Options, arrays_of
from natten_jax.profiler.run.inputs import check_fits
from natten_jax.profiler.run.workload import Workload, check_available
from natten_jax.profiler.search.choices import spelled_out, with_backend, with_schedule, with_tiles
from natten_jax.profiler.search.configurations import Listing, candidates, listing, main_sub_call
from natten_jax.profiler.search.optimum import Optimum, Trial
from natten_jax.profiler.search.trials import Trials, fastest_first


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much of a search is done.

    Attributes:
        screened: Configurations of a pass that are compiled at most.
        finalists: Those of them that are measured a second time.
        seconds: The first measurement of one pass goes through the ranking in batches, and ends with the one that
            exceeds so many seconds: slow problems get fewer configurations, the best ranked ones.
    """

    screened: int = 40
    finalists: int = 6
    seconds: float = 8.0


THOROUGH = Effort()

#: Runs of each: in the first measurement, and in the second.
_SCREENING_RUNS, _FINAL_RUNS = 2, 6
_BATCH = 8
#: A backend whose own choice is this much slower than another's is not searched.
_HOPELESS = 1.5
#: Seconds from which on plain JAX is not even tried where there are kernels: it was several times slower everywhere.
_SLOW = 0.02


def optimize(options: Options, effort: Effort = THOROUGH) -> Optimum:
    """Search for the fastest configuration on the default device.

    Tiles, a schedule or backends that the options name stay as they are. Ctrl-C ends the search with the best
    configuration so far.

    Args:
        options: The problem.
        effort: How much is tried.

    Raises:
        ValueError: No configuration runs.
        MemoryError: The problem is too large for the device.
        KeyboardInterrupt: It was interrupted before anything was measured.
    """
    device = default_device()
    check_available(options, device)
    check_fits(options)
    with arrays_of(options.dtype), Progress(0) as progress:
        return _Search(options, device, progress, effort).run()


class _Search:
    def __init__(self, options: Options, device: Device, progress: Progress, effort: Effort) -> None:
        self._options = options
        self._effort = effort
        self._device = device
        self._progress = progress
        self._trials = Trials(device.platform, progress)
        self._start = time.perf_counter()

    def run(self) -> Optimum:
        try:
            return self._run()
        except KeyboardInterrupt:
            ran, backprop = fastest_first(self._trials.done), self._options.backprop
            # The fastest trial with all passes, or of the forward pass where none has all.
            best = next((each for each in ran if each[1].backprop == backprop), next(iter(ran), None))
            if best is None:
                raise
            chosen = dataclasses.replace(best[1], backprop=backprop)
            return self._optimum(chosen, best[0], None, is_complete=False)

    def _optimum(
        self, chosen: Options, seconds: float, default_seconds: float | None, *, is_complete: bool = True
    ) -> Optimum:
        wall, trials = time.perf_counter() - self._start, tuple(self._trials.done)
        return Optimum(chosen, seconds, default_seconds, trials, wall, self._trials.compile_seconds, is_complete)

    def _run(self) -> Optimum:
        plain = self._options
        found = [self._best_of(rival) for rival in list(self._rivals())]
        best = min(filter(None, found), key=lambda each: each[0], default=None)
        if best is None:
            if not self._trials.done:
                self._trials.measure([plain], 1, 0)  # for the reason
            reasons = "; ".join(dict.fromkeys(trial.error for trial in self._trials.done))
            raise ValueError(f"no configuration runs: {reasons}")
        # The best against what runs without a choice, in turns, under equal conditions.
        final = self._trials.measure([best[1], plain], _FINAL_RUNS, plain.optimize_warmup_steps)
        seconds = best[0] if final[0].seconds is None else final[0].seconds
        chosen = best[1]
        if final[1].seconds is not None and final[1].seconds < seconds:
            workload = self._trials.compile(plain)
            assert isinstance(workload, Workload)  # it ran a moment ago
            chosen, seconds = spelled_out(plain, workload), final[1].seconds
        return self._optimum(chosen, seconds, final[1].seconds)

    def _rivals(self) -> Iterator[Options]:
        """The options with each backend that is worth a search."""
        problem = main_sub_call(self._options).request.problem
        named = []
        for backend in candidates(self._options):
            # One without a backward pass is a rival, too: another backend serves its gradients.
            if backend.rejection(problem, self._device, "forward") is None:
                id_ = BackendId(backend.family, problem.operator)
                named.append((backend, with_backend(self._options, id_)))
        if len(named) < 2:
            yield from (options for _, options in named)
            return
        self._progress.stage("trying backends")
        fastest: float | None = None
        for backend, options in named:  # in order of preference: the first is most likely the fastest
            if backend.is_slow_fallback and fastest is not None and fastest > _SLOW:
                continue
            (trial,) = self._trials.measure([options], 1, 0)
            if trial.seconds is None:
                continue
            fastest = trial.seconds if fastest is None else min(fastest, trial.seconds)
            if trial.seconds <= _HOPELESS * fastest:
                yield options

    def _best_of(self, options: Options) -> tuple[float, Options] | None:
        performance = options.performance.with_tiles("backward", None)
        forward = dataclasses.replace(options, backprop=False, performance=performance)
        best = self._search(forward, "forward")
        if best is None or not self._options.backprop:
            return best
        performance = best[1].performance.with_tiles("backward", options.performance.tiles("backward"))
        return self._search(dataclasses.replace(best[1], backprop=True, performance=performance), "backward")

    def _search(self, options: Options, pass_: Pass) -> tuple[float, Options] | None:
        """The best configuration of one pass, the other pass as it is."""
        self._progress.stage(f"{options.backend or options.fmha_backend}, {pass_}")
        offered = self._offered(options, pass_)
        if options.performance.tiles(pass_) is not None or offered is None:
            every = [options]
        else:
            every = [with_tiles(options, pair, pass_) for pair in offered.pairs[: self._effort.screened]]
        screened = fastest_first(self._screen(every))
        finalists = [each for _, each in screened[: self._effort.finalists]]
        if offered is not None and offered.schedules and options.performance.kernel_schedule is None:
            finalists = [
                with_schedule(each, schedule)
                for i, each in enumerate(finalists)
                for schedule in offered.schedules[: None if i < 2 else 1]
            ]
        if not finalists:
            return None
        if len(finalists) == 1:
            return screened[0][0], finalists[0]
        last = fastest_first(self._trials.measure(finalists, _FINAL_RUNS, options.optimize_warmup_steps))
        return last[0] if last else None

    def _offered(self, options: Options, pass_: Pass) -> Listing | None:
        try:
            plan = resolve(main_sub_call(options).request, self._device, pass_)
        except ValueError:
            return None
        return listing(backends.of(plan.backend), plan.problem, self._device, pass_)

    def _screen(self, every: Sequence[Options]) -> list[Trial]:
        """Brief measurements, as many as the budget allows."""
        trials: list[Trial] = []
        start, compiling = time.perf_counter(), self._trials.compile_seconds
        for first in range(0, len(every), _BATCH):
            trials += self._trials.measure(every[first : first + _BATCH], _SCREENING_RUNS, 1)
            if time.perf_counter() - start - (self._trials.compile_seconds - compiling) > self._effort.seconds:
                break
        return trials
