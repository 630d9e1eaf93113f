"""What a call asks for, and how a pass of it runs: resolved once, read by everything that runs, shows or predicts it.

A plan travels as JSON in the metadata of the compiled program (:meth:`Plan.payload`), from where the profiler reads
what ran. All operations of a pass are marked with a short name of its plan; the plan itself stands on one of them that
no optimisation removes, because it has hundreds of characters and a pass in plain JAX hundreds of operations.
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

from natten_jax.arguments.static import planned_batch
from natten_jax.performance import KernelSchedule, Pass, Performance, TilePair, tile_names
from natten_jax.problem import OPERATORS, Operator, Problem
from natten_jax.windows import Axis


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


class BackendId(NamedTuple):
    """A family of backends and the operator that it runs; users write ``<family>-<operator>``."""

    family: str
    operator: Operator

    def __str__(self) -> str:
        return f"{self.family}-{self.operator}"

    @classmethod
    def parse(cls, name: str) -> BackendId:
        """What ``"cpu-fna"`` means, whether there is such a backend or not.

        Raises:
            ValueError: The name has no operator.
        """
        for operator in OPERATORS:
            if name.endswith(f"-{operator}"):
                return cls(name.removesuffix(f"-{operator}"), operator)
        raise ValueError(f"{name!r} is no backend's name: those end with {' or '.join(OPERATORS)}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pass of a problem with everything decided.

    Attributes:
        problem: What is computed, with heads as wide as the backend's kernels have them.
        pass_: The pass.
        backend: What computes it.
        platform: That of the devices that it is decided for, as :class:`natten_jax.plan.devices.Device` has it.
        performance: How. The tiles of this pass and, where the backend has schedules, the schedule are given.
        precision: That of products, as ``jax.default_matmul_precision`` where the call stands. It holds for all passes,
            wherever they are traced: logits have to be the same in each.
        kernels: The backend's kernels that the tiles select, where it has several kinds
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
        """Query and key/value tile."""
        asked = self.performance
        if self.pass_ == "forward":
            query, key_value = asked.q_tile_shape, asked.kv_tile_shape
        else:
            query, key_value = asked.backward_q_tile_shape, asked.backward_kv_tile_shape
        assert query is not None and key_value is not None, "a plan has tiles"
        return query, key_value

    @property
    def kernel_schedule(self) -> KernelSchedule | None:
        """The schedule, where the backend has several."""
        name = self.performance.kernel_schedule
        return None if name is None else KernelSchedule(name)

    def payload(self) -> str:
        """Everything as JSON, in one line; :meth:`of_payload` reads it."""
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
    def of_payload(cls, text: str) -> Plan:
        """The plan that a program's metadata describe.

        Raises:
            ValueError: The text is no plan of this version of the package.
        """
        try:
            content = json.loads(text)
            facts: dict[str, Any] = dict(content["problem"])
            facts["axes"] = tuple(Axis(*axis) for axis in facts["axes"])
            performance: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in content["performance"].items()
            }
            asked, backend = Performance(**performance), BackendId.parse(content["backend"])
            optional = map(content.get, _OPTIONAL)
            return cls(Problem(**facts), content["pass"], backend, content["platform"], asked, *optional)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"no plan of natten_jax: {error}") from None


#: Fields of a plan that payloads may lack.
_OPTIONAL = "precision", "kernels"
_PROBLEM_FIELDS = [field.name for field in dataclasses.fields(Problem)]


def tile_arguments(operator: Operator, pass_: Pass) -> tuple[str, str]:
    """What the operator calls its tile arguments of a pass."""
    suffix = "size" if operator == "fmha" else "shape"
    query, key_value = (name.replace("shape", suffix) for name in tile_names(pass_))
    return query, key_value


#: Attributes of operations: the name of their plan, and the plan as :meth:`.Plan.payload` writes it.
NAME_ATTRIBUTE, PLAN_ATTRIBUTE = "natten_jax", "natten_jax_plan"

_payload: contextvars.ContextVar[str | None] = contextvars.ContextVar("natten_jax_payload", default=None)


def name_of(payload: str) -> str:
    """Return the short name of a plan, from its payload: the same in every process."""
    return hashlib.sha256(payload.encode()).hexdigest()[:12]


@contextlib.contextmanager
def of_plan(plan: Plan, *, on_all: bool = False) -> Iterator[None]:
    """Mark the operations that are traced inside as those of a pass.

    Args:
        plan: The plan of the pass.
        on_all: Whether each of them has the plan, since none of them asks for it by :func:`carrying_plan`.
    """
    payload = plan.payload()
    token = _payload.set(payload)
    try:
        with set_xla_metadata(**{NAME_ATTRIBUTE: name_of(payload)}, **({PLAN_ATTRIBUTE: payload} if on_all else {})):
            yield
    finally:
        _payload.reset(token)


def carrying_plan() -> contextlib.AbstractContextManager[None]:
    """Put the plan of the pass that is being traced onto what is traced inside: one operation that stays as it is."""
    payload = _payload.get()
    return contextlib.nullcontext() if payload is None else set_xla_metadata(**{PLAN_ATTRIBUTE: payload})
