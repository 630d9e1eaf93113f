"""The backend families that are for some devices alone."""

from __future__ import annotations

from natten_jax import backends
from natten_jax.backends.base import Platform

#: The devices that each is for.
KNOWN_FAMILIES: dict[str, Platform] = {
    backend.family: backend.platform for backend in backends.registered() if backend.platform is not None
}
