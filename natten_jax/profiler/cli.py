"""Parser, messages, progress bar and exit status of the command line programs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from natten_jax.plan.devices import NoDeviceError

#: Name of the profiler's program, and prefix of the program's messages.
PROGRAM = "natten-jax-profiler"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one sentence, without a list of all flags."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help explains all options)\n")


# Parsers for the values of flags.


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that parses an integer of at least ``minimum``."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: write true, false, 1 or 0")
    return values[text.lower()]


# Messages on standard error.


def print_warning(what: object) -> None:
    """Print a warning on standard error, as one line."""
    print_message(f"warning: {' '.join(str(what).split())}")


def print_message(what: object) -> None:
    """Print a line on standard error."""
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


def run_program(
    program: str, run: Callable[[], int | None], expected: tuple[type[Exception], ...] = (NoDeviceError,)
) -> int:
    """Call ``run``, and return the exit status of the program.

    The status is the result of ``run``, or 0 if the result is ``None``. If ``run`` raises an exception of a type in
    ``expected``, the exception's message is printed, and the status is 1. After Ctrl-C, the status is 130.
    """
    try:
        return run() or 0
    except expected as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130  # as in shells: 128 plus the number of the signal SIGINT


#: Function ``(stage, *, more_steps, done)`` that updates a progress bar. ``stage`` is the new description.
#: ``more_steps`` is added to the total number of steps, and ``done`` to the number of finished steps.
Update = Callable[..., None]


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Update]:
    """Show a progress bar if standard error is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda *_, **__: None
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=steps)

        def update(stage: str | None = None, *, more_steps: int = 0, done: int = 0) -> None:
            nonlocal steps
            steps += more_steps
            bar.update(task, description=stage, total=steps, advance=done)

        yield update
