"""Tables of measured configurations: the active table, the package's tables, and the lookup of a call's pass."""

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

#: Environment variable; ``"0"`` makes operators ignore the package's tables.
VARIABLE = "NATTEN_JAX_TUNED"

#: Key of a measured pass in a table. Calls with equal keys take the same time with the same configuration.
_Key = tuple[Problem, Performance, str | None, Pass]


@dataclasses.dataclass(frozen=True)
class TunedPass:
    """The configuration of a pass that measurements selected, with its times.

    Attributes:
        plan: The selected configuration.
        seconds: Device time with the selected configuration. If ``plan`` is for the forward pass, this is the time of
            the forward pass. If ``plan`` is for the backward pass, this is the total time of both passes.
        default_seconds: Device time of the same passes with the default configuration. Both configurations were
            measured in alternation.
        is_default: True if the default was selected, because no other configuration was clearly faster.
        label: Name of the problem in reports.
    """

    plan: Plan
    seconds: float
    default_seconds: float
    is_default: bool
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the pass as an object of JSON values, which :meth:`from_json` reads."""
        fields = {name: getattr(self, name) for name in ("label", "seconds", "default_seconds", "is_default")}
        return {**fields, "plan": json.loads(self.plan.payload())}

    @classmethod
    def from_json(cls, content: Any) -> TunedPass:
        """Create a measured pass from an object of JSON values.

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
    """Passes that were measured on one kind of device; tables with the same content are equal.

    Attributes:
        device: Kind of the device: :attr:`natten_jax.plan.devices.Device.kind`.
        passes: The measured passes.
    """

    device: str
    passes: tuple[TunedPass, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the table as an object of JSON values, whose JSON text :meth:`from_text` reads."""
        return {"device": self.device, "tuned": [each.to_json() for each in self.passes]}

    @classmethod
    def from_text(cls, text: str) -> TunedTable:
        """Create a table from the text of a JSON file.

        Raises:
            ValueError: The text does not contain a table, or a field of the table is malformed. The message names the
                field.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("device"), str):
            raise ValueError("device must be a str")
        passes = content.get("tuned")
        if not isinstance(passes, list):
            raise ValueError(f"tuned must be a list, got {type(passes).__name__}")
        tuned = []
        for number, each in enumerate(passes):
            try:
                tuned.append(TunedPass.from_json(each))
            except ValueError as error:
                raise ValueError(f"tuned[{number}]: {error}") from None
        return cls(content["device"], tuple(tuned))

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
        """Return the measured pass of a problem; ``None`` if the table does not have it."""
        return self._by_key.get(_key(problem, performance, precision, pass_))


def _key(problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> _Key:
    return tuned_problem(problem), without_configuration(performance), precision, pass_


def tuned_problem(problem: Problem) -> Problem:
    """Return the problem with a scale of 1, because the scale does not affect speed."""
    return dataclasses.replace(problem, scale=1.0)


def without_configuration(performance: Performance) -> Performance:
    """Return performance arguments without tiles and schedule, which the tables choose."""
    for pass_ in PASSES:
        performance = performance.with_tiles(pass_, None)
    return dataclasses.replace(performance, kernel_schedule=None)


#: The table that operators use during tracing instead of the package's tables; ``None`` outside of ``with`` blocks. The
#: table is part of the keys of JAX's caches. A function that was compiled outside of a ``with`` block is therefore
#: compiled again inside it.
active_table = jax.make_user_context(None)


def table_for(*, is_box: bool = False) -> TunedTable | None:
    """Return the table for a call that is being traced; ``None`` stands for the package's table.

    Calls whose queries are a box inside the key layout (``is_box``) are not measured, so they get an empty table.
    """
    table: TunedTable | None = TunedTable("") if is_box else active_table.value
    return table


@functools.cache
def shipped_tables() -> dict[str, TunedTable]:
    """Return the package's tables by kind of device. A table contains only configurations that beat the default."""
    files = resources.files("natten_jax.autotuning").joinpath("measured").iterdir()
    tables = [TunedTable.from_text(file.read_text(encoding="utf-8")) for file in files if file.name.endswith(".json")]
    return {table.device: table for table in tables}


def is_switched_off() -> bool:
    """Return True if the environment disables the package's tables."""
    return os.environ.get(VARIABLE) == "0"


def shipped(device: Device) -> TunedTable | None:
    """Return the package's table for a device; ``None`` without a table, or if the tables are disabled."""
    return None if device.product is None or is_switched_off() else shipped_tables().get(device.product)


def measured(request: Request, device: Device, pass_: Pass) -> TunedPass | None:
    """Return the measured pass of a request on a device; ``None`` if no table entry applies.

    Even if the table contains the problem, no entry applies in these cases:

    - The call specifies tiles of the pass, or a kernel schedule.
    - The call specifies another backend than the entry.
    - The layout of the call is split over devices.
    """
    table = shipped(device) if request.tuned is None else request.tuned
    is_part = math.prod(request.parts) > 1
    if table is None or table.device != device.kind or names_configuration(request, pass_) or is_part:
        return None
    entry: TunedPass | None = table.find(request.problem, request.performance, request.precision, pass_)
    return entry if entry is None or request.backend in (None, str(entry.plan.backend)) else None


def names_configuration(request: Request, pass_: Pass) -> bool:
    """Return True if a call specifies tiles of a pass, or a kernel schedule."""
    return request.performance.tiles(pass_) is not None or request.performance.kernel_schedule is not None


def with_configuration(request: Request, plan: Plan) -> Request:
    """Return the request with a plan's backend and schedule.

    Each pass for which the request specifies no tiles gets the plan's tiles.
    """
    performance = request.performance
    for each in PASSES:
        if performance.tiles(each) is None:
            performance = performance.with_tiles(each, plan.performance.tiles(each))
    performance = dataclasses.replace(performance, kernel_schedule=plan.performance.kernel_schedule)
    return dataclasses.replace(request, performance=performance, backend=str(plan.backend))
