"""What ``jax.debug_nans`` and ``jax.debug_infs`` ask of an operation that runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "jax_debug_nans": ("nan", np.isnan),
    "jax_debug_infs": ("inf", np.isinf),
}


def check(results: Iterable[jax.Array], what: str) -> None:
    """Check the results of an operation, where JAX is set to do so.

    Args:
        results: The results.
        what: What computed them, for the message.

    Raises:
        FloatingPointError: One of them holds a value that is not wanted.
    """
    for option, (name, is_invalid) in _CHECKS.items():
        if not getattr(jax.config, option):
            continue
        for array in results:
            if not np.issubdtype(array.dtype, np.integer) and any(
                np.any(is_invalid(np.asarray(shard.data))) for shard in array.addressable_shards
            ):
                raise FloatingPointError(f"invalid value ({name}) encountered in {what}")
