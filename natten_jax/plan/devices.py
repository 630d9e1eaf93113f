"""Kinds of devices: the devices of this process, and devices that programs can be lowered for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from natten_jax.arguments.static import hashable, python_int, shown

ComputeCapability = tuple[int, int]


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


def parse_compute_capability(text: str) -> ComputeCapability:
    """Parse a compute capability: ``"9.0"`` becomes ``(9, 0)``.

    Raises:
        ValueError: The text does not have the form ``"9.0"``.
    """
    match = re.fullmatch(r"([1-9][0-9]?)\.([0-9])", text)
    if match is None:
        raise ValueError(_refusal(text))
    return int(match[1]), int(match[2])


def compute_capability_of(argument: Any) -> ComputeCapability:
    """Convert ``"9.0"``, ``(9, 0)``, ``[9, 0]`` or ``9.0`` to ``(9, 0)``.

    Raises:
        ValueError: The argument is not a compute capability (for example 8.65), or is ambiguous (``"90"``).
        TypeError: The argument has an unsupported type, for example int.
    """
    if isinstance(argument, str):
        return parse_compute_capability(argument)
    if isinstance(argument, (float, np.floating)):
        try:
            return parse_compute_capability(str(argument))  # `str` returns the shortest text that has this value
        except ValueError:
            raise ValueError(_refusal(argument)) from None
    parts = hashable(argument)
    numbers = list(map(python_int, parts)) if isinstance(parts, tuple) else [None]
    values = [number for number in numbers if number is not None]
    if len(values) < len(numbers):
        raise TypeError(_refusal(argument))
    if len(values) != 2 or values[0] not in range(1, 100) or values[1] not in range(10):
        raise ValueError(_refusal(argument))
    return values[0], values[1]


def _refusal(argument: Any) -> str:
    return (
        f'compute_capability must be None or the major and minor number, as in "9.0" or (9, 0), got {shown(argument)}'
    )


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
    except (RuntimeError, AssertionError) as error:  # AssertionError, without a message, if no GPU is visible
        told = getattr(jax.config, "jax_platforms", None)
        platforms = f"JAX_PLATFORMS={told}" if told else "its platforms"
        said = " ".join(str(error).split()) or f"it finds no device of {platforms} on this machine"
        raise NoDeviceError(f"JAX has no device: {said}") from error


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
    can also be exported for devices that this process does not have. For such devices, only
    the platform is known.
    """
    try:
        first = default_device().platform
    except NoDeviceError:
        first = CPU.platform
    return {
        platform: lowering_target(platform) if platform == "cuda" else Device(platform)
        for platform in dict.fromkeys((first, *PLATFORMS))
    }


def lowering_target(platform: str) -> Device:
    """Return the kind of device to lower a platform's programs for. For CUDA, it is the first GPU of this process."""
    try:
        return _cuda_device() if platform == "cuda" else Device(platform)
    except NoDeviceError:
        return Device(platform)  # not cached: JAX may be configured for another platform later


@functools.cache
def _cuda_device() -> Device:
    devices = _cuda_devices()
    capability = getattr(devices[0], "compute_capability", None) if devices else None
    product = getattr(devices[0], "device_kind", None) if devices else None
    return Device("cuda", parse_compute_capability(str(capability)) if capability else None, product=product)


def local_devices() -> tuple[Device, ...]:
    """Return the kinds of devices that this process can run programs on, the default device first.

    If JAX finds no device, return the CPU: programs can still be traced, and lowered for devices of other machines.
    """
    try:
        found = default_device(), _device_for_platform(jax.default_backend())
    except NoDeviceError:
        return (CPU,)
    return tuple(dict.fromkeys((*found, CPU)))


@functools.cache
def _cuda_devices() -> tuple[jax.Device, ...]:
    _started(None)  # raises if no platform starts; exceptions are not cached
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:
        return ()
