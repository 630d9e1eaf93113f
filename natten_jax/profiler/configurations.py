"""Configurations of the backends for a problem, with what the simulator says about each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from natten_jax import backends, simulator
from natten_jax.backends.base import Backend
from natten_jax.configs import kernel_schedules
from natten_jax.devices import Device
from natten_jax.passes import PASSES, Pass, TilePair
from natten_jax.problem import Problem
from natten_jax.profiler.options import Options
from natten_jax.profiler.workload import Part, parts_of
from natten_jax.simulator import Simulation


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a backend offers for one pass.

    Attributes:
        backend: Its name.
        pass_: The pass.
        problem: What the backend gets.
        pairs: Query and key/value tiles, the recommended pair first.
        schedules: Kernel schedules, the default one first; empty where there is no choice.
    """

    backend: str
    pass_: Pass
    problem: Problem
    pairs: tuple[TilePair, ...]
    schedules: tuple[str, ...]

    @property
    def family(self) -> str:
        """Of the backend."""
        return self.backend.rpartition("-")[0]

    def simulate(self, pair: TilePair, device: Device) -> Simulation:
        """Count a pair's tiles and, where that was calibrated, predict its time."""
        calibration = simulator.calibration_for(self.family, device.compute_capability)
        return simulator.simulate(self.problem, pair, self.pass_, calibration=calibration)


def main_part(options: Options) -> Part:
    """The attention over the tokens themselves."""
    return parts_of(options)[0]


def candidates(options: Options) -> tuple[Backend, ...]:
    """The backends that the options leave to choose from."""
    part = main_part(options)
    if part.backend is None:
        return backends.BACKENDS
    return (backends.find(part.backend, part.problem.operator),)


def rejections(options: Options, device: Device, pass_: Pass = "forward") -> dict[str, str]:
    """Why the candidates that cannot run a pass cannot, by name."""
    problem = main_part(options).problem
    return {
        backends.backend_name(backend, problem.operator): reason
        for backend in candidates(options)
        if (reason := backend.rejection(problem, device, pass_)) is not None
    }


def listings(options: Options, device: Device) -> Iterator[Listing]:
    """The configurations of every candidate that can run the problem on the device, pass by pass."""
    problem = main_part(options).problem
    for backend in candidates(options):
        name = backends.backend_name(backend, problem.operator)
        if backend.rejection(problem, device, "forward") is not None:
            continue
        for pass_ in PASSES:
            if backend.rejection(problem, device, pass_) is None:
                yield listing(backend, problem, device, pass_, name)


def listing(backend: Backend, problem: Problem, device: Device, pass_: Pass, name: str) -> Listing:
    """The configurations of one backend for one pass."""
    schedules = tuple(map(str, kernel_schedules(backend.family, pass_)))
    return Listing(name, pass_, problem, tuple(backend.tile_pairs(problem, device, pass_)), schedules)


def tile_text(tile: tuple[int, ...]) -> str:
    """``(4, 4, 8)``; a single extent as a number."""
    return str(tile[0]) if len(tile) == 1 else f"({', '.join(map(str, tile))})"
