"""Rows of a trace file."""

from __future__ import annotations

from pathlib import Path

from natten_jax.profiler import Row
from natten_jax.profiler.trace import TracedProgram, hosts_of


def programs_of(path: Path, *, with_memory: bool = False) -> dict[str, TracedProgram]:
    """Return the traced programs, by name, of the host with the most device time."""
    return next(iter(hosts_of(path, with_memory=with_memory).values()), {})


def rows_by_module(path: Path, *, with_memory: bool = False) -> dict[str, tuple[Row, ...]]:
    """Return the rows of each program in a trace, by the program's name."""
    return {name: each.rows for name, each in programs_of(path, with_memory=with_memory).items()}
