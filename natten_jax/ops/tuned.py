"""Configurations that ``python -m natten_jax.profiler --optimize --json PATH`` found, as arguments of the operators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from natten_jax import backends
from natten_jax.arguments.static import shown
from natten_jax.ops.attention_kwargs import checked_attention_kwargs
from natten_jax.performance import ATTENTION_NAMES, PASSES, performance_of, tile_names

_TILES = tuple(name for pass_ in PASSES for name in tile_names(pass_))
_ARGUMENTS = {"attention_kwargs", "backend", *ATTENTION_NAMES.values()}
_KEY = "best_configuration"


def load_tuned(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The best configuration in a result file, as keyword arguments.

    Example:
        The modules in ``natten_jax.flax_modules`` take them, too.

        >>> import json, pathlib, tempfile
        >>> import natten_jax
        >>> path = pathlib.Path(tempfile.mkdtemp(), "tuned.json")  # the profiler writes it
        >>> tiles = {"q_tile_shape": [2, 8, 8], "kv_tile_shape": [2, 8, 8]}
        >>> _ = path.write_text(json.dumps({"best_configuration": tiles}))
        >>> natten_jax.load_tuned(path)
        {'q_tile_shape': (2, 8, 8), 'kv_tile_shape': (2, 8, 8)}

    Args:
        path: File that the profiler wrote with ``--optimize --json``.

    Returns:
        Performance arguments of ``na1d``, ``na2d`` or ``na3d``, whichever the file is about.

    Raises:
        ValueError: The file is no result of ``--optimize``, or a field of it is malformed.
        TypeError: ``path`` is none.
        OSError: The file cannot be read.
    """
    best = _best_configuration(path)
    where = f"path={os.fspath(path)!r}"
    unknown = sorted(best.keys() - _ARGUMENTS)
    if unknown:
        raise ValueError(f"{where} has unknown arguments {', '.join(unknown)} ({_KEY}.{unknown[0]})")
    arguments = {name: value for name, value in best.items() if value is not None}
    try:
        _check(arguments)
    except (TypeError, ValueError) as error:  # of the field that its message starts with
        raise ValueError(f"{where}: {_KEY}.{error}") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


def _best_configuration(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object with the configuration."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, got {shown(path)}")
    where = os.fspath(path)
    if "\0" in where:
        raise ValueError(f"path must hold no null character, got {where!r}")
    content = Path(path).read_bytes()
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"path={where!r} is no JSON of this package: it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or an integer without an end
        raise ValueError(f"path={where!r} is no JSON: {error}") from None
    best = found.get(_KEY) if isinstance(found, dict) else None
    if not isinstance(best, dict):
        has = f"its {_KEY} is {shown(best)}" if isinstance(found, dict) and _KEY in found else f"it has no {_KEY}"
        raise ValueError(
            f"path={where!r} holds no tuned configuration ({has}): write one with "
            "python -m natten_jax.profiler ... --optimize --json PATH"
        )
    return best


def _check(arguments: dict[str, Any]) -> None:
    """Check everything that does not depend on the problem; messages start with the argument's name."""
    for name in _TILES:
        if name in arguments and not (isinstance(arguments[name], list) and 1 <= len(arguments[name]) <= 3):
            raise TypeError(f"{name} must be a list of 1 to 3 ints, got {shown(arguments[name])}")
    rank = next((len(arguments[name]) for name in _TILES if name in arguments), 1)
    others = {"backend", "attention_kwargs"}
    performance = performance_of(rank, **{name: value for name, value in arguments.items() if name not in others})
    if "backend" in arguments:
        backends.find(arguments["backend"], "fna")
    own = arguments.get("attention_kwargs")
    checked_attention_kwargs(own, performance.flattened())
    for name in own or {}:
        if name not in (*ATTENTION_NAMES, "backend"):  # what a call says of its result was not tuned
            raise TypeError(f"attention_kwargs has {shown(name)}, which is no performance argument")
