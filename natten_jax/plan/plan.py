"""The request of a call, and the plan of a pass: resolved once, and read by all code that runs or predicts it.

A plan is stored as JSON in the metadata of the compiled program (:meth:`Plan.payload`), from which the profiler reads
it. All operations of a pass carry a short name of its plan. Only one of them, which no optimisation removes, carries
the plan itself, because a plan has hundreds of characters and a pass in plain JAX hundreds of operations.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from jax.experimental.xla_metadata import set_xla_metadata

from natten_jax.arguments.static import hashable, planned_batch
from natten_jax.performance import KernelSchedule, Pass, Performance, TilePair, tile_names
from natten_jax.problem import OPERATORS, Operator, Problem
from natten_jax.windows import Axis


class ConfigurationTable(Protocol):
    """Interface of :class:`natten_jax.autotuning.tables.TunedTable`, which imports this module."""

    @property
    def device(self) -> str:
        """Kind of the device."""

    def find(self, problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> Any:
        """Return the measured pass of a problem, or ``None``."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The request of an attention call.

    Attributes:
        problem: Problem to compute.
        performance: Performance arguments that the caller gave.
        backend: Name of the requested backend; ``None`` chooses a backend automatically.
        precision: ``jax.default_matmul_precision`` at the call.
        token_axes: Manual mesh axes that each token dimension is split over; empty if none is split.
        parts: Number of parts that each token dimension is split into; a device runs one part, at its position in the
            layout. Empty if none is split.
        tuned: Table of configurations that is active at the call; ``None`` is the package's table.
    """

    problem: Problem
    performance: Performance = dataclasses.field(default_factory=Performance)
    backend: str | None = None
    precision: str | None = None
    token_axes: tuple[tuple[str, ...], ...] = ()
    parts: tuple[int, ...] = ()
    tuned: ConfigurationTable | None = None

    def for_part(self, batch: int, heads: int, heads_kv: int) -> Request:
        """Return the request for one device's share of the batch, of query heads and of key/value heads."""
        problem = dataclasses.replace(self.problem, batch=planned_batch(batch), heads=heads, heads_kv=heads_kv)
        return self if problem == self.problem else dataclasses.replace(self, problem=problem)


class BackendId(NamedTuple):
    """A family of backends and the operator it runs; users write ``<family>-<operator>``."""

    family: str
    operator: Operator

    def __str__(self) -> str:
        return f"{self.family}-{self.operator}"

    @classmethod
    def parse(cls, name: str) -> BackendId:
        """Parse a name such as ``"cpu-fna"``, even of an unknown backend.

        Raises:
            ValueError: The name does not end with an operator.
        """
        for operator in OPERATORS:
            if name.endswith(f"-{operator}"):
                return cls(name.removesuffix(f"-{operator}"), operator)
        raise ValueError(f"{name!r} is not a backend name: backend names end with {' or '.join(OPERATORS)}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pass of a problem, with backend, tiles and schedule chosen.

    Attributes:
        problem: Problem to compute, with heads as wide as the backend's kernels require.
        pass_: The pass.
        backend: Backend of the pass.
        platform: Platform of the devices, as in :class:`natten_jax.plan.devices.Device`.
        performance: Performance arguments, with the tiles of this pass and, if the backend has schedules, the schedule.
        precision: Precision of products, from ``jax.default_matmul_precision`` at the call. All passes use it, even if
            they are traced elsewhere, because their logits must be equal.
        kernels: The kind of kernels that the tiles select, if the backend has several
            (:meth:`natten_jax.backends.base.Backend.kernels`); ``None`` otherwise.
    """

    problem: Problem
    pass_: Pass
    backend: BackendId
    platform: str
    performance: Performance
    precision: str | None = None
    kernels: str | None = None

    @property
    def tiles(self) -> TilePair:
        asked = self.performance
        if self.pass_ == "forward":
            query, key_value = asked.q_tile_shape, asked.kv_tile_shape
        else:
            query, key_value = asked.backward_q_tile_shape, asked.backward_kv_tile_shape
        assert query is not None and key_value is not None, "a plan has tiles"
        return query, key_value

    @property
    def kernel_schedule(self) -> KernelSchedule | None:
        """The schedule, if the backend has several."""
        name = self.performance.kernel_schedule
        return None if name is None else KernelSchedule(name)

    def payload(self) -> str:
        """Return the plan as one line of JSON; :meth:`from_payload` reads it."""
        return self._payload

    @functools.cached_property
    def _payload(self) -> str:
        problem = {name: getattr(self.problem, name) for name in _PROBLEM_FIELDS}
        problem["axes"] = [list(axis.facts) for axis in self.problem.axes]
        given, defaults = [dataclasses.asdict(each) for each in (self.performance, Performance())]
        performance = {name: value for name, value in given.items() if value != defaults[name]}
        content = {
            "description": self.problem.describe(),
            "pass": self.pass_,
            "backend": str(self.backend),
            "platform": self.platform,
            "problem": problem,
            "performance": performance,
            **{name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None},
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_payload(cls, text: str) -> Plan:
        """Parse the plan in a program's metadata.

        Raises:
            ValueError: The text is not a plan of this version of the package.
        """
        try:
            content = json.loads(text)
            facts: dict[str, Any] = dict(content["problem"])
            facts["axes"] = tuple(Axis(*axis) for axis in facts["axes"])
            performance = {name: hashable(value) for name, value in content["performance"].items()}
            asked, backend = Performance(**performance), BackendId.parse(content["backend"])
            optional = map(content.get, _OPTIONAL)
            return cls(Problem(**facts), content["pass"], backend, content["platform"], asked, *optional)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"no plan of natten_jax: {error}") from None


#: Fields of a plan that a payload may omit.
_OPTIONAL = "precision", "kernels"
_PROBLEM_FIELDS = [field.name for field in dataclasses.fields(Problem)]


def tile_arguments(operator: Operator, pass_: Pass) -> tuple[str, str]:
    """Return the names of the operator's tile arguments for a pass."""
    suffix = "size" if operator == "fmha" else "shape"
    query, key_value = (name.replace("shape", suffix) for name in tile_names(pass_))
    return query, key_value


#: Attribute names of operations: for the short name of their plan, and for the plan from :meth:`.Plan.payload`.
NAME_ATTRIBUTE, PLAN_ATTRIBUTE = "natten_jax", "natten_jax_plan"

_payload: contextvars.ContextVar[str | None] = contextvars.ContextVar("natten_jax_payload", default=None)


def name_of(payload: str) -> str:
    """Return the short name of a plan, a hash of its payload, which is equal in every process."""
    return hashlib.sha256(payload.encode()).hexdigest()[:12]


@contextlib.contextmanager
def annotate_with_plan(plan: Plan, *, on_all: bool = False) -> Iterator[None]:
    """Mark the operations traced inside the ``with`` block as operations of a pass.

    Args:
        plan: The plan of the pass.
        on_all: Attach the plan to every operation, because no operation is traced in :func:`carrying_plan`.
    """
    payload = plan.payload()
    token = _payload.set(payload)
    try:
        with set_xla_metadata(**{NAME_ATTRIBUTE: name_of(payload)}, **({PLAN_ATTRIBUTE: payload} if on_all else {})):
            yield
    finally:
        _payload.reset(token)


def carrying_plan() -> contextlib.AbstractContextManager[None]:
    """Attach the plan of the current pass to the operation traced inside; XLA must not remove this operation."""
    payload = _payload.get()
    return contextlib.nullcontext() if payload is None else set_xla_metadata(**{PLAN_ATTRIBUTE: payload})
