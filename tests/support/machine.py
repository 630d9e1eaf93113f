"""Simulate a machine with another device. Programs are lowered for this device, but cannot run."""

from __future__ import annotations

from typing import NamedTuple

import jax
import pytest

from natten_jax import backends
from natten_jax.backends import select
from natten_jax.backends.base import Backend
from natten_jax.plan import devices
from natten_jax.plan.devices import Device


class FakeDevice(NamedTuple):
    """A JAX device with only the attributes that this package reads."""

    platform: str


class Machine:
    """A simulated machine. This process appears to run on it until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.forget()

    def has(self, device: Device) -> None:
        """Make ``device`` the default device."""
        is_gpu = device.platform == "cuda"
        jax_device = FakeDevice("gpu" if is_gpu else device.platform)
        self._monkeypatch.setattr(devices, "default_jax_device", lambda: jax_device)
        if is_gpu:
            self._monkeypatch.setattr(devices, "_cuda_devices", lambda: (jax_device,))
            self._monkeypatch.setattr(devices, "_cuda_device", lambda: device)
        self.forget()

    def knows(self, backend: Backend) -> None:
        """Register a backend until the test ends."""
        self._monkeypatch.setattr(backends, "_registered", [*backends.registered()])
        backends.register(backend)

    def forget(self) -> None:
        """Clear the caches of traces and of backend decisions, because their entries depend on the machine."""
        select.decided.cache_clear()
        jax.clear_caches()
