"""Draw batches of problems. The process that runs a batch also draws it: its device determines the available tiles."""

from __future__ import annotations

from natten_jax import backends
from natten_jax.performance import PASSES
from natten_jax.plan import devices
from tests.support.families import family_named

from .execution import device_computes
from .features import draw_with
from .options import Options
from .problem import Fuzzed, draw, variants


def problems_of(options: Options, batch: int) -> list[tuple[int, Fuzzed]]:
    """Return the problems of a batch, each with its number."""
    family = family_named(options.family)
    first, end = batch * options.at_once, (batch + 1) * options.at_once
    if options.problems is not None:
        end = min(end, options.problems)
    # A group contains all variants of a problem. Its number determines the problem's inputs and first variant.
    drawn = {
        group: variants(
            draw_with(options.features, family, options.operators, options.seed, group, options.is_direct),
            options.variants,
        )
        for group in range(first // options.variants, -(-end // options.variants))
    }
    return [(number, drawn[number // options.variants][number % options.variants]) for number in range(first, end)]


def rejection(options: Options) -> str | None:
    """Return the reason why the backend cannot run here, or ``None`` if it can.

    Raises:
        RuntimeError: The device fails a simple computation before the first problem.
    """
    family = family_named(options.family)
    operator = options.operators[0]
    problem, device = draw(family, (operator,), 0, 0, is_direct=False).description(), devices.default_device()
    backend = backends.find(f"{family.name}-{operator}", operator)
    reasons = [backend.rejection(problem, device, pass_) for pass_ in PASSES]
    reason = next(filter(None, reasons), None)
    if reason is None and not device_computes():
        raise RuntimeError("the device runs no program")
    return reason
