"""The registry of backends, and one folder or file for each family of them.

- ``base``: what a backend states, and the functions that run a plan; ``ffi`` for those with native kernels.
- ``hopper``, ``cutlass``, ``cpu``, ``flex``: a family each; ``pallas``: the families ``tpu`` and ``blackwell``.
- ``select``: which backend runs a pass, with which tiles: the only place where that is decided. Also which performance
  arguments a backend ignores.
- ``names``: what is said of names that no backend has.

Whoever asks for a family by its facts finds it here, and needs no word of its own for it. Imports
:mod:`natten_jax.native`, :mod:`natten_jax.cost_model` and what lies below.
"""

from __future__ import annotations

from natten_jax.backends.base import Backend
from natten_jax.backends.cpu import CpuBackend
from natten_jax.backends.cutlass import CutlassBackend
from natten_jax.backends.flex.backend import FlexBackend
from natten_jax.backends.hopper import HopperBackend
from natten_jax.backends.names import unknown
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
        wanted = str(name)
        for backend in _registered:
            if wanted == str(BackendId(backend.family, operator)):
                return backend
    raise ValueError(unknown(name, operator, registered()))


def of(id_: BackendId) -> Backend:
    """The backend of a plan, or another one that is known to be registered."""
    (found,) = [backend for backend in _registered if backend.family == id_.family]
    return found


def counterpart(name: str | None) -> str | None:
    """The FMHA backend of the family that an FNA backend's name belongs to."""
    return None if name is None else str(BackendId(find(name, "fna").family, "fmha"))


def export_targets() -> tuple[str, ...]:
    """Every custom call that some backend makes."""
    every = (
        target for backend in _registered for targets in backend.capabilities.targets.values() for target in targets
    )
    return tuple(dict.fromkeys(every))
