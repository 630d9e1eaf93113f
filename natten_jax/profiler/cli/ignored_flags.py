"""Flags that change nothing in what is done: each is said, and nothing that was asked for is ignored without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from natten_jax.backends.heeded import ignored
from natten_jax.backends.select import resolve
from natten_jax.ops.parts import KeySet
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.profiler.cli.complaints import warn
from natten_jax.profiler.cli.flags import PERFORMANCE_FLAGS, TILE_FLAGS, default_of
from natten_jax.profiler.cli.parser import flag
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import device_parts, parts_of, passes

_FLAGS = {field: name for name, field in PERFORMANCE_FLAGS.items()}


def warn_of_ignored(options: Options, device: Device) -> None:
    """Warn of each flag that changes nothing, in a line of its own."""
    for asked, reason in _ignored(options, device):
        warn(f"{asked} changes nothing: {reason}")


def _ignored(options: Options, device: Device) -> Iterator[tuple[str, str]]:
    """Flags as they were given, and why they change nothing."""
    mode = next((name for name in ("dry_run", "simulate") if getattr(options, name)), None)
    if not options.dry_run:
        yield from _given(options, ("max_configs",), "only --dry-run lists configurations")
    if mode is not None:
        yield from _given(options, ("warmup_steps", "iterations"), f"{flag(mode)} measures nothing")
    if not options.optimize:
        yield from _given(options, ("optimize_warmup_steps",), "only --optimize has finalists")
    if options.devices == 1:
        yield from _given(options, ("split",), "--devices says over how many devices, and it is 1")
    if options.is_baseline:
        return  # which is said where they are taken away
    if options.fmha_backend is not None and all(part.kind is KeySet.WINDOWS for part in parts_of(options)):
        reason = "no attention backend runs: windows are smaller than the layout, and there are no additional tokens"
        yield f"--fmha-backend {options.fmha_backend}", reason
    if options.dry_run:
        yield from _performance(options, tuple(_FLAGS), "--dry-run lists all configurations")
    elif options.simulate:
        others = tuple(field for field, name in _FLAGS.items() if name not in TILE_FLAGS)
        yield from _performance(options, others, "--simulate predicts by tiles alone")
    else:
        yield from _by_backends(options, device)


def _given(options: Options, names: tuple[str, ...], reason: str) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(options, name)
        if value != default_of(name):
            yield f"{flag(name)} {value}", reason


def _performance(options: Options, fields: tuple[str, ...], reason: str) -> Iterator[tuple[str, str]]:
    for field in fields:
        value = getattr(options.performance, field)
        if value != getattr(Performance(), field):
            yield _spelled(field, value), reason


def _by_backends(options: Options, device: Device) -> Iterator[tuple[str, str]]:
    """What the backends that run do not heed."""
    found: dict[str, str] = {}
    for part in device_parts(options):
        for pass_ in passes(options):
            try:
                plan = resolve(part.request, device, pass_)
            except ValueError:
                continue  # which is said where it fails
            found |= ignored(plan, part.request.performance)
    for field, reason in found.items():
        yield _spelled(field, getattr(options.performance, field)), reason


def _spelled(field: str, value: Any) -> str:
    """A performance argument as the command line has it."""
    name = flag(_FLAGS[field])
    if isinstance(value, bool):
        return name if value else f"--no-{name.removeprefix('--')}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
