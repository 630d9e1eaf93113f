"""Measure how long halo exchanges take, and for how long they overlap computation; compile programs without overlap."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from natten_jax.cost_model import halos
from natten_jax.profiler.capture import Devices, Event
from natten_jax.profiler.program import Program
from natten_jax.profiler.symbols import kind_of_collective

Span = tuple[float, float]


@contextlib.contextmanager
def halos_first() -> Iterator[None]:
    """Enter a context in which programs are compiled without overlap: all halos arrive before any computation."""
    decide = halos.is_overlap_faster
    halos.is_overlap_faster = lambda *_: False
    halos.profitable_overlap.cache_clear()
    try:
        yield
    finally:
        halos.is_overlap_faster = decide
        halos.profitable_overlap.cache_clear()


def exchange_milliseconds(devices: Devices, program: Program) -> dict[str, float]:
    """Return the time of halo exchanges per iteration, and the part of this time that overlaps computation.

    Both are medians over iterations, in milliseconds, on the device with the longest exchange time. The exchange time
    is the time during which at least one kernel or copy of an exchange runs. It includes waiting for other devices.
    """

    def times(events: Sequence[Event]) -> tuple[float, float]:
        spans: tuple[list[Span], list[Span]] = ([], [])
        for event in events:
            is_exchange = kind_of_collective(event.symbol, program.instruction(event.instruction)) is not None
            spans[is_exchange].append((event.start, event.start + event.duration))
        return _length(spans[True]), _shared(*spans)

    found = [[times(events) for events in iterations] for iterations in devices.values()]
    medians = [tuple(map(statistics.median, zip(*each, strict=True))) for each in found]
    exchange, hidden = max(medians)
    return {"exchange": exchange / 1e6, "hidden": hidden / 1e6}


def timeline(devices: Devices, program: Program) -> list[dict[str, Any]]:
    """Return the kernels and copies of the first iteration; start times are milliseconds since the first event."""
    started = min(event.start for iterations in devices.values() for event in iterations[0])
    return [
        {
            "device": device,
            "start": (event.start - started) / 1e6,
            "milliseconds": event.duration / 1e6,
            "is exchange": kind_of_collective(event.symbol, program.instruction(event.instruction)) is not None,
            "symbol": event.symbol[:80],
        }
        for device, iterations in devices.items()
        for event in iterations[0]
    ]


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in _union(spans))


def _shared(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the time that is covered both by ``spans`` and by ``others``."""
    return _length(spans) + _length(others) - _length([*spans, *others])
