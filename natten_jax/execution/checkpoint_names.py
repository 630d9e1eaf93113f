"""Names of what backward passes read of forward passes, for policies of ``jax.checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name

#: Names of the saved output, and of the logsumexp and whatever else is saved of each row.
CHECKPOINT_NAMES = ("natten_jax_output", "natten_jax_logsumexp")


def named(saved: Sequence[Any]) -> list[Any]:
    """What a forward pass saves, the output first, under its names."""
    of_output, of_rows = CHECKPOINT_NAMES
    return [checkpoint_name(array, of_rows if i else of_output) for i, array in enumerate(saved)]
