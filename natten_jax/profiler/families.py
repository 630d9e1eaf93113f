"""The backend families that a command line may name, whether this package has kernels for them or not."""

from __future__ import annotations

from natten_jax import backends
from natten_jax.backends.base import Platform

#: The devices that each is for. Their names, some of which NATTEN's profiler has alone, are never typing errors.
KNOWN_FAMILIES: dict[str, Platform] = {
    "blackwell": Platform("cuda", (10, 0), is_exact=True),
    **{backend.family: backend.platform for backend in backends.registered() if backend.platform is not None},
}
