"""A progress bar on standard error, for people only, and only where there is something to wait for."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import Any

_PATIENCE = 1.0  # seconds


class Progress:
    """A context in which a bar appears once the work has taken over a second; nothing without a terminal or rich."""

    def __init__(self, steps: int) -> None:
        self._bar: Any = None
        self._timer: threading.Timer | None = None
        self._total = steps
        if not sys.stderr.isatty():
            return
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=steps)
            self._timer = threading.Timer(_PATIENCE, self._bar.start)
            self._timer.daemon = True

    def __enter__(self) -> Progress:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()

    def stage(self, description: str) -> None:
        """Say what is going on."""
        if self._bar is not None:
            self._bar.update(self._task, description=description)

    def expect(self, steps: int) -> None:
        """There are more steps to come."""
        if self._bar is not None:
            self._total += steps
            self._bar.update(self._task, total=self._total)

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)
