"""Visited keys, array layouts and softmax statistics, for both the TPU and the Blackwell kernels.

Token indices are indices in a dilation group, in which windows are contiguous.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Cotangents, Inputs, Operands, Saved, delta
from natten_jax.arrays.remainders import LOG2_E, base2, base2_parts, pack_remainder
from natten_jax.native.module import KERNEL_RANK, with_kernel_tiles
from natten_jax.plan.plan import Plan
from natten_jax.problem import Shape
from natten_jax.windows import Axis, group_length

Scalar = Any  # int or traced int32 scalar
Table = Any  # numpy.ndarray or jax.Array, int32

#: ``HIDDEN`` is the logit of a key that a query does not see (a masked key). ``SMALLEST_MAXIMUM`` is a row's initial
#: maximum. It is above ``HIDDEN``, so that masked keys have the weight 0. Finite biased logits in base 2 are above
#: ``finfo.min / 2 * log2(e)``, which is above both constants.
HIDDEN = -3.3e38
SMALLEST_MAXIMUM = -2.9e38
#: Logsumexp in base 2 that makes all weights of a query 0. Queries that see no key have this logsumexp. In
#: Blackwell kernels, padding also has this logsumexp.
NO_KEY_SEEN = 1e30
#: Number of statistics per query that the backward pass reads. They are the logsumexp, its remainder, and delta.
STATISTICS = 3


# Visits --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Visits:
    """Keys that each query tile visits along one token dimension. A tile visits them box by box.

    If the arrays of a call contain all tokens, tables are NumPy arrays. If they are a shard, the program computes the
    tables at run time, because the first token of a shard depends on the device.

    Key indices count the padding before the first key, which therefore has the index ``before``. An end is exclusive:
    one more than the index of the last key.

    Attributes:
        axis: The token dimension.
        q_tile: Queries per tile.
        box: Keys per box. A key tile has the same number of keys.
        q_tiles: Query tiles per dilation group.
        keys: Keys per dilation group, including padding.
        before: Number of padding keys before the first key of a dilation group.
        alignment: Boxes begin at multiples of this number of keys.
        bounds: ``[groups, q_tiles, 2, q_tile]``. First and end of the keys that each query sees; both 0 if the query is
            padding or sees no key.
        hull_first: ``[groups, q_tiles]``. First key that at least one query of the tile sees.
        hull_end: ``[groups, q_tiles]``. End of the keys that at least one query of the tile sees; 0 if no query sees a
            key.
        core_first: ``[groups, q_tiles]``. First key that all queries of the tile see.
        core_end: ``[groups, q_tiles]``. End of the keys that all queries of the tile see.
        key_group: ``[groups, q_tiles]``. Dilation group of the keys that the tile visits.
    """

    axis: Axis
    q_tile: int
    box: int
    q_tiles: int
    keys: int
    before: int
    alignment: int
    bounds: Table
    hull_first: Table
    hull_end: Table
    core_first: Table
    core_end: Table
    key_group: Table

    @classmethod
    def along_axis(
        cls, axis: Axis, tiles: Shape, extents: Shape, origins: Any, alignment: int, before: int, whole_boxes: bool
    ) -> Visits:
        """Compute the visits along one token dimension.

        Args:
            axis: The token dimension.
            tiles: Queries per tile, and keys per box.
            extents: Extents of the query array and of the key array.
            origins: Two int32 scalars. Layout coordinates of the first query and of the first key of the arrays;
                ``None`` if the arrays contain all tokens.
            alignment: Boxes begin at multiples of this number of keys.
            before: Number of padding keys before the first key of a dilation group.
            whole_boxes: True to pad keys to a multiple of ``box``. False to pad them to a multiple of ``alignment``,
                and to at least one box.
        """
        (q_tile, box), (queries, keys) = tiles, extents
        xp: ModuleType = np if origins is None else jnp
        q_origin, kv_origin = (0, 0) if origins is None else origins
        d = axis.dilation
        q_tiles = -(-queries // (d * q_tile))
        step = box if whole_boxes else alignment
        padded = max(math.ceil((before + math.ceil(keys / d)) / step) * step, box)
        group = xp.arange(d)[:, None]
        local = group + xp.arange(q_tiles * q_tile) * d
        is_query = local < queries
        token = xp.minimum(q_origin + local, axis.query_extent - 1)  # clamp: padding may map to any token
        residue = (q_origin + group) % d
        key_group = (residue - kv_origin) % d
        bounds = axis.bounds(token // d, axis.lengths(residue), xp=xp)
        base, keys_in_group = (kv_origin + key_group) // d, group_length(keys, d, key_group)
        first, end = (before + xp.clip(bound - base, 0, keys_in_group) for bound in bounds)
        sees = is_query & (first < end)
        first, end = xp.where(sees, first, 0), xp.where(sees, end, 0)

        def per_tile(values: Table, where: Table, other: int, reduce: Any) -> Table:
            return reduce(xp.where(where, values, other).reshape(d, q_tiles, q_tile), axis=-1)

        hull = per_tile(first, sees, padded, xp.min), per_tile(end, sees, 0, xp.max)
        core = per_tile(first, is_query, 0, xp.max), per_tile(end, is_query, padded, xp.min)
        query_bounds = xp.stack([each.reshape(d, q_tiles, q_tile) for each in (first, end)], axis=2).astype(np.int32)
        group_of_tiles = xp.broadcast_to(key_group, hull[0].shape)
        return cls(axis, q_tile, box, q_tiles, padded, before, alignment, query_bounds, *hull, *core, group_of_tiles)

    @property
    def groups(self) -> int:
        return self.axis.dilation

    @property
    def kv_tiles(self) -> int:
        """Key tiles per dilation group."""
        return self.keys // self.box

    @property
    def start(self) -> Table:
        """``[groups, q_tiles]``. First key of the first box that each tile visits."""
        return self.hull_first // self.alignment * self.alignment

    @property
    def count(self) -> Table:
        """``[groups, q_tiles]``. Number of boxes that each tile visits."""
        return (-(-(self.hull_end - self.start) // self.box)).clip(0)

    def table(self, columns: Sequence[str]) -> Table:
        """Return a table ``[groups, q_tiles, columns]``; each column is the attribute with the column's name."""
        return self._numpy.stack([getattr(self, name) for name in columns], axis=-1).astype(np.int32)

    @functools.cached_property
    def visitors(self) -> Table:
        """``[groups, kv_tiles, 2]``. Range of query tiles that visit each key tile: first tile, and number of tiles.

        The range may include query tiles that see no key of the key tile. Groups are dilation groups of queries.
        """
        xp, first, end = self._numpy, self.hull_first, self.hull_end
        tile = (xp.arange(self.kv_tiles) * self.box)[:, None]
        meets = (first[:, None] < tile + self.box) & (end[:, None] > tile)
        first_tile, any_ = xp.argmax(meets, axis=-1), meets.any(axis=-1)
        end_tile = end.shape[1] - xp.argmax(meets[..., ::-1], axis=-1)
        return xp.where(any_[..., None], xp.stack([first_tile, end_tile - first_tile], axis=-1), 0).astype(np.int32)

    @functools.cached_property
    def most_boxes(self) -> int:
        """Maximum number of boxes that a query tile visits; an upper bound if tables are computed at run time."""
        if self._numpy is np:
            return int(self.count.max())
        window = self.axis.kernel_size + self.axis.stride
        return -(-min(self.keys, window + self.q_tile + self.alignment) // self.box)

    @functools.cached_property
    def fewest_boxes(self) -> int:
        """Minimum number of boxes that a query tile visits; 0 if tables are computed at run time."""
        return int(self.count.min()) if self._numpy is np else 0

    @functools.cached_property
    def most_tiles(self) -> int:
        """Maximum number of query tiles that visit a key tile; an upper bound if tables are computed at run time."""
        if self._numpy is np:
            return int(self.visitors[..., 1].max())
        # Near an edge, windows are shifted inwards: the distance from a query to a key grows by up to half a window.
        window = self.axis.kernel_size + self.axis.stride + self.axis.kernel_size // 2
        reach = window + self.box + self.q_tile
        return -(-min(self.q_tiles * self.q_tile, reach) // self.q_tile)

    @property
    def _numpy(self) -> ModuleType:
        return np if isinstance(self.bounds, np.ndarray) else jnp

    def bounds_of_tokens(self, dim: int, tile: Sequence[int]) -> jax.Array:
        """Return :attr:`bounds`, repeated for every token of a three-dimensional tile.

        The result is ``[groups, q_tiles, 2, tokens]``. This instance describes dimension ``dim`` of the tile.
        """
        array = jnp.asarray(self.bounds)
        spread: list[int] = [1] * KERNEL_RANK
        spread[dim] = self.q_tile
        array = jnp.broadcast_to(array.reshape(*array.shape[:3], *spread), (*array.shape[:3], *tile))
        return array.reshape(*array.shape[:3], math.prod(tile))


def visits_of(plan: Plan, operands: Operands, alignment: int, *, whole_boxes: bool, pads: bool) -> tuple[Visits, ...]:
    """Compute the visits along each of three token dimensions.

    Args:
        plan: Plan of the pass.
        operands: Operands of the call.
        alignment: Boxes begin at multiples of this number of keys along the last dimension.
        whole_boxes: True to pad keys to whole boxes; see :meth:`Visits.along_axis`.
        pads: True to add padding before the first key; see :func:`before_keys`.
    """
    problem, inputs, origins = plan.problem, operands.inputs, operands.origins
    missing = KERNEL_RANK - problem.rank
    axes = (Axis(1, 1, 1),) * missing + problem.axes
    extents = ((1,) * missing + array.shape[1:-2] for array in (inputs.query, inputs.key))
    dimensions = []
    pairs = (zip(*pair, strict=True) for pair in (with_kernel_tiles(problem, plan.tiles), extents))
    for dim, (axis, tiles, local) in enumerate(zip(axes, *pairs, strict=True)):
        step = alignment if dim == KERNEL_RANK - 1 else 1
        before = before_keys(axis, tiles[0], step) if pads else 0
        first = None if origins is None else tuple(origins[:, dim])
        dimensions.append(Visits.along_axis(axis, tiles, local, first, step, before, whole_boxes))
    return tuple(dimensions)


def before_keys(axis: Axis, q_tile: int, alignment: int) -> int:
    """Return the number of padding keys to add before the first key of a dilation group.

    With this padding, the windows of most query tiles begin at multiples of the alignment.
    """
    lengths = math.ceil(axis.query_extent / axis.dilation), math.ceil(axis.kv_extent / axis.dilation)
    middle = lengths[0] // (2 * q_tile) * q_tile
    first, _ = axis.bounds(np.arange(middle, min(middle + q_tile, lengths[0])), lengths)
    return -int(first.min()) % alignment


def divided(number: Scalar, by: Scalar) -> tuple[Scalar, Scalar]:
    """Return ``number // by`` and ``number % by``, for a ``number`` that is not negative."""
    if not isinstance(by, int):
        return jax.lax.div(number, by), jax.lax.rem(number, by)
    if by == 1:
        return number, 0
    if isinstance(number, int):
        return divmod(number, by)
    return jax.lax.div(number, np.int32(by)), jax.lax.rem(number, np.int32(by))


def unravel(number: Scalar, extents: Sequence[Scalar]) -> list[Scalar]:
    """Return one index per dimension, given a flat row-major index. The first extent is not read."""
    indices = []
    for extent in reversed(extents[1:]):
        number, index = divided(number, extent)
        indices.append(index)
    return [number, *reversed(indices)]


@dataclasses.dataclass(frozen=True)
class StaticCall:
    """Plan, array layouts and visits of a call. Base class for the TPU and the Blackwell kernels.

    Attributes:
        plan: Plan of the pass.
        queries: Layout of queries and of the output.
        keys: Layout of keys and values.
        visits: Visits along each of three token dimensions.
    """

    #: Names of attributes of :class:`Visits`. Box tables have one column per name.
    columns: ClassVar[Sequence[str]]
    plan: Plan
    queries: Any
    keys: Any
    visits: tuple[Visits, ...]

    def laid_out(self, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Convert query, key and value to the layouts of the kernels."""
        return self.queries.laid_out(inputs.query), self.keys.laid_out(inputs.key), self.keys.laid_out(inputs.value)

    @functools.cached_property
    def box_tables(self) -> list[jax.Array]:
        """Tables of the boxes that each query tile visits: per dimension, a flattened :meth:`Visits.table`."""
        return [jnp.asarray(visits.table(self.columns)).reshape(-1) for visits in self.visits]

    @functools.cached_property
    def tile_tables(self) -> list[jax.Array]:
        """Tables of the query tiles that visit each key tile: per dimension, a flattened :attr:`Visits.visitors`."""
        return [jnp.asarray(visits.visitors).reshape(-1) for visits in self.visits]

    def visitors(self, tables: Sequence[Any], group: Sequence[Scalar], tile: Sequence[Scalar]) -> list[tuple[Any, Any]]:
        """Return, per dimension, the first query tile that visits a key tile, and the number of such query tiles.

        Args:
            tables: References to :attr:`tile_tables`.
            group: Dilation group of the queries.
            tile: The key tile.
        """
        rows = [(g * v.kv_tiles + t) * 2 for g, t, v in zip(group, tile, self.visits, strict=True)]
        return [(table[row], table[row + 1]) for table, row in zip(tables, rows, strict=True)]

    def columns_of(self, table: Any, row: Scalar) -> Callable[[str], Any]:
        """Return a function that reads a row of a box table: it maps the name of a column to the column's value."""
        row *= len(self.columns)
        return lambda name: table[row + self.columns.index(name)]


# Layouts -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a kernel's array, ``[batch * leading, groups, *lengths, width]``.

    Heads are in the first dimension, or in packs of adjacent heads along the last dimension. The second dimension is
    the dilation group. Each of the three token dimensions is padded to whole tiles.

    Attributes:
        heads: Heads per batch entry.
        pack: Number of heads per pack; 1 if heads are not packed. A pack in TPU kernels contains all heads, or as many
            heads as fill the lanes of a register.
        extents: Tokens along each dimension of the problem.
        groups: Number of dilation groups along each of three dimensions.
        lengths: Tokens per group along each dimension, including padding.
        tile: Tokens per tile along each dimension.
        before: Number of padding tokens before the first token of a group, along each dimension.
    """

    heads: int
    pack: int
    extents: tuple[int, ...]
    groups: tuple[int, ...]
    lengths: tuple[int, ...]
    tile: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def for_queries(cls, visits: Sequence[Visits], extents: Sequence[int], heads: int, pack: int) -> Layout:
        sizes = ((v.groups, v.q_tiles * v.q_tile, v.q_tile, 0) for v in visits)
        return cls(heads, pack, tuple(extents), *zip(*sizes, strict=True))

    @classmethod
    def for_keys(cls, visits: Sequence[Visits], extents: Sequence[int], heads: int, pack: int) -> Layout:
        sizes = zip(*((v.groups, v.keys, v.box, v.before) for v in visits), strict=True)
        return cls(heads, pack, tuple(extents), *sizes)

    @property
    def blocks(self) -> int:
        """Number of packs along the last dimension; 1 if heads are not packed."""
        return self.heads // self.pack if self.pack > 1 else 1

    @property
    def leading(self) -> int:
        """Number of indices of the first dimension per batch entry: the number of heads, or 1 if heads are packed."""
        return self.heads // (self.pack * self.blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles per group along each dimension."""
        return tuple(length // tile for length, tile in zip(self.lengths, self.tile, strict=True))

    @property
    def tile_tokens(self) -> int:
        return math.prod(self.tile)

    @property
    def _placed(self) -> list[tuple[int, int, int]]:
        """Bounds of the tokens in the padded array, before it is split into dilation groups.

        Per dimension: the first token, the end of the tokens, and the extent including padding.
        """
        extents = (1,) * (KERNEL_RANK - len(self.extents)) + self.extents
        sizes = zip(self.before, extents, self.lengths, self.groups, strict=True)
        return [(before * groups, before * groups + n, length * groups) for before, n, length, groups in sizes]

    def laid_out(self, array: jax.Array, padding: float = 0) -> jax.Array:
        """Convert ``[batch, *extents, heads, width]`` to ``[batch * leading, groups, *lengths, width]``.

        The resulting width includes all packed heads.
        """
        batch, heads = array.shape[0], self.leading
        width = array.shape[-2] * array.shape[-1] // heads
        array = array.reshape(batch, *(end - first for first, end, _ in self._placed), heads, width)
        pads = [(first, whole - end) for first, end, whole in self._placed]
        array = jnp.pad(array, [(0, 0), *pads, (0, 0), (0, 0)], constant_values=padding)
        split = [n for pair in zip(self.lengths, self.groups, strict=True) for n in pair]
        array = array.reshape(batch, *split, heads, width).transpose(0, 7, 2, 4, 6, 1, 3, 5, 8)
        return array.reshape(batch * heads, math.prod(self.groups), *self.lengths, width)

    def restored(self, array: jax.Array) -> jax.Array:
        """Invert :meth:`laid_out`."""
        heads, width = self.leading, array.shape[-1]
        array = array.reshape(-1, heads, *self.groups, *self.lengths, width).transpose(0, 5, 2, 6, 3, 7, 4, 1, 8)
        array = array.reshape(array.shape[0], *(whole for *_, whole in self._placed), heads, width)
        array = array[:, *(slice(first, end) for first, end, _ in self._placed)]
        return array.reshape(array.shape[0], *self.extents, self.heads, -1)

    def in_tiles(self, rows: Sequence[jax.Array], padding: float = 0) -> jax.Array:
        """Stack arrays ``[batch, *extents, heads]`` to ``[batch * leading, blocks, groups, *tiles, arrays, rows]``.

        There is one row for each pair of a head of the pack and a token of the tile.
        """
        count, pack, (x, y, z), (tx, ty, tz) = len(rows), self.pack, self.grid, self.tile
        array = self.laid_out(jnp.stack(rows, axis=-1), padding)
        array = array.reshape(*array.shape[:2], x, tx, y, ty, z, tz, self.blocks, pack, count)
        array = array.transpose(0, 8, 1, 2, 4, 6, 10, 9, 3, 5, 7)
        return array.reshape(*array.shape[:6], count, pack * self.tile_tokens)

    def unpacked(self, array: jax.Array) -> list[jax.Array]:
        """Invert :meth:`in_tiles`."""
        array = array.reshape(*array.shape[:7], self.pack, *self.tile)
        array = array.transpose(0, 2, 3, 8, 4, 9, 5, 10, 1, 7, 6)
        restored = self.restored(array.reshape(*array.shape[:2], *self.lengths, -1))
        return [restored[..., i] for i in range(restored.shape[-1])]


# Statistics of the softmax -------------------------------------------------------------------------------------------


def finite_scale(scale: float, factors: jax.Array | None) -> jax.Array:
    """Return the scale of the logits in float32.

    If ``factors`` are given, one scale per head, return these instead, with infinities replaced by NaN. A product with
    an infinite scale could be ``-inf``, which would give the key a weight of 0.
    """
    if factors is None:
        return jnp.float32(scale)
    return jnp.where(jnp.isfinite(factors), factors, jnp.nan).astype(jnp.float32)


def logsumexp_and_remainder(maximum: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logsumexp, and its remainder in base 2 (:class:`natten_jax.arrays.operands.Saved`).

    Args:
        maximum: float32. Maximum of the logits in base 2.
        total: float32. Sum of the weights ``exp2(logit - maximum)``; 0 if a query sees no key. The logsumexp of such a
            query is ``-inf``.
    """
    sees_nothing = total == 0
    total = jnp.where(sees_nothing, 1, total)
    logsumexp = maximum / LOG2_E + jnp.log(total)
    remainder = jnp.where(sees_nothing, 0, pack_remainder(maximum - base2(logsumexp), jnp.log2(total)))
    return jnp.where(sees_nothing, -jnp.inf, logsumexp), remainder


def saved_statistics(saved: Saved, cotangents: Cotangents) -> list[jax.Array]:
    """Return the statistics of each query that the backward pass reads: one array for each of :data:`STATISTICS`."""
    reference, remainder = base2_parts(saved.logsumexp, saved.remainder)
    logsumexp = jnp.where(saved.logsumexp == -jnp.inf, NO_KEY_SEEN, reference)
    return [logsumexp, remainder, delta(saved.out, *cotangents)]
