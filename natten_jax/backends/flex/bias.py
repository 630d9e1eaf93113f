"""What is added to the logits of a tile, and the gradients of what is: biases of offsets, and of keys.

What a tile's pairs have of a relative bias is constant along its diagonals, where keys and queries are equally far
apart. So along a dimension a tile has a stretch of the table, a number for each diagonal, and its rows are that
stretch, begun one place earlier each time. The gradient goes the other way: sums along diagonals, and then into the
table, by products with zeros and ones, which add in the same order in every run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Inputs
from natten_jax.backends.flex.blocks import Sweep, TilePositions
from natten_jax.backends.flex.shapes import PairTiles, RowTiles, Scalar, Split
from natten_jax.problem import Problem, Shape


@functools.partial(jax.tree_util.register_dataclass, data_fields=("tables", "keys"), meta_fields=("sweep", "heads_kv"))
@dataclasses.dataclass(frozen=True)
class TileBias:
    """The biases of a sweep, cut as its tiles are.

    Attributes:
        sweep: The sweep.
        heads_kv: Key/value heads.
        tables: Numbers of all offsets (``Problem.bias_shape``), one for all batch entries or one for each; or ``None``.
        keys: Biases of all keys as the sweep loads them, where its outer tiles are queries; ``None`` elsewhere.
    """

    sweep: Sweep
    heads_kv: int
    tables: Annotated[jax.Array, "tables heads *offsets"] | None
    keys: Split | None

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, sweep: Sweep) -> TileBias:
        """Those of a call, or their tangents."""
        tables, keys = inputs.relative_bias, inputs.key_bias
        if tables is not None:
            tables = tables.reshape(*tables.shape[:2], *problem.bias_shape)
        loaded = sweep.split_inner(keys) if keys is not None and sweep.outer_is_query else None
        return cls(sweep, problem.heads_kv, tables, loaded)

    def at(
        self, positions: TilePositions, inner_step: Scalar, of_outer_keys: RowTiles | None = None
    ) -> Annotated[jax.Array, "tiles batch heads_kv queries keys"] | None:
        """What is added to the logits of a step's tiles.

        Args:
            positions: The positions of the tiles.
            inner_step: Which inner tiles are visited.
            of_outer_keys: The biases of the outer tiles' keys, as :meth:`Sweep.cut_outer` cuts them.

        Returns:
            ``None`` where nothing is.
        """
        of_keys = of_outer_keys
        if self.keys is not None:
            of_keys = self.sweep.load(self.keys, positions, inner_step, self.heads_kv)
        found = None if self.tables is None else self._of_offsets(self.tables, positions, inner_step)
        if of_keys is None:
            return found
        queries, keys = self.sweep.pair_tokens
        *outer, rows, _ = of_keys.shape
        by_head = of_keys.reshape(*outer, rows // keys, 1, keys)
        by_row = jnp.broadcast_to(by_head, (*outer, rows // keys, queries, keys)).reshape(*outer, -1, keys)
        return by_row if found is None else found + by_row

    def table_gradients(
        self, changes: PairTiles, positions: TilePositions, inner_step: Scalar
    ) -> Annotated[jax.Array, "tables heads *offsets"]:
        """The gradients of the tables, from those of the logits of a step's tiles."""
        assert self.tables is not None
        if self.tables.shape[0] == 1:
            changes = jnp.sum(changes, axis=1, keepdims=True)
        extents = self.sweep.pair_extents
        rank = len(extents)
        tiles, batch = changes.shape[:2]
        heads = self.tables.shape[1]

        diagonals = jax.ShapeDtypeStruct((tiles, batch, heads, *(q + k for q, k in extents)), changes.dtype)
        (sums,) = jax.linear_transpose(self._rows, diagonals)(changes)
        starts = self._starts(positions, inner_step)
        for i, ((queries, keys), size) in enumerate(zip(extents, self.tables.shape[2:], strict=True)):
            entries = starts[:, i, None] + jnp.arange(queries + keys, dtype=jnp.int32)[None]
            goes_to = (entries[..., None] == jnp.arange(size, dtype=jnp.int32)[None, None]).astype(changes.dtype)
            # The last product adds tiles up.
            letters = "xyz"[:rank]
            own, new = letters[i], letters.replace(letters[i], "r")
            last = i == rank - 1
            sums = jnp.einsum(
                f"tbh{letters},t{own}r->{'' if last else 't'}bh{new}", sums, goes_to, precision=lax.Precision.HIGHEST
            )
        return sums

    def _of_offsets(
        self, tables: Annotated[jax.Array, "tables heads *offsets"], positions: TilePositions, inner_step: Scalar
    ) -> PairTiles:
        """What pairs of tokens have of the tables."""
        extents = self.sweep.pair_extents
        rank = len(extents)
        lengths = [queries + keys for queries, keys in extents]
        # What lies outside of the table belongs to pairs that no window has.
        padded = jnp.pad(tables, [(0, 0), (0, 0), *((length, length) for length in lengths)])
        bounds = jnp.asarray([[-length for length in lengths], tables.shape[2:]], jnp.int32)
        starts = jnp.clip(self._starts(positions, inner_step), bounds[:1], bounds[1:]) - bounds[:1]
        stretches = lax.gather(
            padded,
            starts,
            lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, rank + 3)),
                collapsed_slice_dims=(),
                start_index_map=tuple(range(2, rank + 2)),
            ),
            slice_sizes=(*tables.shape[:2], *lengths),
            mode="promise_in_bounds",
        )
        return self._rows(stretches)

    def _starts(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles rank"]:
        """Which entries the first diagonals of tiles have: those of the last queries."""
        distances = self.sweep.key_distances(positions, inner_step)
        firsts = [
            axis.axis.kernel_size - q for axis, (q, _) in zip(self.sweep.axes, self.sweep.pair_extents, strict=True)
        ]
        return distances + jnp.asarray([firsts], jnp.int32)

    def _rows(self, diagonals: Annotated[jax.Array, "tiles batch heads *diagonals"]) -> PairTiles:
        """The pairs of tiles."""
        extents = self.sweep.pair_extents
        rank = len(extents)
        for i, (queries, keys) in enumerate(extents):
            diagonals = _unrolled(diagonals, 3 + 2 * i, queries, keys)
        order = [3 + 2 * i for i in range(rank)] + [4 + 2 * i for i in range(rank)]
        queries, keys = self.sweep.pair_tokens
        tiles, batch = diagonals.shape[:2]
        return diagonals.transpose(0, 1, 2, *order).reshape(tiles, batch, self.heads_kv, -1, keys)


def _unrolled(diagonals: jax.Array, axis: int, queries: int, keys: int) -> jax.Array:
    """``[..., queries + keys, ...]`` along a dimension as ``[..., queries, keys, ...]``: each row begins one earlier.

    Rows of one number more than there are between the beginnings of two, one behind the other, are as many copies.
    """
    before: Shape = diagonals.shape[:axis]
    after: Shape = diagonals.shape[axis + 1 :]
    length = queries + keys
    copies = jnp.broadcast_to(jnp.expand_dims(diagonals, axis), (*before, queries, length, *after))
    line = copies.reshape(*before, queries * length, *after)
    line = lax.slice_in_dim(line, queries - 1, queries - 1 + queries * (length - 1), axis=axis)
    rows = line.reshape(*before, queries, length - 1, *after)
    return lax.slice_in_dim(rows, 0, keys, axis=axis + 1)


def summed_by_key(changes: jax.Array, pair_tokens: Sequence[int]) -> jax.Array:
    """The gradients of the biases of a tile's keys, from those of its logits; as :meth:`Sweep.cut_outer` cuts these."""
    queries, keys = pair_tokens
    *outer, rows, _ = changes.shape
    by_head = changes.reshape(*outer, rows // queries, queries, keys).sum(axis=-2)
    return by_head.reshape(*outer, -1, 1)
