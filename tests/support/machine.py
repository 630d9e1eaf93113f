"""Simulate another machine: programs are lowered for its device, but do not run on it."""

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
    """Attributes of a JAX device that this package reads."""

    platform: str


class Machine:
    """The machine that this process appears to run on, until the test ends."""

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
        """Register a backend."""
        self._monkeypatch.setattr(backends, "_registered", [*backends.registered()])
        backends.register(backend)

    def forget(self) -> None:
        """Clear caches of traces and backend decisions, which depend on the machine."""
        select.decided.cache_clear()
        jax.clear_caches()
