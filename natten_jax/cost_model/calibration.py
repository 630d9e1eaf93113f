"""Coefficients of the time model, in one file per backend family and compute capability.

The coefficients in most files are fitted to measurements (:attr:`Calibration.is_measured`) by ``bench/calibrate.py``.
:func:`natten_jax.simulator.predict` computes times from them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from natten_jax.arguments.names import check_types, checked_pair
from natten_jax.native.module import continues
from natten_jax.performance import Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import CapabilityLike, ComputeCapability, compute_capability_of
from natten_jax.problem import Problem

_FOLDER = Path(__file__).with_name("calibrations")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its tile sizes, and the seconds that parts of its work take.

    A thread block owns an outer tile and loops over inner tiles (``natten_jax.cost_model.tiles``).

    Attributes:
        head_dim: Largest supported head dimension.
        outer_tokens: Tokens of an outer tile.
        inner_tokens: Tokens of an inner tile.
        outer_tile: Seconds per outer tile, without the time of its inner tiles.
        inner_tile: Seconds per inner tile, without masking.
        masking: Additional seconds per partial inner tile, which is an inner tile that needs a mask.
        skipping: Seconds per inner tile that the kernel visits but skips.
        row_groups: Number of groups into which the rows of an outer tile are divided. Each group skips and masks inner
            tiles independently.
        power: Factor on :attr:`Calibration.slowdown`. It is smaller for kernels that draw less power.
        side_by_side: Number of outer tiles that a multiprocessor processes concurrently.
        dtypes: Supported element types, if they differ from :attr:`Calibration.dtypes`.
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
        """Head dimension, tokens per outer tile, and tokens per inner tile. Unique per pass and element type."""
        return self.head_dim, self.outer_tokens, self.inner_tokens


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The time model of a backend family on one kind of device.

    Attributes:
        family: ``"hopper"``, ...
        device: The device of the measurements.
        compute_capability: The compute capability of the device.
        multiprocessors: The number of multiprocessors of the device.
        launch: Fixed overhead of a forward pass, in seconds.
        byte: Seconds to read or write one byte of inputs and results in memory.
        slowdown: Largest relative increase of a pass's time because the device lowers its clock at the power limit.
        onset: Duration of a pass, in seconds, at which half of ``slowdown`` applies. A larger share applies to longer
            passes.
        kernels: Compiled kernels, by pass.
        backward_launch: Fixed overhead of a backward pass, which consists of several kernels, in seconds. If it is
            ``None``, ``launch`` applies.
        tail: Time between the average finish of all multiprocessors and the finish of the slowest one, in rounds
            (waves). It applies to forward kernels whose thread blocks take tiles from a counter (dynamic scheduling).
            ``None`` if tiles are assigned statically.
        counted_rounds: Smallest number of rounds with dynamic scheduling. With fewer rounds, tiles are assigned
            statically.
        dtypes: Element types for which the coefficients are valid.
        limits: Names under which ``natten_jax.native.module.limits`` returns the limits of these kernels.
        is_measured: True if the coefficients were fitted to measurements. Otherwise they are derived from the
            throughput of the device's units, and predicted times are only accurate enough to rank tiles.
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

    @check_types
    def merges(self, problem: Problem) -> bool:
        """Return True if the forward kernels can merge their results into results of earlier calls over other keys."""
        return any(continues(name, problem) for name in self.limits)

    @check_types
    def launch_of(self, pass_: Pass) -> float:
        """Return the fixed overhead of a pass in seconds."""
        return self.launch if pass_ == "forward" or self.backward_launch is None else self.backward_launch

    @check_types
    def kernel(self, problem: Problem, pair: TilePair, pass_: Pass) -> Kernel | None:
        """Return the smallest kernel for the head dimensions, tiles and element type; ``None`` if no kernel fits."""
        tiles = outer_and_inner(checked_pair(pair, problem.rank), pass_)
        size = max(problem.head_dim, problem.head_dim_v), *map(math.prod, tiles)
        able = [each for each in self.kernels.get(pass_, ()) if problem.dtype in (each.dtypes or self.dtypes)]
        fitting = [each for each in able if all(map(operator.le, size, each.size))]
        return min(fitting, key=lambda each: each.size, default=None)

    def rounds(self, tiles: Any, pass_: Pass, kernel: Kernel) -> Any:
        """Return the number of rounds (waves) in which the multiprocessors process ``tiles`` outer tiles."""
        rounds = tiles / (self.multiprocessors * kernel.side_by_side)
        if self.tail is None or pass_ == "backward":
            return np.ceil(rounds)
        return np.where(rounds < self.counted_rounds, np.ceil(rounds), rounds + self.tail)

    @check_types
    def clocked(self, busy: Any, kernel: Kernel) -> Any:
        """Return the seconds that work takes at the actual clock, if it takes ``busy`` seconds at the full clock."""
        return busy * (1 + self.slowdown * kernel.power * busy / (busy + self.onset))


@check_types
def calibration_for(family: str, compute_capability: CapabilityLike | None = None) -> Calibration | None:
    """Return the time model of a backend family.

    Example:
        >>> from natten_jax import simulator
        >>> simulator.calibration_for("hopper", compute_capability=(9, 0)).compute_capability
        (9, 0)

    Args:
        family: ``"hopper"``, ...
        compute_capability: Compute capability of the device whose times are predicted, as ``(9, 0)``, ``"9.0"`` or
            ``9.0``. If it is ``None``, the result is the model of any calibrated device of the family. Such a model is
            accurate enough to rank tiles.

    Returns:
        The model, or ``None`` if there is no file for this family and compute capability.

    Raises:
        ValueError: ``family`` is not the name of a calibrated family, but is similar to such a name; or
            ``compute_capability`` is invalid.
        TypeError: An argument is of the wrong type.
    """
    return _calibration(family, None if compute_capability is None else compute_capability_of(compute_capability))


@functools.cache
def _calibration(family: str, compute_capability: ComputeCapability | None) -> Calibration | None:
    calibrated = sorted({file.stem.split("-")[0] for file in _FOLDER.glob("*.json")})
    if family not in calibrated and (near := difflib.get_close_matches(family.lower(), calibrated, 1)):
        raise ValueError(f"family must be one of {', '.join(calibrated)}, got {family!r}: did you mean {near[0]!r}?")
    prefix = f"{family}-" if compute_capability is None else "{}-{}.{}".format(family, *compute_capability)
    file = min((each for each in _FOLDER.glob("*.json") if each.stem.startswith(prefix)), default=None)
    if file is None:
        return None
    model: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    major, minor = model["compute_capability"]
    kernels = {
        pass_: tuple([Kernel(**{**fields, "dtypes": tuple(fields.get("dtypes", ()))}) for fields in pass_kernels])
        for pass_, pass_kernels in model["kernels"].items()
    }
    return Calibration(**{**model, "compute_capability": (major, minor), "kernels": kernels})
