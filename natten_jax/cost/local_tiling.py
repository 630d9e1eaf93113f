"""The fastest tiles for a device's part of a layout, which may be others than those for the whole.

A part of ten columns leaves six of a second tile of eight idle, and its windows end where its keys do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from natten_jax.cost.calibration import calibration_for
from natten_jax.cost.halo_time import predict_split
from natten_jax.performance import TilePair
from natten_jax.plan.plan import Plan

#: How many of the whole layout's fastest pairs are looked at; a part's fastest one was among 64 of them for a
#: video whose height or width is split over two to eight devices. They take 0.2 seconds.
_PAIRS = 64

#: What part of the time of the whole layout's tiles that of others has to be.
_CLEARLY_FASTER = 0.95


def tiled_for_part(plan: Plan, parts: tuple[int, ...], pairs: Sequence[TilePair]) -> Plan:
    """The plan with the tiles that a device's part takes the least time with, halos and all.

    Args:
        plan: The plan of the pass, with the tiles for the whole layout.
        parts: Into how many parts each token dimension is split.
        pairs: Query and key/value tiles that the backend offers, by predicted time of the whole layout.

    Returns:
        The plan as it is where other tiles are not clearly faster, or the kernels were not calibrated.
    """
    return _fastest(plan, parts, tuple(pairs[:_PAIRS]))


@functools.lru_cache(maxsize=1024)
def _fastest(plan: Plan, parts: tuple[int, ...], pairs: tuple[TilePair, ...]) -> Plan:
    def seconds(plan: Plan) -> float | None:
        calibration = calibration_for(plan.backend.family)
        split = None if calibration is None else predict_split(plan, parts, calibration)
        return None if split is None else split.seconds

    as_it_is = seconds(plan)
    if as_it_is is None:
        return plan
    best, limit = plan, _CLEARLY_FASTER * as_it_is
    for pair in pairs:
        other = dataclasses.replace(plan, performance=plan.performance.with_tiles(plan.pass_, pair))
        time = seconds(other)
        if time is not None and time < limit:
            best, limit = other, time
    return best
