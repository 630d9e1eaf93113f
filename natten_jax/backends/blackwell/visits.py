"""Which boxes of keys a tile of queries visits along one token dimension, and what its queries see of them.

Everything here is counted inside a dilation group, where windows are contiguous. Tables are NumPy arrays where a call
has all tokens; where it has some of them, whose first may depend on the device, they are computed by the program.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from natten_jax.windows import Axis, group_length

Table = Any  # numpy.ndarray or jax.Array, int32

#: Columns of :attr:`Visits.boxes`.
START, COUNT, CORE_FIRST, CORE_END, KEY_GROUP = range(5)
COLUMNS = 5


@dataclasses.dataclass(frozen=True)
class Visits:
    """What one token dimension's tiles visit.

    Attributes:
        groups: Dilation groups.
        tiles: Tiles of queries in a group.
        bounds: ``[groups, tiles, 2, q_tile]``: first and end of the keys that each query sees; both 0 where there is no
            query.
        boxes: ``[groups, tiles, COLUMNS]``: where a tile's boxes of keys begin, how many there are, first and end of
            the keys that all of its queries see, and the keys' group.
    """

    groups: int
    tiles: int
    bounds: Table
    boxes: Table

    @classmethod
    def of(
        cls, axis: Axis, q_tile: int, kv_tile: int, queries: int, keys: int, origins: Any, alignment: int = 1
    ) -> Visits:
        """Those of an axis.

        Args:
            axis: The axis.
            q_tile: Queries of a tile.
            kv_tile: Keys of a box.
            queries: Queries that the call has.
            keys: Keys that the call has.
            origins: Where they begin: two int32 scalars, or ``None`` where the call has all of them.
            alignment: Boxes begin at multiples of this.
        """
        xp: ModuleType = np if origins is None else jnp
        q_origin, kv_origin = (0, 0) if origins is None else origins
        d = axis.dilation
        tiles = -(-queries // (d * q_tile))
        group = xp.arange(d)[:, None]
        local = group + xp.arange(tiles * q_tile) * d
        is_query = local < queries
        token = xp.minimum(q_origin + local, axis.query_extent - 1)  # where there is no query, any
        residue = (q_origin + group) % d
        key_group = (residue - kv_origin) % d
        bounds = axis.bounds(token // d, axis.lengths(residue), xp=xp)
        base, own = (kv_origin + key_group) // d, group_length(keys, d, key_group)
        first, end = (xp.clip(bound - base, 0, own) for bound in bounds)
        sees = is_query & (first < end)
        first, end = xp.where(sees, first, 0), xp.where(sees, end, 0)

        def of_tiles(values: Table, where: Table, other: int, reduce: Any) -> Table:
            return reduce(xp.where(where, values, other).reshape(d, tiles, q_tile), axis=-1)

        start = of_tiles(first, sees, keys, xp.min) // alignment * alignment
        count = xp.maximum(-(-(of_tiles(end, sees, 0, xp.max) - start) // kv_tile), 0)
        core = of_tiles(first, is_query, 0, xp.max), of_tiles(end, is_query, keys, xp.min)
        boxes = xp.stack((start, count, *core, xp.broadcast_to(key_group, start.shape)), axis=-1)
        rows = xp.stack([first.reshape(d, tiles, q_tile), end.reshape(d, tiles, q_tile)], axis=2)
        return cls(d, tiles, rows.astype(np.int32), boxes.astype(np.int32))

    def seeing(self, kv_tile: int, kv_tiles: int) -> Table:
        """``[groups, kv_tiles, 2]``: the first tile of queries that sees some of a tile of keys, and how many do.

        Between them may be tiles that see none of it; a tile of keys belongs to the group of queries that see it.
        """
        xp: ModuleType = np if isinstance(self.bounds, np.ndarray) else jnp
        first, end = self.bounds[:, :, 0], self.bounds[:, :, 1]
        first = xp.where(first < end, first, kv_tile * kv_tiles).min(axis=-1)[:, None]
        end = end.max(axis=-1)[:, None]
        tile = (xp.arange(kv_tiles) * kv_tile)[:, None]
        meets = (first < tile + kv_tile) & (end > tile)
        first_tile, any_ = xp.argmax(meets, axis=-1), meets.any(axis=-1)
        end_tile = self.tiles - xp.argmax(meets[..., ::-1], axis=-1)
        return xp.where(any_[..., None], xp.stack([first_tile, end_tile - first_tile], axis=-1), 0).astype(np.int32)
