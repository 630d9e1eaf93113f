"""The command line of programs that run random problems in an interpreter of Pallas, one after the other."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

_Problem = TypeVar("_Problem")


def run_problems(
    module: str,
    description: str | None,
    draw: Callable[[int, int], _Problem],
    complaints: Callable[[_Problem], list[str]],
    what: str,
    arguments: Sequence[str] | None,
) -> int:
    """Run problems; the exit status.

    Args:
        module: What ``python -m`` is given.
        description: The description of the program.
        draw: The problem with a number in the sequence that a seed stands for.
        complaints: What is wrong with its results.
        what: What the last line counts.
        arguments: The arguments of the command line; ``None`` is the process's.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--problems", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of problems")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    done = bad = 0
    for number in range(options.first, options.first + options.problems):
        if time.monotonic() > end:
            break
        problem = draw(options.seed, number)
        found = complaints(problem)
        done, bad = done + 1, bad + bool(found)
        if found:
            print(f"problem {number}: {'; '.join(found)}\n  {problem}", flush=True)
        if done % 10 == 0:
            print(f"{done} problems, {bad} bad", flush=True)
        jax.clear_caches()
    print(f"{done} {what}, {bad} bad")
    return 1 if bad else 0
