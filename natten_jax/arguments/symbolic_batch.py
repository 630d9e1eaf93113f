"""A batch size that a program leaves open: ``jax.export`` traces with a symbolic one, and with no other such extent.

Nothing that is computed depends on it but the extents of arrays, which may be symbolic. What depends on it is cost: how
large tiles are, and how many of them a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Stands for any batch: neither one of a single entry is cut badly, nor do steps for hundreds take much memory.
_ASSUMED_BATCH = 8


def planned_batch(batch: int) -> int:
    """``batch``, or where it is symbolic the number that decisions about cost take in its place."""
    return batch if isinstance(batch, int) else _ASSUMED_BATCH


def least_batch(batch: int) -> int:
    """``batch``, or where it is symbolic the least that it can be: of what some entries share in turns, one's."""
    return batch if isinstance(batch, int) else 1


def check_extents(name: str, shape: Sequence[int], dimensions: Sequence[str]) -> None:
    """Check that no extent but the batch is symbolic.

    Args:
        name: The name of the argument.
        shape: Its shape.
        dimensions: What each dimension is, the batch first.

    Raises:
        ValueError: One is.
    """
    for axis, (what, extent) in enumerate(zip(dimensions, shape, strict=True)):
        if axis > 0 and not isinstance(extent, int):
            raise ValueError(
                f"{name} has shape {tuple(shape)}, in which {what} (dimension {axis}) is the symbolic {extent}: only "
                "the batch may be symbolic, as windows and tiles are worked out from all else; export one for each"
            )
