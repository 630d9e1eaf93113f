"""Plan the passes of a problem with a given backend, and rank small-window tiles by predicted time."""

from __future__ import annotations

from collections.abc import Iterator

from natten_jax import backends
from natten_jax.backends.base import Backend
from natten_jax.backends.select import plan_with
from natten_jax.cost_model import small_windows
from natten_jax.performance import PASSES, Pass, Performance, TilePair
from natten_jax.plan.devices import ComputeCapability, Device, default_device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem


def plans_of(
    name: str,
    problem: Problem,
    performance: Performance | None = None,
    device: Device | None = None,
    precision: str | None = None,
) -> tuple[Backend, dict[Pass, Plan]]:
    """Return the named backend, and the plan of each pass that the operators would use with this backend."""
    backend = backends.find(name, problem.operator)
    request = Request(problem, performance or Performance(), name, precision)
    return backend, {pass_: plan_with(backend, request, device or default_device(), pass_) for pass_ in PASSES}


def launches_by_tiles(
    problem: Problem, pass_: Pass, capability: ComputeCapability | None = (9, 0)
) -> Iterator[tuple[TilePair, tuple[small_windows.Launch, ...]]]:
    """Yield each tile pair of the small-window kernels with its kernel launches, by increasing predicted time."""
    for pair, _ in small_windows.ranked("cutlass", problem, pass_, capability):
        found = small_windows.estimate("cutlass", problem, pass_, pair, capability)
        if found is not None:
            yield pair, tuple(found.launches)


def kernels_by_tiles(
    problem: Problem, pass_: Pass, capability: ComputeCapability | None = (9, 0)
) -> Iterator[tuple[TilePair, tuple[str, ...]]]:
    """Yield each tile pair of the small-window kernels with its kernel names, by increasing predicted time."""
    for pair, launches in launches_by_tiles(problem, pass_, capability):
        yield pair, tuple(launch.kernel for launch in launches)


def first_tiles(problem: Problem, pass_: Pass, has_ring: bool) -> TilePair:
    """Return the predicted fastest small-window tiles whose last kernel has (or does not have) a ring buffer.

    If no tiles match ``has_ring``, return the fastest tiles, regardless of the ring buffer.
    """
    found = list(kernels_by_tiles(problem, pass_))
    return next((pair for pair, kernels in found if ("with a ring" in kernels[-1]) == has_ring), found[0][0])
