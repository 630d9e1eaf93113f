"""Exchange of halos: the keys and values that neighbors hold, where token dimensions are split over devices.

Queries stay where they are, and none is computed twice: a device takes the keys that its windows reach
(:mod:`natten_jax.halo`) from the devices that have them, and attends at its place in the global layout. The transpose,
which JAX derives, sends the gradients of these keys and values back and adds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import linear_call

from natten_jax.backends.base import Operands
from natten_jax.halo import Halo, halos_of
from natten_jax.mesh.types import type_like
from natten_jax.problem import Problem

FIRST_TOKEN_AXIS = 1  # behind the batch


@dataclasses.dataclass(frozen=True)
class Line:
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

    def shifted(self, array: jax.Array, hops: int) -> jax.Array:
        """What the device that is so many places further to the front has, or to the back, if negative."""
        places = range(self.parts)
        return self.permuted(array, [(place, place + hops) for place in places if place + hops in places])


def lines_of(token_axes: Sequence[tuple[str, ...]]) -> list[Line | None]:
    """The lines along manual mesh axes, from those that each token dimension is split over."""
    return [
        _line_of(names) if parts > 1 else None for names, parts in zip(token_axes, parts_of(token_axes), strict=True)
    ]


def parts_of(token_axes: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """Into how many parts manual mesh axes split each token dimension."""
    return tuple(jax.lax.axis_size(names) if names else 1 for names in token_axes)


def _line_of(names: tuple[str, ...]) -> Line:
    """The line along manual mesh axes, the first one slowest."""
    parts = jax.lax.axis_size(names)

    def permuted(array: jax.Array, moves: Sequence[tuple[int, int]]) -> jax.Array:
        return jax.lax.ppermute(array, names, moves)

    def gathered(array: jax.Array, axis: int) -> jax.Array:
        return jax.lax.all_gather(array, names, axis=axis, tiled=True)

    return Line(parts, jax.lax.axis_index(names), permuted, gathered)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the devices of a call exchange.

    Attributes:
        halos: One for each token dimension.
        lines: Likewise; ``None`` where it is not split.
    """

    halos: Sequence[Halo]
    lines: Sequence[Line | None]

    @classmethod
    def of(cls, problem: Problem, lines: Sequence[Line | None]) -> Exchange:
        """That of a call, whose layout is the global one.

        Of two devices both get halos of one length, so that these change places in one exchange.
        """
        halos = halos_of(problem, [1 if line is None else line.parts for line in lines])
        return cls([_even(halo) if halo.parts == 2 else halo for halo in halos], lines)

    @property
    def travelling(self) -> list[int]:
        """The token dimensions that have halos, the one of whose tokens most travel first."""
        dimensions = [i for i, line in enumerate(self.lines) if line is not None and self.halos[i].received]
        return sorted(dimensions, key=lambda i: -self.halos[i].received / self.halos[i].part)

    def brought(self, operands: Operands) -> Operands:
        """A device's operands, with all keys that its windows reach, and where they lie in the global layout."""
        key, value = self.extended(operands.key), self.extended(operands.value)
        return operands._replace(key=key, value=value, origins=self.origins())

    def extended(self, array: jax.Array) -> jax.Array:
        """Keys or values, with all that this device's windows reach.

        Dimension by dimension; what is extended already goes along, so that corners arrive, too.
        """
        layout = array.shape[FIRST_TOKEN_AXIS:-2]

        def extend(places: Sequence[Any], array: jax.Array) -> jax.Array:
            for axis, halo, line in self._at(places)._split_axes():
                array = _extended(array, halo, line, axis)
            return array

        def reduce(places: Sequence[Any], array: jax.Array) -> jax.Array:
            return self._at(places).returned(array, layout)

        places = [None if line is None else line.place for line in self.lines]
        result: jax.Array = linear_call(extend, reduce, places, array)
        return result

    def _at(self, places: Sequence[Any]) -> Exchange:
        """The same for a device at these places, as traced functions need it."""
        lines = [
            None if line is None else dataclasses.replace(line, place=place)
            for line, place in zip(self.lines, places, strict=True)
        ]
        return dataclasses.replace(self, lines=lines)

    def returned(self, array: jax.Array, layout: Sequence[int]) -> jax.Array:
        """The transpose: what belongs to others goes to them, and is added there.

        Args:
            array: Of the extended keys.
            layout: Tokens that this device has itself.
        """
        for axis, halo, line in reversed(self._split_axes()):
            array = _returned(array, halo, line, axis, layout[axis - FIRST_TOKEN_AXIS])
        return array

    def _split_axes(self) -> list[tuple[int, Halo, Line]]:
        return [
            (FIRST_TOKEN_AXIS + i, halo, line)
            for i, (halo, line) in enumerate(zip(self.halos, self.lines, strict=True))
            if line is not None and (halo.is_gathered or halo.received)
        ]

    def origins(self) -> jax.Array:
        """Where this device's queries, and the keys that it holds with halos, begin."""
        first_keys = [-halo.before for halo in self.halos]
        found = self.origins_of([0] * len(self.halos), first_keys)
        gathered = [line is not None and halo.is_gathered for halo, line in zip(self.halos, self.lines, strict=True)]
        pad = [False] * (3 - len(gathered))
        return jnp.where(np.array([[False] * 3, [*pad, *gathered]]), 0, found) if any(gathered) else found

    def origins_of(self, queries: Sequence[int], keys: Sequence[int]) -> jax.Array:
        """Where queries and keys begin in the global layout that begin there in this device's part."""
        starts = [
            jnp.zeros((), jnp.int32) if line is None else jnp.asarray(line.place, jnp.int32) * halo.part
            for halo, line in zip(self.halos, self.lines, strict=True)
        ]
        pad = [jnp.zeros((), jnp.int32)] * (3 - len(starts))
        places = [*pad, *starts, *pad, *starts]
        zeros = [0] * len(pad)
        offsets = np.array([*zeros, *queries, *zeros, *keys], np.int32)
        return (jnp.stack(places) + offsets).reshape(2, 3)


def with_all_keys(operands: Operands, lines: Sequence[Line | None]) -> Operands:
    """A device's queries and everyone's keys and values."""
    arrays = [operands.key, operands.value]
    for i, line in enumerate(lines):
        if line is not None:
            arrays = [line.gathered(array, FIRST_TOKEN_AXIS + i) for array in arrays]
    return operands._replace(key=arrays[0], value=arrays[1])


def flat_origins(layout: Sequence[int], lines: Sequence[Line | None]) -> jax.Array:
    """Where a device's queries begin among all, as a sequence; keys are everyone's.

    In several dimensions the queries of a part are no contiguous part of the sequence, and the first stand for them:
    such a call has no causal mask, so that it does not matter which queries these are.
    """
    (line, *others) = lines
    first = 0 if line is None or others else line.place * layout[0]
    return jnp.zeros((2, 3), jnp.int32).at[0, 2].set(first)


def _even(halo: Halo) -> Halo:
    longer = max(halo.before, halo.after)
    return dataclasses.replace(halo, before=longer, after=longer) if halo.before and halo.after else halo


def _extended(array: jax.Array, halo: Halo, line: Line, axis: int) -> jax.Array:
    if halo.is_gathered:
        return line.gathered(array, axis)
    if _changes_places(halo):
        # Own tokens are copied to where there is room for halos while these travel: neither waits for the other.
        room = [(halo.before, halo.after, 0) if i == axis else (0, 0, 0) for i in range(array.ndim)]
        roomy = jax.lax.pad(array, jnp.zeros((), array.dtype), room)
        slab = _swapped(_sent_to_other(array, halo, line, axis), line)
        start = jnp.where(line.place == 0, halo.before + halo.part, 0)
        return jax.lax.dynamic_update_slice_in_dim(roomy, slab, start, axis)
    sent = [jax.lax.slice_in_dim(array, *each, axis=axis) for each in sent_to_neighbors(halo)]
    before, after = received_from_neighbors(sent, halo, line)
    return jnp.concatenate([*before, array, *after], axis)


def _returned(array: jax.Array, halo: Halo, line: Line, axis: int, tokens: int) -> jax.Array:
    """The transpose of :func:`_extended`."""
    if _changes_places(halo):
        start = jnp.where(line.place == 0, halo.before + halo.part, 0)
        slab = _swapped(jax.lax.dynamic_slice_in_dim(array, start, halo.before, axis), line)
        own = jax.lax.slice_in_dim(array, halo.before, halo.before + halo.part, axis=axis)
        edge = _edge(halo, line)
        seen = jax.lax.dynamic_slice_in_dim(own, edge, halo.before, axis)
        return jax.lax.dynamic_update_slice_in_dim(own, seen + slab, edge, axis)
    own = type_like(array, (*array.shape[:axis], tokens, *array.shape[axis + 1 :]), array.dtype)
    (result,) = jax.linear_transpose(lambda own: _extended(own, halo, line, axis), own)(array)
    return result  # type: ignore[no-any-return]


def _changes_places(halo: Halo) -> bool:
    """Whether two devices send each other halos."""
    return halo.parts == 2 and halo.before == halo.after and not halo.is_gathered


def _edge(halo: Halo, line: Line) -> jax.Array:
    """Where the tokens begin that the other one of two devices needs."""
    return jnp.where(line.place == 0, halo.part - halo.before, 0)


def _sent_to_other(array: jax.Array, halo: Halo, line: Line, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, _edge(halo, line), halo.before, axis)


def _swapped(array: jax.Array, line: Line) -> jax.Array:
    """What the other one of two devices has.

    Each sends in one direction only: as two exchanges, one after the other, they would use half of what connects them.
    """
    return line.permuted(array, [(0, 1), (1, 0)])


def sent_to_neighbors(halo: Halo) -> list[tuple[int, int]]:
    """The tokens ``[first, last)`` of a part that others need: by hops to the back, then by hops to the front."""
    before, after = halo.slabs(halo.before), halo.slabs(halo.after)
    return [(halo.part - tokens, halo.part) for tokens in before] + [(0, tokens) for tokens in after]


def received_from_neighbors(
    sent: Sequence[jax.Array], halo: Halo, line: Line
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What neighbors send, of :func:`sent_to_neighbors`: in front of a part and behind it, in the order of tokens."""
    if _changes_places(halo):
        is_front = line.place == 0
        to_back, to_front = sent
        other = _swapped(jnp.where(is_front, to_back, to_front), line)
        nothing = jnp.zeros_like(other)
        return [jnp.where(is_front, nothing, other)], [jnp.where(is_front, other, nothing)]
    count = len(halo.slabs(halo.before))
    before = [line.shifted(array, hops) for hops, array in enumerate(sent[:count], 1)]
    return before[::-1], [line.shifted(array, -hops) for hops, array in enumerate(sent[count:], 1)]
