"""Says so, once, where plain JAX runs what kernels would run if this build had them."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Iterable

from natten_jax import source_tree
from natten_jax.backends.base import Backend
from natten_jax.native import cuda_version
from natten_jax.native import module as native
from natten_jax.performance import Pass
from natten_jax.plan.devices import Device
from natten_jax.problem import Problem

#: Values of ``sys.platform`` where kernels can be compiled.
_BUILDABLE = ("linux", "darwin")

_was_warned = False


class MissingKernelsWarning(UserWarning):
    """The slow portable backend runs because this build of natten_jax lacks kernels for the device at hand."""


def lack(backends: Iterable[Backend], problem: Problem, device: Device, pass_: Pass) -> str | None:
    """Why this build has no kernels for a pass, and how to mend it; ``None`` where another build would not either.

    Args:
        backends: Every backend.
        problem: The problem.
        device: Where it runs.
        pass_: The pass.
    """
    if not device.is_present or sys.platform not in _BUILDABLE:
        return None
    reasons = {backend.family: backend.rejection(problem, device, pass_) for backend in backends}
    for backend in backends:
        reason = reasons[backend.family]
        if backend.is_slow_fallback or backend.runs_only_by_name(problem):
            continue
        if reason is None:
            return None
        # For a device that is not present, only what every build lacks is a reason.
        elsewhere = dataclasses.replace(device, is_present=False)
        if reason == native.load_error or backend.rejection(problem, elsewhere, pass_) is None:
            return f"{reason}. {_remedy(device)}"
    return None


def warn_once(reason: str) -> None:
    """Warn that the portable backend runs for this reason; only the first time in a process."""
    global _was_warned
    if _was_warned:
        return
    _was_warned = True
    warnings.warn(
        f"attention runs on the slow portable backend (flex): {reason}; python -m natten_jax.doctor shows what was "
        "built. Name the backend (flex-fna or flex-fmha) to do without this warning.",
        MissingKernelsWarning,
        stacklevel=2,
    )


def _remedy(device: Device) -> str:
    variables, capability = "", device.compute_capability
    if device.platform == "cuda" and capability is not None:
        architectures = "80;90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"
        variables = f"NATTEN_JAX_CUDA={cuda_version.choice()} NATTEN_JAX_CUDA_ARCHS='{architectures}'"
    sentence = source_tree.remedy(variables)
    return sentence[0].upper() + sentence[1:]
