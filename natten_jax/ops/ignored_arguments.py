"""Warns of performance arguments that change nothing where a call runs."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Collection

import jax

from natten_jax import backends
from natten_jax.arguments.static import shown
from natten_jax.backends.base import Backend
from natten_jax.backends.heeded import CHOICES, ignored
from natten_jax.backends.select import resolve
from natten_jax.performance import PASSES, Performance
from natten_jax.plan.devices import Device, device_of, lowering_targets
from natten_jax.plan.request import Request

#: The packages whose frames stand between a user's line and the operators.
_BETWEEN = ("natten_jax", "jax", "flax")
_DEFAULTS = Performance()


class IgnoredArgumentWarning(UserWarning):
    """A performance argument was given that changes nothing on the backend that runs here."""


def warn_of_ignored(request: Request, query: jax.Array, of_attention: Collection[str] = ()) -> None:
    """Warn of what a request asks for that no pass heeds, on the device where it runs.

    The warning is of the line that calls this package, jax or flax: Python shows it once for each such line.

    Args:
        request: An attention call.
        query: Its query, which may say on which device that is. A program that is being traced is for the default one.
        of_attention: The names of the arguments that ``attention_kwargs`` gave.
    """
    if not _asks(request.performance):
        return
    for name, problem in _ignored(request, device_of(query), backends.registered()):
        prefix = "attention_kwargs: " if name in of_attention else ""
        warnings.warn(f"{prefix}{problem}", IgnoredArgumentWarning, stacklevel=_level_of_caller())


@functools.lru_cache(maxsize=4096)
def _asks(performance: Performance) -> bool:
    return any(getattr(performance, name) != getattr(_DEFAULTS, name) for name in CHOICES)


@functools.lru_cache(maxsize=4096)
def _ignored(request: Request, device: Device, registered: tuple[Backend, ...]) -> tuple[tuple[str, str], ...]:
    """Names of arguments and sentences, for the device or else the first other one that can run the request."""
    for each in dict.fromkeys((device, *lowering_targets().values())):
        try:
            plans = [resolve(request, each, pass_) for pass_ in PASSES]
        except ValueError:
            continue
        asked = request.performance
        reasons = {name: why for plan in plans for name, why in ignored(plan, asked).items()}
        return tuple(
            (name, f"{name}={_value(asked, name)} changes nothing on {each}: {why}") for name, why in reasons.items()
        )
    return ()  # it is refused later


def _value(asked: Performance, name: str) -> str:
    value = getattr(asked, name)
    return shown(value[0] if isinstance(value, tuple) and len(value) == 1 else value)


def _level_of_caller() -> int:
    """How many frames above the function that calls this one a user's line stands."""
    level = 1
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    return level + 1
