"""Flags that change nothing in what is done: each is said, and nothing that was asked for is ignored without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from natten_jax.backends.heeded import ignored
from natten_jax.backends.select import resolve
from natten_jax.ops.sub_calls import KeySet
from natten_jax.performance import Performance
from natten_jax.plan.devices import Device
from natten_jax.profiler.cli.flags import PERFORMANCE_FLAGS, TILE_FLAGS, default_of
from natten_jax.profiler.cli.parser import flag
from natten_jax.profiler.messages import warn
from natten_jax.profiler.options import Options
from natten_jax.profiler.run.workload import passes, sub_calls_of, sub_calls_of_device

_FLAGS = {field: name for name, field in PERFORMANCE_FLAGS.items()}


def warn_of_ignored(options: Options, device: Device) -> None:
    """Warn of each flag that changes nothing, in a line of its own."""
    for asked, reason in _ignored(options, device):
        warn(f"{asked} changes nothing: {reason}")


def _ignored(options: Options, device: Device) -> Iterator[tuple[str, str]]:
    """Flags as they were given, and why they change nothing."""
    is_measured = not (options.dry_run or options.simulate)
    measures_nothing = f"{'--dry-run' if options.dry_run else '--simulate'} measures nothing"
    for name, is_used, reason in (
        ("max_configs", options.dry_run, "only --dry-run lists configurations"),
        ("warmup_steps", is_measured, measures_nothing),
        ("iterations", is_measured, measures_nothing),
        ("optimize_warmup_steps", options.optimize, "only --optimize has finalists"),
        ("split", options.devices > 1, "--devices says over how many devices, and it is 1"),
    ):
        value = getattr(options, name)
        if not is_used and value != default_of(name):
            yield f"{flag(name)} {value}", reason
    if options.is_baseline:
        return  # which is said where they are taken away
    if options.fmha_backend is not None and all(call.kind is KeySet.WINDOWS for call in sub_calls_of(options)):
        reason = "no attention backend runs: windows are smaller than the layout, and there are no additional tokens"
        yield f"--fmha-backend {options.fmha_backend}", reason
    if is_measured:
        found = _by_backends(options, device)
    elif options.dry_run:
        found = dict.fromkeys(_FLAGS, "--dry-run lists all configurations")
    else:
        others = (field for field, name in _FLAGS.items() if name not in TILE_FLAGS)
        found = dict.fromkeys(others, "--simulate predicts by tiles alone")
    for field, reason in found.items():
        value = getattr(options.performance, field)
        if value != getattr(Performance(), field):
            yield _spelled(field, value), reason


def _by_backends(options: Options, device: Device) -> dict[str, str]:
    """The performance arguments that the backends that run do not heed, and why."""
    found: dict[str, str] = {}
    for call in sub_calls_of_device(options):
        for pass_ in passes(options):
            try:
                plan = resolve(call.request, device, pass_)
            except ValueError:
                continue  # which is said where it fails
            found |= ignored(plan, call.request.performance)
    return found


def _spelled(field: str, value: Any) -> str:
    """A performance argument as the command line has it."""
    name = flag(_FLAGS[field])
    if isinstance(value, bool):
        return name if value else f"--no-{name.removeprefix('--')}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
