"""How the operator splits over a device mesh; the only module that uses experimental JAX.

Inside ``jax.shard_map`` the operator sees local arrays and runs as it is. Without a mesh it runs on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

Result = TypeVar("Result")


def run(function: Callable[..., Result], *arrays: jax.Array | None) -> Result:
    """Call ``function`` on the arrays at hand: one device's, or one shard's inside ``jax.shard_map``."""
    for array in arrays:
        if array is not None and _is_explicitly_sharded(array):
            raise NotImplementedError(
                f"array of type {jax.typeof(array)} is sharded over explicit mesh axes; call the operator inside "
                "jax.shard_map over batch or heads"
            )
    return function(*_varying_alike(arrays))


def _varying_alike(arrays: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """Inside ``jax.shard_map``, make all arrays vary over the mesh axes that any varies over.

    Outside the differentiable operator JAX knows the transpose: gradients are summed over those axes.
    """
    axes = [frozenset() if array is None else jax.typeof(array).manual_axis_type.varying for array in arrays]
    every: frozenset[str] = frozenset().union(*axes)
    return [
        array if array is None or own == every else jax.lax.pcast(array, tuple(every - own), to="varying")
        for array, own in zip(arrays, axes, strict=True)
    ]


def named(description: str) -> contextlib.AbstractContextManager[None]:
    """Mark the operations traced inside with a readable name that reaches the compiled program."""
    return set_xla_metadata(natten_jax=description)


def _is_explicitly_sharded(array: jax.Array) -> bool:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return sharding is not None and any(axis is not None for axis in sharding.spec)
