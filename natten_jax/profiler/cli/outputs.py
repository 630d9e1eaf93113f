"""Whether results can be written where a command line wants them: asked before the work that they cost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def file_problem(path: Path) -> str | None:
    """Why no file can be written to a path; ``None`` where one can.

    Nothing is left behind, and what a file holds stays as it is. Pipes and devices are not opened.
    """
    try:
        if path.is_dir():
            return f"{str(path)!r} is a folder, not a file"
        if not path.parent.is_dir():
            return f"the folder {str(path.parent)!r} does not exist"
        if path.is_file():
            path.open("r+b").close()
        elif not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            path.unlink()
    except (OSError, ValueError) as error:
        return _cannot_write(path, error)
    return None


def folder_problem(path: Path) -> str | None:
    """Why a folder cannot be made or filled; ``None`` where it can. Nothing is left behind."""
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not existing.is_dir():
            return f"{str(existing)!r} is a file, not a folder"
        tempfile.TemporaryDirectory(dir=existing).cleanup()
    except (OSError, ValueError) as error:
        return _cannot_write(path, error)
    return None


def chart_problem(path: Path) -> str | None:
    """Why no chart can be drawn into a file of this name; ``None`` where one can."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return "it needs matplotlib: pip install matplotlib"
    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.lstrip(".").lower()
    if suffix and suffix not in formats:
        return f"{str(path)!r} is of no known format; choose one of {', '.join(sorted(formats))}"
    return None


def shared_file(paths: Mapping[str, Path | None]) -> tuple[str, str] | None:
    """Two of the flags that name the same file, the second of which would replace what the first one wrote."""
    owners: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None or (path.exists() and not path.is_file()):
            continue  # a device such as /dev/stdout takes what it gets
        owner = owners.setdefault(os.path.realpath(path), flag)
        if owner != flag:
            return owner, flag
    return None


def _cannot_write(path: Path, error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else error
    return f"{str(path)!r} cannot be written: {reason}"
