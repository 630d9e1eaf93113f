"""Kinds of devices: the devices of this process, and devices that programs can be lowered for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from natten_jax.arguments.static import hashable, python_int, shown

ComputeCapability = tuple[int, int]
#: A compute capability as users write it: ``"9.0"``, ``9.0`` or ``(9, 0)``.
CapabilityLike = str | float | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device that a program can be lowered for.

    Attributes:
        platform: ``"cpu"``, ``"cuda"``, or another platform name that JAX uses for lowering.
        compute_capability: ``(major, minor)`` of an NVIDIA GPU; ``None`` if unknown.
        is_present: False if the device is only described, for example for a configuration query. No program then runs
            on it.
        product: The vendor's name of the device, such as ``"NVIDIA H100 80GB HBM3"``. Known for GPUs of this process,
            and for simulated TPUs.
    """

    platform: str
    compute_capability: ComputeCapability | None = None
    is_present: bool = True
    product: str | None = None

    @property
    def kind(self) -> str:
        """Name under which measurements are stored: the product, or the platform if the product is unknown."""
        return self.product or self.platform

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform if self.is_present or self.product is None else f"{self.platform} ({self.product})"
        return f"{self.platform} (compute capability {self.compute_capability[0]}.{self.compute_capability[1]})"


class NoDeviceError(RuntimeError):
    """JAX cannot find a device to compute on. The error message contains JAX's error message."""


CPU = Device("cpu")

#: Platforms that JAX supports without a third-party plugin.
PLATFORMS = "cpu", "cuda", "rocm", "tpu"


def compute_capability_of(argument: Any) -> ComputeCapability:
    """Convert ``"9.0"``, ``(9, 0)``, ``[9, 0]`` or ``9.0`` to ``(9, 0)``.

    Raises:
        ValueError: The argument is not a compute capability (for example 8.65), or is ambiguous (``"90"``).
        TypeError: The argument has an unsupported type, for example int.
    """
    rule = 'compute_capability must be None or the major and minor number, as in "9.0" or (9, 0)'
    parts: Any = hashable(argument)
    if isinstance(argument, (str, float, np.floating)):  # str of a float is the shortest text that parses to the float
        parts = tuple(map(int, str(argument).split("."))) if re.fullmatch(r"[1-9][0-9]?\.[0-9]", str(argument)) else ()
    numbers = [python_int(each) for each in parts] if isinstance(parts, tuple) else [None]
    if None in numbers:
        raise TypeError(f"{rule}, got {shown(argument)}")
    match numbers:
        case [int(major), int(minor)] if 1 <= major < 100 and 0 <= minor < 10:
            return major, minor
    raise ValueError(f"{rule}, got {shown(argument)}")


def default_jax_device() -> jax.Device:
    """Return the default ``jax.Device`` of this thread, which ``jax.default_device`` can set.

    Raises:
        NoDeviceError: JAX cannot start the configured platforms.
    """
    chosen: jax.Device | str | None = jax.default_device.value
    return _started(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def _started(platform: str | None) -> list[jax.Device]:
    """Return the devices of a platform in this process. ``None`` means JAX's default platform."""
    try:
        return jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:  # AssertionError, with an empty message, if no GPU is visible
        configured = getattr(jax.config, "jax_platforms", None)
        platforms = f"JAX_PLATFORMS={configured}" if configured else "its platforms"
        reason = " ".join(str(error).split()) or f"it finds no device of {platforms} on this machine"
        raise NoDeviceError(f"JAX has no device: {reason}") from error


def default_device() -> Device:
    """Return the kind of this thread's default device.

    Raises:
        NoDeviceError: JAX cannot find a device.
    """
    return _device_for_platform(default_jax_device().platform)


def device_of(array: jax.Array) -> Device:
    """Return the kind of an array's device. For tracers and arrays of other libraries, return the default device."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return default_device()
    return _device_for_platform(next(iter(array.devices())).platform)


def _device_for_platform(platform: str) -> Device:
    """Return the kind of this process's devices on a platform. The platform ``"gpu"`` is CUDA or ROCm."""
    if platform == "gpu":
        platform = "cuda" if _cuda_devices() else "rocm"
    return lowering_target(platform)


def lowering_targets() -> Mapping[str, Device]:
    """Map each platform to the kind of device that a program can be lowered for.

    The first platform is the platform of this thread's default device. The other entries are needed because a program
    can also be exported for devices that this process does not have. For such devices, only the platform is known.
    """
    return {
        platform: lowering_target(platform) if platform == "cuda" else Device(platform)
        for platform in dict.fromkeys((local_devices()[0].platform, *PLATFORMS))
    }


def lowering_target(platform: str) -> Device:
    """Return the kind of device to lower a platform's programs for. For CUDA, it is the first GPU of this process."""
    try:
        return _cuda_device() if platform == "cuda" else Device(platform)
    except NoDeviceError:
        return Device(platform)  # not cached: JAX can be configured for another platform later


@functools.cache
def _cuda_device() -> Device:
    devices = _cuda_devices()
    capability = getattr(devices[0], "compute_capability", None) if devices else None
    product = getattr(devices[0], "device_kind", None) if devices else None
    return Device("cuda", compute_capability_of(str(capability)) if capability else None, product=product)


def local_devices() -> tuple[Device, ...]:
    """Return the kinds of devices that this process can run programs on, the default device first.

    If JAX finds no device, return the CPU, because programs can still be traced, and lowered for devices of other
    machines.
    """
    try:
        devices = default_device(), _device_for_platform(jax.default_backend())
    except NoDeviceError:
        return (CPU,)
    return tuple(dict.fromkeys((*devices, CPU)))


@functools.cache
def _cuda_devices() -> tuple[jax.Device, ...]:
    _started(None)  # raises if no platform starts; exceptions are not cached
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:
        return ()
