"""``python -m natten_jax.doctor``: what is installed, what was built, and which backend can run here and why."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import jax

from natten_jax import backends, native
from natten_jax.backends.base import Backend, Pass
from natten_jax.devices import Device, local_devices
from natten_jax.problem import SUPPORTED_DTYPES, Problem, TileConfig
from natten_jax.version import __version__

_PASSES: tuple[Pass, ...] = ("forward", "backward")
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


def _verdict(backend: Backend, operator: str, device: Device) -> str:
    forward, backward = (_verdict_of_pass(backend, operator, device, which) for which in _PASSES)
    if forward == backward:
        return forward
    return f"forward: {forward}; backward: {backward}"


def _verdict_of_pass(backend: Backend, operator: str, device: Device, which: Pass) -> str:
    reasons = {dtype: backend.rejection(_problem(operator, dtype), device, which) for dtype in SUPPORTED_DTYPES}
    runs = [dtype for dtype, reason in reasons.items() if reason is None]
    if runs:
        return f"runs {', '.join(runs)}"
    substitute = ""
    if which == "backward" and backend.rejection(_problem(operator, "bfloat16"), device, "forward") is None:
        chosen = backends.choose(_problem(operator, "bfloat16"), TileConfig(), device, which)
        substitute = f" ({backends.backend_name(chosen, operator)} computes its gradients)"
    return f"no: {reasons['bfloat16']}{substitute}"


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
