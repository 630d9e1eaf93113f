"""Which backend runs a pass of a request on a device, and how: the only place where that is decided."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from natten_jax import backends
from natten_jax.backends import defaults, missing_kernels
from natten_jax.backends.base import Backend
from natten_jax.backends.tuned import with_tuned_choices
from natten_jax.cost_model.halos import retile_for_part
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Plan, tile_arguments
from natten_jax.plan.request import Request
from natten_jax.problem import Problem

#: What part of the preferred backend's predicted time another's has to be, for it to run: predictions are not exact.
_CLEARLY_FASTER = 0.9


class _Decision(NamedTuple):
    """What was decided for a pass.

    Attributes:
        plan: How it runs; ``None`` where it cannot.
        refusal: Why not.
        lack: Which kernels this build lacks, so that a slow backend runs; ``None`` where it lacks none.
    """

    plan: Plan | None
    refusal: str = ""
    lack: str | None = None


def resolve(request: Request, device: Device, pass_: Pass) -> Plan:
    """Decide how a pass runs on a device.

    Where the requested family has no such backward pass, the best other one serves it. What was decided is kept: a call
    and its gradient ask many times.

    Raises:
        ValueError: The requested backend cannot run the pass, or none can, or none that can offers the tiles.
    """
    plan, refusal, lack = decided(request, device, pass_, backends.registered())
    if plan is None:
        raise ValueError(refusal)
    if lack is not None:
        missing_kernels.warn_once(lack)
    return plan


@functools.lru_cache(maxsize=4096)
def decided(request: Request, device: Device, pass_: Pass, registered: Sequence[Backend]) -> _Decision:
    """The decision, made once for a request, a device, a pass and the registered backends."""
    try:
        return _decide(request, device, pass_, registered)
    except ValueError as error:
        return _Decision(None, str(error))


def _decide(request: Request, device: Device, pass_: Pass, registered: Sequence[Backend]) -> _Decision:
    request = with_tuned_choices(request, device, pass_)
    problem, requested = request.problem, request.backend
    if requested is not None and pass_ == "backward":
        reason = backends.find(requested, problem.operator).rejection(problem, device, pass_)
        requested = requested if reason is None else None
    candidates = _candidates(problem, device, pass_, requested)
    pair = request.performance.tiles(pass_)
    if requested is None and pair is None:
        candidates = _fastest_first(candidates, problem, device, pass_)
    for backend in candidates:
        if pair is None or backend.offers(backend.widened(problem, device, pass_, pair), device, pass_, pair):
            is_default = requested is None and backend.is_slow_fallback
            lack = missing_kernels.lack(registered, problem, device, pass_) if is_default else None
            return _Decision(plan_with(backend, request, device, pass_), lack=lack)
    assert pair is not None
    raise ValueError(_unknown_tiles(problem, pair, device, pass_, candidates[0]))


def _fastest_first(candidates: list[Backend], problem: Problem, device: Device, pass_: Pass) -> list[Backend]:
    """The candidates in their order, behind the one that is clearly faster than the first by the cost model."""

    def seconds_of(backend: Backend) -> float | None:
        return backend.predicted_seconds(backend.widened(problem, device, pass_), device, pass_)

    first = seconds_of(candidates[0])
    if first is None:
        return candidates
    times = {each.family: seconds_of(each) for each in candidates[1:]}
    fastest, seconds = min(
        ((family, time) for family, time in times.items() if time is not None),
        key=lambda item: item[1],
        default=(None, math.inf),
    )
    if seconds > _CLEARLY_FASTER * first:
        return candidates
    return sorted(candidates, key=lambda each: each.family != fastest)


def plan_with(backend: Backend, request: Request, device: Device, pass_: Pass) -> Plan:
    """The plan of a pass with a backend that can run it: what was left open is the backend's choice."""
    performance = request.performance
    problem = backend.widened(request.problem, device, pass_, performance.tiles(pass_))
    is_split = math.prod(request.parts) != 1
    # A part of the layout may begin anywhere in it, as a box with an origin of its own does.
    tiled = dataclasses.replace(problem, own_origins=True) if is_split else problem
    for each in PASSES if backend.shares_tiles else (pass_,):
        if performance.tiles(each) is None:
            performance = performance.with_tiles(each, backend.tile_pairs(tiled, device, each)[0])
    schedules = backend.schedules.get(pass_, ())
    schedule = (performance.kernel_schedule or str(schedules[0])) if schedules else None
    performance = dataclasses.replace(performance, kernel_schedule=schedule)
    plan = Plan(
        problem, pass_, BackendId(backend.family, problem.operator), device.platform, performance, request.precision
    )
    if request.performance.tiles(pass_) is not None or not is_split:
        return plan
    return retile_for_part(plan, request.parts, backend.tile_pairs(tiled, device, pass_))


def rejections(problem: Problem, device: Device, pass_: Pass) -> dict[BackendId, str]:
    """Why each backend that cannot run this pass cannot."""
    return {
        BackendId(backend.family, problem.operator): reason
        for backend in backends.registered()
        if (reason := backend.rejection(problem, device, pass_)) is not None
    }


def runnable(problem: Problem, device: Device, pass_: Pass) -> list[Backend]:
    """The backends that can run this pass, best first."""
    return [backend for backend in backends.registered() if backend.rejection(problem, device, pass_) is None]


def _candidates(problem: Problem, device: Device, pass_: Pass, requested: str | None) -> list[Backend]:
    if requested is not None:
        backend = backends.find(requested, problem.operator)
        reason = backend.rejection(problem, device, pass_)
        if reason is not None:
            raise ValueError(_refusal(requested, reason, problem, device, pass_))
        return [backend]
    wanted = defaults.asked_for(backends.registered())
    candidates = [
        backend
        for backend in runnable(problem, device, pass_)
        if not backend.runs_only_by_name(problem) or backend.family in wanted
    ]
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in rejections(problem, device, pass_).items())
        raise ValueError(f"no backend can run the {pass_} pass of {problem.describe()} on {device}: {reasons}")
    return candidates


def _refusal(requested: str, reason: str, problem: Problem, device: Device, pass_: Pass) -> str:
    able = [str(BackendId(backend.family, problem.operator)) for backend in runnable(problem, device, pass_)]
    return (
        f"backend={requested!r} cannot run the {pass_} pass of {problem.describe()} ({problem.dtype}) on {device}: "
        f"{reason}. Backends that can: {', '.join(able) or 'none'}"
    )


def _unknown_tiles(problem: Problem, pair: TilePair, device: Device, pass_: Pass, backend: Backend) -> str:
    infix = "" if pass_ == "forward" else "bwd_"
    query_function = f"get_{infix}configs_for_{backend.query_family or backend.family}_{problem.operator}"
    is_flat = problem.operator == "fmha"

    def text(tile: tuple[int, ...]) -> str:
        return str(tile[0] if is_flat else tile)

    examples = backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_)[:5]
    offered = ", ".join(f"({text(query)}, {text(key_value)})" for query, key_value in examples)
    names = tile_arguments(problem.operator, pass_)
    asked = ", ".join(f"{name}={text(tile)}" for name, tile in zip(names, pair, strict=True))
    return (
        f"{BackendId(backend.family, problem.operator)} does not offer {asked} for {problem.describe()}; "
        f"among those it offers are {offered} (natten_jax.{query_function} lists them)"
    )
