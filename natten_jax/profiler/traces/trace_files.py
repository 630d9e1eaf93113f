"""Trace files: where JAX's profiler puts them, and reading them."""

from __future__ import annotations

import itertools
from pathlib import Path

from jax.profiler import ProfileData

#: Where JAX's profiler puts a folder per run, and what it calls a trace in there.
_RUNS = ("plugins", "profile")
_TRACES = "*.xplane.pb"


class CaptureError(RuntimeError):
    """The profiler's traces could not be read."""


class DamagedTrace(CaptureError, ValueError):
    """A trace file is not what JAX's profiler wrote."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the trace {str(path)!r} is truncated or corrupt: {reason}")


def trace_file(path: Path) -> Path:
    """``path``, or the newest trace in it where it is a folder that JAX's profiler wrote to, or a run's folder there.

    Raises:
        CaptureError: There is none.
    """
    if path.is_file():
        return path
    # Not anywhere below: that may be a whole file system.
    found = [*path.glob(_TRACES), *path.glob("/".join((*_RUNS, "*", _TRACES)))]
    if not found:
        raise CaptureError(
            f"there is no trace ({_TRACES}) in {str(path)!r}, nor in the folders {'/'.join(_RUNS)}/* in it"
        )
    return max(found, key=lambda each: each.stat().st_mtime)


def read(path: Path) -> ProfileData:
    """The trace in a file, or the newest one in a folder.

    Raises:
        CaptureError: There is none.
        DamagedTrace: It is truncated, or something else.
        OSError: It cannot be read.
    """
    file = trace_file(path)
    content = file.read_bytes()  # JAX opens no file whose name is not in UTF-8
    try:
        return ProfileData.from_serialized_xspace(content)
    except Exception as error:
        raise DamagedTrace(file, str(error)) from error


def keep(run: Path, folder: Path) -> None:
    """Move a run's folder to where JAX's profiler would have put it, under a name that no other run has."""
    runs = folder.joinpath(*_RUNS)
    runs.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([run.name], (f"{run.name}_{number}" for number in itertools.count(2)))
    run.rename(next(runs / name for name in names if not (runs / name).exists()))
