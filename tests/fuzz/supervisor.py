"""The processes that fuzz: started, listened to, and replaced when a kernel takes one down."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from tests.support.families import family_named
from tests.support.resources import limits

from .options import Options

ROOT = Path(__file__).parents[2]
PROGRESS_SECONDS = 10
#: Longer than any batch takes to compile, run and make simpler.
SILENCE_SECONDS = 300


class Rejected(Exception):
    """The backend cannot run here."""


@dataclasses.dataclass
class Worker:
    """A process, which batch it is at, that batch's problems as failures, and when it was last heard of."""

    index: int
    process: subprocess.Popen[str]
    errors: TextIO
    batch: int | None = None
    suspects: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    heard: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass
class Totals:
    """What has been found so far; and how many problems of batches that ended each kernel with a ring has run."""

    problems: int = 0
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    kernels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Supervisor:
    """Runs the workers of one session.

    Args:
        options: What to fuzz.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lines: queue.Queue[tuple[Worker, str | None]] = queue.Queue()
        self._totals = Totals()
        self._environment = _environment(options)
        self._start = time.monotonic()

    def run(self) -> Totals:
        """Fuzz until the problems or the time are used up.

        Raises:
            Rejected: The backend cannot run here.
        """
        workers = {index: self._started(index, index) for index in range(self._options.workers)}
        reported = time.monotonic()
        try:
            while workers:
                try:
                    worker, line = self._lines.get(timeout=1)
                except queue.Empty:
                    self._end_silent(workers)
                else:
                    if line is not None:
                        self._hear(worker, json.loads(line))
                    else:
                        successor = self._after_end(worker)
                        if successor is None:
                            del workers[worker.index]
                        else:
                            workers[worker.index] = successor
                if time.monotonic() - reported > PROGRESS_SECONDS:
                    reported = time.monotonic()
                    counts = f"{self._totals.problems} problems, {len(self._totals.failures)} bad"
                    self._say(f"{counts}, {self._seconds():.0f} s")
        finally:
            for worker in workers.values():
                worker.process.kill()
        return self._totals

    def _started(self, index: int, first: int) -> Worker:
        left = None if self._options.minutes is None else 60 * self._options.minutes - self._seconds()
        process, errors = self._python(f"session.main(options, {first}, {self._options.workers}, {left})")
        worker = Worker(index, process, errors)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _python(self, statement: str) -> tuple[subprocess.Popen[str], TextIO]:
        """A process that runs a statement of this package."""
        program = (
            "from pathlib import PosixPath; from tests.fuzz import session; "
            f"from tests.fuzz.options import Options; options = {self._options!r}; {statement}"
        )
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="backslashreplace",
        )
        return process, errors

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            if line.startswith("{"):
                self._lines.put((worker, line))
        worker.process.wait()
        self._lines.put((worker, None))

    def _hear(self, worker: Worker, message: dict[str, Any]) -> None:
        worker.heard = time.monotonic()
        if "rejection" in message:
            raise Rejected(message["rejection"])
        if "began" in message:
            worker.batch, worker.suspects = message["began"], message["suspects"]
            return
        worker.batch = None
        self._totals.problems += message["problems"]
        self._totals.kernels.update(message["kernels"])
        for failure in message["failures"]:
            self._report(failure)

    def _after_end(self, worker: Worker) -> Worker | None:
        """Find out why a worker ended; its successor, if it was before its time."""
        status = worker.process.returncode
        tail = _tail(worker.errors)
        if worker.batch is None:
            if status != 0:
                raise RuntimeError(f"a fuzzing process ended with status {status}:\n{tail}")
            return None
        self._blame(worker, worker.batch, f"the process ended with status {status}", tail)
        return self._started(worker.index, worker.batch + self._options.workers)

    def _blame(self, worker: Worker, batch: int, what: str, tail: str) -> None:
        """Run each problem of a batch that took its process down in a process of its own."""
        self._totals.problems += len(worker.suspects)
        found: list[dict[str, Any]] = []
        for position, suspect in enumerate(worker.suspects):
            process, errors = self._python(f"session.alone(options, {batch}, {position})")
            try:
                output, _ = process.communicate(timeout=SILENCE_SECONDS)
                ending = f"the process ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                process.kill()
                output, ending = process.communicate()[0], "the process did not end"
            lines = [line for line in output.splitlines() if line.startswith("{")]
            failures = json.loads(lines[-1])["failures"] if lines else []
            if not failures and (process.returncode != 0 or not lines):
                failures = [{**suspect, "what": [ending, _tail(errors)]}]
            found += failures
        if not found:
            found = [{**worker.suspects[0], "what": [what, "each problem of the batch runs alone", tail]}]
        for failure in found:
            self._report(failure)

    def _end_silent(self, workers: dict[int, Worker]) -> None:
        for worker in workers.values():
            if time.monotonic() - worker.heard > SILENCE_SECONDS:
                worker.process.kill()

    def _report(self, failure: dict[str, Any]) -> None:
        self._totals.failures.append(failure)
        folder = self._options.output
        folder.mkdir(parents=True, exist_ok=True)
        direct = "-direct" if self._options.is_direct else ""
        path = folder / f"{self._options.family}{direct}-{self._options.seed}-{failure['number']}.py"
        path.write_text(failure["program"], encoding="utf-8")
        self._say(f"BAD problem {failure['number']}: {'; '.join(failure['what'])}")
        self._say(f"  {failure['problem']}")
        self._say(f"--- {path}\n{failure['program']}---")

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _environment(options: Options) -> dict[str, str]:
    """Variables of the processes."""
    environment = {**os.environ, **limits(os.environ, len(os.sched_getaffinity(0)), options.workers)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    family = family_named(options.family)
    if not family.needs_gpu and family.capabilities.platform is not None:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _tail(errors: TextIO) -> str:
    errors.seek(0)
    return errors.read()[-2000:]
