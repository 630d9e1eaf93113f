"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import jax

from natten_jax import backends, native
from natten_jax.backends.base import Pass
from natten_jax.devices import local_devices
from natten_jax.problem import Problem
from natten_jax.version import __version__

# A problem that every backend family is made for: where it is refused, the reason lies with the machine.
_TYPICAL = {"batch": 1, "heads": 1, "heads_kv": 1, "head_dim": 64, "head_dim_v": 64, "scale": 0.125}


def main() -> int:
    """Print the report."""
    for line in report():
        print(line)
    return 0


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"natten_jax {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))
    yield ""
    yield from _native_lines()
    yield ""
    yield "Devices"
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        detail = f", compute capability {capability}" if capability else ""
        yield f"  {device.id}: {device.device_kind} ({device.platform}{detail})"
    for device in local_devices():
        yield ""
        yield f"Backends on {device}"
        for operator in backends.OPERATORS:
            for backend in backends.BACKENDS:
                yield f"  {backends.backend_name(backend, operator):<14} {_verdict(backend, operator, device)}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _native_lines() -> Iterator[str]:
    if native.load_error is not None:
        yield f"Native module: not available: {native.load_error}"
        return
    yield f"Native module: {native.path()}"
    for name, value in native.build_info().items():
        yield f"  {name}: {value}"


def _verdict(backend: backends.Backend, operator: str, device: backends.Device) -> str:
    passes: tuple[Pass, ...] = ("forward", "backward")
    reasons: dict[str, dict[str, str | None]] = {
        which: {dtype: backend.rejection(_problem(operator, dtype), device, which) for dtype in _DTYPES}
        for which in passes
    }
    parts = []
    for which in passes:
        runs = [dtype for dtype, reason in reasons[which].items() if reason is None]
        if runs:
            parts.append(f"{which}: {', '.join(runs)}")
        else:
            parts.append(f"{which}: no, {reasons[which]['bfloat16']}")
    if parts[0].partition(": ")[2] == parts[1].partition(": ")[2]:
        return parts[0].partition(": ")[2] if parts[0].startswith("forward: no") else f"runs {parts[0][9:]}"
    return "; ".join(parts)


_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _problem(operator: str, dtype: str) -> Problem:
    window = (128,) if operator == "fmha" else (32,)
    return Problem(
        operator="fmha" if operator == "fmha" else "fna",
        query_layout=(128,),
        kv_layout=(128,),
        dtype=dtype,
        kernel_size=window,
        stride=(1,),
        dilation=(1,),
        is_causal=(False,),
        **_TYPICAL,  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    sys.exit(main())
