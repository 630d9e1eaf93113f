"""Messages and progress on standard error: errors, warnings, and a progress bar or lines during long work."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Any

#: The name of the program, in front of every sentence.
PROGRAM = "natten-jax-profiler"
#: Seconds until a bar appears, and between lines.
_PATIENCE, _LINES = 1.0, 10.0


def complain(what: object) -> None:
    """Say why something asked for was not done: it is the user's to change."""
    _say("error", what)


def warn(what: object) -> None:
    """Say how what is done differs from what was asked for."""
    _say("warning", what)


def tell(what: object) -> None:
    """Say what is going on, for whoever waits."""
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


def _say(kind: str, what: object) -> None:
    print(f"{PROGRAM}: {kind}: {' '.join(str(what).split())}", file=sys.stderr)


class Progress:
    """A context in which a bar appears once the work has taken over a second, or a line every ten seconds.

    There are lines where standard error is no terminal, or rich is not installed.
    """

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        self._total, self._done, self._stage = steps, 0, ""
        self._start = time.perf_counter()
        self._is_over = threading.Event()
        # Runs may take longer than the time between lines.
        self._thread = threading.Thread(target=self._say_so, daemon=True)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import Progress as Bar

                self._bar = Bar(console=Console(stderr=True), transient=True)
                self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def stage(self, description: str) -> None:
        """Say what is going on."""
        self._stage = description
        if self._bar is not None:
            self._bar.update(self._task, description=description)

    def expect(self, steps: int) -> None:
        """There are more steps to come."""
        self._total += steps
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def advance(self) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)

    def _say_so(self) -> None:
        if self._bar is not None:
            if not self._is_over.wait(_PATIENCE):
                self._bar.start()
            return
        while not self._is_over.wait(_LINES):
            seconds = time.perf_counter() - self._start
            tell(f"{self._stage}: {self._done} of {self._total} runs are done after {seconds:.0f} s")
