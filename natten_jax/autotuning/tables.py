"""Tables of measured configurations: the active table, the package's tables, and the lookup of a call."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jax

from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.problem import Problem

#: Environment variable. If it is 0, the tables of the package are ignored.
VARIABLE = "NATTEN_JAX_TUNED"

#: Key of a measured pass: calls with equal keys run equally fast with the same configuration.
_Key = tuple[Problem, Performance, str | None, Pass]


@dataclasses.dataclass(frozen=True)
class TunedPass:
    """The fastest measured configuration of a pass.

    Attributes:
        plan: The configuration.
        seconds: Device time of the forward pass, or of both passes together for the plan of a backward pass.
        default_seconds: Time of the default configuration, measured in alternation with this one.
        is_default: The default was kept, because no other configuration was clearly faster.
        label: Name of the problem for reports.
    """

    plan: Plan
    seconds: float
    default_seconds: float
    is_default: bool
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; :meth:`from_json` reads them."""
        facts = {name: getattr(self, name) for name in ("label", "seconds", "default_seconds", "is_default")}
        return {**facts, "plan": json.loads(self.plan.payload())}

    @classmethod
    def from_json(cls, content: Any) -> TunedPass:
        """Read a measured pass from JSON values.

        Raises:
            ValueError: The values are malformed; the message names the field.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"it is not an object, but {type(content).__name__}")
        for name, type_ in (("seconds", float), ("default_seconds", float), ("is_default", bool), ("label", str)):
            if not isinstance(content.get(name), type_):
                raise ValueError(f"{name} must be a {type_.__name__}, got {content.get(name)!r}")
        plan = Plan.from_payload(json.dumps(content.get("plan")))
        if plan.performance.tiles(plan.pass_) is None:
            raise ValueError("plan has no tiles")
        return cls(plan, content["seconds"], content["default_seconds"], content["is_default"], content["label"])


@dataclasses.dataclass(frozen=True)
class TunedTable:
    """Measured passes of a kind of device; tables with the same content are equal.

    Attributes:
        device: Kind of the device, as :attr:`natten_jax.plan.devices.Device.kind`.
        passes: The measured passes.
    """

    device: str
    passes: tuple[TunedPass, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; :meth:`from_text` reads their text."""
        return {"device": self.device, "tuned": [each.to_json() for each in self.passes]}

    @classmethod
    def from_text(cls, text: str) -> TunedTable:
        """Read a table from the text of a JSON file.

        Raises:
            ValueError: The text lacks a table, or the table is malformed; the message names the field.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("device"), str):
            raise ValueError("device must be a str")
        passes = content.get("tuned")
        if not isinstance(passes, list):
            raise ValueError(f"tuned must be a list, got {type(passes).__name__}")
        found = []
        for number, each in enumerate(passes):
            try:
                found.append(TunedPass.from_json(each))
            except ValueError as error:
                raise ValueError(f"tuned[{number}]: {error}") from None
        return cls(content["device"], tuple(found))

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TunedTable) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"TunedTable({self.device!r}, {len(self.passes)} passes, {self._digest[:12]})"

    @functools.cached_property
    def _by_key(self) -> dict[_Key, TunedPass]:
        plans = ((each, each.plan) for each in self.passes)
        return {_key(plan.problem, plan.performance, plan.precision, plan.pass_): each for each, plan in plans}

    def find(self, problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> TunedPass | None:
        """Return the measured pass of a problem; ``None`` if it was not measured."""
        return self._by_key.get(_key(problem, performance, precision, pass_))


def _key(problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> _Key:
    return tuned_problem(problem), without_configuration(performance), precision, pass_


def tuned_problem(problem: Problem) -> Problem:
    """Return the problem without the scale, which does not affect speed."""
    return dataclasses.replace(problem, scale=1.0)


def without_configuration(performance: Performance) -> Performance:
    """Remove tiles and schedule, which a table contains, from performance arguments."""
    for pass_ in PASSES:
        performance = performance.with_tiles(pass_, None)
    return dataclasses.replace(performance, kernel_schedule=None)


#: The table that is active during tracing; it replaces the package's tables. It is part of the keys of JAX's
#: caches, so that functions compiled before are compiled again inside a ``with`` block that activates a table.
in_force = jax.make_user_context(None)


def table_for(*, is_box: bool = False) -> TunedTable | None:
    """Return the active table for a call; ``None`` selects the tables of the package.

    Calls whose queries are a box of the layout were never measured: for these the active table is empty.
    """
    table: TunedTable | None = TunedTable("") if is_box else in_force.value
    return table


@functools.cache
def shipped_tables() -> dict[str, TunedTable]:
    """Return the package's tables by kind of device. They contain only passes that beat the default configuration."""
    files = resources.files("natten_jax.autotuning").joinpath("measured").iterdir()
    found = [TunedTable.from_text(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".json")]
    return {table.device: table for table in found}


def is_switched_off() -> bool:
    """Return True if the package's tables are ignored."""
    return os.environ.get(VARIABLE) == "0"


def shipped(device: Device) -> TunedTable | None:
    """Return the package's table for a kind of device, or ``None`` without a table."""
    return None if device.product is None or is_switched_off() else shipped_tables().get(device.product)


def measured(request: Request, device: Device, pass_: Pass) -> TunedPass | None:
    """Return the measured pass of a request on a device; ``None`` if it was not measured.

    Also returns ``None`` for calls that specify tiles or a schedule of the pass, or another backend, and for layouts
    that are split over devices.
    """
    table = shipped(device) if request.tuned is None else request.tuned
    is_part = math.prod(request.parts) > 1
    if table is None or table.device != device.kind or names_configuration(request, pass_) or is_part:
        return None
    found: TunedPass | None = table.find(request.problem, request.performance, request.precision, pass_)
    return found if found is None or request.backend in (None, str(found.plan.backend)) else None


def names_configuration(request: Request, pass_: Pass) -> bool:
    """Return True if a call specifies tiles or a schedule for a pass."""
    return request.performance.tiles(pass_) is not None or request.performance.kernel_schedule is not None


def with_configuration(request: Request, plan: Plan) -> Request:
    """Return the request with a plan's backend, tiles and schedule."""
    performance = request.performance
    for each in PASSES:
        if performance.tiles(each) is None:
            performance = performance.with_tiles(each, plan.performance.tiles(each))
    performance = dataclasses.replace(performance, kernel_schedule=plan.performance.kernel_schedule)
    return dataclasses.replace(request, performance=performance, backend=str(plan.backend))
