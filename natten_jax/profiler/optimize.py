"""``--optimize``: measure the configurations that the simulator ranks best, and keep the fastest.

Passes are kernels of their own, so the forward pass is searched first, and the backward pass with the best forward
pass in place. Each search measures many configurations briefly, all in one trace and in turns, and then the best few
of them for longer. A backend is chosen by its best forward and backward pass together.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from natten_jax import backends
from natten_jax.backends.base import Pass, TilePair
from natten_jax.configs import kernel_schedules
from natten_jax.devices import Device, default_device
from natten_jax.profiler import capture
from natten_jax.profiler.configurations import Listing, candidates, listing, main_part, tile_text
from natten_jax.profiler.element_types import arrays_of
from natten_jax.profiler.options import Options
from natten_jax.profiler.progress import Progress
from natten_jax.profiler.tables import Table
from natten_jax.profiler.workload import Workload, check_available, compile_workload, passes

#: Configurations of a pass that are compiled, and of those that are measured a second time.
_SCREENED, _FINALISTS = 40, 6
#: Runs of each: in the first measurement, and in the second.
_SCREENING_RUNS, _FINAL_RUNS = 2, 6
#: The first measurement of one pass goes through the ranking in batches, and ends with the one that exceeds so many
#: seconds: slow problems get fewer configurations, the best ranked ones.
_BATCH, _BUDGET = 8, 8.0
#: A backend whose own choice is this much slower than another's is not searched.
_HOPELESS = 1.5
#: Seconds from which on plain JAX is not even tried where there are kernels: it was several times slower everywhere.
_SLOW = 0.02


@dataclasses.dataclass(frozen=True)
class Trial:
    """A configuration and what became of it.

    Attributes:
        options: The configuration.
        seconds: Device time, median of the runs; ``None`` where it failed.
        error: Why it failed.
    """

    options: Options
    seconds: float | None
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best configuration that was found.

    Attributes:
        options: The options with it filled in.
        seconds: Its device time.
        default_seconds: Device time of what runs without any choice; ``None`` where that failed.
        trials: Every measurement, in order.
        wall_seconds: How long the search took, of which ``compile_seconds`` were compilation.
        compile_seconds: Seconds of compilation.
        is_complete: Whether the search came to its end and was not interrupted.
    """

    options: Options
    seconds: float
    default_seconds: float | None
    trials: tuple[Trial, ...]
    wall_seconds: float
    compile_seconds: float
    is_complete: bool = True

    @property
    def failures(self) -> list[Trial]:
        """The configurations that failed."""
        return [trial for trial in self.trials if trial.seconds is None]


def optimize(options: Options) -> Optimum:
    """Search for the fastest configuration on the default device.

    Tiles, a schedule or backends that the options name stay as they are. Ctrl-C ends the search with the best
    configuration so far.

    Raises:
        ValueError: No configuration runs.
        KeyboardInterrupt: It was interrupted before anything was measured.
    """
    device = default_device()
    check_available(options, device)
    with arrays_of(options.dtype), Progress(0) as progress:
        return _Search(options, device, progress).run()


def configuration(options: Options) -> dict[str, Any]:
    """The performance arguments of an operator, as :func:`natten_jax.load_tuned` returns them."""
    fmha = {} if options.fmha_backend is None else {"attention_kwargs": {"backend": options.fmha_backend}}
    arguments = {
        "backend": options.backend,
        **fmha,
        "q_tile_shape": options.q_tile,
        "kv_tile_shape": options.kv_tile,
        "kernel_schedule": options.schedule,
        "backward_q_tile_shape": options.backward_q_tile,
        "backward_kv_tile_shape": options.backward_kv_tile,
        "run_persistent_kernel": options.persistent,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def best_table(optimum: Optimum) -> Table:
    """The best configuration."""
    rows = []
    for name, value in configuration(optimum.options).items():
        if name == "attention_kwargs":
            name, value = "fmha_backend", value["backend"]
        if name == "run_persistent_kernel" and value:
            continue  # the operators' default
        rows.append((name, tile_text(value) if isinstance(value, tuple) else str(value)))
    return Table("Best configuration", ("Parameter", "Value"), tuple(rows))


class _Search:
    def __init__(self, options: Options, device: Device, progress: Progress) -> None:
        self._options = options
        self._device = device
        self._progress = progress
        self._arguments: dict[bool, tuple[jax.Array, ...]] = {}
        self._trials: list[Trial] = []
        self._number = 0
        self._compiling = 0.0

    def run(self) -> Optimum:
        start = time.perf_counter()
        try:
            return self._run(start)
        except KeyboardInterrupt:
            best = self._best_so_far()
            if best is None or best.seconds is None:
                raise
            wall = time.perf_counter() - start
            chosen = dataclasses.replace(best.options, backprop=self._options.backprop)
            return Optimum(chosen, best.seconds, None, tuple(self._trials), wall, self._compiling, is_complete=False)

    def _best_so_far(self) -> Trial | None:
        """The fastest trial of all passes, or of the forward pass where there is none of all."""
        ran = self._ordered(self._trials)
        return next((trial for trial in ran if trial.options.backprop == self._options.backprop), next(iter(ran), None))

    def _run(self, start: float) -> Optimum:
        plain = self._options
        best: tuple[float, Options] | None = None
        for rival in list(self._rivals()):
            found = self._best_of(rival)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            if not self._trials:
                self._measure([plain], 1, 0)  # for the reason
            reasons = "; ".join(dict.fromkeys(trial.error for trial in self._trials))
            raise ValueError(f"no configuration runs: {reasons}")
        # The best against what runs without a choice, in turns, under equal conditions.
        final = self._measure([best[1], plain], _FINAL_RUNS, plain.optimize_warmup_steps)
        seconds = best[0] if final[0].seconds is None else final[0].seconds
        chosen = best[1]
        if final[1].seconds is not None and final[1].seconds < seconds:
            chosen, seconds = self._default(), final[1].seconds
        wall = time.perf_counter() - start
        return Optimum(chosen, seconds, final[1].seconds, tuple(self._trials), wall, self._compiling)

    def _default(self) -> Options:
        """What runs without a choice, spelled out."""
        workload = self._compile(self._options)
        assert isinstance(workload, Workload)  # it ran a moment ago
        return spelled_out(self._options, workload)

    def _rivals(self) -> Iterator[Options]:
        """The options with each backend that is worth a search."""
        part = main_part(self._options)
        named = []
        for backend in candidates(self._options):
            # One without a backward pass is a rival, too: another backend serves its gradients.
            if backend.rejection(part.problem, self._device, "forward") is None:
                name = backends.backend_name(backend, part.problem.operator)
                named.append((backend, _with_backend(self._options, name)))
        if len(named) < 2:
            yield from (options for _, options in named)
            return
        self._progress.stage("trying backends")
        fastest: float | None = None
        for backend, options in named:  # in order of preference: the first is most likely the fastest
            if backend.is_pure_jax and fastest is not None and fastest > _SLOW:
                continue
            (trial,) = self._measure([options], 1, 0)
            if trial.seconds is None:
                continue
            fastest = trial.seconds if fastest is None else min(fastest, trial.seconds)
            if trial.seconds <= _HOPELESS * fastest:
                yield options

    def _best_of(self, options: Options) -> tuple[float, Options] | None:
        forward = dataclasses.replace(options, backprop=False, backward_q_tile=None, backward_kv_tile=None)
        best = self._search(forward, "forward")
        if best is None or not self._options.backprop:
            return best
        chosen = dataclasses.replace(
            best[1], backprop=True, backward_q_tile=options.backward_q_tile, backward_kv_tile=options.backward_kv_tile
        )
        return self._search(chosen, "backward")

    def _search(self, options: Options, pass_: Pass) -> tuple[float, Options] | None:
        """The best configuration of one pass, the other pass as it is."""
        self._progress.stage(f"{options.backend or options.fmha_backend}, {pass_}")
        offered = self._offered(options, pass_)
        requested = options.q_tile if pass_ == "forward" else options.backward_q_tile
        if requested is not None or offered is None:
            every = [options]
        else:
            every = [_with_tiles(options, pair, pass_) for pair in offered.pairs[:_SCREENED]]
        screened = self._ordered(self._screen(every))
        finalists = [trial.options for trial in screened[:_FINALISTS]]
        if offered is not None and offered.schedules and options.schedule is None:
            finalists = [
                dataclasses.replace(each, schedule=schedule)
                for i, each in enumerate(finalists)
                for schedule in offered.schedules[: None if i < 2 else 1]
            ]
        if not finalists:
            return None
        if len(finalists) == 1 and screened[0].seconds is not None:
            return screened[0].seconds, finalists[0]
        last = self._ordered(self._measure(finalists, _FINAL_RUNS, options.optimize_warmup_steps))
        return (last[0].seconds or 0.0, last[0].options) if last else None

    def _offered(self, options: Options, pass_: Pass) -> Listing | None:
        part = main_part(options)
        try:
            backend = backends.choose_pass(part.problem, part.tiles, self._device, pass_, part.backend)
        except ValueError:
            return None
        name = backends.backend_name(backend, part.problem.operator)
        return listing(backend, part.problem, self._device, pass_, name)

    def _screen(self, every: Sequence[Options]) -> list[Trial]:
        """Brief measurements, as many as the budget allows."""
        trials: list[Trial] = []
        start, compiling = time.perf_counter(), self._compiling
        for first in range(0, len(every), _BATCH):
            trials += self._measure(every[first : first + _BATCH], _SCREENING_RUNS, 1)
            if time.perf_counter() - start - (self._compiling - compiling) > _BUDGET:
                break
        return trials

    def _ordered(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those that ran, the fastest first."""
        ran = [trial for trial in trials if trial.seconds is not None]
        return sorted(ran, key=lambda trial: trial.seconds or 0.0)

    def _measure(self, every: Sequence[Options], runs: int, warmup_steps: int) -> list[Trial]:
        """A trial of each, measured in turns; what fails alone fails alone."""
        self._progress.expect(len(every) * (1 + warmup_steps + runs))
        prepared = [self._warm(each, warmup_steps) for each in every]
        alive = [each for each in prepared if isinstance(each, Workload)]
        times: dict[int, float | str] = {}
        try:
            captured = self._captured(alive, runs)
            times = {id(workload): each for workload, each in zip(alive, captured, strict=True)}
        except Exception:  # one of them spoils the trace of all
            for workload in alive:
                times[id(workload)] = self._guarded(functools.partial(self._captured_alone, workload, runs))
        trials = []
        for options, each in zip(every, prepared, strict=True):
            outcome = times[id(each)] if isinstance(each, Workload) else each
            trials.append(Trial(options, None, outcome) if isinstance(outcome, str) else Trial(options, outcome))
        self._trials += trials
        return trials

    def _captured(self, workloads: Sequence[Workload], runs: int) -> list[float]:
        if not workloads:
            return []

        def counted(workload: Workload) -> capture.Launch:
            def run() -> Any:
                self._progress.advance()
                return workload.run()

            return capture.Launch(run, workload.program)

        iterations = capture.capture_in_turns([counted(each) for each in workloads], runs, self._device.platform)
        return [
            statistics.median(sum(event.duration for event in events) / 1e9 for events in of_workload)
            for of_workload in iterations
        ]

    def _captured_alone(self, workload: Workload, runs: int) -> float:
        return self._captured([workload], runs)[0]

    def _warm(self, options: Options, warmup_steps: int) -> Workload | str:
        """A workload that was compiled and has run, or why it could not."""
        workload = self._compile(options)
        self._progress.advance()
        if isinstance(workload, str):
            return workload

        def warm() -> Workload:
            for _ in range(max(warmup_steps, 1)):
                jax.block_until_ready(workload.run())  # type: ignore[no-untyped-call]
                self._progress.advance()
            return workload

        return self._guarded(warm)

    def _compile(self, options: Options) -> Workload | str:
        start = time.perf_counter()
        self._number += 1
        workload = self._guarded(
            lambda: compile_workload(options, f"candidate_{self._number}", self._arguments.get(options.backprop))
        )
        self._compiling += time.perf_counter() - start
        if isinstance(workload, Workload):
            self._arguments[options.backprop] = workload.arguments
        return workload

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """The step's result, or its error as one line: no configuration ends the search."""
        try:
            return step()
        except Exception as error:
            return " ".join(str(error).split()) or type(error).__name__


def spelled_out(options: Options, workload: Workload) -> Options:
    """The options with every choice named that their compiled program made for itself."""
    name = workload.backends["forward"]
    options = _with_backend(options, name)
    for pass_, pair in workload.tiles.items():
        options = _with_tiles(options, pair, "forward" if pass_ == "forward" else "backward")
    if options.schedule is None:
        schedules = kernel_schedules(name.rpartition("-")[0], "forward")
        options = dataclasses.replace(options, schedule=str(schedules[0]) if schedules else None)
    return options


def _with_backend(options: Options, name: str) -> Options:
    """The options with the backend named that runs the tokens themselves."""
    if name.endswith("-fmha"):
        return dataclasses.replace(options, backend=None, fmha_backend=name)
    # Naming a backend for additional tokens would keep them out of the kernel that takes them, too.
    counterpart = None if options.add_kv else backends.fmha_counterpart(name)
    return dataclasses.replace(options, backend=name, fmha_backend=options.fmha_backend or counterpart)


def _with_tiles(options: Options, pair: TilePair, pass_: Pass) -> Options:
    # Attention over flattened tokens has tiles of one extent; the operators multiply theirs.
    q_tile, kv_tile = ((1,) * (options.rank - len(tile)) + tile for tile in pair)
    if pass_ == "forward":
        return dataclasses.replace(options, q_tile=q_tile, kv_tile=kv_tile)
    return dataclasses.replace(options, backward_q_tile=q_tile, backward_kv_tile=kv_tile)


def search_json(optimum: Optimum) -> dict[str, Any]:
    """How the search went, and every trial, as JSON values."""
    trials = [
        {
            **configuration(trial.options),
            "passes": passes(trial.options),
            "seconds": trial.seconds,
            "error": trial.error,
        }
        for trial in optimum.trials
    ]
    return {
        "default_seconds": optimum.default_seconds,
        "best_seconds": optimum.seconds,
        "wall_seconds": optimum.wall_seconds,
        "compile_seconds": optimum.compile_seconds,
        "is_complete": optimum.is_complete,
        "trials": trials,
    }
