"""Coefficients of the time model, most of them fitted to measurements: a file per backend family and kind of device.

``bench/calibrate.py`` writes them; :func:`natten_jax.simulator.predict` has the formula.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from natten_jax.arguments.static import int_tuple
from natten_jax.native.module import continues
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import ComputeCapability
from natten_jax.problem import Problem

_FOLDER = Path(__file__).with_name("calibrations")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel: the tile that it executes, and the seconds that parts of its work take.

    Attributes:
        head_dim: Widest heads that it takes.
        outer_tokens: Tokens of an outer tile.
        inner_tokens: Tokens of an inner tile.
        outer_tile: Seconds per outer tile, whatever inner tiles it visits.
        inner_tile: Seconds per inner tile.
        masking: Seconds more per partial inner tile.
        skipping: Seconds per skipped inner tile.
        row_groups: Groups of an outer tile's rows that skip and mask inner tiles on their own.
        power: How much of the device's slowdown it suffers: less where it draws less power.
        side_by_side: Outer tiles that a multiprocessor works on at the same time.
        dtypes: Element types that it takes, where these are not those of the calibration.
    """

    head_dim: int
    outer_tokens: int
    inner_tokens: int
    outer_tile: float
    inner_tile: float
    masking: float
    skipping: float = 0.0
    row_groups: int = 1
    power: float = 1.0
    side_by_side: int = 1
    dtypes: Sequence[str] = ()

    @property
    def size(self) -> tuple[int, int, int]:
        """Widest heads, tokens of an outer and of an inner tile: what tells the kernels of a pass apart."""
        return self.head_dim, self.outer_tokens, self.inner_tokens


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The time model of a backend family on one kind of device.

    Attributes:
        family: ``"hopper"``, ...
        device: The device that it was fitted on.
        compute_capability: The compute capability of that device.
        multiprocessors: The number of multiprocessors of that device.
        launch: Seconds that a forward pass takes, whatever its size.
        byte: Seconds that the device's memory takes per byte of inputs and results.
        slowdown: How much longer kernels take, at most, once the device is at its power limit.
        onset: Seconds of work after which half of that applies.
        kernels: The compiled kernels of each pass.
        backward_launch: As ``launch``, of a backward pass, which is several kernels; ``None`` is the same.
        tail: Rounds by which the last of many tiles of a forward pass outlast the others, as whoever is done takes the
            next one; ``None``: tiles are dealt out beforehand.
        counted_rounds: Rounds from which on the kernels take the next tile from a counter; below, tiles are dealt out.
        dtypes: Element types that the times are of.
        limits: Names of what the kernels take, in ``natten_jax.native.module.limits``.
        is_measured: Whether it was fitted to measurements; if not, coefficients follow from what the device's units do
            in a cycle, and times are good for an order of tiles.
    """

    family: str
    device: str
    compute_capability: ComputeCapability
    multiprocessors: int
    launch: float
    byte: float
    slowdown: float
    onset: float
    kernels: dict[str, tuple[Kernel, ...]]
    backward_launch: float | None = None
    tail: float | None = None
    counted_rounds: int = 0
    dtypes: Sequence[str] = ("float16", "bfloat16")
    limits: Sequence[str] = ()
    is_measured: bool = True

    def merges(self, problem: Problem) -> bool:
        """Whether forward kernels can merge their results with those of earlier calls on other keys."""
        return any(continues(name, problem) for name in self.limits)

    def launch_of(self, pass_: Pass) -> float:
        """Seconds that a pass of any size takes in addition to its work."""
        return self.launch if pass_ == "forward" or self.backward_launch is None else self.backward_launch

    def kernel(self, problem: Problem, pair: TilePair, pass_: Pass) -> Kernel | None:
        """Smallest kernel that takes the heads and the tiles; ``None`` if none was timed for these elements."""
        outer, inner = map(math.prod, outer_and_inner(pair, pass_))
        wider = max(problem.head_dim, problem.head_dim_v)
        fitting = [
            each
            for each in self.kernels.get(pass_, ())
            if problem.dtype in (each.dtypes or self.dtypes)
            and wider <= each.head_dim
            and outer <= each.outer_tokens
            and inner <= each.inner_tokens
        ]
        return min(fitting, key=lambda each: each.size, default=None)

    def rounds(self, tiles: Any, pass_: Pass, kernel: Kernel) -> Any:
        """Rounds that the multiprocessors work on outer tiles."""
        rounds = tiles / (self.multiprocessors * kernel.side_by_side)
        if self.tail is None or pass_ == "backward":
            return np.ceil(rounds)
        return np.where(rounds < self.counted_rounds, np.ceil(rounds), rounds + self.tail)

    def clocked(self, busy: Any, kernel: Kernel) -> Any:
        """Seconds of a kernel whose work takes ``busy`` seconds at the full clock."""
        return busy * (1 + self.slowdown * kernel.power * busy / (busy + self.onset))


@functools.cache
def calibration_for(family: str, compute_capability: ComputeCapability | None = None) -> Calibration | None:
    """Return the time model of a backend family.

    Example:
        >>> from natten_jax import simulator
        >>> simulator.calibration_for("hopper", compute_capability=(9, 0)).compute_capability
        (9, 0)

    Args:
        family: ``"hopper"``, ...
        compute_capability: Compute capability of the device to predict for. ``None`` takes any calibrated one, which is
            good enough to rank tiles.

    Returns:
        The model, or ``None`` if no device of that family and compute capability was calibrated.

    Raises:
        ValueError: ``family`` looks like the misspelt name of a calibrated one.
        TypeError: ``compute_capability`` is not a pair of ints.
    """
    calibrated = sorted({file.stem.split("-")[0] for file in _FOLDER.glob("*.json")})
    if family not in calibrated and (near := difflib.get_close_matches(family.lower(), calibrated, 1)):
        raise ValueError(f"family must be one of {', '.join(calibrated)}, got {family!r}: did you mean {near[0]!r}?")
    version = "*"
    if compute_capability is not None:
        version = "{}.{}".format(*int_tuple("compute_capability", compute_capability, 2, repeat=False, least=0))
    file = min(_FOLDER.glob(f"{family}-{version}.json"), default=None)
    if file is None:
        return None
    model: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    major, minor = model["compute_capability"]
    kernels = {
        pass_: tuple([Kernel(**{**fields, "dtypes": tuple(fields.get("dtypes", ()))}) for fields in of_pass])
        for pass_, of_pass in model["kernels"].items()
    }
    return Calibration(**{**model, "compute_capability": (major, minor), "kernels": kernels})
