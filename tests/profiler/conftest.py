"""A fixture that runs the profiler's command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from natten_jax.profiler.__main__ import main


class Printed(NamedTuple):
    """Standard output and standard error of a command, and the JSON that it saved (empty without a file)."""

    out: str
    err: str
    saved: dict[str, Any]


Profiler = Callable[..., Printed]


@pytest.fixture
def profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Profiler:
    """Return a function that runs ``python -m natten_jax.profiler`` with ``--json``.

    The function checks the exit status and that output lines have at most 100 characters.
    """

    def run(arguments: str, status: int = 0) -> Printed:
        path = tmp_path / "result.json"
        path.unlink(missing_ok=True)
        assert main([*arguments.split(), "--json", str(path)]) == status
        out, err = capsys.readouterr()
        assert all(len(line) <= 100 for line in out.splitlines()) and "\x1b" not in out
        return Printed(out, err, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    return run
