"""What the command lines of this package share: errors of one sentence, and the types of their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from natten_jax.plan.devices import ComputeCapability, parse_compute_capability
from natten_jax.profiler.cli.outputs import file_problem, shared_file

#: Largest number that a command line may have: XLA counts elements in 64 bits.
_LARGEST = 2**63 - 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage: with many flags it would bury the message."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help explains all options)\n")

    def check_files(self, given: argparse.Namespace, names: Sequence[str]) -> None:
        """Check that the files that arguments of these names want can be written, each by itself."""
        paths: dict[str, Path | None] = {flag(name): getattr(given, name) for name in names}
        for option, path in paths.items():
            if path is not None and (problem := file_problem(path)):
                self.error(f"{option}: {problem}")
        if shared := shared_file(paths):
            self.error(f"{shared[0]} and {shared[1]} name the same file: give each its own")


def flag(name: str) -> str:
    """``--kv-tile`` of ``kv_tile``."""
    return f"--{name.replace('_', '-')}"


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an integer that is not below ``minimum``."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {_shortened(text)}")
        if value > _LARGEST:
            raise argparse.ArgumentTypeError(f"must be at most {_LARGEST}, got {_shortened(text)}")
        return value

    return integer


def boolean(text: str) -> bool:
    """The type of a truth value."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: write true, false, 1 or 0")
    return values[text.lower()]


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """The type of one of some words."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is none of {', '.join(words)}")
        return words[words.index(text)]

    return word


def compute_capability(text: str) -> ComputeCapability:
    """The type of a compute capability."""
    try:
        return parse_compute_capability(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not a compute capability such as 9.0") from None


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
