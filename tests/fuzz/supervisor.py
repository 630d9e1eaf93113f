"""The fuzzing session: worker processes run the problems. If a kernel crashes a worker, a new worker replaces it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.families import family_named
from tests.support.resources import limits

from .execution import find_errors
from .options import Options
from .problem import Fuzzed
from .reproducer import program_of, simplest
from .session import problems_of, rejection

PROGRESS_SECONDS = 10
#: Timeout of a worker's call, in seconds. Compiling and running a batch takes less time, and so does simplifying a
#: problem.
SILENCE_SECONDS = 300
#: Maximum number of failing problems that a worker simplifies. Later failing problems are not simplified.
MAX_SIMPLIFIED = 3
_SPAWN = multiprocessing.get_context("spawn")


class Rejected(Exception):
    """The backend cannot run here."""


class Died(Exception):
    """A worker process did not survive a call."""


class Worker:
    """A process that calls functions. If a function raises an exception, the process ends."""

    def __init__(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process.

        Raises:
            Died: The process ended or did not answer in time.
        """
        what = "the process did not end"
        try:
            self._connection.send((function, arguments))
            if self._connection.poll(SILENCE_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError):
            self.process.join()
            what = f"the process ended with status {self.process.exitcode}"
        self.process.kill()
        raise Died(what)


def _serve(connection: Any) -> None:
    with contextlib.suppress(EOFError):  # EOFError: the session is over
        while True:
            function, arguments = connection.recv()
            connection.send(function(*arguments))


@dataclasses.dataclass
class Totals:
    """Count of problems that ran, and the numbers that identify the failing problems."""

    problems: int = 0
    failures: list[int] = dataclasses.field(default_factory=list)


class Supervisor:
    """Runs the workers of one session.

    Args:
        options: Options of the session.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._totals = Totals()
        self._start = self._reported = time.monotonic()
        self._lock = threading.Lock()
        self._is_over = False

    def run(self) -> Totals:
        """Run problems until their maximum number or the time limit is reached.

        Raises:
            Rejected: The backend cannot run here.
        """
        os.environ.update(_environment(self._options))
        workers = range(self._options.workers)
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
            try:
                list(threads.map(self._run_batches, workers))
            finally:
                self._is_over = True
                for process in _SPAWN.active_children():
                    process.kill()
        return self._totals

    def _run_batches(self, index: int) -> None:
        """Run batches ``index``, ``index + workers``, ... in a worker."""
        options, worker, simplified = self._options, Worker(), 0
        if (reason := worker.call(rejection, options)) is not None:
            raise Rejected(reason)
        end = time.monotonic() + 60 * (float("inf") if options.minutes is None else options.minutes)
        for batch in itertools.count(index, options.workers):
            is_last = options.problems is not None and batch * options.at_once >= options.problems
            if is_last or time.monotonic() > end:
                return
            numbered = worker.call(problems_of, options, batch)
            problems = [problem for _, problem in numbered]
            try:
                found = worker.call(find_errors, problems)
            except Died as error:
                if self._is_over:
                    return
                found, worker = _find_errors_alone(problems, str(error))
            for (number, problem), what in zip(numbered, found, strict=True):
                if what and simplified < MAX_SIMPLIFIED:
                    simplified += 1
                    try:
                        problem = worker.call(simplest, problem)
                    except Died:
                        worker = Worker()
                if what:
                    self._report(number, problem, what)
            with self._lock:
                self._totals.problems += len(numbered)
                self._say_progress()

    def _report(self, number: int, problem: Fuzzed, what: list[str]) -> None:
        program = program_of(problem, "; ".join(what), self._options.seed, number)
        folder = self._options.output
        folder.mkdir(parents=True, exist_ok=True)
        direct = "-direct" if self._options.is_direct else ""
        path = folder / f"{self._options.family}{direct}-{self._options.seed}-{number}.py"
        path.write_text(program, encoding="utf-8")
        with self._lock:
            self._totals.failures.append(number)
            print(f"BAD problem {number}: {'; '.join(what)}\n--- {path}\n{program}---", flush=True)

    def _say_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported > PROGRESS_SECONDS:
            self._reported = now
            counts = f"{self._totals.problems} problems, {len(self._totals.failures)} bad"
            print(f"{counts}, {now - self._start:.0f} s", flush=True)


def _find_errors_alone(problems: list[Fuzzed], ending: str) -> tuple[list[list[str]], Worker]:
    """Run the problems of a batch one by one, because the batch ended its process.

    Return the errors of each problem, and the last worker that was started.
    """
    found, worker = [], Worker()
    for problem in problems:
        try:
            found += worker.call(find_errors, [problem])
        except Died as error:
            found.append([str(error)])
            worker = Worker()
    if not any(found):
        found[0] = [ending, "each problem of the batch runs alone"]
    return found, worker


def _environment(options: Options) -> dict[str, str]:
    """Return the environment variables of the worker processes."""
    family = family_named(options.family)
    environment = limits(os.environ, len(os.sched_getaffinity(0)), options.workers)
    if not family.needs_gpu and family.capabilities.platform is not None:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment
