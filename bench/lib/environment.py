"""Device, versions, commit and command of a benchmark, for its record."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import natten_jax
from natten_jax.native import module as native
from natten_jax.plan.devices import default_jax_device


def present_devices() -> list[jax.Device]:
    """Return JAX's devices.

    Raises:
        natten_jax.plan.devices.NoDeviceError: There is no device.
    """
    default_jax_device()
    return jax.devices()


def environment() -> dict[str, Any]:
    """Return the device, date, versions, commit and command of this run."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        check=False,
    )
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "device": default_jax_device().device_kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
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
        for line in cpu_info.read_text(encoding="utf-8", errors="backslashreplace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
