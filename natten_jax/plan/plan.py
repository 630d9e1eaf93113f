"""The request of an attention call, and the plan of each pass.

A plan is made once. All code that runs the pass or predicts its time reads the plan.

A plan is stored as JSON in the metadata of the compiled program (:meth:`Plan.payload`). The profiler reads it there.
All operations of a pass carry a short name of the plan. If possible, only a single operation carries the plan itself,
because a plan has hundreds of characters, and a pass in plain JAX has hundreds of operations. XLA must not remove this
operation (:func:`carrying_plan`). If there is no such operation, all operations carry the plan (``on_all``).
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
    """Interface of :class:`natten_jax.autotuning.tables.TunedTable`, whose import here would be circular."""

    @property
    def device(self) -> str:
        """Kind of device that the table was measured on, as in :attr:`natten_jax.plan.devices.Device.kind`."""

    def find(self, problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> Any:
        """Return the entry of the table for a pass of a problem, or ``None``."""


@dataclasses.dataclass(frozen=True)
class Request:
    """An attention call, before a backend is chosen.

    Attributes:
        problem: Problem to compute.
        performance: Performance arguments that the caller gave.
        backend: Name of the requested backend. ``None`` chooses a backend automatically.
        precision: ``jax.default_matmul_precision`` at the call.
        token_axes: For each token dimension, the manual mesh axes that shard it. Empty if no token dimension is
            sharded.
        parts: For each token dimension, the number of shards. A device computes one shard, whose position in the layout
            differs per device. Empty if no token dimension is sharded.
        tuned: Table of tuned configurations that is active at the call. ``None`` uses the package's own table.
    """

    problem: Problem
    performance: Performance = dataclasses.field(default_factory=Performance)
    backend: str | None = None
    precision: str | None = None
    token_axes: tuple[tuple[str, ...], ...] = ()
    parts: tuple[int, ...] = ()
    tuned: ConfigurationTable | None = None

    def for_part(self, batch: int, heads: int, heads_kv: int) -> Request:
        """Return the request for a shard with these numbers of batch entries, query heads and key/value heads."""
        problem = dataclasses.replace(self.problem, batch=planned_batch(batch), heads=heads, heads_kv=heads_kv)
        return self if problem == self.problem else dataclasses.replace(self, problem=problem)


class BackendId(NamedTuple):
    """Name of a backend: its family and its operator. Users write ``<family>-<operator>``."""

    family: str
    operator: Operator

    def __str__(self) -> str:
        return f"{self.family}-{self.operator}"

    @classmethod
    def parse(cls, name: str) -> BackendId:
        """Parse a name such as ``"cpu-fna"``. A backend with this name need not exist.

        Raises:
            ValueError: The name does not end with an operator.
        """
        for operator in OPERATORS:
            if name.endswith(f"-{operator}"):
                return cls(name.removesuffix(f"-{operator}"), operator)
        raise ValueError(f"{name!r} is not a backend name: backend names end with {' or '.join(OPERATORS)}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choice of backend, tiles and schedule for a pass of a problem.

    Attributes:
        problem: The problem that the kernels compute. It can differ from the problem of the call, for example if heads
            are padded (:meth:`natten_jax.backends.base.Backend.widened`).
        pass_: The pass.
        backend: Backend of the pass.
        platform: Platform of the devices, as in :class:`natten_jax.plan.devices.Device`.
        performance: Performance arguments, including the chosen tiles. If the backend has schedules, they also include
            the chosen schedule.
        precision: Precision of matrix products: ``jax.default_matmul_precision`` at the call. All passes of the call
            use this precision, even if they are traced under another setting, because all passes must compute equal
            logits.
        kernels: Name of the kernels that the tiles select, if the backend has several kinds of kernels. ``None`` for
            the default kernels (:meth:`natten_jax.backends.base.Backend.kernels`).
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
        performance = self.performance
        if self.pass_ == "forward":
            query, key_value = performance.q_tile_shape, performance.kv_tile_shape
        else:
            query, key_value = performance.backward_q_tile_shape, performance.backward_kv_tile_shape
        assert query is not None and key_value is not None, "a plan has tiles"
        return query, key_value

    @property
    def kernel_schedule(self) -> KernelSchedule | None:
        """The kernel schedule; ``None`` if the backend does not have schedules."""
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
        """Parse a plan from the metadata of a program.

        Raises:
            ValueError: The text is not a plan that this version of the package can read.
        """
        try:
            content = json.loads(text)
            problem: dict[str, Any] = dict(content["problem"])
            problem["axes"] = tuple(Axis(*axis) for axis in problem["axes"])
            options = {name: hashable(value) for name, value in content["performance"].items()}
            performance, backend = Performance(**options), BackendId.parse(content["backend"])
            optional = map(content.get, _OPTIONAL)
            return cls(Problem(**problem), content["pass"], backend, content["platform"], performance, *optional)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"no plan of natten_jax: {error}") from None


#: Fields of a plan that the payload omits if they are ``None``.
_OPTIONAL = "precision", "kernels"
_PROBLEM_FIELDS = [field.name for field in dataclasses.fields(Problem)]


def tile_arguments(operator: Operator, pass_: Pass) -> tuple[str, str]:
    """Return the names of the operator's tile arguments for a pass."""
    suffix = "size" if operator == "fmha" else "shape"
    query, key_value = (name.replace("shape", suffix) for name in tile_names(pass_))
    return query, key_value


#: Attributes of operations. The first contains the short name of a plan, the second the plan (:meth:`.Plan.payload`).
NAME_ATTRIBUTE, PLAN_ATTRIBUTE = "natten_jax", "natten_jax_plan"

_payload: contextvars.ContextVar[str | None] = contextvars.ContextVar("natten_jax_payload", default=None)


def name_of(payload: str) -> str:
    """Return the short name of a plan: a hash of its payload. The hash is equal in all processes."""
    return hashlib.sha256(payload.encode()).hexdigest()[:12]


@contextlib.contextmanager
def annotate_with_plan(plan: Plan, *, on_all: bool = False) -> Iterator[None]:
    """Mark the operations traced inside the ``with`` block as operations of a pass.

    Args:
        plan: The plan of the pass.
        on_all: Attach the plan to every operation. Set this if no operation of the pass is traced in a ``with``
            block of :func:`carrying_plan`.
    """
    payload = plan.payload()
    token = _payload.set(payload)
    try:
        with set_xla_metadata(**{NAME_ATTRIBUTE: name_of(payload)}, **({PLAN_ATTRIBUTE: payload} if on_all else {})):
            yield
    finally:
        _payload.reset(token)


def carrying_plan() -> contextlib.AbstractContextManager[None]:
    """Attach the current pass's plan to the operation in the ``with`` block. XLA must not remove this operation."""
    payload = _payload.get()
    return contextlib.nullcontext() if payload is None else set_xla_metadata(**{PLAN_ATTRIBUTE: payload})
