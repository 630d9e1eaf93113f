"""What keeps memory apart that is written in place."""

from __future__ import annotations

from typing import TypeVar

import jax

_Arrays = TypeVar("_Arrays")


def apart(arrays: _Arrays) -> _Arrays:
    """The same arrays, which XLA does not join with slices of them on the way from or to a custom call.

    For GPUs it makes one operation of a custom call and of contiguous slices that it reads or is written to. In JAX
    0.11.2 that fails where the call's result is what is updated ("DUS target must be a fusion parameter"), and takes
    results away from operands whose place in memory they have.
    """
    return jax.lax.optimization_barrier(arrays)  # type: ignore[no-any-return]
