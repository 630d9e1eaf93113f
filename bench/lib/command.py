"""Start-up and exit of the benchmark programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from natten_jax.plan.devices import default_jax_device
from natten_jax.profiler.cli import run_program


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a program and exit with its status; if JAX has no device, print the reason and exit with status 1."""

    def with_reason() -> int | None:
        try:
            return main()
        except Exception:
            default_jax_device()  # raises the actual reason if there is no device
            raise

    sys.exit(run_program(f"bench/{Path(sys.argv[0]).name}", with_reason))
