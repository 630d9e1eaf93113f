"""The registry of backends, and one folder or file per backend family.

- ``base``: base classes of backends, with their capabilities; ``ffi``: base class of backends with native kernels.
- ``hopper``, ``cutlass``, ``cpu``, ``flex``: one backend family each; ``pallas``: the families ``tpu`` and
  ``blackwell``.
- ``select``: the only module that selects the backend and the tiles of a pass. It also reports the performance
  arguments that the selected backend ignores.

Code outside this package looks up backends by their capabilities, not by family name. This package imports
:mod:`natten_jax.native`, :mod:`natten_jax.cost_model` and modules on lower import levels.
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

#: Backend classes in order of preference.
_FAMILIES = HopperBackend, BlackwellBackend, CutlassBackend, CpuBackend, TpuBackend, FlexBackend
_registered: list[Backend] = [family() for family in _FAMILIES]


def registered() -> tuple[Backend, ...]:
    """Return all backends in order of preference."""
    return tuple(_registered)


def register(backend: Backend) -> None:
    """Register a backend. The operators, configuration queries, profiler and doctor then include it.

    The backend becomes the second-to-last in order of preference. The last one is the pure JAX backend, which supports
    every problem. A call without the ``backend`` argument uses the new backend in two cases:

    - No backend before it can run the problem.
    - Its predicted time is the smallest, and clearly smaller than that of the first backend that can run the problem.

    Raises:
        ValueError: A backend of the same family is already registered.
    """
    if backend.family in (each.family for each in _registered):
        raise ValueError(f"backend family {backend.family!r} is registered already")
    _registered.insert(len(_registered) - 1, backend)


def ids(operator: Operator | None = None) -> tuple[BackendId, ...]:
    """Return the identifiers of all backends of an operator; ``None`` stands for both operators."""
    operators = OPERATORS if operator is None else (operator,)
    return tuple(BackendId(backend.family, each) for each in operators for backend in _registered)


def names(operator: Operator | None = None) -> tuple[str, ...]:
    """Return the names of all backends, such as ``cpu-fna``, that the ``backend`` argument accepts."""
    return tuple(map(str, ids(operator)))


def find(name: str | BackendId, operator: Operator) -> Backend:
    """Return the backend of an operator by name.

    Raises:
        ValueError: No backend of this operator has that name.
    """
    if isinstance(name, (str, BackendId)):
        for backend in _registered:
            if str(name) == str(BackendId(backend.family, operator)):
                return backend
    raise ValueError(_unknown(name, operator))


def by_id(id_: BackendId) -> Backend:
    """Return a registered backend by its identifier, such as ``Plan.backend``."""
    (match,) = [backend for backend in _registered if backend.family == id_.family]
    return match


def counterpart(name: str | None) -> str | None:
    """Return the name of the FMHA backend in the same family as an FNA backend; return ``None`` for ``None``."""
    return None if name is None else str(BackendId(find(name, "fna").family, "fmha"))


def export_targets() -> tuple[str, ...]:
    """Return the custom call targets of all backends."""
    by_pass = [targets for backend in _registered for targets in backend.capabilities.targets.values()]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(by_pass)))


#: Names of attention implementations in other libraries. If a call requests such a name as its backend, the error
#: message contains the description of the implementation.
_JAX_IMPLEMENTATION = "an implementation of attention in JAX, which the profiler can measure for comparison"
_PYTORCH_IMPLEMENTATION = "an implementation of attention in PyTorch"
_OTHERS = {
    **dict.fromkeys(("cudnn", "xla", "pallas", "triton", "mosaic"), _JAX_IMPLEMENTATION),
    **dict.fromkeys(
        ("xformers", "fav2", "fa2", "fa3", "flash", "flash-attention", "sdpa", "eager"), _PYTORCH_IMPLEMENTATION
    ),
}

_LONGEST = 64  # number of leading characters of a name that are compared

_WHAT = {"fna": "neighborhood attention", "fmha": "attention"}


def _unknown(name: Any, operator: Operator) -> str:
    """Return the error message for an unknown backend name."""
    families = [backend.family for backend in _registered]
    choices = f"hoose None or one of {', '.join(str(BackendId(family, operator)) for family in families)}"
    family, named = _parts(name) if isinstance(name, str) else ("", None)
    if family in _OTHERS:
        return f"backend={shown(name)} is unknown: {family} is {_OTHERS[family]}; c{choices}"
    close = difflib.get_close_matches(family, families, 1, cutoff=0.7)
    if not close:
        return f"backend={shown(name)} is unknown; c{choices}"
    is_other = named not in (None, operator) and name == str(BackendId(close[0], named))
    problem = f"is a backend of {_WHAT[named]}, and this is {_WHAT[operator]}" if named and is_other else "is unknown"
    return f"backend={shown(name)} {problem}: did you mean {str(BackendId(close[0], operator))!r}? C{choices}"


def _parts(name: str) -> tuple[str, Operator | None]:
    """Split a backend name into family and operator. Case is ignored; the separator may be ``-``, ``_`` or spaces."""
    written = re.sub(r"[\s_]+", "-", name[:_LONGEST].strip().lower())
    for operator in OPERATORS:
        if written.endswith(f"-{operator}"):
            return written.removesuffix(f"-{operator}"), operator
    return written, None
