"""What was measured of a call on a device: by the table in force, or by those that come with the package."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from importlib import resources

from natten_jax import backends
from natten_jax.performance import PASSES, Pass
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.plan.request import Request
from natten_jax.plan.tuned import TunedPass, TunedTable, merged

#: Set to 0, it leaves everything to the ranking that no table in force speaks of.
VARIABLE = "NATTEN_JAX_TUNED"
TABLES = "tuned_tables"


def shipped(device: Device) -> TunedTable | None:
    """The table that comes with the package for a kind of device; ``None`` where there is none."""
    if device.product is None or is_switched_off():
        return None
    return _tables().get(device.product)


def is_switched_off() -> bool:
    """Whether tables that come with the package are left alone."""
    return os.environ.get(VARIABLE) == "0"


def products() -> tuple[str, ...]:
    """The kinds of devices that tables come with the package for."""
    return tuple(_tables())


@functools.cache
def _tables() -> dict[str, TunedTable]:
    folder = resources.files("natten_jax.backends").joinpath(TABLES)
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda each: each.name)
    by_device: dict[str, list[TunedTable]] = {}
    for file in files:
        table = table_of_text(file.read_text(encoding="utf-8"))
        by_device.setdefault(table.device, []).append(table)
    return {device: merged(tables) for device, tables in by_device.items()}


def table_of_text(text: str) -> TunedTable:
    """The table in a file.

    Raises:
        ValueError: It holds none, or is malformed; the message names the field.
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
            found.append(TunedPass.of_json(each))
        except ValueError as error:
            raise ValueError(f"tuned[{number}]: {error}") from None
    return TunedTable(content["device"], tuple(found))


def measured(request: Request, device: Device, pass_: Pass) -> TunedPass | None:
    """What was measured of a pass of a request on a device; ``None`` where nothing was.

    What a call says itself holds: one that names tiles or a schedule of the pass, or another backend, is not looked
    up. Nor is a part of a layout that is split over devices.
    """
    table = shipped(device) if request.tuned is None else request.tuned
    is_part = math.prod(request.parts) > 1
    if table is None or table.device != device.kind or names_configuration(request, pass_) or is_part:
        return None
    found = table.find(request.problem, request.performance, request.precision, pass_)
    return found if found is None or request.backend in (None, str(found.plan.backend)) else None


def names_configuration(request: Request, pass_: Pass) -> bool:
    """Whether a call says itself which tiles, or which schedule, a pass runs with."""
    return request.performance.tiles(pass_) is not None or request.performance.kernel_schedule is not None


def staleness(plan: Plan, device: Device) -> str | None:
    """Why this build of the package cannot run a plan of a table; ``None`` where it can."""
    name, problem = str(plan.backend), plan.problem
    if name not in backends.names(problem.operator):
        return f"there is no backend {name}"
    backend = backends.of(plan.backend)
    reason = backend.rejection(problem, device, plan.pass_)
    if reason is None and not backend.offers(problem, device, plan.pass_, plan.tiles):
        reason = f"it does not offer the tiles {plan.tiles}"
    return None if reason is None else f"{name}: {reason}"


def with_tuned_choices(request: Request, device: Device, pass_: Pass) -> Request:
    """The request with the configuration named that was the fastest, where that was measured."""
    found = measured(request, device, pass_)
    if found is None or found.is_default or staleness(found.plan, device) is not None:
        return request
    plan, performance = found.plan, request.performance
    for each in PASSES:
        if performance.tiles(each) is None:
            performance = performance.with_tiles(each, plan.performance.tiles(each))
    performance = dataclasses.replace(performance, kernel_schedule=plan.performance.kernel_schedule)
    return dataclasses.replace(request, performance=performance, backend=str(plan.backend))
