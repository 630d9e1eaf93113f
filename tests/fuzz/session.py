"""A part of the fuzzing: one process's batches of problems, one after the other."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Iterator
from typing import Any

from natten_jax import backends
from natten_jax.performance import PASSES
from natten_jax.plan import devices
from tests.support.families import family_named

from .execution import complaints, device_computes
from .features import draw_with, kernels_of
from .options import Options
from .problem import Fuzzed, draw, variants
from .reproducer import program_of, simplest

#: Failures of a process that are made simpler; later ones are reported as they are.
MOST_SIMPLIFIED = 3
FATAL = "the process did not survive it"


def problems_of(options: Options, batch: int) -> list[tuple[int, Fuzzed]]:
    """The problems of a batch, with their numbers."""
    family = family_named(options.family)
    first, end = batch * options.at_once, (batch + 1) * options.at_once
    if options.problems is not None:
        end = min(end, options.problems)
    # A number stands for inputs and one way to run them: it alone says which.
    drawn = {
        group: variants(
            draw_with(options.features, family, options.operators, options.seed, group, options.is_direct),
            options.variants,
        )
        for group in range(first // options.variants, -(-end // options.variants))
    }
    return [(number, drawn[number // options.variants][number % options.variants]) for number in range(first, end)]


def rejection(options: Options) -> str | None:
    """Why the backend cannot run here; ``None`` where it can."""
    family = family_named(options.family)
    operator = options.operators[0]
    problem = draw(family, (operator,), 0, 0, is_direct=False).description()
    for pass_ in PASSES:
        reason = backends.find(f"{family.name}-{operator}", operator).rejection(
            problem, devices.default_device(), pass_
        )
        if reason is not None:
            return reason
    return None


def run_batch(
    options: Options, numbered: list[tuple[int, Fuzzed]], most_simplified: int = MOST_SIMPLIFIED
) -> list[dict[str, Any]]:
    """Run a batch; what failed, as ``number``, ``what`` is wrong, the ``problem`` and a ``program`` that shows it."""
    failures: list[dict[str, Any]] = []
    for (number, problem), what in zip(numbered, complaints([problem for _, problem in numbered]), strict=True):
        if what:
            failures.append(failure(options, number, problem, what, len(failures) < most_simplified))
    return failures


def failure(
    options: Options, number: int, problem: Fuzzed, what: list[str], may_simplify: bool = True
) -> dict[str, Any]:
    """The report of a problem that failed."""
    simple = simplest(problem) if may_simplify else problem
    program = program_of(simple, "; ".join(what), options.seed, number)
    return {"number": number, "what": what, "problem": repr(problem), "program": program}


def batches(options: Options, first: int, step: int, end: float) -> Iterator[int]:
    """Numbers of the batches of one process, until ``end`` on the monotonic clock."""
    batch = first
    while options.problems is None or batch * options.at_once < options.problems:
        if time.monotonic() > end:
            return
        yield batch
        batch += step


def main(options: Options, first: int, step: int, seconds: float | None) -> None:
    """Run batches ``first``, ``first + step``, ...; print a line of JSON before and after each.

    Raises:
        RuntimeError: The device computes nothing from the start, which no problem is to blame for.
    """
    reason = rejection(options)
    if reason is not None:
        print(json.dumps({"rejection": reason}), flush=True)
        return
    if not device_computes():
        raise RuntimeError("the device computes nothing")
    end = float("inf") if seconds is None else time.monotonic() + seconds
    simplified = 0
    for batch in batches(options, first, step, end):
        numbered = problems_of(options, batch)
        suspects = [failure(options, number, problem, [FATAL], may_simplify=False) for number, problem in numbered]
        print(json.dumps({"began": batch, "suspects": suspects}), flush=True)
        failures = run_batch(options, numbered, MOST_SIMPLIFIED - simplified)
        simplified += len(failures)
        kernels = collections.Counter(name for _, problem in numbered for name in kernels_of(problem))
        report = {"ended": batch, "problems": len(numbered), "failures": failures, "kernels": kernels}
        print(json.dumps(report), flush=True)


def alone(options: Options, batch: int, position: int) -> None:
    """Run one problem of a batch; print a line of JSON with its failure, and another when that is made simpler."""
    number, problem = problems_of(options, batch)[position]
    (what,) = complaints([problem])
    if what:
        # This is the report where a simpler problem takes the process down.
        print(json.dumps({"failures": [failure(options, number, problem, what, may_simplify=False)]}), flush=True)
    print(json.dumps({"failures": [failure(options, number, problem, what)] if what else []}), flush=True)
