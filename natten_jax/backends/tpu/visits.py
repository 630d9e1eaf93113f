"""Which boxes of keys a tile of queries visits along one token dimension, and which tiles of queries a tile of keys.

Everything here is counted inside a dilation group, where windows are contiguous.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from natten_jax.backends.tile_windows import Table, TileWindows
from natten_jax.windows import Axis

#: Columns of :attr:`Visits.boxes`.
START, COUNT, HULL_END, CORE_FIRST, CORE_END, KEY_GROUP = range(6)
COLUMNS = 6


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Static sizes of one token dimension, inside a dilation group.

    Attributes:
        groups: Dilation groups.
        q_tile: Queries of a tile.
        kv_tile: Keys of a box, or of a tile.
        queries: Queries of a group, padded to whole tiles.
        keys: Keys of a group, padded to whole tiles, or to one and to registers where only boxes are visited, which
            may begin anywhere.
        before: What of these is padded before the first key, so that windows of tiles begin where registers do.
    """

    groups: int
    q_tile: int
    kv_tile: int
    queries: int
    keys: int
    before: int

    @classmethod
    def of(
        cls, axis: Axis, queries: int, keys: int, q_tile: int, kv_tile: int, alignment: int, *, whole_tiles: bool
    ) -> Lengths:
        """Those of an axis, of whose tokens a call has some."""
        before = before_keys(axis, q_tile, alignment)
        queries, keys = (math.ceil(tokens / axis.dilation) for tokens in (queries, keys))
        step = kv_tile if whole_tiles else alignment
        padded = math.ceil(queries / q_tile) * q_tile, max(math.ceil((before + keys) / step) * step, kv_tile)
        return cls(axis.dilation, q_tile, kv_tile, *padded, before)

    @property
    def q_tiles(self) -> int:
        """Tiles of queries in a group."""
        return self.queries // self.q_tile

    @property
    def kv_tiles(self) -> int:
        """Tiles of keys in a group."""
        return self.keys // self.kv_tile


def before_keys(axis: Axis, q_tile: int, alignment: int) -> int:
    """What is padded before the first key, so that windows of most tiles begin at multiples of an alignment."""
    lengths = math.ceil(axis.query_extent / axis.dilation), math.ceil(axis.kv_extent / axis.dilation)
    middle = lengths[0] // (2 * q_tile) * q_tile
    first, _ = axis.bounds(np.arange(middle, min(middle + q_tile, lengths[0])), lengths)
    return -int(first.min()) % alignment


@dataclasses.dataclass(frozen=True)
class Visits:
    """What one token dimension's tiles visit.

    Attributes:
        lengths: The sizes.
        bounds: ``[groups, q_tiles, 2, q_tile]``: first and end of the keys that each query sees; both 0 where there is
            no query.
        boxes: ``[groups, q_tiles, COLUMNS]``: where a tile's boxes of keys begin, how many there are, the end of the
            keys that its queries see, first and end of those that all of them see, and the keys' group.
        tiles: ``[groups, kv_tiles, 2]``: the first tile of queries that sees some of a tile of keys, and how many do.
        most_boxes: The largest count of boxes.
        fewest_boxes: The smallest count; 0 where it is not known.
        most_tiles: The largest count of tiles.
    """

    lengths: Lengths
    bounds: Table
    boxes: Table
    tiles: Table
    most_boxes: int
    fewest_boxes: int
    most_tiles: int

    @classmethod
    def of(cls, axis: Axis, lengths: Lengths, queries: int, keys: int, origins: Any, alignment: int) -> Visits:
        """Those of an axis.

        Args:
            axis: The axis.
            lengths: Its sizes.
            queries: Queries that the call has.
            keys: Keys that the call has.
            origins: Where they begin: two int32 scalars, or ``None`` where the call has all of them.
            alignment: Boxes begin at multiples of this.
        """
        xp: ModuleType = np if origins is None else jnp
        q_tile, box = lengths.q_tile, lengths.kv_tile
        windows = TileWindows.of(
            axis, q_tile, lengths.q_tiles, queries, keys, origins, before=lengths.before, most=lengths.keys
        )
        start, count = windows.boxes(box, alignment)
        boxes = xp.stack((start, count, windows.hull[1], *windows.core, windows.key_group), axis=-1).astype(np.int32)
        tiles = windows.seeing(box, lengths.kv_tiles)
        if origins is None:
            most = int(count.max()), int(count.min()), int(tiles[..., 1].max())
        else:
            # Near an edge a key may be seen from half a window further.
            window = axis.kernel_size + axis.stride
            reach = min(lengths.keys, window + q_tile + alignment)
            seeing = min(lengths.queries, window + axis.kernel_size // 2 + box + q_tile)
            most = -(-reach // box), 0, -(-seeing // q_tile)
        return cls(lengths, windows.bounds, boxes, tiles, *most)
