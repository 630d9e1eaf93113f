"""Which performance arguments a backend heeds, and why the others change nothing: what is ignored is said.

A backend states it as facts of its class (:attr:`Backend.heeds`, :attr:`Backend.schedules`) and, where it depends on
the plan, in :meth:`Backend.unused_in`. Operators, profiler and documentation read it here. Tiles are heeded by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from natten_jax import backends
from natten_jax.backends.base import Backend
from natten_jax.performance import Pass, Performance
from natten_jax.plan.plan import BackendId, Plan


class Choice(NamedTuple):
    """What a performance argument chooses.

    Attributes:
        pass_: The pass that it is about.
        lacking: What a backend that does not heed it has not.
    """

    pass_: Pass
    lacking: str


#: By the names of the arguments.
CHOICES: Mapping[str, Choice] = MappingProxyType(
    {
        "run_persistent_kernel": Choice("forward", "no persistent tile scheduling to turn off"),
        "kernel_schedule": Choice("forward", "no kernel schedules"),
        "backward_kv_splits": Choice("backward", "no number of key/value splits to choose"),
        "backward_use_xla_reduction": Choice("backward", "no kernel for the row sums that XLA could take over"),
        "backward_deterministic": Choice("backward", "no gradients that are equal from run to run"),
        "memory_usage_preference": Choice("backward", "no scratch memory to trade for speed"),
    }
)


def heeded(backend: Backend) -> frozenset[str]:
    """The names of the performance arguments that make a difference to a backend, or whose promise it keeps."""
    return frozenset(backend.heeds) | ({"kernel_schedule"} if backend.schedules else set())


def ignored(plan: Plan, asked: Performance) -> dict[str, str]:
    """The performance arguments that change nothing where a plan runs.

    Args:
        plan: How a pass runs.
        asked: The performance arguments of the call; those that have their defaults ask for nothing.

    Returns:
        By argument, why that is: a clause that begins with the backend's name. Only arguments about the plan's pass.
    """
    return dict(_ignored(plan, asked))


def _ignored(plan: Plan, asked: Performance) -> Iterator[tuple[str, str]]:
    backend = backends.of(plan.backend)
    known, unused = heeded(backend), backend.unused_in(plan)
    for name, choice in CHOICES.items():
        if choice.pass_ != plan.pass_ or getattr(asked, name) == getattr(_DEFAULTS, name):
            continue
        if name not in known:
            yield name, f"{plan.backend} has {choice.lacking}{_others(name, plan.backend)}"
        elif name in unused:
            yield name, f"{plan.backend} {unused[name]}"


def _others(name: str, here: BackendId) -> str:
    """Which backends heed an argument, in brackets."""
    *others, last = [
        str(BackendId(backend.family, here.operator)) for backend in backends.registered() if name in heeded(backend)
    ] or [""]
    if not last:
        return ""
    return f" ({', '.join(others)} and {last} have)" if others else f" ({last} has)"


_DEFAULTS = Performance()
