"""Predictions for bench/scaling.py from the time models of the kernels and of the interconnect."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lib.timing import ratio

from devices.problems import Curve
from natten_jax.backends.select import resolve
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import BackendId, Request
from natten_jax.simulator import SplitTime, calibration_for, predict_split

#: The GPU of the measurements for the time models. Predictions do not require this GPU.
_GPU = Device("cuda", (9, 0), is_present=False)

EXPOSED = "exposed milliseconds"


def figures(curve: Curve, devices: int, on_one: list[float], on_several: list[float]) -> dict[str, float]:
    """Return time, speed-up and efficiency on ``devices`` devices, from predicted or measured seconds per turn.

    The speed-up is the throughput relative to the throughput of one device, for strong and for weak scaling.
    """
    faster = ratio(on_one, on_several) * curve.work(devices)
    return {
        "milliseconds": 1e3 * statistics.median(on_several),
        "speedup": faster,
        "efficiency": faster / devices,
    }


def predictions(curve: Curve, family: str, pass_: str, counts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Predict the time, the speed-up and the exchange time that computation does not hide, for each number of devices.

    Args:
        curve: Problem and split.
        family: Backend family.
        pass_: ``"forward"`` or ``"forward+backward"``.
        counts: Numbers of devices that can share the problem.

    Returns:
        Predictions by number of devices; empty if the kernels were not calibrated for the problem.
    """
    times = {devices: _split_times(curve, family, pass_, devices) for devices in (1, *counts)}
    seconds = {devices: sum(each.seconds for each in found) for devices, found in times.items() if found}
    return {
        devices: {
            **figures(curve, devices, [seconds[1]], [seconds[devices]]),
            EXPOSED: 1e3 * sum(each.exposed for each in times[devices]),
        }
        for devices in counts
        if devices in seconds and 1 in seconds
    }


def relative_errors(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of predicted figures; an error is positive if the prediction is too large."""
    return {name: predicted[name] / measured[name] - 1 for name in ("milliseconds", "efficiency")}


def _split_times(curve: Curve, family: str, pass_: str, devices: int) -> list[SplitTime]:
    """Return the predicted time of each pass, or an empty list if one of the passes cannot be predicted."""
    if calibration_for(family) is None:
        return []
    wanted: Sequence[Pass] = ("forward",) if pass_ == "forward" else PASSES
    times = [_split_time(curve, family, each, devices) for each in wanted]
    return [each for each in times if each is not None] if None not in times else []


def _split_time(curve: Curve, family: str, pass_: Pass, devices: int) -> SplitTime | None:
    problem, parts = curve.share(devices), curve.parts(devices)
    request = Request(problem, backend=str(BackendId(family, problem.operator)), parts=parts)
    try:
        plan = resolve(request, _GPU, pass_)
    except ValueError:  # these kernels do not support the problem
        return None
    calibration = calibration_for(plan.backend.family)
    return None if calibration is None else predict_split(plan, parts, calibration)
