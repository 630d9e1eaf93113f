"""Whether what was measured elsewhere is used here: the table of a device, and the configuration of a problem."""

from __future__ import annotations

from natten_jax.autotuning import tables as tuned
from natten_jax.backends.select import staleness
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device
from natten_jax.plan.request import ConfigurationTable, Request


def table_line(device: Device) -> str:
    """Which table of configurations is for a device, and how much of it is used."""
    table = tuned.shipped(device)
    if table is None:
        return f"miss: {_no_table(device)}"
    problems = {each.plan.problem for each in table.passes}
    faster = sum(not each.is_default for each in table.passes)
    stale = sum(staleness(each.plan, device) is not None for each in table.passes)
    left_alone = f"; {stale} are left alone, as this build does not offer their configuration" if stale else ""
    return (
        f"hit: the table of {table.device} has {len(problems)} problems; {faster} of their {len(table.passes)} passes "
        f"run otherwise than by default{left_alone}"
    )


def problem_line(request: Request, device: Device, pass_: Pass) -> str:
    """Whether a pass was measured, and what follows from that."""
    table: ConfigurationTable | None = tuned.shipped(device) if request.tuned is None else request.tuned
    if table is None:
        return f"miss: {_no_table(device)}"
    found = tuned.measured(request, device, pass_)
    if found is None:
        return f"miss: {_no_entry(request, table, pass_)}"
    if reason := staleness(found.plan, device):
        return f"miss: it was measured, but this build cannot run what was found: {reason}"
    times = f"{1e3 * found.default_seconds:.4g} ms"
    if found.is_default:
        return f"hit: nothing was clearly faster than the default ({times})"
    q_tile, kv_tile = found.plan.tiles
    gain = found.default_seconds / found.seconds
    return (
        f"hit: {found.plan.backend}, query tile {q_tile}, key/value tile {kv_tile}; "
        f"{1e3 * found.seconds:.4g} ms, by default {times} ({gain:.2f} times as fast)"
    )


def _no_table(device: Device) -> str:
    if tuned.is_switched_off():
        return f"{tuned.VARIABLE}=0 leaves tables alone"
    have = ", ".join(sorted(tuned.shipped_tables())) or "no device"
    return f"no table is for {device.product or device}; the package has those of {have}"


def _no_entry(request: Request, table: ConfigurationTable, pass_: Pass) -> str:
    if tuned.names_configuration(request, pass_) or request.backend is not None:
        return "the call names a configuration of its own"
    return f"the table of {table.device} has no such problem; batch, heads and element type have to be equal, too"
