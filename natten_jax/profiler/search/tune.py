"""Measures the configurations of problems, and keeps those that are clearly faster than the ranking's choice."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from natten_jax import backends
from natten_jax.backends.select import resolve
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device, default_device
from natten_jax.plan.plan import Plan
from natten_jax.plan.tuned import TunedPass, TunedTable, in_force, tuned_problem, without_configuration
from natten_jax.problem import Problem
from natten_jax.profiler import capture
from natten_jax.profiler.arguments import parse
from natten_jax.profiler.capture import CaptureError
from natten_jax.profiler.options import Options, arrays_of, element_type
from natten_jax.profiler.run.workload import Workload, compile_workload, passes, sub_calls_of
from natten_jax.profiler.search.optimize import THOROUGH, Effort, optimize

#: How much faster than the ranking's choice a configuration has to be to take its place.
_CLEARLY = 1.02
#: Runs of each table in the comparison that decides, and runs before them.
_RUNS, _WARMUP = 8, 2


@dataclasses.dataclass(frozen=True)
class Runs:
    """Device times of a program that ran in turns with others.

    Attributes:
        seconds: How long each run took.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The time that counts."""
        return statistics.median(self.seconds)

    def clearly_faster(self, other: Runs) -> bool:
        """Whether it is faster by more than the least gain, and by more than the middle halves of both vary."""
        slow_quarter = statistics.quantiles(self.seconds, n=4)[2]
        return other.median > _CLEARLY * self.median and slow_quarter < statistics.quantiles(other.seconds, n=4)[0]


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem whose configurations are measured.

    Attributes:
        problem: The problem.
        backprop: Whether its backward pass runs, too.
        performance: The performance arguments that hold whatever the configuration is.
        precision: That of products, as :attr:`natten_jax.plan.plan.Plan.precision`.
        label: What the problem is of, for people.
    """

    problem: Problem
    backprop: bool
    performance: Performance = dataclasses.field(default_factory=Performance)
    precision: str | None = None
    label: str = ""

    @property
    def obstacle(self) -> str | None:
        """Why a problem that was planned cannot be measured; ``None`` where it can."""
        if self.problem.query_layout != self.problem.kv_layout or self.problem.own_origins:
            return "its queries are not those of all keys"
        if self.problem.own_extents:
            return "its batch entries have layouts of their own"
        if (measured := self.planned_problem) != tuned_problem(self.problem):
            return f"{measured.describe()} would be measured in its place"
        return None

    @property
    def planned_problem(self) -> Problem:
        """What backends are asked for, and a table is searched for: windows of the whole layout are attention."""
        return tuned_problem(sub_calls_of(self.options)[0].request.problem)

    @property
    def options(self) -> Options:
        """As the profiler takes it."""
        problem = self.problem
        options = parse(["-i", *map(str, problem.query_layout)])
        return dataclasses.replace(
            options,
            batch_size=problem.batch,
            heads=problem.heads,
            heads_kv=problem.heads_kv,
            dim=problem.head_dim,
            dim_value=problem.head_dim_v,
            window=problem.windows,
            dtype=element_type(problem.dtype),
            backprop=self.backprop,
            add_kv=problem.additional_kv,
            performance=self.performance,
            optimize=True,
        )


def tasks_of(plans: Iterable[Plan]) -> list[Task]:
    """What is to be measured so that each of these passes is tuned: a problem once, with both passes if both ran."""
    found: dict[tuple[Problem, Performance, str | None], bool] = {}
    for plan in plans:
        key = tuned_problem(plan.problem), without_configuration(plan.performance), plan.precision
        found[key] = found.get(key, False) or plan.pass_ == "backward"
    return [Task(problem, backprop, how, precision) for (problem, how, precision), backprop in found.items()]


def tuned_passes(task: Task, effort: Effort = THOROUGH) -> tuple[TunedPass, ...]:
    """Measure a task's configurations on the default device.

    Raises:
        ValueError: No configuration runs.
        MemoryError: The problem is too large for the device.
    """
    device = default_device()
    nothing = TunedTable(device.kind)
    with in_force(nothing), jax.default_matmul_precision(task.precision):
        best = optimize(task.options, effort)
    defaults = dict(_plans(task, task.options, device))
    chosen = dict(_plans(task, best.options, device))
    return _Decision(task, device, defaults, chosen).passes()


def _plans(task: Task, options: Options, device: Device) -> Iterator[tuple[Pass, Plan]]:
    """How the passes run as the options say."""
    call = sub_calls_of(options)[0]
    request = dataclasses.replace(call.request, precision=task.precision, tuned=TunedTable(device.kind))
    request = dataclasses.replace(request, problem=tuned_problem(request.problem))
    for pass_ in passes(options):
        yield pass_, resolve(request, device, pass_)


class _Decision:
    """What is kept of a search: what the comparison with the ranking's choice, in turns, says is faster."""

    def __init__(self, task: Task, device: Device, defaults: dict[Pass, Plan], chosen: dict[Pass, Plan]) -> None:
        self._task = task
        self._device = device
        self._defaults = defaults
        self._chosen = chosen

    def passes(self) -> tuple[TunedPass, ...]:
        forward = dataclasses.replace(self._task, backprop=False)
        default, fast = self._runs(forward, (), ("forward",))
        if not self._task.backprop:
            return (self._passed("forward", fast, default, fast.clearly_faster(default)),)
        # A forward pass that is faster alone has to be so in front of the backward pass, too.
        candidates: list[tuple[Pass, ...]] = [(), ("backward",)]
        if fast.clearly_faster(default):
            candidates += [("forward",), ("forward", "backward")]
        both = dict(zip(candidates, self._runs(self._task, *candidates), strict=True))
        best = min(both, key=lambda each: both[each].median)
        kept = best if both[best].clearly_faster(both[()]) else ()
        if not kept and ("forward",) in both and both["forward",].median <= both[()].median:
            kept = ("forward",)  # which pays where there is no backward pass
        return (
            self._passed("forward", fast, default, "forward" in kept),
            self._passed("backward", both[kept], both[()], "backward" in kept),
        )

    def _passed(self, pass_: Pass, tuned: Runs, default: Runs, is_kept: bool) -> TunedPass:
        """What is written of a pass: its backward pass is timed together with the forward pass that is kept."""
        plan = (self._chosen if is_kept else self._defaults)[pass_]
        seconds = default.median if pass_ == "forward" and not is_kept else tuned.median
        return TunedPass(_of_pass_alone(plan), seconds, default.median, not is_kept, self._task.label)

    def _runs(self, task: Task, *kept: Sequence[Pass]) -> list[Runs]:
        """Runs of a task, where the chosen plans of these passes are in force, all in turns."""
        tables = [
            TunedTable(
                self._device.kind,
                tuple(TunedPass(_of_pass_alone(self._chosen[pass_]), 0.0, 0.0, False) for pass_ in each),
            )
            for each in kept
        ]
        options, workloads = task.options, list[Workload]()
        with arrays_of(options.dtype), jax.default_matmul_precision(task.precision):
            for number, table in enumerate(tables):
                with in_force(table):
                    arguments = workloads[0].arguments if workloads else None
                    workloads.append(compile_workload(options, f"tuned_{number}", arguments))
            for workload in workloads:
                for _ in range(_WARMUP):
                    jax.block_until_ready(workload.run())
            launches = [workload.launch for workload in workloads]
            iterations = capture.capture_in_turns(launches, _RUNS, self._device.platform)
        return [Runs(tuple(sum(event.duration for event in events) / 1e9 for events in of)) for of in iterations]


def _of_pass_alone(plan: Plan) -> Plan:
    """The plan without the tiles of the other pass, unless its backend has the same in both."""
    (other,) = [pass_ for pass_ in PASSES if pass_ != plan.pass_]
    if backends.of(plan.backend).shares_tiles:
        return plan
    return dataclasses.replace(plan, performance=plan.performance.with_tiles(other, None))


def tune_plans(plans: Iterable[Plan], effort: Effort, say: Callable[[str], Any]) -> tuple[TunedTable, tuple[str, ...]]:
    """Measure every problem of these passes; also what could not be measured, and why."""
    measured: list[TunedPass] = []
    skipped = []
    tasks = tasks_of(plans)
    for number, task in enumerate(tasks):
        about = f"{task.problem.describe()} ({task.problem.dtype})"
        say(f"{number + 1} of {len(tasks)}: {about}")
        try:
            if (obstacle := task.obstacle) is not None:
                raise ValueError(obstacle)
            measured += tuned_passes(task, effort)
        except (ValueError, MemoryError, jax.errors.JaxRuntimeError, CaptureError) as error:
            skipped.append(f"{about}: {error}")
            say(f"not measured: {skipped[-1]}")
    return TunedTable(default_device().kind, tuple(measured)), tuple(skipped)
