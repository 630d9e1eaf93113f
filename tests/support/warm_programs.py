"""Programs that tests run in processes of their own, without the second that each would take to import JAX."""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
#: Environment variables that nobody reads before a program begins: XLA reads its own when a backend starts.
_READ_LATE = ("XLA_FLAGS", "PYTEST_CURRENT_TEST")
#: NumPy would start threads, which forks do not have.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
#: An interpreter with what it has imported keeps 200 MB: so few are kept, those that were asked last.
_MOST = 3


class _Interpreter:
    """A process that runs programs in forks of itself (``warm_interpreter.py``)."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_interpreter", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            cwd=_ROOT,
        )

    def run(self, request: Mapping[str, object], timeout: float) -> int:
        """How a program ended.

        Raises:
            subprocess.TimeoutExpired: It did not in time, and is killed.
        """
        deadline = time.monotonic() + timeout
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it ended with is said below
            self._process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self._process.stdin.flush()
        number = self._number(None)
        try:
            return self._number(deadline)
        except TimeoutError:
            os.kill(number, signal.SIGKILL)
            self._number(None)
            raise subprocess.TimeoutExpired(str(request["command"]), timeout) from None

    def _number(self, deadline: float | None) -> int:
        """The next answer."""
        assert self._process.stdout is not None
        wait = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not select.select([self._process.stdout], [], [], wait)[0]:
            raise TimeoutError
        line = b""
        while not line.endswith(b"\n"):
            found = os.read(self._process.stdout.fileno(), 1)
            if not found:
                raise RuntimeError(f"the interpreter has ended with status {self._process.wait()}")
            line += found
        return int(line)

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


#: By the environment variables that they started with, and the modules that they have imported.
_interpreters: collections.OrderedDict[Any, _Interpreter] = collections.OrderedDict()


def _interpreter_of(environment: Mapping[str, str], modules: Sequence[str]) -> _Interpreter:
    """The interpreter that started so."""
    early = {name: text for name, text in environment.items() if name not in _READ_LATE}
    for each in [key for key, interpreter in _interpreters.items() if interpreter.has_ended]:
        _interpreters.pop(each).end()
    key = frozenset(early.items()), tuple(modules)
    if key not in _interpreters:
        while len(_interpreters) >= _MOST:
            _interpreters.popitem(last=False)[1].end()
        _interpreters[key] = _Interpreter(early, modules)
    _interpreters.move_to_end(key)
    return _interpreters[key]


@atexit.register
def _end_all() -> None:
    while _interpreters:
        _interpreters.popitem()[1].end()


def _bytes_of(word: str | Path) -> str:
    """The bytes of a word of a command line, as characters: in another locale these are another word."""
    return os.fsencode(word).decode("latin-1")


def run_warm(
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    timeout: float = 300,
    folder: Path | None = None,
    modules: Sequence[str] = (),
) -> subprocess.CompletedProcess[bytes]:
    """What ``python COMMAND...`` does, whose imports of JAX and natten_jax are done already.

    A test needs a process of its own instead, :func:`subprocess.run`, where it is about imports, start, memory or
    signals.

    Args:
        command: Arguments of Python: ``-c`` and a program, ``-m`` and a module, or a file; with arguments.
        environment: All environment variables.
        timeout: In seconds.
        folder: Where it runs, if not here.
        modules: What else is imported before it begins.
    """
    environment = {**environment, **_ONE_THREAD}
    interpreter = _interpreter_of(environment, modules)
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        request = {
            "command": list(map(_bytes_of, command)),
            "environment": {name: _bytes_of(text) for name, text in environment.items()},
            "folder": _bytes_of(folder or Path.cwd()),
            "output": output.name,
            "errors": errors.name,
        }
        try:
            status = interpreter.run(request, timeout)
        except subprocess.TimeoutExpired as error:
            error.stdout = Path(output.name).read_bytes()
            raise
        return subprocess.CompletedProcess(
            [sys.executable, *command], status, Path(output.name).read_bytes(), Path(errors.name).read_bytes()
        )
