"""The backend families that NATTEN's profiler knows, whether this package has kernels for them or not."""

from __future__ import annotations

from natten_jax.devices import ComputeCapability

#: The GPUs that each is for. Their names are never typing errors.
KNOWN_FAMILIES: dict[str, ComputeCapability] = {"cutlass": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}
