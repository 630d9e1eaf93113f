"""Configurations that ``python -m natten_jax.profiler --optimize --json PATH`` found, as arguments of the operators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_TILES = ("q_tile_shape", "kv_tile_shape", "backward_q_tile_shape", "backward_kv_tile_shape")
_ARGUMENTS = {"attention_kwargs", "backend", "kernel_schedule", "run_persistent_kernel", *_TILES}
_KEY = "best_configuration"


def load_tuned(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The best configuration in a result file, as keyword arguments.

    Example:
        ``na3d(query, key, value, kernel_size=(18, 24, 24), **natten_jax.load_tuned("tuned.json"))``. The modules in
        ``natten_jax.flax_modules`` take them, too.

    Args:
        path: File that the profiler wrote with ``--optimize --json``.

    Returns:
        Performance arguments of ``na1d``, ``na2d`` or ``na3d``, whichever the file is about.

    Raises:
        ValueError: The file is no result of ``--optimize``.
        OSError: It cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"path={os.fspath(path)!r} is no JSON: {error}") from None
    best = found.get(_KEY) if isinstance(found, dict) else None
    if not isinstance(best, dict):
        raise ValueError(
            f"path={os.fspath(path)!r} holds no tuned configuration: write one with "
            "python -m natten_jax.profiler ... --optimize --json PATH"
        )
    unknown = sorted(best.keys() - _ARGUMENTS)
    if unknown:
        raise ValueError(f"path={os.fspath(path)!r} has unknown arguments {', '.join(unknown)}")
    return {name: tuple(value) if name in _TILES else value for name, value in best.items() if value is not None}
