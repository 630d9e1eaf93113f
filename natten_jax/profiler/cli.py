"""Shared by the command line programs: parser, checks of output files, messages, progress and exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from natten_jax.plan.devices import ComputeCapability, NoDeviceError, parse_compute_capability

#: Name of the program, the prefix of its messages.
PROGRAM = "natten-jax-profiler"

#: Exit status after Ctrl-C, as in shells: 128 plus the number of the signal.
INTERRUPTED = 130

#: Largest integer of a flag. XLA counts elements in 64 bits.
_LARGEST = 2**63 - 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help explains all options)\n")

    def check_files(self, given: argparse.Namespace, names: Sequence[str]) -> None:
        """Check that the output files in these arguments can be written, and are different files."""
        owners: dict[Path, str] = {}
        for name in names:
            path: Path | None = getattr(given, name)
            if path is None:
                continue
            if problem := _file_problem(path):
                self.error(f"{flag(name)}: {problem}")
            if path.is_file() or not path.exists():  # not a device such as /dev/stdout
                owner = owners.setdefault(path.resolve(), name)
                if owner != name:
                    self.error(f"{flag(owner)} and {flag(name)} name the same file: give each its own")


def flag(name: str) -> str:
    """Return ``--kv-tile`` for ``kv_tile``."""
    return f"--{name.replace('_', '-')}"


def _file_problem(path: Path) -> str | None:
    """Return the reason why a file cannot be written, or ``None``. The file system stays as it is."""
    try:
        if path.is_dir():
            return f"{str(path)!r} is a folder, not a file"
        if not path.parent.is_dir():
            return f"the folder {str(path.parent)!r} does not exist"
        is_new = not path.exists()
        if is_new or path.is_file():  # opening a pipe would wait for its reader
            path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return cannot_write(path, error)
    return None


def cannot_write(path: Path, error: OSError) -> str:
    """Return the sentence about a path that cannot be written."""
    return f"{str(path)!r} cannot be written: {error.strerror}"


# Types of flags.


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers from ``minimum`` on."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shorten(text)!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {_shorten(text)}")
        if value > _LARGEST:
            raise argparse.ArgumentTypeError(f"must be at most {_LARGEST}, got {_shorten(text)}")
        return value

    return integer


def boolean(text: str) -> bool:
    """Parse a truth value."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: write true, false, 1 or 0")
    return values[text.lower()]


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of a fixed set of words."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{_shorten(text)!r} is none of {', '.join(words)}")
        return words[words.index(text)]

    return word


def compute_capability(text: str) -> ComputeCapability:
    """Parse a compute capability such as ``9.0``."""
    try:
        return parse_compute_capability(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shorten(text)!r} is not a compute capability such as 9.0") from None


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


# Messages on standard error.


def print_error(what: object) -> None:
    """Print the reason why the program fails, as one line."""
    print_message(f"error: {' '.join(str(what).split())}")


def print_warning(what: object) -> None:
    """Print how the program deviates from its flags, as one line."""
    print_message(f"warning: {' '.join(str(what).split())}")


def print_message(what: object) -> None:
    """Print a line on standard error."""
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


def run_program(program: str, run: Callable[[], int | None]) -> int:
    """Call ``run`` and return the exit status of a program.

    1: JAX lacks a device, or the reader of the output has exited, as ``head`` does. 130: Ctrl-C.
    """
    try:
        status = run() or 0
        sys.stdout.flush()
        return status
    except NoDeviceError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python prints an error at exit
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED


class Progress:
    """A progress bar on standard error, if that is a terminal and rich is installed."""

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        self._total = steps
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import Progress as Bar

                self._bar = Bar(console=Console(stderr=True), transient=True)
                self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, description: str) -> None:
        """Show a description of the current steps."""
        self._update(description=description)

    def expect(self, steps: int) -> None:
        """Add steps."""
        self._total += steps
        self._update(total=self._total)

    def advance(self) -> None:
        """Count a finished step."""
        self._update(advance=1)

    def _update(self, **changes: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, **changes)
