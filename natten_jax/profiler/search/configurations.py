"""Configurations of the backends for a problem, with what the simulator says about each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from natten_jax import backends, simulator
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.cost_model.simulation import TpuChip, chip_of
from natten_jax.ops.sub_calls import SubCall
from natten_jax.performance import PASSES, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId
from natten_jax.problem import Problem
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import request_of, sub_calls_of
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

    backend: BackendId
    pass_: Pass
    problem: Problem
    pairs: tuple[TilePair, ...]
    schedules: tuple[str, ...]

    def calibration(self, device: Device) -> simulator.Calibration | None:
        """The model of time on a device; ``None`` where there is none."""
        return simulator.calibration_for(self.backend.family, device.compute_capability)

    def simulate(self, pair: TilePair, device: Device) -> Simulation:
        """Count a pair's tiles and, where that was calibrated, predict its time; that on a TPU by a static model."""
        found = simulator.simulate(self.problem, pair, self.pass_, calibration=self.calibration(device))
        chip = self.static_chip(device)
        return found if chip is None else dataclasses.replace(found, seconds=chip.seconds(found))

    def static_chip(self, device: Device) -> TpuChip | None:
        """The TPU whose published rates times are from; ``None`` where they are predicted from measurements."""
        platform = backends.of(self.backend).platform
        return chip_of(device) if platform is not None and platform.name == "tpu" else None


def main_sub_call(options: Options) -> SubCall:
    """The attention over the tokens themselves."""
    return sub_calls_of(options)[0]


def candidates(options: Options) -> tuple[Backend, ...]:
    """The backends that the options leave to choose from."""
    request = main_sub_call(options).request
    if request.backend is None:
        return backends.registered()
    return (backends.find(request.backend, request.problem.operator),)


def windows_problem(options: Options) -> Problem | None:
    """The same self attention as neighborhood attention with windows of the whole layout; ``None`` for other problems.

    The attention backends run self attention. Its users may be about to choose a window: tiles of windows have shapes.
    """
    problem = request_of(options).problem
    is_about_attention = options.fmha_backend is not None and options.backend is None
    return problem if problem.is_attention and not is_about_attention else None


def rejections(options: Options, problem: Problem, device: Device) -> dict[str, str]:
    """Why the candidates that cannot run the forward pass of a problem cannot, by name."""
    families = {backend.family for backend in candidates(options)}
    return {
        str(id_): reason
        for id_, reason in select.rejections(problem, device, "forward").items()
        if id_.family in families
    }


def listings(options: Options, problem: Problem, device: Device) -> Iterator[Listing]:
    """The configurations of every candidate that can run a problem on the device, pass by pass."""
    for backend in candidates(options):
        if backend.rejection(problem, device, "forward") is not None:
            continue
        for pass_ in PASSES:
            if backend.rejection(problem, device, pass_) is None:
                yield listing(backend, problem, device, pass_)


def listing(backend: Backend, problem: Problem, device: Device, pass_: Pass) -> Listing:
    """The configurations of one backend for one pass."""
    schedules = tuple(map(str, backend.schedules.get(pass_, ())))
    id_ = BackendId(backend.family, problem.operator)
    pairs = backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_)
    return Listing(id_, pass_, problem, tuple(pairs), schedules)


def remarks(calibration: simulator.Calibration | None) -> list[str]:
    """What is to be said of predicted times."""
    if calibration is None or calibration.is_measured:
        return []
    return [f"Predicted times of {calibration.family}-*: from arithmetic, not measured."]


def tile_text(tile: tuple[int, ...]) -> str:
    """``(4, 4, 8)``; a single extent as a number."""
    return str(tile[0]) if len(tile) == 1 else f"({', '.join(map(str, tile))})"
