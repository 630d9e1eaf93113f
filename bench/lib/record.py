"""Save the figures of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.environment import environment


def save(results: Any, path: Path | None) -> None:
    """Write the current results and their environment to ``path``, unless it is ``None``.

    Call it after every row, so that an interrupted run keeps its figures.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n", encoding="utf-8"
        )
