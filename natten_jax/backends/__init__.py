"""The registry of backends, and one folder or file for each family of them.

- ``base``: what a backend states, and the functions that run a plan; ``ffi`` for those with native kernels.
- ``hopper``, ``cutlass``, ``cpu``, ``flex``: a family each; ``pallas``: the families ``tpu`` and ``blackwell``.
- ``select``: which backend runs a pass, with which tiles: the only place where that is decided. Also which performance
  arguments a backend ignores.

Whoever asks for a family by its facts finds it here, and needs no word of its own for it. Imports
:mod:`natten_jax.native`, :mod:`natten_jax.cost_model` and what lies below.
"""

from __future__ import annotations

import difflib
import itertools
import re
from typing import Any

from natten_jax.arguments.static import shown
from natten_jax.backends.base import Backend
from natten_jax.backends.cpu import CpuBackend
from natten_jax.backends.cutlass import CutlassBackend
from natten_jax.backends.flex.backend import FlexBackend
from natten_jax.backends.hopper import HopperBackend
from natten_jax.backends.pallas.blackwell import BlackwellBackend
from natten_jax.backends.pallas.tpu import TpuBackend
from natten_jax.plan.plan import BackendId
from natten_jax.problem import OPERATORS, Operator

_registered: list[Backend] = [
    HopperBackend(),
    BlackwellBackend(),
    CutlassBackend(),
    CpuBackend(),
    TpuBackend(),
    FlexBackend(),
]


def registered() -> tuple[Backend, ...]:
    """All backends in order of preference."""
    return tuple(_registered)


def register(backend: Backend) -> None:
    """Make a backend known to operators, configuration queries, profiler and doctor.

    Without a name in the call it is chosen where none of those before it can run a problem: last, but for the pure JAX
    one that runs everything.

    Raises:
        ValueError: There is one of its family already.
    """
    if backend.family in (each.family for each in _registered):
        raise ValueError(f"backend family {backend.family!r} is registered already")
    _registered.insert(len(_registered) - 1, backend)


def ids(operator: Operator | None = None) -> tuple[BackendId, ...]:
    """Names of all backends of an operator, or of both."""
    operators = OPERATORS if operator is None else (operator,)
    return tuple(BackendId(backend.family, each) for each in operators for backend in _registered)


def names(operator: Operator | None = None) -> tuple[str, ...]:
    """The same, as users write them: ``cpu-fna``, ``flex-fmha``, ..."""
    return tuple(map(str, ids(operator)))


def find(name: str | BackendId, operator: Operator) -> Backend:
    """The backend called ``name``.

    Raises:
        ValueError: No backend of this operator has that name.
    """
    if isinstance(name, (str, BackendId)):
        for backend in _registered:
            if str(name) == str(BackendId(backend.family, operator)):
                return backend
    raise ValueError(_unknown(name, operator))


def of(id_: BackendId) -> Backend:
    """The backend of a plan, or another one that is known to be registered."""
    (found,) = [backend for backend in _registered if backend.family == id_.family]
    return found


def counterpart(name: str | None) -> str | None:
    """The FMHA backend of the family that an FNA backend's name belongs to."""
    return None if name is None else str(BackendId(find(name, "fna").family, "fmha"))


def export_targets() -> tuple[str, ...]:
    """Every custom call that some backend makes."""
    by_pass = [targets for backend in _registered for targets in backend.capabilities.targets.values()]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(by_pass)))


#: Names of attention implementations in other libraries and in the profiler.
_OF_JAX = "an implementation of attention in JAX, which the profiler measures beside these"
_OF_PYTORCH = "an implementation of attention in PyTorch"
_OTHERS = {
    **dict.fromkeys(("cudnn", "xla", "pallas", "triton", "mosaic"), _OF_JAX),
    **dict.fromkeys(("xformers", "fav2", "fa2", "fa3", "flash", "flash-attention", "sdpa", "eager"), _OF_PYTORCH),
}

_LONGEST = 64  # of a name that is looked at

_WHAT = {"fna": "neighborhood attention", "fmha": "attention"}


def _unknown(name: Any, operator: Operator) -> str:
    """The message for a name that no backend of the operator has."""
    families = [backend.family for backend in _registered]
    choices = f"hoose None or one of {', '.join(str(BackendId(family, operator)) for family in families)}"
    family, of = _parts(name) if isinstance(name, str) else ("", None)
    if family in _OTHERS:
        return f"backend={shown(name)} is unknown: {family} is {_OTHERS[family]}; c{choices}"
    close = difflib.get_close_matches(family, families, 1, cutoff=0.7)
    if not close:
        return f"backend={shown(name)} is unknown; c{choices}"
    is_other = of not in (None, operator) and name == str(BackendId(close[0], of))
    problem = f"is a backend of {_WHAT[of]}, and this is {_WHAT[operator]}" if of and is_other else "is unknown"
    return f"backend={shown(name)} {problem}: did you mean {str(BackendId(close[0], operator))!r}? C{choices}"


def _parts(name: str) -> tuple[str, Operator | None]:
    """Family and operator of a name in any case, with any separators."""
    written = re.sub(r"[\s_]+", "-", name[:_LONGEST].strip().lower())
    for operator in OPERATORS:
        if written.endswith(f"-{operator}"):
            return written.removesuffix(f"-{operator}"), operator
    return written, None
