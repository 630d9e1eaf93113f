"""The devices of this process: platform names and compute capabilities."""

from __future__ import annotations

import dataclasses
import functools

import jax

ComputeCapability = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device that a program may be lowered for.

    Attributes:
        platform: ``"cpu"``, ``"cuda"``, or another XLA platform's name.
        compute_capability: Of an NVIDIA GPU, ``(major, minor)``; ``None`` where it is not known.
        is_present: Whether programs are to run here, or only questions about the device are to be answered.
    """

    platform: str
    compute_capability: ComputeCapability | None = None
    is_present: bool = True

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        return f"{self.platform} (compute capability {self.compute_capability[0]}.{self.compute_capability[1]})"


CPU = Device("cpu")


def parse_compute_capability(text: str) -> ComputeCapability:
    """``"9.0"`` as ``(9, 0)``."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


@functools.cache
def default_device() -> Device:
    """The device that this process computes on by default."""
    platform = jax.default_backend()
    return cuda_device() if platform == "gpu" and _cuda_devices() else Device(platform)


@functools.cache
def cuda_device() -> Device:
    """This process's first CUDA device, or one of unknown compute capability where there is none."""
    devices = _cuda_devices()
    capability = getattr(devices[0], "compute_capability", None) if devices else None
    return Device("cuda", parse_compute_capability(str(capability)) if capability else None)


def local_devices() -> tuple[Device, ...]:
    """The kinds of devices that this process can run programs on, the default one first."""
    return tuple(dict.fromkeys((default_device(), CPU)))


@functools.cache
def _cuda_devices() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:
        return ()
