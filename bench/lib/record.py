"""How a benchmark's figures are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.environment import environment
from natten_jax.profiler.report import write_file


def save(results: Any, path: Path | None) -> None:
    """Write what there is so far with what it depends on, if it is asked for.

    Called after every row: a run that is cut short keeps what it measured.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")
