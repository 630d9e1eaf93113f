"""The host's kernels as a backend that wraps by strips, as those for GPUs do."""

from __future__ import annotations

from natten_jax.backends.cpu import CpuBackend


class StripsBackend(CpuBackend):
    """Takes windows that are shifted or cut, and any that wrap in strips."""

    family = "strips"
    wraps_by_strips = True


BACKEND = StripsBackend()
