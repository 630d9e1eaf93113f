"""Which boxes of keys a tile of queries visits along one token dimension, and what its queries see of them.

Everything here is counted inside a dilation group, where windows are contiguous.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from natten_jax.backends.tile_windows import Table, TileWindows
from natten_jax.windows import Axis

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
        windows: Where both are from.
    """

    groups: int
    tiles: int
    bounds: Table
    boxes: Table
    windows: TileWindows

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
        tiles = -(-queries // (axis.dilation * q_tile))
        windows = TileWindows.of(axis, q_tile, tiles, queries, keys, origins, before=0, most=keys)
        boxes = xp.stack((*windows.boxes(kv_tile, alignment), *windows.core, windows.key_group), axis=-1)
        return cls(axis.dilation, tiles, windows.bounds, boxes.astype(np.int32), windows)

    def seeing(self, kv_tile: int, kv_tiles: int) -> Table:
        """Which tiles of queries see tiles of keys: see :meth:`TileWindows.seeing`."""
        return self.windows.seeing(kv_tile, kv_tiles)
