"""The host's kernels as a backend that wraps by strips, as those for GPUs do."""

from __future__ import annotations

import dataclasses

from natten_jax.backends.cpu import CpuBackend


class StripsBackend(CpuBackend):
    """Takes windows that are shifted or cut, and any that wrap in strips."""

    family = "strips"
    capabilities = dataclasses.replace(CpuBackend.capabilities, wraps_by_strips=True)


BACKEND = StripsBackend()
