"""Which device and which run of a program an event belongs to, and which share of the time.

Every device of a program is looked at by itself: they all run the same steps, at the same time. CPU events carry the
number of the run that they belong to. GPU events do not: there the events, in order of time, are cut into as many equal
parts as there were runs, and each part must consist of the same kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from natten_jax.profiler.traces.events import Event, Interval
from natten_jax.profiler.traces.program import Program


def grouped(intervals: Iterable[Interval], key: Callable[[Interval], Any]) -> dict[Any, list[Interval]]:
    """The intervals by a key, in order of its first appearance."""
    groups: dict[Any, list[Interval]] = collections.defaultdict(list)
    for interval in intervals:
        groups[key(interval)].append(interval)
    return groups


def by_device(intervals: Iterable[Interval]) -> dict[int, list[Interval]]:
    """The intervals of each device, by its number."""
    return dict(sorted(grouped(intervals, lambda interval: interval.device).items()))


def busiest(devices: Mapping[int, Sequence[Sequence[Event]]]) -> int:
    """The number of the device that was busy longest: by the median of its iterations."""

    def time_of(device: int) -> float:
        return statistics.median(sum(event.duration for event in events) for events in devices[device])

    return max(devices, key=time_of)


def split(intervals: Iterable[Interval], iterations: int) -> list[list[Interval]] | None:
    """The intervals of each iteration of one device in order of time; ``None`` where that cannot be told."""
    ordered = sorted(intervals, key=lambda interval: interval.event.start)
    runs = grouped(ordered, lambda interval: interval.run)
    if None not in runs:
        return list(runs.values()) if len(runs) == iterations else None
    if len(ordered) % iterations:
        return None
    size = len(ordered) // iterations
    parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    kernels = [collections.Counter(interval.event.symbol for interval in part) for part in parts]
    return parts if all(kernel == kernels[0] for kernel in kernels) else None


def exclusive(events: Sequence[Event], program: Program) -> list[Event]:
    """The events with durations that add up to the time in which anything ran.

    Steps of a CPU program overlap: loops and calls contain other steps, and independent steps run side by side on
    the same cores. At every moment the time goes, in equal parts, to the steps that are running; a loop or call
    gets only what none of its steps accounts for.
    """
    marks = sorted(
        (time_, is_start, i)
        for i, event in enumerate(events)
        if event.duration > 0
        for time_, is_start in ((event.start, True), (event.start + event.duration, False))
    )
    is_container = [program.is_container(event.instruction) for event in events]
    durations = [0.0] * len(events)
    running: dict[int, None] = {}  # in order of their starts
    previous = marks[0][0] if marks else 0.0
    for now, is_start, i in marks:
        if now > previous and running:
            steps = [j for j in running if not is_container[j]] or [next(reversed(running))]
            for j in steps:
                durations[j] += (now - previous) / len(steps)
        previous = now
        if is_start:
            running[i] = None
        else:
            del running[i]
    return [dataclasses.replace(event, duration=time_) for event, time_ in zip(events, durations, strict=True)]
