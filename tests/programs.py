"""Programs that tests run in a fresh interpreter: other devices, other modules, crashes, peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import natten_jax

TESTS = Path(__file__).parent
PACKAGE = Path(natten_jax.__file__).parent


def run_python(
    source: str,
    *arguments: str,
    devices: int = 1,
    paths: tuple[Path, ...] = (PACKAGE.parent, TESTS),
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a program on the host's devices.

    Args:
        source: The program.
        *arguments: Its ``sys.argv[1:]``.
        devices: How many devices JAX sees.
        paths: Where it finds modules before the environment's own.
        environment: More environment variables.
        timeout: In seconds.
    """
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip(),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        **(environment or {}),
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        env=variables,
        timeout=timeout,
        check=False,
    )


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    """What a program that must succeed printed."""
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout
