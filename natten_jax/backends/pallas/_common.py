"""What Pallas kernels share: windows of tiles, and statistics of the softmax."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.remainders import LOG2_E, base2, pack_remainder
from natten_jax.windows import Axis, group_length

Table = Any  # numpy.ndarray or jax.Array, int32


@dataclasses.dataclass(frozen=True)
class TileWindows:
    """What the queries of each tile see.

    Attributes:
        bounds: ``[groups, tiles, 2, q_tile]``: first and end of the keys that each query sees; both 0 where there is no
            query, or none that it sees.
        hull: ``[groups, tiles]`` each: first and end of the keys that any query sees; the end is 0 where nobody does.
        core: ``[groups, tiles]`` each: first and end of the keys that all queries see.
        key_group: ``[groups, tiles]``: the keys' group.
    """

    bounds: Table
    hull: tuple[Table, Table]
    core: tuple[Table, Table]
    key_group: Table

    @classmethod
    def of(
        cls, axis: Axis, q_tile: int, tiles: int, queries: int, keys: int, origins: Any, *, before: int, most: int
    ) -> TileWindows:
        """Those of an axis.

        Args:
            axis: The axis.
            q_tile: Queries of a tile.
            tiles: Tiles of a group.
            queries: Queries that the call has.
            keys: Keys that the call has.
            origins: Where they begin: two int32 scalars, or ``None`` where the call has all of them.
            before: Keys of a group that are padding before the first.
            most: Keys of a group, padded: no window ends behind it.
        """
        xp: ModuleType = np if origins is None else jnp
        q_origin, kv_origin = (0, 0) if origins is None else origins
        d = axis.dilation
        group = xp.arange(d)[:, None]
        local = group + xp.arange(tiles * q_tile) * d
        is_query = local < queries
        token = xp.minimum(q_origin + local, axis.query_extent - 1)  # where there is no query, any
        residue = (q_origin + group) % d
        key_group = (residue - kv_origin) % d
        bounds = axis.bounds(token // d, axis.lengths(residue), xp=xp)
        base, own = (kv_origin + key_group) // d, group_length(keys, d, key_group)
        first, end = (before + xp.clip(bound - base, 0, own) for bound in bounds)
        sees = is_query & (first < end)
        first, end = xp.where(sees, first, 0), xp.where(sees, end, 0)

        def of_tiles(values: Table, where: Table, other: int, reduce: Any) -> Table:
            return reduce(xp.where(where, values, other).reshape(d, tiles, q_tile), axis=-1)

        hull = of_tiles(first, sees, most, xp.min), of_tiles(end, sees, 0, xp.max)
        core = of_tiles(first, is_query, 0, xp.max), of_tiles(end, is_query, most, xp.min)
        of_queries = xp.stack([each.reshape(d, tiles, q_tile) for each in (first, end)], axis=2)
        return cls(of_queries.astype(np.int32), hull, core, xp.broadcast_to(key_group, hull[0].shape))

    def boxes(self, kv_tile: int, alignment: int) -> tuple[Table, Table]:
        """Where the boxes of keys of each tile begin, at multiples of an alignment, and how many there are."""
        first, end = self.hull
        start = first // alignment * alignment
        return start, (-(-(end - start) // kv_tile)).clip(0)

    def seeing(self, kv_tile: int, kv_tiles: int) -> Table:
        """``[groups, kv_tiles, 2]``: the first tile of queries that sees some of a tile of keys, and how many do.

        Between them may be tiles that see none of it; a tile of keys belongs to the group of queries that see it.
        """
        first, end = self.hull
        xp: ModuleType = np if isinstance(end, np.ndarray) else jnp
        tile = (xp.arange(kv_tiles) * kv_tile)[:, None]
        meets = (first[:, None] < tile + kv_tile) & (end[:, None] > tile)
        first_tile, any_ = xp.argmax(meets, axis=-1), meets.any(axis=-1)
        end_tile = end.shape[1] - xp.argmax(meets[..., ::-1], axis=-1)
        return xp.where(any_[..., None], xp.stack([first_tile, end_tile - first_tile], axis=-1), 0).astype(np.int32)


def finite_scale(scale: float, factors: jax.Array | None) -> jax.Array:
    """Return the scale in float32, or the scales of heads, with NaN instead of infinity.

    A product with infinity may be ``-inf``, which would hide keys.
    """
    if factors is None:
        return jnp.float32(scale)
    return jnp.where(jnp.isfinite(factors), factors, jnp.nan).astype(jnp.float32)


def logsumexp_and_remainder(maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logsumexp, and what float32 leaves out of it in base 2 (:class:`natten_jax.arrays.operands.Saved`).

    Args:
        maximum: float32, what weights are relative to, in base 2.
        total: Their sum, in the same shape; 0 of a query that sees no key, whose logsumexp is ``-inf``.
    """
    sees_nothing = total == 0
    total = jnp.where(sees_nothing, 1, total)
    logsumexp = maximum / LOG2_E + jnp.log(total)
    remainder = jnp.where(sees_nothing, 0, pack_remainder(maximum - base2(logsumexp), jnp.log2(total)))
    return jnp.where(sees_nothing, -jnp.inf, logsumexp), remainder
