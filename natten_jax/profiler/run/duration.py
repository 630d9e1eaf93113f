"""How long measurements take, said before they start: predicted for calibrated kernels, estimated for the host."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from natten_jax import backends, simulator
from natten_jax.backends.select import resolve
from natten_jax.cost.work import flops
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.profiler.messages import tell
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import passes, request_of, sub_calls_of_device

#: Operations per second of one of the host's processors, of kernels and of plain JAX: what 2-D windows of 16 x 16 come
#: to with AVX-512. They are to tell seconds from hours.
_KERNEL_RATE, _PLAIN_RATE = 12e9, 4e9

#: Seconds of a pass's search beside the runs of slow problems: its compilations, and the runs of fast ones.
_SEARCH_OVERHEAD = 30.0

#: Measurements that are shorter say nothing before they start.
_WORTH_SAYING = 5.0


def seconds_of_run(options: Options, device: Device) -> float | None:
    """Estimated seconds of one run of what the options describe; ``None`` where no model of the device is known.

    Raises:
        ValueError: No backend runs it.
    """
    if options.is_baseline:
        if device.platform != "cpu":
            return None
        problem = request_of(options).problem
        return sum(flops(problem, pass_) for pass_ in passes(options)) / (_PLAIN_RATE * _processors())
    times = [
        _seconds(resolve(call.request, device, pass_), device)
        for call in sub_calls_of_device(options)
        for pass_ in passes(options)
    ]
    known = [each for each in times if each is not None]
    # Devices of the host share it.
    return sum(known) * (options.devices if device.platform == "cpu" else 1) if len(known) == len(times) else None


def _seconds(plan: Plan, device: Device) -> float | None:
    calibration = simulator.calibration_for(plan.backend.family, device.compute_capability)
    if device.platform != "cpu":
        return simulator.simulate(plan.problem, plan.tiles, plan.pass_, calibration=calibration).seconds
    backend = backends.of(plan.backend)
    rate = _PLAIN_RATE if backend.is_slow_fallback else _KERNEL_RATE
    return flops(plan.problem, plan.pass_) / (rate * _processors())


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _seconds_of_runs(every: Sequence[Options], device: Device) -> list[float] | None:
    """Estimated seconds of a run of each; ``None`` where that is not known of all, and none where one cannot run."""
    try:
        times = [seconds_of_run(options, device) for options in every]
    except ValueError:
        return []  # which is said where it fails
    known = [each for each in times if each is not None]
    return known if len(known) == len(times) else None


def say_of_measurement(every: Sequence[Options], device: Device) -> None:
    """Say how long it takes to measure these in turns, where that is worth saying."""
    runs = every[0].warmup_steps + every[0].iterations
    times = _seconds_of_runs(every, device) or []
    if runs * sum(times) >= _WORTH_SAYING:
        tell(
            f"{runs} runs of about {' and '.join(map(format_duration, times))} take about "
            f"{format_duration(runs * sum(times))} on {device}; --iterations and --warmup-steps choose how many"
        )


def say_of_search(options: Options, device: Device, count: int) -> None:
    """Say how long a search takes at most, if it measures as many configurations of each pass."""
    every = [dataclasses.replace(options, backprop=pass_ == "backward") for pass_ in passes(options)]
    times = _seconds_of_runs(every, device)
    if times is None:
        tell("searching; how long that takes on such a device is not known")
    elif times:
        seconds = sum(each * count + _SEARCH_OVERHEAD for each in times)
        seconds += times[-1] * (options.warmup_steps + options.iterations)
        tell(
            f"search and measurement take up to about {format_duration(seconds)} on {device}, with runs of about "
            f"{' and '.join(map(format_duration, times))}; Ctrl-C ends the search with the best so far"
        )


def format_duration(seconds: float) -> str:
    """``0.2 s``, ``40 s``, ``6 min`` or ``2.5 h``: with the digits that an estimate has."""
    if seconds < 10:
        return f"{max(seconds, 0.1):.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
