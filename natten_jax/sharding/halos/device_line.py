"""The devices that share a token dimension, and how arrays move along them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class DeviceLine:
    """The devices that share one token dimension, in the order of their parts.

    Attributes:
        parts: How many.
        place: The part of this device.
        permuted: What the device has from which an array moves here, of moves from one place to another; zeros where
            there is none.
        gathered: All parts of an array, joined along an axis.
    """

    parts: int
    place: Any
    permuted: Callable[[jax.Array, Sequence[tuple[int, int]]], jax.Array]
    gathered: Callable[[jax.Array, int], jax.Array]

    def shifted(self, array: jax.Array, hops: int, *, is_ring: bool = False) -> jax.Array:
        """What the device that is so many places further to the front has, or to the back, if negative.

        In a ring, the last device is the one in front of the first.
        """
        places = range(self.parts)
        if is_ring:
            return self.permuted(array, [(place, (place + hops) % self.parts) for place in places])
        return self.permuted(array, [(place, place + hops) for place in places if place + hops in places])


def lines_of(token_axes: Sequence[tuple[str, ...]]) -> list[DeviceLine | None]:
    """The lines along manual mesh axes, from those that each token dimension is split over."""
    return [
        _line_of(names) if parts > 1 else None for names, parts in zip(token_axes, parts_of(token_axes), strict=True)
    ]


def parts_of(token_axes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Into how many parts manual mesh axes split each token dimension."""
    return tuple(jax.lax.axis_size(names) if names else 1 for names in token_axes)


def _line_of(names: tuple[str, ...]) -> DeviceLine:
    """The line along manual mesh axes, the first one slowest."""
    parts = jax.lax.axis_size(names)

    def permuted(array: jax.Array, moves: Sequence[tuple[int, int]]) -> jax.Array:
        return jax.lax.ppermute(array, names, moves)

    def gathered(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, names, axis=axis, tiled=True)

    return DeviceLine(parts, jax.lax.axis_index(names), permuted, gathered)
