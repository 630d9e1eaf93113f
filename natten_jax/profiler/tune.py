"""Tune whole programs: find the passes of a function, and keep configurations that beat the default."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import jax

from natten_jax import backends
from natten_jax.autotuning.tables import TunedPass, TunedTable, in_force, tuned_problem, without_configuration
from natten_jax.backends.select import resolve
from natten_jax.performance import Pass, Performance
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, problem_of
from natten_jax.profiler.arguments import parse
from natten_jax.profiler.capture import CaptureError, capture_in_turns
from natten_jax.profiler.measure import seconds_of_iterations
from natten_jax.profiler.options import PROBLEM_FLAGS, Options, arrays_of
from natten_jax.profiler.program import Program
from natten_jax.profiler.search import THOROUGH, Effort, optimize
from natten_jax.profiler.workload import Workload, compile_workload

#: Least speedup of a configuration over the default.
_CLEARLY = 1.02
#: Runs of each table in the final comparison, and runs before them.
_RUNS, _WARMUP = 8, 2

#: Seconds of the runs of a program, in alternation with others.
Times = tuple[float, ...]


def plans_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Plan, ...]:
    """Return the plans of all passes that a function runs, without duplicates.

    Args:
        function: A function, jitted or not.
        *arguments: Its arguments: arrays, or their shapes and types.
        **keywords: Its keyword arguments.

    Raises:
        TypeError: ``jax.jit`` cannot trace it.
    """
    traced: Any = function if hasattr(function, "lower") else jax.jit(function)
    lowered = traced.lower(*arguments, **keywords)
    if len(jax.local_devices()) > 1:  # plans depend on how XLA partitions the program
        program = Program.from_compiled(lowered.compile())
    else:
        module: Any = lowered.compiler_ir(dialect="hlo")
        program = Program.from_proto(module.as_serialized_hlo_module_proto())
    found = (instruction.plan for instruction in program.instructions.values())
    return tuple(dict.fromkeys(plan for plan in found if plan is not None))


def is_clearly_faster(times: Times, others: Times) -> bool:
    """Return if the median is lower by the least speedup, and the 75th percentile is below the others' 25th."""
    slow_quarter, fast_quarter = statistics.quantiles(times, n=4)[2], statistics.quantiles(others, n=4)[0]
    return median(others) > _CLEARLY * median(times) and slow_quarter < fast_quarter


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem to tune.

    Attributes:
        problem: The problem.
        backprop: Tune the backward pass as well.
        performance: Performance arguments that stay fixed.
        precision: Precision of products, as :attr:`natten_jax.plan.plan.Plan.precision`.
        label: Description of the problem.
    """

    problem: Problem
    backprop: bool
    performance: Performance = dataclasses.field(default_factory=Performance)
    precision: str | None = None
    label: str = ""

    @property
    def obstacle(self) -> str | None:
        """Reason why the problem cannot be measured, or ``None``."""
        if self.problem.query_layout != self.problem.kv_layout or self.problem.own_origins:
            return "its queries are not those of all keys"
        if self.problem.own_extents:
            return "its batch entries have layouts of their own"
        if (measured := self.planned_problem) != tuned_problem(self.problem):
            return f"{measured.describe()} would be measured in its place"
        return None

    @property
    def planned_problem(self) -> Problem:
        """Problem that backends get. Windows as large as the layout are attention."""
        return tuned_problem(self.options.main_request.problem)

    @property
    def options(self) -> Options:
        """Options of the profiler."""
        problem = self.problem
        sizes: dict[str, Any] = {field: getattr(problem, field) for field in PROBLEM_FLAGS.values()}
        measured = problem_of(problem.query_layout, **problem.windows._asdict(), dtype=problem.dtype, **sizes)
        how: dict[str, Any] = {"backprop": self.backprop, "performance": self.performance, "optimize": True}
        return dataclasses.replace(parse(["-i", "1"]), problem=measured, **how)


def tasks_of(plans: Iterable[Plan]) -> list[Task]:
    """Return a task per problem, with both passes if both have plans."""
    found: dict[tuple[Problem, Performance, str | None], bool] = {}
    for plan in plans:
        key = tuned_problem(plan.problem), without_configuration(plan.performance), plan.precision
        found[key] = found.get(key, False) or plan.pass_ == "backward"
    return [Task(problem, backprop, how, precision) for (problem, how, precision), backprop in found.items()]


def tune_plans(plans: Iterable[Plan], effort: Effort, log: Callable[[str], Any]) -> tuple[TunedTable, tuple[str, ...]]:
    """Measure every problem of these plans. Return the table, and the problems that could not be measured."""
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
    """Measure a task's configurations on the default device, and keep the fastest if it beats the default.

    Raises:
        ValueError: Every configuration failed.
        MemoryError: The problem is too large for the device.
    """
    device = default_device()
    with in_force(TunedTable(device.kind)), jax.default_matmul_precision(task.precision):
        best = optimize(task.options, effort)
    defaults, chosen = _plans(task, task.options, device), _plans(task, best.options, device)
    forward_only = dataclasses.replace(task, backprop=False)
    default, fast = _runs(forward_only, device, chosen, [(), ("forward",)])
    kept: tuple[Pass, ...] = ("forward",) if is_clearly_faster(fast, default) else ()
    runs: dict[Pass, tuple[Times, Times]] = {"forward": (fast, default)}
    if task.backprop:
        # A faster forward pass must not slow down the backward pass after it.
        candidates: list[tuple[Pass, ...]] = [(), ("backward",)]
        if kept:
            candidates += [("forward",), ("forward", "backward")]
        both = dict(zip(candidates, _runs(task, device, chosen, candidates), strict=True))
        best_passes = min(both, key=lambda each: median(both[each]))
        if is_clearly_faster(both[best_passes], both[()]):
            kept = best_passes
        elif kept and median(both[kept]) > median(both[()]):
            kept = ()
        runs["backward"] = both[kept], both[()]

    def tuned(pass_: Pass) -> TunedPass:
        """Return a pass of the table. A backward pass is timed with the forward pass before it."""
        fast, default = runs[pass_]
        plan = (chosen if pass_ in kept else defaults)[pass_]
        seconds = median(default if pass_ == "forward" and pass_ not in kept else fast)
        return TunedPass(plan, seconds, median(default), pass_ not in kept, task.label)

    return tuple(map(tuned, runs))


def _plans(task: Task, options: Options, device: Device) -> dict[Pass, Plan]:
    """Return the plans of the passes with these options.

    Plans have no tiles of the other pass, unless their backend has the same tiles in both.
    """
    main = options.main_request
    problem, table = tuned_problem(main.problem), TunedTable(device.kind)
    request = dataclasses.replace(main, problem=problem, precision=task.precision, tuned=table)
    plans = {pass_: resolve(request, device, pass_) for pass_ in options.passes}
    for pass_, plan in plans.items():
        if not backends.of(plan.backend).capabilities.is_plain_jax:
            other: Pass = "backward" if pass_ == "forward" else "forward"
            plans[pass_] = dataclasses.replace(plan, performance=plan.performance.with_tiles(other, None))
    return plans


def _runs(task: Task, device: Device, plans: dict[Pass, Plan], candidates: Sequence[tuple[Pass, ...]]) -> list[Times]:
    """Measure a task with the plans of some passes and the default of the others, in alternation."""
    options, workloads = task.options, list[Workload]()
    with arrays_of(options.problem), jax.default_matmul_precision(task.precision):
        for number, passes in enumerate(candidates):
            tuned = (TunedPass(plans[pass_], 0.0, 0.0, False) for pass_ in passes)
            with in_force(TunedTable(device.kind, tuple(tuned))):
                arguments = workloads[0].arguments if workloads else None
                workloads.append(compile_workload(options, f"tuned_{number}", arguments))
        for workload in workloads:
            workload.warm_up(_WARMUP)
        captured = capture_in_turns([workload.launch for workload in workloads], _RUNS, device.platform)
    return [seconds_of_iterations(iterations) for iterations in captured]
