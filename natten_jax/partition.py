"""How the operator splits over a device mesh; the only module that uses experimental JAX.

Inside ``jax.shard_map`` the operator sees local arrays and runs as it is. Without a mesh it runs on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from natten_jax import native

Result = TypeVar("Result")


def run(function: Callable[..., Result], *arrays: jax.Array | None) -> Result:
    """Call ``function`` on the arrays at hand: one device's, or one shard's inside ``jax.shard_map``."""
    for array in arrays:
        if array is not None and _is_explicitly_sharded(array):
            raise NotImplementedError(
                f"array of type {jax.typeof(array)} is sharded over explicit mesh axes; call the operator inside "
                "jax.shard_map over batch or heads"
            )
    return function(*native.vary_alike(arrays))


def named(description: str) -> contextlib.AbstractContextManager[None]:
    """Mark the operations traced inside with a readable name that reaches the compiled program."""
    return set_xla_metadata(natten_jax=description)


def _is_explicitly_sharded(array: jax.Array) -> bool:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return sharding is not None and any(axis is not None for axis in sharding.spec)
