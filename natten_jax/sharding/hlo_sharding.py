"""Which device holds which part of an array, as XLA's partitioner says it, and as it is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from natten_jax.arrays.roles import Role
from natten_jax.sharding.heads import HeadSplit


def device_tiles(sharding: Any, ndim: int, devices: int) -> np.ndarray:
    """Device numbers by the parts of an array of ``ndim`` dimensions, ``[*parts, copies, manual]``.

    Args:
        sharding: XLA's ``HloSharding``, or ``None``.
        ndim: The number of dimensions of the array.
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
    """How a pass is split over devices: by batch entries, by tokens and by heads.

    Attributes:
        tiles: The partitioner's device numbers, ``[*batch parts, *token parts, head parts, copies, manual]``.
        batch_axes: How many leading dimensions are independent of each other.
        heads: How heads are split.
        devices: The program's device numbers by the partitioner's, ``[manual, devices]``: beside manual mesh axes it
            numbers the devices of the other axes alone.
    """

    tiles: np.ndarray
    batch_axes: int
    heads: HeadSplit
    devices: np.ndarray

    @classmethod
    def of_query(
        cls,
        tiles: np.ndarray,
        devices: np.ndarray,
        shape: Sequence[int],
        batch_axes: int,
        heads_kv: int,
        kv_parts: int,
        *,
        splits_tokens: bool,
    ) -> Layout:
        """The layout in which queries stay where they are, as far as that is possible.

        Args:
            tiles: Tiles of the query, as :func:`device_tiles` says.
            devices: The program's device numbers by the partitioner's.
            shape: The shape of the query.
            batch_axes: How many leading dimensions are independent of each other.
            heads_kv: Key/value heads.
            kv_parts: In how many parts they come.
            splits_tokens: Whether token dimensions may be split.
        """
        ndim = len(shape)
        kept = [
            shape[axis] % tiles.shape[axis] == 0 and (splits_tokens or not batch_axes <= axis < ndim - 2)
            for axis in range(ndim - 1)
        ]
        parts = [count if keeps else 1 for count, keeps in zip(tiles.shape, kept, strict=False)]
        order = [axis for axis in range(ndim - 1) if kept[axis]]
        copied = [axis for axis in range(ndim + 1) if axis not in order]
        tiles = tiles.transpose(*order, *copied, ndim + 1).reshape(*parts, -1, tiles.shape[-1])
        return cls(tiles, batch_axes, HeadSplit.of(shape[-2], heads_kv, parts[-1], kv_parts), devices)

    @property
    def token_parts(self) -> tuple[int, ...]:
        """Into how many parts each token dimension is split."""
        return self.tiles.shape[self.batch_axes : -3]

    def tiles_of(self, role: Role, ndim: int) -> np.ndarray:
        """Device numbers by the parts of an array, ``[*parts, copies, manual]``."""
        if role is Role.WHOLE:
            return self.tiles.reshape((1,) * ndim + (-1, self.tiles.shape[-1]))
        tiles = self._contributing(role)
        *leading, heads, contributions, copies, manual = tiles.shape
        parts = [*leading, *(1,) * (ndim - len(leading))]
        if not role.heads_axis:
            return tiles.reshape(*parts, heads * contributions * copies, manual)
        parts[ndim + role.heads_axis] = heads
        return tiles.reshape(*parts, contributions * copies, manual)

    def line(self, dimension: int) -> np.ndarray:
        """Devices along a token dimension in the order of their parts, ``[lines, parts]``."""
        rows = np.moveaxis(self.tiles, self.batch_axes + dimension, -1)
        return self._of_program(rows.reshape(-1, rows.shape[-1]))

    def groups(self, role: Role) -> np.ndarray:
        """Devices that hold copies of the same part of an array for different queries, ``[groups, devices]``."""
        rows = np.moveaxis(self._contributing(role), -3, -1)
        return self._of_program(rows.reshape(-1, rows.shape[-1]))

    def head_parts(self) -> np.ndarray:
        """By device, which part of the query heads it has."""
        parts = np.empty(self.devices.size, np.int32)
        parts[self.devices[:, self.tiles]] = np.arange(self.heads.parts, dtype=np.int32)[:, None, None]
        return parts

    def _contributing(self, role: Role) -> np.ndarray:
        """Device numbers by the parts of a kind of array, ``[*leading, heads, contributions, copies, manual]``.

        Contributions are the parts of the queries that an array is the same for: of the query heads that share heads of
        keys and values, or all there is of an array without heads, and of all tokens, for what has none of its own, and
        of the batch, for what its entries share.
        """
        *leading, heads, copies, manual = self.tiles.shape
        parts = self.heads.kv_parts if role.is_key_value else heads if role.heads_axis else 1
        tiles = self.tiles.reshape(*leading, parts, heads // parts, copies, manual)
        if role.has_layout:
            return tiles
        is_shared = role is Role.PER_HEAD_OF_ALL
        batch = self.batch_axes - is_shared
        others = range(batch, len(leading))
        tiles = np.moveaxis(tiles, others, range(-3 - len(others), -3))
        return tiles.reshape(*leading[:batch], *(1,) * is_shared, parts, -1, copies, manual)

    def _of_program(self, rows: np.ndarray) -> np.ndarray:
        return self.devices[:, rows].reshape(-1, rows.shape[-1])


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
