"""How the programs of this folder start and end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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
