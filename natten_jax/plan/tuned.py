"""Configurations that were measured on a device, and the table that is in force where a call stands."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem

#: What a configuration is found by: two calls of which this is equal run equally well in the same way.
_Key = tuple[Problem, Performance, str | None, Pass]


@dataclasses.dataclass(frozen=True)
class TunedPass:
    """The fastest configuration of a pass that was found.

    Attributes:
        plan: How it runs.
        seconds: Device time: of the forward pass, or of both passes together where the plan is a backward pass's.
        default_seconds: The same with the configuration that the ranking chooses, measured in turns with it.
        is_default: Whether that configuration was kept, since no other was clearly faster.
        label: What the problem is of, for people.
    """

    plan: Plan
    seconds: float
    default_seconds: float
    is_default: bool
    label: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values; :meth:`of_json` reads them."""
        facts = {name: getattr(self, name) for name in ("label", "seconds", "default_seconds", "is_default")}
        return {**facts, "plan": json.loads(self.plan.payload())}

    @classmethod
    def of_json(cls, content: Any) -> TunedPass:
        """What was measured, from JSON values.

        Raises:
            ValueError: They are malformed; the message names the field.
        """
        if not isinstance(content, Mapping):
            raise ValueError(f"it is no object, but {type(content).__name__}")
        for name, type_ in (("seconds", float), ("default_seconds", float), ("is_default", bool), ("label", str)):
            if not isinstance(content.get(name), type_):
                raise ValueError(f"{name} must be a {type_.__name__}, got {content.get(name)!r}")
        plan = Plan.of_payload(json.dumps(content.get("plan")))
        if plan.performance.tiles(plan.pass_) is None:
            raise ValueError("plan has no tiles")
        return cls(plan, content["seconds"], content["default_seconds"], content["is_default"], content["label"])


@dataclasses.dataclass(frozen=True)
class TunedTable:
    """What was measured on a kind of device; tables with the same content are equal.

    Attributes:
        device: The device's kind, as :attr:`natten_jax.plan.devices.Device.kind` has it.
        passes: What was measured.
    """

    device: str
    passes: tuple[TunedPass, ...] = ()

    @functools.cached_property
    def _digest(self) -> str:
        text = json.dumps([self.device, *(each.to_json() for each in self.passes)])
        return hashlib.sha256(text.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TunedTable) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"TunedTable({self.device!r}, {len(self.passes)} passes, {self._digest[:12]})"

    @functools.cached_property
    def _by_key(self) -> dict[_Key, TunedPass]:
        return {_key(each.plan.problem, each.plan.performance, each.plan.precision, each.plan.pass_): each
                for each in self.passes}  # fmt: skip

    def find(self, problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> TunedPass | None:
        """What was measured of a pass of a problem; ``None`` where nothing was."""
        return self._by_key.get(_key(problem, performance, precision, pass_))


#: In force where a call is traced: a table in place of those that come with the package. Part of the keys of JAX's
#: caches: a function that was compiled before is compiled again inside.
in_force = jax.make_user_context(None)


def table_in_force() -> TunedTable | None:
    """The table that was put in force where this stands; ``None`` where none was."""
    table: TunedTable | None = in_force.value
    return table


#: Nothing was measured: a table of no device.
_NOTHING = TunedTable("")


def table_for(*, is_box: bool) -> TunedTable | None:
    """The table that a call is looked up in: of one whose queries are a box of the layout, nothing was measured."""
    return _NOTHING if is_box else table_in_force()


def without_configuration(performance: Performance) -> Performance:
    """Performance arguments without those that a table knows better: tiles and schedule."""
    for pass_ in PASSES:
        performance = performance.with_tiles(pass_, None)
    return dataclasses.replace(performance, kernel_schedule=None)


def tuned_problem(problem: Problem) -> Problem:
    """The problem without what makes no difference to speed: the scale."""
    return dataclasses.replace(problem, scale=1.0)


def _key(problem: Problem, performance: Performance, precision: str | None, pass_: Pass) -> _Key:
    return tuned_problem(problem), without_configuration(performance), precision, pass_


def merged(tables: Sequence[TunedTable]) -> TunedTable:
    """One table of several of the same device."""
    return TunedTable(tables[0].device, tuple(each for table in tables for each in table.passes))
