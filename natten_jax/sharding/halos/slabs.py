"""How tokens of a device's part become its neighbors' halos along a dimension, and how gradients of these come back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arrays.avals import type_like
from natten_jax.halo import Halo
from natten_jax.sharding.halos.device_line import DeviceLine


class _Shift(NamedTuple):
    """What becomes a halo of the part so many places further to the back, or to the front, if negative.

    Attributes:
        hops: How many places.
        edge: Where its tokens begin in the part that has them.
        start: Where they begin in a part with its halos, one after the other.
        tokens: How many.
    """

    hops: int
    edge: int
    start: int
    tokens: int


def _shifts(halo: Halo) -> list[_Shift]:
    """By hops to the back, then by hops to the front."""
    shifts: list[_Shift] = []
    start = halo.before
    for hops, tokens in enumerate(halo.slabs(halo.before), 1):
        start -= tokens
        shifts.append(_Shift(hops, halo.part - tokens, start, tokens))
    start = halo.before + halo.part
    for hops, tokens in enumerate(halo.slabs(halo.after), 1):
        shifts.append(_Shift(-hops, 0, start, tokens))
        start += tokens
    return shifts


class _Move(NamedTuple):
    """How tokens become a halo.

    Attributes:
        edge: As of a shift; which of two depends on the device where two change places.
        start: Likewise.
        tokens: How many.
        there: Brings an array there.
        back: Brings it back.
    """

    edge: Any
    start: Any
    tokens: int
    there: Callable[[jax.Array], jax.Array]
    back: Callable[[jax.Array], jax.Array]


def _moves(halo: Halo, line: DeviceLine) -> list[_Move]:
    if halo.changes_places:
        is_front = line.place == 0
        edge = jnp.where(is_front, halo.part - halo.before, 0)
        behind = jnp.where(is_front, halo.before + halo.part, 0)
        swapped = functools.partial(_swapped, line=line)
        return [_Move(edge, behind, halo.before, swapped, swapped)]
    return [
        _Move(
            shift.edge,
            shift.start,
            shift.tokens,
            functools.partial(line.shifted, hops=shift.hops, is_ring=halo.wraps),
            functools.partial(line.shifted, hops=-shift.hops, is_ring=halo.wraps),
        )
        for shift in _shifts(halo)
    ]


def extended(arrays: Sequence[jax.Array], halo: Halo, line: DeviceLine, axis: int) -> list[jax.Array]:
    """Arrays of a part with their halos along a dimension, or with all that there is where that is gathered."""
    if halo.is_gathered:
        return [line.gathered(array, axis) for array in arrays]
    # Own tokens are copied to where there is room for halos while these travel. Those of an array set out when the one
    # before is copied: that takes about as long, and exchanges take turns.
    room = halo.before, halo.after, 0
    moves = _moves(halo, line)
    copied: list[jax.Array] = []
    arrived: list[list[jax.Array]] = []
    for array in arrays:
        sent = [jax.lax.dynamic_slice_in_dim(array, each.edge, each.tokens, axis) for each in moves]
        sent, copied = jax.lax.optimization_barrier((sent, copied))
        arrived.append([each.there(slab) for each, slab in zip(moves, sent, strict=True)])
        copied.append(jax.lax.pad(array, jnp.zeros((), array.dtype), _along(room, axis, array.ndim)))
    for i, slabs in enumerate(arrived):
        for each, slab in zip(moves, slabs, strict=True):
            copied[i] = jax.lax.dynamic_update_slice_in_dim(copied[i], slab, each.start, axis)
    return copied


def _along(room: tuple[int, int, int], axis: int, ndim: int) -> list[tuple[int, int, int]]:
    return [room if i == axis else (0, 0, 0) for i in range(ndim)]


def returned(array: jax.Array, halo: Halo, line: DeviceLine, axis: int, tokens: int) -> jax.Array:
    """The transpose of :func:`extended`, of one array."""
    if halo.is_gathered:
        own = type_like(array, (*array.shape[:axis], tokens, *array.shape[axis + 1 :]), array.dtype)
        (gathered,) = jax.linear_transpose(lambda own: line.gathered(own, axis), own)(array)
        return gathered  # type: ignore[no-any-return]
    own = jax.lax.slice_in_dim(array, halo.before, halo.before + tokens, axis=axis)
    moves = _moves(halo, line)
    slabs = [jax.lax.dynamic_slice_in_dim(array, each.start, each.tokens, axis) for each in moves]
    return _with_edges(own, slabs, moves, axis)


def returned_to_neighbors(
    own: jax.Array, slabs: Sequence[jax.Array], halo: Halo, line: DeviceLine, axis: int
) -> jax.Array:
    """A part's own tokens, with what all devices have of them in their halos added.

    Args:
        own: A part's own.
        slabs: The slabs of its halos, in the order of :meth:`natten_jax.halo.Halo.seen_slabs`.
        halo: Along the dimension.
        line: The devices that share it.
        axis: The dimension.
    """
    return _with_edges(own, slabs, _moves(halo, line), axis)


def _with_edges(own: jax.Array, slabs: Sequence[jax.Array], moves: Sequence[_Move], axis: int) -> jax.Array:
    for move, slab in zip(moves, slabs, strict=True):
        edge = unknown(move.edge)
        sum_ = move.back(slab) + jax.lax.dynamic_slice_in_dim(own, edge, move.tokens, axis)
        own = jax.lax.dynamic_update_slice_in_dim(own, sum_, edge, axis)
    return own


def unknown(start: Any) -> jax.Array:
    """Where a slice begins, not as a constant.

    Where a slice of an array is read, changed and written back, XLA updates that slice alone if it does not know where
    it is, and copies the whole array if it does: 81 instead of 7 microseconds for 8 of 134 MB on an H200.
    """
    return jax.lax.optimization_barrier(jnp.asarray(start, jnp.int32))


def _swapped(array: jax.Array, line: DeviceLine) -> jax.Array:
    """What the other one of two devices has.

    Each sends in one direction only: as two exchanges, one after the other, they would use half of what connects them.
    """
    return line.permuted(array, [(0, 1), (1, 0)])


def edge_for_neighbor(number: int, halo: Halo, line: DeviceLine) -> jax.Array:
    """Where a slab begins in the part that sends it, of those that :meth:`natten_jax.halo.Halo.seen_slabs` has."""
    return jnp.asarray(_moves(halo, line)[number].edge, jnp.int32)


def received_from_neighbor(sent: jax.Array, number: int, halo: Halo, line: DeviceLine) -> jax.Array:
    """That slab of this part's halos."""
    return _moves(halo, line)[number].there(sent)
