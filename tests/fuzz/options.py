"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from natten_jax.problem import OPERATORS, Operator
from tests.support.families import FAMILIES, family_named

from .features import FEATURES

DEFAULT_MINUTES = 1.0


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a fuzzing session.

    Attributes:
        family: Name of the backend family.
        operators: Operators to draw: ``"fna"``, ``"fmha"`` or both.
        seed: Seed of the sequence of problems.
        problems: Stop after this number of problems. ``None``: no limit.
        minutes: Start no new batch of problems after this time. ``None``: no limit. The start of processes is not
            included.
        workers: Number of parallel processes.
        is_direct: True to call the backend's kernels without the public operators.
        at_once: Number of problems per compiled program.
        variants: Number of ways to run each set of inputs. Each way counts as a problem.
        output: Folder in which programs that reproduce failures are saved.
        features: Features that every problem must have, by their names in ``features.FEATURES``.
    """

    family: str
    operators: tuple[Operator, ...]
    seed: int
    problems: int | None
    minutes: float | None
    workers: int
    is_direct: bool
    at_once: int
    variants: int
    output: Path
    features: tuple[str, ...] = ()


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line. Exit with status 2 and a message if an option is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Run random problems and compare outputs, logsumexp and all gradients with a float64 oracle. "
        "Exit status: 0 if all results are right, 1 if a result is wrong, 2 if the backend cannot run here.",
    )
    families = [family.name for family in FAMILIES]
    names = [*families, *(f"{name}-{operator}" for name in families for operator in OPERATORS)]
    parser.add_argument("--backend", required=True, choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, help=f"time limit (default {DEFAULT_MINUTES:g}; none with --problems)")
    parser.add_argument("--problems", type=int, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sequence of problems (default 0)")
    parser.add_argument("--workers", type=int, default=1, help="parallel processes (default 1)")
    parser.add_argument("--direct", action="store_true", help="call the kernels directly, with any tiles and origins")
    parser.add_argument(
        "--feature", nargs="+", default=[], choices=FEATURES, help="features of every problem; others are random"
    )
    parser.add_argument("--at-once", type=int, help="problems per compiled program")
    parser.add_argument("--output-dir", type=Path, default=Path("build/fuzz"), help="folder for failing programs")
    found = parser.parse_args(arguments)
    name, _, chosen = found.backend.partition("-")
    family = family_named(name)
    for option in ("minutes", "problems", "workers", "at_once"):
        value = getattr(found, option)
        if value is not None and not value > 0:
            parser.error(f"--{option.replace('_', '-')} must be positive, got {value}")
    if found.seed < 0:
        parser.error(f"--seed must not be negative, got {found.seed}")
    if found.direct and family.target is None:
        parser.error(f"--direct calls native kernels, and {name} has none")
    minutes = DEFAULT_MINUTES if found.minutes is None and found.problems is None else found.minutes
    return Options(
        family=name,
        operators=tuple(operator for operator in OPERATORS if chosen in ("", operator)),
        seed=found.seed,
        problems=found.problems,
        minutes=minutes,
        workers=found.workers,
        is_direct=found.direct,
        # In plain JAX, each problem in a program adds compile time. Programs of native kernel calls have a fixed
        # compile time, which their problems share.
        at_once=found.at_once or (32 if found.direct else 2 if family.target is None else 8),
        variants=4 if found.direct else 1,
        output=found.output_dir,
        features=tuple(found.feature),
    )
