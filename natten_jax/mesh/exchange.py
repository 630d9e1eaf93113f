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
        """That of a call, whose layout is the global one."""
        return cls(halos_of(problem, [1 if line is None else line.parts for line in lines]), lines)

    @property
    def travelling(self) -> list[int]:
        """The token dimensions that have halos, the one of whose tokens most travel first."""
        dimensions = [i for i, line in enumerate(self.lines) if line is not None and self.halos[i].received]
        return sorted(dimensions, key=lambda i: -self.halos[i].received / self.halos[i].part)

    def brought(self, operands: Operands) -> Operands:
        """A device's operands, with all keys that its windows reach, and where they lie in the global layout."""
        key, value = self.extended([operands.key, operands.value])
        return operands._replace(key=key, value=value, origins=self.origins())

    def extended(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Keys and values, with all that this device's windows reach.

        Dimension by dimension; what is extended already goes along, so that corners arrive, too.
        """
        layout = arrays[0].shape[FIRST_TOKEN_AXIS:-2]

        def extend(_: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return self._extended(arrays, _extended_meanwhile)

        def reduce(_: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
            return [self.returned(array, layout) for array in arrays]

        result: list[jax.Array] = linear_call(extend, reduce, (), list(arrays))
        return result

    def returned(self, array: jax.Array, layout: Sequence[int]) -> jax.Array:
        """The transpose: what belongs to others goes to them, and is added there.

        Args:
            array: Of the extended keys.
            layout: Tokens that this device has itself.
        """
        batch, *_, heads, width = array.shape
        own = type_like(array, (batch, *layout, heads, width), array.dtype)
        (result,) = jax.linear_transpose(lambda own: self._extended([own], _extended_at_once), own)([array])
        return result  # type: ignore[no-any-return]

    def _extended(self, arrays: Sequence[jax.Array], extend: _Extend) -> list[jax.Array]:
        result = list(arrays)
        for i, (halo, line) in enumerate(zip(self.halos, self.lines, strict=True)):
            axis = FIRST_TOKEN_AXIS + i
            if line is not None and halo.is_gathered:
                result = [line.gathered(array, axis) for array in result]
            elif line is not None and halo.received:
                result = extend(result, halo, line, axis)
        return result

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


#: Arrays with their halos along a dimension.
_Extend = Callable[[Sequence[jax.Array], Halo, Line, int], list[jax.Array]]


def _slabs(array: jax.Array, halo: Halo, axis: int) -> list[jax.Array]:
    return [jax.lax.slice_in_dim(array, *each, axis=axis) for each in sent_to_neighbors(halo)]


def _extended_at_once(arrays: Sequence[jax.Array], halo: Halo, line: Line, axis: int) -> list[jax.Array]:
    result = []
    for array in arrays:
        before, after = received_from_neighbors(_slabs(array, halo, axis), halo, line, axis)
        result.append(jnp.concatenate([*before, array, *after], axis))
    return result


def _extended_meanwhile(arrays: Sequence[jax.Array], halo: Halo, line: Line, axis: int) -> list[jax.Array]:
    """What a device has is copied to where it has room for halos while these travel."""
    sent = [_slabs(array, halo, axis) for array in arrays]
    sent, arrays = jax.lax.optimization_barrier((sent, list(arrays)))
    slabs = [sum(received_from_neighbors(each, halo, line, axis), []) for each in sent]
    room = [(halo.before, halo.after, 0) if i == axis else (0, 0, 0) for i in range(arrays[0].ndim)]
    roomy = [jax.lax.pad(array, jnp.zeros((), array.dtype), room) for array in arrays]
    slabs, roomy = jax.lax.optimization_barrier((slabs, roomy))
    result = []
    for array, each in zip(roomy, slabs, strict=True):
        start = 0
        for number, slab in enumerate(each):
            if number == len(halo.slabs(halo.before)):
                start += halo.part
            array = jax.lax.dynamic_update_slice_in_dim(array, slab, start, axis)
            start += slab.shape[axis]
        result.append(array)
    return result


def sent_to_neighbors(halo: Halo) -> list[tuple[int, int]]:
    """The tokens ``[first, last)`` of a part that others need: by hops to the back, then by hops to the front."""
    before, after = halo.slabs(halo.before), halo.slabs(halo.after)
    return [(halo.part - tokens, halo.part) for tokens in before] + [(0, tokens) for tokens in after]


def received_from_neighbors(
    sent: Sequence[jax.Array], halo: Halo, line: Line, axis: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What neighbors send, of :func:`sent_to_neighbors`: in front of a part and behind it, in the order of tokens.

    Args:
        sent: What this device sends.
        halo: Along the dimension.
        line: The devices that share it.
        axis: The dimension.
    """
    count = len(halo.slabs(halo.before))
    if line.parts == 2 and count == len(sent) - count == 1:
        from_behind, from_front = _swapped(sent, line, axis)
        return [from_behind], [from_front]
    before = [line.shifted(array, hops) for hops, array in enumerate(sent[:count], 1)]
    return before[::-1], [line.shifted(array, -hops) for hops, array in enumerate(sent[count:], 1)]


def _swapped(sent: Sequence[jax.Array], line: Line, axis: int) -> list[jax.Array]:
    """What two devices send to the back and to the front, in one exchange.

    Each sends in one direction only: as two exchanges, one after the other, they would use half of what connects them.
    """
    lengths = [array.shape[axis] for array in sent]
    of_front, of_back = (
        jax.lax.pad(array, jnp.zeros((), array.dtype), [(0, more if i == axis else 0, 0) for i in range(array.ndim)])
        for array, more in zip(sent, (max(lengths) - each for each in lengths), strict=True)
    )
    is_front = line.place == 0
    other = line.permuted(jnp.where(is_front, of_front, of_back), [(0, 1), (1, 0)])
    arrived = (jax.lax.slice_in_dim(other, 0, length, axis=axis) for length in lengths)
    return [
        jnp.where(is_there, array, jnp.zeros_like(array))
        for is_there, array in zip((~is_front, is_front), arrived, strict=True)
    ]
