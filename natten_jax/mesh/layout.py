"""Which device holds which part of an array, as XLA's partitioner says it, and as it is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from natten_jax.mesh.heads import HeadSplit
from natten_jax.mesh.roles import Role


def device_tiles(sharding: Any, ndim: int, devices: int) -> np.ndarray:
    """Device numbers by the parts of an array of ``ndim`` dimensions, ``[*parts, copies, manual]``.

    Args:
        sharding: XLA's ``HloSharding``, or ``None``.
        ndim: Of the array.
        devices: How many the partitioner splits arrays over.

    Returns:
        Last but one are devices with copies of the same part. The last are those of manual mesh axes, whose arrays have
        nothing to do with each other, where the partitioner numbers them.
    """
    if sharding is None or not sharding.is_tiled():
        return np.arange(devices).reshape((1,) * ndim + (devices, 1))
    tiles = np.asarray(sharding.tile_assignment_devices()).reshape(sharding.tile_assignment_dimensions())
    kinds = [kind.name for kind in sharding.subgroup_types()]
    manual = [ndim + i for i, kind in enumerate(kinds) if kind == "MANUAL"]
    copies = [axis for axis in range(ndim, tiles.ndim) if axis not in manual]
    tiles = tiles.transpose(*range(ndim), *copies, *manual)
    return tiles.reshape(*tiles.shape[:ndim], math.prod(tiles.shape[ndim : ndim + len(copies)]), -1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a pass is split over devices: by batch entries, and by heads.

    Attributes:
        tiles: The partitioner's device numbers, ``[*batch parts, head parts, copies, manual]``.
        heads: How heads are split.
        devices: The program's device numbers by the partitioner's, ``[manual, devices]``: beside manual mesh axes it
            numbers the devices of the other axes alone.
    """

    tiles: np.ndarray
    heads: HeadSplit
    devices: np.ndarray

    @classmethod
    def of_query(
        cls, tiles: np.ndarray, devices: np.ndarray, shape: Sequence[int], batch_axes: int, heads_kv: int, kv_parts: int
    ) -> Layout:
        """The layout in which queries stay where they are, as far as that is possible.

        Args:
            tiles: Of the query, as :func:`device_tiles` says.
            devices: The program's device numbers by the partitioner's.
            shape: Of the query.
            batch_axes: How many leading dimensions are independent of each other.
            heads_kv: Key/value heads.
            kv_parts: In how many parts they come.
        """
        ndim = len(shape)
        split = [*range(batch_axes), ndim - 2]
        kept = [axis for axis in split if shape[axis] % tiles.shape[axis] == 0]
        parts = [tiles.shape[axis] if axis in kept else 1 for axis in split]
        copied = [axis for axis in range(ndim + 1) if axis not in kept]
        tiles = tiles.transpose(*kept, *copied, ndim + 1).reshape(*parts, -1, tiles.shape[-1])
        return cls(tiles, HeadSplit.of(shape[-2], heads_kv, parts[-1], kv_parts), devices)

    def tiles_of(self, role: Role, ndim: int) -> np.ndarray:
        """Device numbers by the parts of an array, ``[*parts, copies, manual]``."""
        *batch, heads, copies, manual = self.tiles.shape
        if role is Role.WHOLE:
            return self.tiles.reshape((1,) * ndim + (-1, manual))
        tiles = self.tiles
        if role.is_key_value:
            # What parts of query heads share a part of key/value heads hold copies of it.
            heads, copies = self.heads.kv_parts, heads // self.heads.kv_parts * copies
        parts = [*batch, *(1,) * (ndim - len(batch))]
        parts[ndim + role.heads_axis] = heads
        return tiles.reshape(*parts, copies, manual)

    def groups(self) -> list[list[int]]:
        """Devices that hold copies of the same key/value heads for different query heads."""
        *batch, heads, copies, manual = self.tiles.shape
        shared = heads // self.heads.kv_parts
        tiles = self.tiles.reshape(*batch, self.heads.kv_parts, shared, copies, manual)
        groups = np.moveaxis(tiles, -3, -1).reshape(-1, shared)
        return self.devices[:, groups].reshape(-1, shared).tolist()

    def head_parts(self) -> np.ndarray:
        """By device, which part of the query heads it has."""
        parts = np.empty(self.devices.size, np.int32)
        parts[self.devices[:, self.tiles]] = np.arange(self.heads.parts, dtype=np.int32)[:, None, None]
        return parts


def sharding_like(like: Any, tiles: np.ndarray) -> Any:
    """``tiles``, as :func:`device_tiles` makes them, in the class of the ``HloSharding`` ``like``."""
    *parts, copies, manual = tiles.shape
    proto = like.to_proto()
    kinds = type(proto).Type
    new = type(proto)()
    if tiles.size == copies:
        new.type = kinds.REPLICATED
        return type(like).from_proto(new)
    new.type = kinds.OTHER
    trailing = [(copies, kinds.REPLICATED), (manual, kinds.MANUAL)]
    new.tile_assignment_dimensions = [*parts, *(size for size, _ in trailing if size > 1)]
    new.tile_assignment_devices = tiles.reshape(-1).tolist()
    new.last_tile_dims = [kind for size, kind in trailing if size > 1]
    return type(like).from_proto(new)
