"""What the exchange of halos takes, and how much of it passes can hide behind what they compute."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from natten_jax.cost.calibration import calibration_for
from natten_jax.cost.simulation import simulate
from natten_jax.halo import Division, Halo, bytes_received, division_of
from natten_jax.plan import Plan
from natten_jax.problem import ELEMENT_BYTES


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        name: For people.
        latency: Seconds that an exchange takes, whatever its size.
        byte: Seconds per byte that a device receives.
    """

    name: str
    latency: float
    byte: float

    def seconds(self, received: int) -> float:
        """Of an exchange in which the device that receives most receives so many bytes."""
        return self.latency + received * self.byte if received else 0.0


#: Two H200 on NVLink, both directions at once: 0.12 ms for 1 MB, 0.25 for 16, 0.44 for 64, 1.03 for 212, 1.59 for 425.
#: This line is within 21% of each.
NVLINK = Link("NVLink", 1.4e-4, 1 / 280e9)


@functools.lru_cache(maxsize=1024)
def division_that_pays(plan: Plan, halos: tuple[Halo, ...]) -> Division | None:
    """How a forward pass divides its queries to compute while halos travel; ``None`` where it gains nothing by that.

    Args:
        plan: Of the pass, whose problem has the global layout.
        halos: One for each token dimension.
    """
    division = division_of(plan.problem, halos, plan.tiles[0])
    if division is None:
        return None
    calls = sum(box is not None for sides in division.borders for box in sides)
    part = math.prod(halo.part for halo in halos)
    share = math.prod(last - first for first, last in division.interior) / part
    # Queries are cut and outputs joined: each is read and written.
    return division if gains(plan, halos, share, calls, 4 * part) else None


@functools.lru_cache(maxsize=1024)
def dividing_keys_pays(plan: Plan, halos: tuple[Halo, ...]) -> bool:
    """Whether a backward pass gains by taking a device's own keys while the others travel.

    Args:
        plan: Of the pass, whose problem has the global layout.
        halos: One for each token dimension.
    """
    if any(halo.is_gathered for halo in halos) or not any(halo.received for halo in halos):
        return False
    part = math.prod(halo.part for halo in halos)
    calls, copied = 0, 0
    for axis, halo in zip(plan.problem.axes, halos, strict=True):
        begin, end = halo.borders(axis)
        for seeing in filter(None, (begin, halo.part - end)):
            calls += 1
            # Where only some queries see a halo, these, their outputs and gradients of these are cut. Gradients of
            # theirs are added.
            copied += part // halo.part * seeing * (3 + (6 if seeing < halo.part else 0))
    own = math.prod(halo.part / (halo.part + halo.received) for halo in halos)
    return gains(plan, halos, own, calls, copied)


def gains(plan: Plan, halos: Sequence[Halo], share: float, calls: int, copied: int) -> bool:
    """Whether computing while halos travel hides more of their time than it costs.

    The one place where that is decided, for kernels whose times are known; others gain nothing.

    Args:
        plan: Of the pass, whose problem has the global layout.
        halos: One for each token dimension.
        share: How much of the pass can be computed meanwhile.
        calls: How many more calls there are.
        copied: Queries, or their outputs, that are read or written more often.
    """
    calibration = calibration_for(plan.backend.family)
    problem, parts = plan.problem, [halo.parts for halo in halos]
    seconds = None
    if calibration is not None:
        seconds = simulate(problem, plan.tiles, plan.pass_, calibration=calibration).seconds
    if calibration is None or seconds is None:
        return False
    hidden = min(NVLINK.seconds(bytes_received(problem, parts)), share * seconds / math.prod(parts))
    width = max(problem.head_dim, problem.head_dim_v)
    bytes_copied = copied * problem.batch * problem.heads * width * ELEMENT_BYTES[problem.dtype]
    return hidden > calls * calibration.launch_of(plan.pass_) + bytes_copied * calibration.byte
