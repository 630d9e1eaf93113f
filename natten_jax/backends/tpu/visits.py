"""Which boxes of keys a tile of queries visits along one token dimension, and which tiles of queries a tile of keys.

Everything here is counted inside a dilation group, where windows are contiguous. Tables are NumPy arrays where a call
has all tokens; where it has some of them, whose first may depend on the device, they are computed by the program.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from natten_jax.windows import Axis, group_length

Table = Any  # numpy.ndarray or jax.Array, int32

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
        before: Of these, what is padded before the first key, so that windows of tiles begin where registers do.
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
        q_origin, kv_origin = (0, 0) if origins is None else origins
        d = lengths.groups
        group = xp.arange(d)[:, None]
        local = group + xp.arange(lengths.queries) * d
        token = xp.minimum(q_origin + local, axis.query_extent - 1)  # where there is no query, any
        residue = (q_origin + group) % d
        key_group = (residue - kv_origin) % d
        first, end = axis.bounds(token // d, axis.lengths(residue), xp=xp)
        base, own = (kv_origin + key_group) // d, group_length(keys, d, key_group)
        first, end = (lengths.before + xp.clip(bound - base, 0, own) for bound in (first, end))
        is_query = local < queries
        sees = is_query & (first < end)
        by_tile = (d, lengths.q_tiles, lengths.q_tile)

        def of_tiles(values: Table, where: Table, other: int, reduce: Any) -> Table:
            return reduce(xp.where(where, values, other).reshape(by_tile), axis=-1)

        hull_first = of_tiles(first, sees, lengths.keys, xp.min)
        hull_end = of_tiles(end, sees, 0, xp.max)
        core_first = of_tiles(first, is_query, 0, xp.max)
        core_end = of_tiles(end, is_query, lengths.keys, xp.min)
        box = lengths.kv_tile
        start = hull_first // alignment * alignment
        count = xp.maximum(-(-(hull_end - start) // box), 0)
        columns = (start, count, hull_end, core_first, core_end, xp.broadcast_to(key_group, start.shape))
        boxes = xp.stack(columns, axis=-1).astype(np.int32)

        tile_first = (xp.arange(lengths.kv_tiles) * box)[:, None]
        meets = (hull_first[:, None] < tile_first + box) & (hull_end[:, None] > tile_first)
        any_ = meets.any(axis=-1)
        first_tile = xp.where(any_, xp.argmax(meets, axis=-1), 0)
        last_tile = lengths.q_tiles - 1 - xp.argmax(meets[..., ::-1], axis=-1)
        tiles = xp.stack([first_tile, xp.where(any_, last_tile + 1 - first_tile, 0)], axis=-1).astype(np.int32)

        bounds = xp.stack([xp.where(sees, first, 0), xp.where(sees, end, 0)], axis=-2).astype(np.int32)
        bounds = xp.moveaxis(bounds.reshape(d, 2, lengths.q_tiles, lengths.q_tile), 1, 2)
        if origins is None:
            most = int(count.max()), int(count.min()), int(tiles[..., 1].max())
        else:
            # Near an edge a key may be seen from half a window further.
            window = axis.kernel_size + axis.stride
            reach = min(lengths.keys, window + lengths.q_tile + alignment)
            seeing = min(lengths.queries, window + axis.kernel_size // 2 + box + lengths.q_tile)
            most = -(-reach // box), 0, -(-seeing // lengths.q_tile)
        return cls(lengths, bounds, boxes, tiles, *most)
