"""How a benchmark's figures are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.environment import environment


def save(results: Any, path: Path | None) -> None:
    """Write what there is so far with what it depends on, if it is asked for.

    Called after every row: a run that is cut short keeps what it measured.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n", encoding="utf-8"
        )
