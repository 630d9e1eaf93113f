"""What hides keys from queries, for logits ``[queries, keys]`` and ``[keys, queries]``.

Along the last dimension bounds differ from query to query of a slab, the queries or keys of a tile that are alike in
all others. Those of the other dimensions are the same for a slab, and cost little.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.boxes import Chunk, KeyBox
from natten_jax.backends.tpu.chunks import NOWHERE
from natten_jax.backends.tpu.kernels import Call, Place, Scalar, across, columns, spec
from natten_jax.backends.tpu.packs import LANES
from natten_jax.native.abi import KERNEL_RANK

#: Logit of a key that a query does not see; below what a maximum begins with, so that its weight is 0.
#: Both are below every finite logit in base 2 that a bias makes, which is above ``finfo.min / 2 * log2(e)``.
HIDDEN = -3.3e38
SMALLEST_MAXIMUM = -2.9e38


# Programs that own queries -------------------------------------------------------------------------------------------


def slab_bounds(call: Call) -> list[jax.Array]:
    """First and end of the keys that queries see along all dimensions but the last, one after another."""
    return [jnp.asarray(visits.bounds).reshape(-1) for visits in call.visits[:-1]]


def last_bounds(call: Call) -> jax.Array:
    """The same along the last dimension, ``[groups, tiles, 2, tokens]``."""
    return jnp.asarray(call.visits[-1].bounds)


def last_bounds_spec(call: Call) -> pl.BlockSpec:
    """Those of a tile."""
    return spec(
        (None, None, 2, call.queries.tile[-1]), lambda place, _: (call.group_of(place.group)[-1], place.tile[-1], 0, 0)
    )


def key_coordinates(call: Call) -> np.ndarray:
    """Coordinates of the keys of a box, ``[chunks, 3, keys]``."""
    return call.chunks.coordinates()


def key_coordinates_spec() -> pl.BlockSpec:
    """All of them, which are brought once."""
    return pl.BlockSpec(memory_space=pltpu.VMEM)


def window_scratch(call: Call) -> Any:
    """Room for what :func:`keep_windows` makes of a tile's bounds."""
    return pltpu.VMEM((2, call.queries.tile[-1], LANES), jnp.int32)


def keep_windows(bounds: Any, scratch: Any) -> None:
    """Write the bounds of a slab's queries as columns, once for a tile."""
    for side in (0, 1):
        scratch[side] = columns(bounds[side : side + 1, :])


@dataclasses.dataclass(frozen=True)
class QueryMask:
    """What hides keys of a step's box from a tile of queries.

    Attributes:
        call: What runs.
        place: The place of the program.
        bounds: References to :func:`slab_bounds`.
        coordinates: Reference to :func:`key_coordinates`.
        windows: Reference to what :func:`keep_windows` wrote.
    """

    call: Call
    place: Place
    bounds: Sequence[Any]
    coordinates: Any
    windows: Any

    def hidden(self, chunk: Chunk) -> jax.Array:
        """Which keys of a chunk rows of queries do not see, ``[rows, keys]``."""
        x_tile, y_tile, _ = self.call.queries.tile
        boxes = chunk.boxes
        keys = [self.coordinates[chunk.number, dim : dim + 1, :] + box.first for dim, box in enumerate(boxes)]
        along_z = jnp.where(keys[-1] >= boxes[-1].own, keys[-1], NOWHERE)
        first, end = (across(self.windows[side], along_z.shape[1]) for side in (0, 1))
        slabs = []
        for x in range(x_tile):
            of_x = self._seen(0, x, keys[0], boxes[0], along_z)
            for y in range(y_tile):
                seen = self._seen(1, y, keys[1], boxes[1], of_x)
                slabs.append((seen < first) | (seen >= end))
        slabs *= self.call.pack
        return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)

    def _seen(self, dim: int, query: int, keys: jax.Array, box: KeyBox, coordinates: jax.Array) -> jax.Array:
        """The coordinates along the last dimension, but those of keys that a slab does not see along another one."""
        if dim < KERNEL_RANK - self.call.plan.problem.rank:
            return coordinates
        lengths = self.call.lengths[dim]
        tile = self.call.group_of(self.place.group)[dim] * lengths.q_tiles + self.place.tile[dim]
        at = tile * (2 * lengths.q_tile) + query
        first = jnp.maximum(self.bounds[dim][at], box.own)
        return jnp.where((keys >= first) & (keys < self.bounds[dim][at + lengths.q_tile]), coordinates, NOWHERE)


# Programs that own keys ----------------------------------------------------------------------------------------------


def query_bounds(call: Call) -> list[jax.Array]:
    """First and end of the keys that each row of a tile sees, ``[groups, tiles, 2, rows]`` by dimension."""
    found = []
    for dim, visits in enumerate(call.visits):
        array = jnp.asarray(visits.bounds)
        shape = [1] * KERNEL_RANK
        shape[dim] = array.shape[-1]
        array = jnp.broadcast_to(array.reshape(*array.shape[:3], *shape), (*array.shape[:3], *call.queries.tile))
        array = array.reshape(*array.shape[:3], call.queries.tile_tokens)
        found.append(jnp.tile(array, call.pack))
    return found


def hidden_from(call: Call, logits: jax.Array, firsts_of_tile: Sequence[Scalar], bounds: Sequence[Any]) -> jax.Array:
    """Logits ``[keys, queries]``, with ``HIDDEN`` where a query does not see a key of a tile.

    Args:
        call: What runs.
        logits: The logits.
        firsts_of_tile: First key of the tile along each dimension.
        bounds: References to :func:`query_bounds` of the queries.
    """
    x_tile, y_tile, z_tile = call.keys.tile
    firsts, ends = ([bound[side : side + 1, :] for bound in bounds] for side in (0, 1))
    keys = jax.lax.broadcasted_iota(jnp.int32, (z_tile, logits.shape[1]), 0) + firsts_of_tile[-1]
    along_z = (keys >= firsts[-1]) & (keys < ends[-1])
    slabs = []
    for x in range(x_tile):
        for y in range(y_tile):
            visible = [
                (first + at >= firsts[dim]) & (first + at < ends[dim])
                for dim, (first, at) in enumerate(zip(firsts_of_tile, (x, y), strict=False))
                if dim >= KERNEL_RANK - call.plan.problem.rank
            ]
            start = (x * y_tile + y) * z_tile
            sees = functools.reduce(jnp.logical_and, visible, along_z)
            slabs.append(jnp.where(sees, logits[start : start + z_tile, :], HIDDEN))
    return slabs[0] if len(slabs) == 1 else jnp.concatenate(slabs, axis=0)
