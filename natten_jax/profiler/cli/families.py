"""The backend families that a command line may name, whether this package has kernels for them or not."""

from __future__ import annotations

from natten_jax import backends
from natten_jax.backends.base import Platform
from natten_jax.backends.names import WITHOUT_KERNELS

#: The devices that each is for. Their names, some of which NATTEN's profiler has alone, are never typing errors.
KNOWN_FAMILIES: dict[str, Platform] = {
    **WITHOUT_KERNELS,
    **{backend.family: backend.platform for backend in backends.registered() if backend.platform is not None},
}
