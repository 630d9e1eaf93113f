"""Conclusions from the figures of ``fmha_scaling.py``: speed-ups of optimisations, and what to optimise first.

The figures belong to the steps of a ladder. :mod:`fmha.ladder` defines ladders and steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fmha.ladder import Ladder
from fmha.results import LengthResult

#: A kernel counts as saturated if it reaches this share of its best TFLOP/s.
SATURATED = 0.95

#: Classes of sequence lengths with their upper bounds.
_SIZES = (("Small", 1024.0), ("Medium", 4096.0), ("Large", math.inf))
#: Optimisations with a smaller speed-up are not recommended.
_WORTHWHILE = 1.02


def gains(ladder: Ladder, result: LengthResult) -> dict[str, float]:
    """Return the speed-up of each step over the previous step of the ladder, by the step's name."""
    found = {}
    for lower, upper in zip(ladder.rungs, ladder.rungs[1:], strict=False):
        before, after = result.find(lower.label), result.find(upper.label)
        if before and after:
            found[upper.name] = before.latency_ms / after.latency_ms
    return found


def insights(ladder: Ladder, results: Sequence[LengthResult], matrix_tflops: float) -> list[str]:
    """Return conclusions from this run's figures, one sentence each."""
    lines = []
    by_length = {result.seq_len: gains(ladder, result) for result in results}
    for length, found in by_length.items():
        if found:
            name = max(found, key=lambda each: found[each])
            others = ", ".join(f"{each} {gain:.2f}x" for each, gain in found.items())
            lines.append(f"At {length} tokens, '{name}' gained most (each step over the previous step: {others}).")
    every = [(gain, name, length) for length, found in by_length.items() for name, gain in found.items()]
    if every:
        gain, name, length = max(every)
        lines.append(f"Of all steps and lengths, '{name}' at {length} tokens gained most: {gain:.2f}x.")
    for name in {name: None for _, name, _ in every}:
        curve = [(length, found[name]) for length, found in by_length.items() if name in found]
        if len(curve) > 1:
            (shortest, first), (longest, last) = curve[0], curve[-1]
            trend = (
                "grows with" if last > 1.02 * first else "falls with" if last < 0.98 * first else "hardly depends on"
            )
            lines.append(
                f"The gain of '{name}' {trend} the length: {first:.2f}x at {shortest} tokens, {last:.2f}x at {longest}."
            )
    slower = [f"'{name}' at {length} tokens ({gain:.2f}x)" for gain, name, length in every if gain < 1]
    if slower:
        lines.append(f"Slower than the previous step: {', '.join(slower)}.")
    for step in (ladder.baseline, ladder.production_step):
        rates = [(result.seq_len, own.tflops) for result in results if (own := result.find(step.label))]
        if not rates:
            continue
        best = max(rate for _, rate in rates)
        length = next(length for length, rate in rates if rate >= SATURATED * best)
        shares = ", ".join(f"{rate / matrix_tflops:.0%} at {length}" for length, rate in rates)
        lines.append(
            f"'{step.name}' reaches {SATURATED:.0%} of its best rate ({best:.3g} TFLOP/s) at {length} tokens; its "
            f"share of a matrix product's {matrix_tflops:.3g} TFLOP/s is {shares}."
        )
    speedups = [
        (own.speedup_vs_baseline, result.seq_len)
        for result in results
        if (own := result.find(ladder.production)) and own.speedup_vs_baseline is not None
    ]
    if speedups:
        (low, low_length), (high, high_length) = min(speedups), max(speedups)
        lines.append(
            f"'{ladder.production_step.name}' runs at {low:.2f}x ({low_length} tokens) to {high:.2f}x ({high_length} "
            f"tokens) of '{ladder.baseline.name}'."
        )
    return lines


def priorities(ladder: Ladder, results: Sequence[LengthResult]) -> list[str]:
    """Recommend an order of optimisations for short, medium and long sequences.

    Optimisations are ordered by the geometric mean of their speed-ups over the lengths of a class.
    """
    lines = []
    shorter = 0.0
    for size, longest in _SIZES:
        in_range = [result for result in results if shorter < result.seq_len <= longest]
        span = f"up to {longest:.0f} tokens" if longest < math.inf else f"more than {shorter:.0f} tokens"
        shorter = longest
        if in_range:
            lines.append(f"{size} ({span}): {_priority(ladder, in_range)}")
    return lines


def _priority(ladder: Ladder, results: Sequence[LengthResult]) -> str:
    every = [gains(ladder, result) for result in results]
    names = [step.name for step in ladder.rungs if any(step.name in found for found in every)]
    paid = {name: math.exp(_mean([math.log(found[name]) for found in every if name in found])) for name in names}
    ordered = sorted(paid, key=lambda name: -paid[name])
    worthwhile = [f"'{name}' ({paid[name]:.2f}x)" for name in ordered if paid[name] >= _WORTHWHILE]
    others = [f"'{name}' ({paid[name]:.2f}x)" for name in ordered if paid[name] < _WORTHWHILE]
    text = f"{', then '.join(worthwhile)}." if worthwhile else "no step gained enough."
    return f"{text} Not worth it: {', '.join(others)}." if others else text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
