"""How the programs of this folder start and end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from natten_jax.plan.devices import default_jax_device
from natten_jax.profiler.cli import run_program


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the exit status of a program: 1, with a sentence, where JAX has no device."""

    def with_reason() -> int | None:
        try:
            return main()
        except Exception:
            default_jax_device()  # where there is none, that is why, whatever JAX made of it
            raise

    sys.exit(run_program(f"bench/{Path(sys.argv[0]).name}", with_reason))


def record_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a program that draws a record: where it is, and where the picture goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    return parser


def draw_record(description: str | None, draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Draw the record that is named on the command line."""
    options = record_parser(description).parse_args()
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.picture)
