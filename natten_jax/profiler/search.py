"""Search for the fastest configuration of one problem (``--optimize``), or of every problem in a program.

For each backend, the configurations of the forward pass are searched first. The configurations of the backward pass are
searched next, and measured together with the best forward pass. A search of a pass has two rounds:

1. Measure many configurations with few runs, in batches. Runs of the configurations of a batch alternate in one trace.
2. Measure the best configurations again, with more runs.

Backends are compared by the total time of their best forward and backward pass.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median, quantiles
from typing import Any

import jax

from natten_jax import backends
from natten_jax.autotuning.tables import TunedPass, TunedTable, active_table, tuned_problem, without_configuration
from natten_jax.backends.select import resolve
from natten_jax.performance import Pass, Performance, TilePair
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import BackendId, Plan
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler.capture import CaptureError, capture_interleaved
from natten_jax.profiler.cli import Update, progress
from natten_jax.profiler.measure import Workload, check_runs, compile_workload, seconds_of_iterations
from natten_jax.profiler.options import SIZES, Options, arrays_of, parse
from natten_jax.profiler.predict import candidates, listing, tile_text
from natten_jax.profiler.program import Program
from natten_jax.profiler.report import Table


@dataclasses.dataclass(frozen=True)
class Effort:
    """Limits of a search.

    Attributes:
        screened: Maximum number of tile pairs of a pass in the first round.
        finalists: Maximum number of tile pairs that are measured again in the second round. The two fastest pairs are
            measured with every kernel schedule, and the other pairs with the default schedule.
        seconds: Time limit of the first round in seconds, without compilation. The round ends after the batch that
            exceeds the limit. Fewer configurations of a slow problem are therefore measured.
    """

    screened: int = 40
    finalists: int = 6
    seconds: float = 8.0


THOROUGH = Effort()

#: Number of runs of each configuration in the first round, and in the second round.
_SCREENING_RUNS, _FINAL_RUNS = 2, 6
_BATCH = 8
#: Backends are tried one after another with their default configurations. A backend is not searched if its time is more
#: than this factor times the shortest time so far.
_MAX_SLOWDOWN = 1.5
#: If the shortest time so far exceeds this number of seconds, slow fallbacks are not tried. In every measurement, slow
#: fallbacks were several times slower than other backends.
_FALLBACK_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measurement of a configuration.

    Attributes:
        options: Options with the configuration.
        seconds: Median device time in seconds. Infinite if the measurement failed.
        error: Reason of the failure, or empty.
    """

    options: Options
    seconds: float
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The result of a search.

    Attributes:
        options: Options with the best configuration.
        seconds: Median device time of the best configuration, in seconds.
        default_seconds: Median device time of the default configuration in seconds, or ``None`` if its measurement
            failed.
        trials: Every measurement, in the order of the search.
        wall_seconds: Duration of the search in seconds, including compilation.
        compile_seconds: Duration of all compilations in seconds.
    """

    options: Options
    seconds: float
    default_seconds: float | None
    trials: tuple[Trial, ...]
    wall_seconds: float
    compile_seconds: float

    @property
    def failures(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.error]


def optimize(options: Options, effort: Effort = THOROUGH) -> Optimum:
    """Search for the fastest configuration on the default device.

    Tiles, a schedule or a backend that the options set are fixed: the search does not change them.

    Args:
        options: The problem and the way to measure it.
        effort: Limits of the search.

    Raises:
        ValueError: Every configuration failed.
        MemoryError: The problem is too large for the device.
    """
    device = default_device()
    check_runs(options, device)
    resolve(options.main_request, device, "forward")  # raises if no backend supports the problem
    with arrays_of(options.problem), progress(0) as update:
        return _Search(options, device, update, effort).run()


class _Search:
    def __init__(self, options: Options, device: Device, update: Update, effort: Effort) -> None:
        self._options, self._device, self._update, self._effort = options, device, update, effort
        self._start = time.perf_counter()
        self._compile_seconds = 0.0
        self._arguments: dict[bool, tuple[jax.Array, ...]] = {}
        self.trials: list[Trial] = []

    def run(self) -> Optimum:
        trials = [self._best_of(candidate) for candidate in list(self._candidates())]
        best = min(filter(None, trials), key=lambda each: each.seconds, default=None)
        plain = self._options
        if best is None:
            reasons = "; ".join(dict.fromkeys(trial.error for trial in self.trials))
            raise ValueError(f"no configuration runs: {reasons}")
        # Runs of the best and the default configuration alternate, so that both are measured under equal conditions.
        final, default = self.measure([best.options, plain], _FINAL_RUNS, plain.optimize_warmup_steps)
        chosen, seconds = best.options, best.seconds if final.error else final.seconds
        if default.seconds < seconds:
            chosen, seconds = with_choices(plain, self._compile(plain)), default.seconds
        wall = time.perf_counter() - self._start
        default_seconds = None if default.error else default.seconds
        return Optimum(chosen, seconds, default_seconds, tuple(self.trials), wall, self._compile_seconds)

    def _candidates(self) -> Iterator[Options]:
        """For each backend that is fast enough to be searched, yield the options with this backend."""
        problem = self._options.main_request.problem
        named = [
            (backend, with_backend(self._options, BackendId(backend.family, problem.operator)))
            for backend in candidates(self._options)
            # A backend without a backward pass is also a candidate, because another backend can compute the gradients.
            if backend.rejection(problem, self._device, "forward") is None
        ]
        self._update("trying backends")
        fastest = math.inf
        for backend, options in named:  # preferred backends, which are probably the fastest, are first
            if backend.capabilities.is_slow_fallback and _FALLBACK_SECONDS < fastest < math.inf:
                continue
            seconds = self.measure([options], 1, 0)[0].seconds if len(named) > 1 else 0.0
            fastest = min(fastest, seconds)
            if seconds < math.inf and seconds <= _MAX_SLOWDOWN * fastest:
                yield options

    def _best_of(self, options: Options) -> Trial | None:
        performance = options.performance.with_tiles("backward", None)
        best = self._search(dataclasses.replace(options, backprop=False, performance=performance), "forward")
        if best is None or not self._options.backprop:
            return best
        performance = best.options.performance.with_tiles("backward", options.performance.tiles("backward"))
        return self._search(dataclasses.replace(best.options, backprop=True, performance=performance), "backward")

    def _search(self, options: Options, pass_: Pass) -> Trial | None:
        """Search the configurations of one pass, and return the fastest trial. The other pass does not change."""
        self._update(f"{options.backend or options.fmha_backend}, {pass_}")
        plan = resolve(options.main_request, self._device, pass_)
        offered, every = listing(backends.by_id(plan.backend), plan.problem, self._device, pass_), [options]
        schedules = offered.schedules if options.performance.kernel_schedule is None else ()
        if options.performance.tiles(pass_) is None:
            every = [with_tiles(options, pair, pass_) for pair in offered.pairs[: self._effort.screened]]
        screened = _fastest_first(self._screen(every))
        finalists = [each.options for each in screened[: self._effort.finalists]]
        if schedules:
            finalists = [
                with_schedule(each, schedule)
                for i, each in enumerate(finalists)
                for schedule in schedules[: None if i < 2 else 1]
            ]
        if len(finalists) < 2:
            return dataclasses.replace(screened[0], options=finalists[0]) if finalists else None
        measured = self.measure(finalists, _FINAL_RUNS, options.optimize_warmup_steps)
        return next(iter(_fastest_first(measured)), None)

    def _screen(self, every: Sequence[Options]) -> list[Trial]:
        """Run the first round: measure batches of configurations until ``effort.seconds`` have passed."""
        trials: list[Trial] = []
        start, compiling = time.perf_counter(), self._compile_seconds
        for first in range(0, len(every), _BATCH):
            trials += self.measure(every[first : first + _BATCH], _SCREENING_RUNS, 1)
            if time.perf_counter() - start - (self._compile_seconds - compiling) > self._effort.seconds:
                break
        return trials

    def measure(self, every: Sequence[Options], runs: int, warmup_steps: int) -> list[Trial]:
        """Measure configurations in alternating runs. A configuration that fails does not end the search."""
        self._update(more_steps=len(every) * (1 + runs))
        workloads, errors, seconds = dict[int, Workload](), dict[int, str](), dict[int, float]()
        for i, options in enumerate(every):
            try:
                workload = self._compile(options, i)
                workload.warm_up(max(warmup_steps, 1))
                workloads[i] = workload
            except Exception as error:
                errors[i] = _one_line(error)
            self._update(done=1)
        try:
            launches = [each.launch for each in workloads.values()]
            captured = capture_interleaved(launches, runs, self._device.platform) if launches else []
            medians = map(median, map(seconds_of_iterations, captured))
            seconds = dict(zip(workloads, medians, strict=True))
        except Exception as error:
            errors |= dict.fromkeys(workloads, _one_line(error))
        self._update(done=len(every) * runs)
        trials = [Trial(options, seconds.get(i, math.inf), errors.get(i, "")) for i, options in enumerate(every)]
        self.trials += trials
        return trials

    def _compile(self, options: Options, number: int = 0) -> Workload:
        start = time.perf_counter()
        workload = compile_workload(options, f"candidate_{number}", self._arguments.get(options.backprop))
        self._compile_seconds += time.perf_counter() - start
        self._arguments[options.backprop] = workload.arguments
        return workload


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _fastest_first(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that did not fail, the fastest trial first."""
    return sorted((trial for trial in trials if not trial.error), key=lambda trial: trial.seconds)


# Changes of the configuration in options.


def with_choices(options: Options, workload: Workload) -> Options:
    """Return the options with the backends, tiles and schedule of the workload's plans."""
    for pass_ in options.passes if workload.plans else ():
        plan = workload.plans[pass_]
        if pass_ == "forward":
            options = with_backend(options, plan.backend)
            options = with_schedule(options, plan.performance.kernel_schedule)
        options = with_tiles(options, plan.tiles, pass_)
    return options


def with_backend(options: Options, id_: BackendId) -> Options:
    """Return the options with this backend for the attention over the layout's tokens."""
    name = str(id_)
    if id_.operator == "fmha":
        return dataclasses.replace(options, backend=None, fmha_backend=name)
    # With a named fmha_backend, additional tokens would be a separate call. Otherwise, the main kernel can fuse them.
    counterpart = None if options.problem.additional_kv else backends.counterpart(name)
    return dataclasses.replace(options, backend=name, fmha_backend=options.fmha_backend or counterpart)


def with_tiles(options: Options, pair: TilePair, pass_: Pass) -> Options:
    # Tiles of self attention have one dimension, but operators require one extent per token dimension. For self
    # attention, operators use the product of the extents, which leading extents of 1 do not change.
    q_tile, kv_tile = ((1,) * (options.problem.rank - len(tile)) + tile for tile in pair)
    return dataclasses.replace(options, performance=options.performance.with_tiles(pass_, (q_tile, kv_tile)))


def with_schedule(options: Options, schedule: str | None) -> Options:
    return dataclasses.replace(options, performance=dataclasses.replace(options.performance, kernel_schedule=schedule))


# Results.


def configuration(options: Options) -> dict[str, Any]:
    """Return the operator's performance arguments, in the format of :func:`natten_jax.load_tuned`."""
    fmha = {} if options.fmha_backend is None else {"attention_kwargs": {"backend": options.fmha_backend}}
    backend = {} if options.backend is None else {"backend": options.backend}
    chosen, default = dataclasses.asdict(options.performance), Performance()
    return {**backend, **fmha, **{name: each for name, each in chosen.items() if each != getattr(default, name)}}


def best_table(optimum: Optimum) -> Table:
    rows = []
    for name, value in configuration(optimum.options).items():
        if name == "attention_kwargs":
            name, value = "fmha_backend", value["backend"]
        rows.append((name, tile_text(value) if isinstance(value, tuple) else str(value)))
    return Table("Best configuration", ("Parameter", "Value"), tuple(rows))


def search_json(optimum: Optimum) -> dict[str, Any]:
    """Return the best configuration and every trial as JSON values."""
    trials = [
        {
            **configuration(trial.options),
            "passes": trial.options.passes,
            "seconds": None if trial.error else trial.seconds,
            "error": trial.error,
        }
        for trial in optimum.trials
    ]
    times = {name: getattr(optimum, name) for name in ("default_seconds", "wall_seconds", "compile_seconds")}
    search = {"best_seconds": optimum.seconds, **times, "trials": trials}
    return {"best_configuration": configuration(optimum.options), "search": search}


# Whole programs.


#: Minimum speedup over the default configuration for which another configuration is kept.
_MIN_SPEEDUP = 1.02
#: Numbers of runs of each candidate in the final comparison: measured runs, and warm-up runs before the measured runs.
_RUNS, _WARMUP = 8, 2

#: Device time of each run of a program, in seconds. Runs of other programs alternate with these runs.
Times = tuple[float, ...]


def plans_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Plan, ...]:
    """Return the plans of all passes that a function runs, without duplicates.

    Args:
        function: A function, jitted or not.
        *arguments: Arguments of the function: arrays, or their shapes and types.
        **keywords: Keyword arguments of the function.

    Raises:
        TypeError: ``jax.jit`` cannot trace the function.
    """
    traced: Any = function if hasattr(function, "lower") else jax.jit(function)
    lowered = traced.lower(*arguments, **keywords)
    if len(jax.local_devices()) > 1:  # compilation partitions the program, and plans depend on the partitioning
        program = Program.from_compiled(lowered.compile())
    else:
        module: Any = lowered.compiler_ir(dialect="hlo")
        program = Program.from_proto(module.as_serialized_hlo_module_proto())
    plans = (instruction.plan for instruction in program.instructions.values())
    return tuple(dict.fromkeys(plan for plan in plans if plan is not None))


def is_clearly_faster(times: Times, baseline: Times) -> bool:
    """Return True if ``times`` are clearly shorter than ``baseline``.

    The median of ``baseline`` must be more than 1.02 times the median of ``times``. The 75th percentile of ``times``
    must be below the 25th percentile of ``baseline``.
    """
    slow_quarter, fast_quarter = quantiles(times, n=4)[2], quantiles(baseline, n=4)[0]
    return median(baseline) > _MIN_SPEEDUP * median(times) and slow_quarter < fast_quarter


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem to tune.

    Attributes:
        problem: The problem.
        backprop: True to tune both passes, False to tune only the forward pass.
        performance: Performance arguments that the search does not change.
        precision: Precision of matrix products, with the values of :attr:`natten_jax.plan.plan.Plan.precision`.
        label: Description of the problem.
    """

    problem: Problem
    backprop: bool
    performance: Performance = dataclasses.field(default_factory=Performance)
    precision: str | None = None
    label: str = ""

    @property
    def obstacle(self) -> str | None:
        """Reason why the problem cannot be measured, or ``None`` if it can."""
        if self.problem.query_layout != self.problem.kv_layout or self.problem.own_origins:
            return "its queries do not cover the layout of the keys"
        if self.problem.own_extents:
            return "its batch entries have separate layouts"
        if (measured := self.planned_problem) != tuned_problem(self.problem):
            return f"{measured.describe()} would be measured instead"
        return None

    @property
    def planned_problem(self) -> Problem:
        """Problem that the backends receive. It is self attention if the windows are as large as the layout."""
        return tuned_problem(self.options.main_request.problem)

    @property
    def options(self) -> Options:
        problem = self.problem
        sizes: dict[str, Any] = {name: getattr(problem, name) for name in SIZES}
        measured = problem_of(problem.query_layout, **problem.windows._asdict(), dtype=problem.dtype, **sizes)
        how: dict[str, Any] = {"backprop": self.backprop, "performance": self.performance, "optimize": True}
        return dataclasses.replace(parse(["-i", "1"]), problem=measured, **how)


def tasks_of(plans: Iterable[Plan]) -> list[Task]:
    """Return one task per problem. A task tunes the backward pass only if a plan of the problem is for that pass."""
    tasks: dict[tuple[Problem, Performance, str | None], bool] = {}
    for plan in plans:
        key = tuned_problem(plan.problem), without_configuration(plan.performance), plan.precision
        tasks[key] = tasks.get(key, False) or plan.pass_ == "backward"
    return [Task(problem, backprop, how, precision) for (problem, how, precision), backprop in tasks.items()]


def tune_plans(plans: Iterable[Plan], effort: Effort, log: Callable[[str], Any]) -> tuple[TunedTable, tuple[str, ...]]:
    """Tune every problem of these plans. Return the table, and descriptions of problems that could not be measured."""
    measured: list[TunedPass] = []
    skipped = []
    tasks = tasks_of(plans)
    for number, task in enumerate(tasks):
        about = f"{task.problem.describe()} ({task.problem.dtype})"
        log(f"{number + 1} of {len(tasks)}: {about}")
        try:
            if (obstacle := task.obstacle) is not None:
                raise ValueError(obstacle)
            measured += tuned_passes(task, effort)
        except (ValueError, MemoryError, jax.errors.JaxRuntimeError, CaptureError) as error:
            skipped.append(f"{about}: {error}")
            log(f"not measured: {skipped[-1]}")
    return TunedTable(default_device().kind, tuple(measured)), tuple(skipped)


def tuned_passes(task: Task, effort: Effort = THOROUGH) -> tuple[TunedPass, ...]:
    """Tune the passes of a task on the default device. Keep the default unless another configuration is clearly faster.

    Raises:
        ValueError: Every configuration failed.
        MemoryError: The problem is too large for the device.
    """
    device = default_device()
    with active_table(TunedTable(device.kind)), jax.default_matmul_precision(task.precision):
        best = optimize(task.options, effort)
    defaults, chosen = _plans(task, task.options, device), _plans(task, best.options, device)

    def fastest(task: Task, *every: tuple[Pass, ...]) -> tuple[tuple[Pass, ...], dict[tuple[Pass, ...], Times]]:
        """Return the fastest candidate, and the times of all candidates.

        A candidate is the tuple of passes that use the tuned configuration. In the candidate (), all passes use the
        default configuration. Return () as the fastest candidate unless another candidate is clearly faster than ().
        """
        times = dict(zip(every, _runs(task, device, chosen, every), strict=True))
        best = min(times, key=lambda each: median(times[each]))
        return best if is_clearly_faster(times[best], times[()]) else (), times

    kept, forward = fastest(dataclasses.replace(task, backprop=False), (), ("forward",))
    runs: dict[Pass, tuple[Times, Times]] = {"forward": (forward["forward",], forward[()])}
    if task.backprop:
        # Measure both passes together, because a faster forward pass can slow down the backward pass after it.
        pass_choices: list[tuple[Pass, ...]] = [("forward",), ("forward", "backward")] if kept else []
        best_passes, both = fastest(task, (), ("backward",), *pass_choices)
        if best_passes or median(both[kept]) > median(both[()]):
            kept = best_passes
        runs["backward"] = both[kept], both[()]

    def tuned(pass_: Pass) -> TunedPass:
        """Return the table's entry for a pass. The time of a backward pass includes the forward pass before it."""
        fast, default = runs[pass_]
        plan = (chosen if pass_ in kept else defaults)[pass_]
        seconds = median(default if pass_ == "forward" and pass_ not in kept else fast)
        return TunedPass(plan, seconds, median(default), pass_ not in kept, task.label)

    return tuple(map(tuned, runs))


def _plans(task: Task, options: Options, device: Device) -> dict[Pass, Plan]:
    """Return the plan of each pass with these options.

    The plan of a pass has the tiles of that pass only. The exception is plain JAX, whose plans have the tiles of both
    passes.
    """
    main = options.main_request
    problem, table = tuned_problem(main.problem), TunedTable(device.kind)
    request = dataclasses.replace(main, problem=problem, precision=task.precision, tuned=table)
    plans = {pass_: resolve(request, device, pass_) for pass_ in options.passes}
    for pass_, plan in plans.items():
        if not backends.by_id(plan.backend).capabilities.is_plain_jax:
            other: Pass = "backward" if pass_ == "forward" else "forward"
            plans[pass_] = dataclasses.replace(plan, performance=plan.performance.with_tiles(other, None))
    return plans


def _runs(task: Task, device: Device, plans: dict[Pass, Plan], candidates: Sequence[tuple[Pass, ...]]) -> list[Times]:
    """Measure candidates in alternating runs.

    A candidate is a tuple of passes. These passes use ``plans``, and all other passes use the default configuration.
    """
    options, workloads = task.options, list[Workload]()
    with arrays_of(options.problem), jax.default_matmul_precision(task.precision):
        for number, passes in enumerate(candidates):
            tuned = (TunedPass(plans[pass_], 0.0, 0.0, False) for pass_ in passes)
            with active_table(TunedTable(device.kind, tuple(tuned))):
                arguments = workloads[0].arguments if workloads else None
                workloads.append(compile_workload(options, f"tuned_{number}", arguments))
        for workload in workloads:
            workload.warm_up(_WARMUP)
        captured = capture_interleaved([workload.launch for workload in workloads], _RUNS, device.platform)
    return [seconds_of_iterations(iterations) for iterations in captured]
