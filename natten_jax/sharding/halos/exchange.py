"""Exchange of halos: the keys and values that neighbors hold, where token dimensions are split over devices.

Queries stay where they are, and none is computed twice: a device takes the keys that its windows reach
(:mod:`natten_jax.halo`) from the devices that have them, and attends at its place in the global layout. The transpose
sends the gradients of these keys and values back and adds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Inputs, Operands
from natten_jax.arrays.roles import roles_of_fields
from natten_jax.halo import Halo, halos_of
from natten_jax.problem import Problem
from natten_jax.sharding.halos import slabs
from natten_jax.sharding.halos.device_line import DeviceLine

FIRST_TOKEN_AXIS = 1  # behind the batch


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the devices of a call exchange.

    Attributes:
        halos: One for each token dimension.
        lines: Likewise; ``None`` where it is not split.
    """

    halos: Sequence[Halo]
    lines: Sequence[DeviceLine | None]

    @classmethod
    def of(cls, problem: Problem, lines: Sequence[DeviceLine | None]) -> Exchange:
        """That of a call, whose layout is the global one.

        Where there are two devices, both get halos of one length, so that these change places in one exchange.
        """
        halos = halos_of(problem, [1 if line is None else line.parts for line in lines])
        return cls([halo.evened() for halo in halos], lines)

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each token dimension is split."""
        return tuple(halo.parts for halo in self.halos)

    def brought(self, operands: Operands) -> Operands:
        """A device's operands, with all keys that its windows reach, and where they lie in the global layout."""
        held = of_keys(operands.inputs)
        extended = dict(zip(held, self.extended([*held.values()]), strict=True))
        return Operands(operands.inputs._replace(**extended), self.origins())

    def extended(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Keys and values, with all that this device's windows reach.

        Dimension by dimension; what is extended already goes along, so that corners arrive, too.
        """
        for axis, halo, line in self._split_axes():
            arrays = slabs.extended(arrays, halo, line, axis)
        return list(arrays)

    def returned(self, array: jax.Array, layout: Sequence[int]) -> jax.Array:
        """The transpose: what belongs to others goes to them, and is added there.

        Args:
            array: An array of the extended keys.
            layout: Tokens that this device has itself.
        """
        for axis, halo, line in reversed(self._split_axes()):
            array = slabs.returned(array, halo, line, axis, layout[axis - FIRST_TOKEN_AXIS])
        return array

    def _split_axes(self) -> list[tuple[int, Halo, DeviceLine]]:
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

    def origins_of(self, queries: Sequence[Any], keys: Sequence[Any]) -> jax.Array:
        """Where queries and keys begin in the global layout that begin there in this device's part."""
        parts = [
            jnp.zeros((), jnp.int32) if line is None else jnp.asarray(line.place, jnp.int32) * halo.part
            for halo, line in zip(self.halos, self.lines, strict=True)
        ]
        pad = [jnp.zeros((), jnp.int32)] * (3 - len(parts))
        rows = [[part + start for part, start in zip(parts, starts, strict=True)] for starts in (queries, keys)]
        return jnp.stack([*pad, *rows[0], *pad, *rows[1]]).reshape(2, 3)


def of_keys(inputs: Inputs) -> dict[str, jax.Array]:
    """The inputs that have a number, or several, for each key."""
    fields = zip(Inputs._fields, roles_of_fields(Inputs), inputs, strict=True)
    return {name: array for name, role, array in fields if role.tokens == "keys" and array is not None}


def with_all_keys(inputs: Inputs, lines: Sequence[DeviceLine | None]) -> Inputs:
    """A device's queries and everyone's keys and values."""
    held = of_keys(inputs)
    for i, line in enumerate(lines):
        if line is not None:
            held = {name: line.gathered(array, FIRST_TOKEN_AXIS + i) for name, array in held.items()}
    return inputs._replace(**held)


def flat_origins(layout: Sequence[int], lines: Sequence[DeviceLine | None]) -> jax.Array:
    """Where a device's queries begin among all, as a sequence; keys are everyone's.

    In several dimensions the queries of a part are no contiguous part of the sequence, and the first stand for them:
    such a call has no causal mask, so that it does not matter which queries these are.
    """
    (line, *others) = lines
    first = 0 if line is None or others else line.place * layout[0]
    return jnp.zeros((2, 3), jnp.int32).at[0, 2].set(first)
