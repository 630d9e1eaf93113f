"""An attention call as it was asked for, before a backend is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from natten_jax.arguments.static import planned_batch
from natten_jax.performance import Pass, Performance
from natten_jax.problem import Problem


class ConfigurationTable(Protocol):
    """A :class:`natten_jax.autotuning.tables.TunedTable`, which imports this module."""

    @property
    def device(self) -> str:
        """Kind of the device."""

    def find(self, problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> Any:
        """Return the measured pass of a problem, or ``None``."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One attention call as it was asked for.

    Attributes:
        problem: What to compute.
        performance: How, as far as the caller said.
        backend: The name of the backend that was asked for; ``None`` leaves it open.
        precision: ``jax.default_matmul_precision`` where the call stands.
        token_axes: The manual mesh axes that each token dimension is split over; nothing where none is.
        parts: Into how many parts each token dimension is split, one of which a device runs at its place in the layout;
            nothing where none is.
        tuned: The table of configurations that is in force where the call stands; ``None`` is the one that comes with
            the package.
    """

    problem: Problem
    performance: Performance = dataclasses.field(default_factory=Performance)
    backend: str | None = None
    precision: str | None = None
    token_axes: tuple[tuple[str, ...], ...] = ()
    parts: tuple[int, ...] = ()
    tuned: ConfigurationTable | None = None

    def of_part(self, batch: int, heads: int, heads_kv: int) -> Request:
        """The request for what one device has of the batch, of query heads and of key/value heads."""
        problem = dataclasses.replace(self.problem, batch=planned_batch(batch), heads=heads, heads_kv=heads_kv)
        return self if problem == self.problem else dataclasses.replace(self, problem=problem)
