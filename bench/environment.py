"""What the figures of a benchmark depend on."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import natten_jax
from natten_jax import native


def environment() -> dict[str, Any]:
    """Device, versions, commit and command of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "natten_jax": natten_jax.__version__,
        },
        "native": dict(native.build_info()),
        "commit": commit.stdout.strip() or None,
        "command": " ".join(sys.argv),
    }


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
