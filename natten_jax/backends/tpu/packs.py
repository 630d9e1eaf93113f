"""Packs: narrow heads that lie side by side, in the lanes that one of them would leave empty.

Heads first, those of 32 would take four times their memory, and XLA would transpose them at length. As calls have them,
the heads of a token follow each other; four of 32 fill the lanes of a register. Kernels take a pack for one head of
more queries: the rows of each of its heads are the pack's queries, but for the lanes of other heads, which are 0. So
products with keys are those of one head, and of products with values each row's own lanes count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
#: The widest heads that are packed: XLA transposes wider ones with little effort.
_WIDEST = 32


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the heads of an array lie.

    Attributes:
        count: Heads of a batch entry.
        pack: How many lie side by side in a pack: all, or as many as fill the lanes; 1 if heads are first.
    """

    count: int
    pack: int

    @property
    def blocks(self) -> int:
        """Packs that lie side by side; 1 if heads are first."""
        return self.count // self.pack if self.pack > 1 else 1

    @property
    def leading(self) -> int:
        """Heads of a batch entry that do not lie side by side."""
        return self.count // (self.pack * self.blocks)


def pack_of(heads: int, heads_kv: int, widths: tuple[int, int]) -> int:
    """How many heads lie side by side.

    Args:
        heads: Query heads.
        heads_kv: Key/value heads.
        widths: Elements of a head of queries and keys, and of values.
    """
    if heads != heads_kv or max(widths) > _WIDEST:
        return 1
    most = LANES // max(widths)
    if heads <= most:
        return heads
    return most if heads % most == 0 and widths == (LANES // most,) * 2 else 1


def stacked(array: jax.Array, pack: int) -> jax.Array:
    """The heads of a pack ``[tokens, pack * width]`` one after another, ``[pack * tokens, pack * width]``."""
    if pack == 1:
        return array
    head = _head_of_lanes(array.shape, pack)
    return jnp.concatenate([jnp.where(head == own, array, jnp.zeros_like(array)) for own in range(pack)], axis=0)


def side_by_side(rows: jax.Array, pack: int) -> jax.Array:
    """The inverse of :func:`stacked`, whatever other lanes hold."""
    tokens = rows.shape[0] // pack
    found = rows[:tokens]
    head = _head_of_lanes(found.shape, pack)
    for own in range(1, pack):
        found = jnp.where(head == own, rows[own * tokens : (own + 1) * tokens], found)
    return found


def of_heads(numbers: list[Any], tokens: int, axis: int) -> Any:
    """A number for each head of a pack as one for each of its rows, along an axis of a matrix; one stays itself."""
    found = numbers[0]
    shape = [1, 1]
    shape[axis] = len(numbers) * tokens
    row = jax.lax.broadcasted_iota(jnp.int32, tuple(shape), axis)
    for own, number in enumerate(numbers[1:], start=1):
        found = jnp.where(row >= own * tokens, number, found)
    return found


def _head_of_lanes(shape: tuple[int, ...], pack: int) -> jax.Array:
    lanes = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jax.lax.div(lanes, jnp.int32(shape[1] // pack))
