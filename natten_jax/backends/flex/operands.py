"""The arrays that a sweep of the ``flex`` backend reads, in tiles, and the biases that it adds to the logits.

A sweep loops over outer tiles, each of which visits inner tiles (:mod:`natten_jax.backends.flex.geometry`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Inputs, Operands, varying_like
from natten_jax.backends.flex.geometry import (
    MaskTiles,
    PairTiles,
    RowTiles,
    Scalar,
    Sweep,
    TilePositions,
    TokenTiles,
    ValueTiles,
    make_sweep,
    repeated,
)
from natten_jax.backends.flex.softmax import KnownRows, Products, Rows, Softmax, exponentials, reference
from natten_jax.performance import Pass
from natten_jax.plan.plan import Plan
from natten_jax.problem import Shape


class AdditionalTiles(NamedTuple):
    """Additional keys and values, cut into tiles.

    Attributes:
        keys: Keys; the last tile may be padded with zeros.
        values: Values; padded like the keys.
        exists: True for tokens, False for padding.
    """

    keys: Annotated[jax.Array, "*tiles batch heads_kv tokens width"]
    values: Annotated[jax.Array, "*tiles batch heads_kv tokens width_v"]
    exists: Annotated[jax.Array, "*tiles 1 1 1 1 tokens"]

    @classmethod
    def from_inputs(cls, inputs: Inputs, sweep: Sweep) -> AdditionalTiles | None:
        """Split the additional tokens of a call into tiles; return ``None`` for a call without additional tokens."""
        keys, values = inputs.additional_keys, inputs.additional_values
        if keys is None or values is None:
            return None
        count = keys.shape[1]
        tiles = -(-count // max(sweep.inner_tokens, 64))
        tokens = -(-count // tiles)

        def tile(array: jax.Array) -> jax.Array:
            array = jnp.pad(jnp.moveaxis(array, 1, 2), [(0, 0), (0, 0), (0, tiles * tokens - count), (0, 0)])
            array = array.reshape(*array.shape[:2], tiles, tokens, array.shape[-1])
            return jnp.moveaxis(array, 2, 0)

        exists = jnp.arange(tiles * tokens, dtype=jnp.int32) < count
        return cls(tile(keys), tile(values), exists.reshape(tiles, 1, 1, 1, 1, tokens))

    def for_tiles(self, query: RowTiles) -> tuple[TokenTiles, ValueTiles, MaskTiles]:
        """Return the keys and values of a tile, repeated for each query tile of a step, and the mask of tokens.

        The mask is False for padding.
        """
        key, value = (jnp.broadcast_to(array, (query.shape[0], *array.shape)) for array in self[:2])
        return key, value, self.exists


def untiled(tiles: jax.Array, count: int) -> jax.Array:
    """Join the tiles of :class:`AdditionalTiles` to an array of keys or values, ``[batch, count, heads_kv, width]``."""
    array = jnp.moveaxis(tiles, 0, 2)
    array = array.reshape(*array.shape[:2], -1, array.shape[-1])
    return jnp.moveaxis(array[:, :, :count], 1, 2)


_Tree = TypeVar("_Tree")
_Sweep = TypeVar("_Sweep", bound="PlacedSweep")


class PlacedSweep:
    """A :class:`Sweep` for one call, with the arrays that it reads and the positions of its tiles.

    Args:
        plan: Plan of the call.
        operands: Operands of the call.
        pass_: The pass that the sweep is part of. The sweep uses the pass's tile shapes.
        outer_is_query: True if outer tiles are query tiles.
    """

    #: Names of the attributes that are arrays; :meth:`constant` stops their gradients.
    arrays: ClassVar[Sequence[str]]

    def __init__(self, plan: Plan, operands: Operands, pass_: Pass, *, outer_is_query: bool) -> None:
        problem = self.problem = plan.problem
        self.operands = operands
        self.products = Products(plan, operands.inputs.scale)
        self.sweep = make_sweep(plan, operands, pass_, outer_is_query=outer_is_query)
        tables = operands.inputs.relative_bias
        self.tables = None if tables is None else tables.reshape(*tables.shape[:2], *problem.bias_shape)
        dimensions = slice(3 - problem.rank, None)
        origins, layout = operands.with_layouts_as_origins().origins, None
        self.origins = None if origins is None else origins[:, dimensions].astype(jnp.int32)
        if problem.own_extents and operands.layouts is not None:
            layout = operands.layouts[0, 1:, dimensions].astype(jnp.int32)
        self.positions = self.sweep.positions(self.origins, layout)

    def constant(self: _Sweep) -> _Sweep:
        """Return a copy that JAX does not differentiate with respect to its arrays and scales."""
        result = copy.copy(self)
        result.products = self.products.constant()
        for name in self.arrays:
            setattr(result, name, lax.stop_gradient(getattr(self, name)))
        return result

    def bias(
        self, positions: TilePositions, inner_step: Scalar, key_bias: RowTiles | None
    ) -> Annotated[jax.Array, "tiles batch heads_kv queries keys"] | None:
        """Return the biases to add to the logits of a step; ``None`` for a call without biases.

        Args:
            positions: Positions of the step's tiles.
            inner_step: Index of the inner step.
            key_bias: Biases of the keys in the step's tiles, as :meth:`Sweep.load` or :meth:`Sweep.cut_outer` returns
                them; ``None`` for a call without key biases.
        """
        by_offset = None if self.tables is None else self._offset_bias(self.tables, positions, inner_step)
        if key_bias is None:
            return by_offset
        queries, keys = self.sweep.pair_tokens
        *outer, rows, _ = key_bias.shape
        by_head = key_bias.reshape(*outer, rows // keys, 1, keys)
        by_row = jnp.broadcast_to(by_head, (*outer, rows // keys, queries, keys)).reshape(*outer, -1, keys)
        return by_row if by_offset is None else by_offset + by_row

    def table_gradients(
        self, changes: PairTiles, positions: TilePositions, inner_step: Scalar
    ) -> Annotated[jax.Array, "tables heads *offsets"]:
        """Compute the gradients of the bias tables from a step's logit gradients ``changes``."""
        assert self.tables is not None
        if self.tables.shape[0] == 1:
            changes = jnp.sum(changes, axis=1, keepdims=True)
        extents, letters = self.sweep.pair_extents, "xyz"[: self.problem.rank]
        lengths = [queries + keys for queries, keys in extents]
        diagonals = jax.ShapeDtypeStruct((*changes.shape[:2], self.problem.heads, *lengths), changes.dtype)
        (sums,) = jax.linear_transpose(self._rows, diagonals)(changes)
        starts = self._starts(positions, inner_step)
        for i, (length, size) in enumerate(zip(lengths, self.tables.shape[2:], strict=True)):
            entries = starts[:, i, None] + jnp.arange(length, dtype=jnp.int32)[None]
            goes_to = (entries[..., None] == jnp.arange(size, dtype=jnp.int32)[None, None]).astype(changes.dtype)
            # The einsum of the last dimension also sums over the tiles.
            new = f"{'' if i == self.problem.rank - 1 else 't'}bh{letters.replace(letters[i], 'r')}"
            subscripts = f"tbh{letters},t{letters[i]}r->{new}"
            sums = jnp.einsum(subscripts, sums, goes_to, precision=lax.Precision.HIGHEST)
        return sums

    def _offset_bias(
        self, tables: Annotated[jax.Array, "tables heads *offsets"], positions: TilePositions, inner_step: Scalar
    ) -> PairTiles:
        """Look up the relative bias of each pair of a query and a key in a step's tiles."""
        rank = self.problem.rank
        lengths = [queries + keys for queries, keys in self.sweep.pair_extents]
        # Pad the tables: lookups outside of them are for pairs whose key is outside of the query's window.
        padded = jnp.pad(tables, [(0, 0), (0, 0), *((length, length) for length in lengths)])
        bounds = jnp.asarray([[-length for length in lengths], tables.shape[2:]], jnp.int32)
        starts = jnp.clip(self._starts(positions, inner_step), bounds[:1], bounds[1:]) - bounds[:1]
        numbers = lax.GatherDimensionNumbers(tuple(range(1, rank + 3)), (), tuple(range(2, rank + 2)))
        sizes = *tables.shape[:2], *lengths
        stretches = lax.gather(padded, starts, numbers, slice_sizes=sizes, mode="promise_in_bounds")
        return self._rows(stretches)

    def _starts(self, positions: TilePositions, inner_step: Scalar) -> Annotated[jax.Array, "tiles rank"]:
        """Return the table index of the first diagonal of each pair of tiles.

        On a diagonal, key minus query is constant. The first diagonal contains the last query and the first key.
        """
        pairs = zip(self.problem.axes, self.sweep.pair_extents, strict=True)
        firsts = [axis.kernel_size - queries for axis, (queries, _) in pairs]
        return self.sweep.key_distances(positions, inner_step) + jnp.asarray([firsts], jnp.int32)

    def _rows(self, diagonals: Annotated[jax.Array, "tiles batch heads *diagonals"]) -> PairTiles:
        """Expand one number per diagonal (see :meth:`_starts`) to one number per pair of a query and a key."""
        rank = self.problem.rank
        for i, (queries, keys) in enumerate(self.sweep.pair_extents):
            diagonals = _unrolled(diagonals, 3 + 2 * i, queries, keys)
        order = [3 + 2 * i for i in range(rank)] + [4 + 2 * i for i in range(rank)]
        queries, keys = self.sweep.pair_tokens
        tiles, batch = diagonals.shape[:2]
        return diagonals.transpose(0, 1, 2, *order).reshape(tiles, batch, self.problem.heads_kv, -1, keys)

    def is_needed(self, positions: TilePositions) -> Callable[[jax.Array], jax.Array] | None:
        """Return a predicate that is True for inner steps in which a query sees a key; ``None`` to run all steps.

        Only calls with padded layouts have a predicate, because in other calls nearly all steps would satisfy it.
        """
        return functools.partial(self.sweep.is_seen, positions) if self.problem.own_extents else None

    def nan_if_invalid(self, results: _Tree) -> _Tree:
        """Return the results unchanged, or NaN if they are invalid.

        In some dimensions, the number of inner steps is valid only for arrays that begin at the layout's first token
        (:attr:`AxisSweep.assumes_whole`). The results are invalid if the arrays begin at another token in one of these
        dimensions.
        """
        axes = [i for i, axis in enumerate(self.sweep.axes) if axis.assumes_whole]
        if self.origins is None or not axes:
            return results
        is_whole = jnp.all(self.origins[:, jnp.array(axes)] == 0)
        return jax.tree.map(lambda array: array * jnp.where(is_whole, 1, jnp.nan).astype(array.dtype), results)


def _unrolled(diagonals: jax.Array, axis: int, queries: int, keys: int) -> jax.Array:
    """Expand a dimension ``[queries + keys]`` to ``[queries, keys]``.

    Each row is a slice of the dimension that starts one element before the slice of the previous row. The
    function needs no gather: it flattens ``queries`` copies of the dimension, and reshapes the result to rows that are
    one element shorter than a copy. Each row therefore starts one element earlier in its copy than the previous row.
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
    """Return the key bias gradients of a key tile, in the layout of :meth:`Sweep.cut_outer`.

    They are the logit gradients ``changes``, summed over queries.
    """
    queries, keys = pair_tokens
    *outer, rows, _ = changes.shape
    by_head = changes.reshape(*outer, rows // queries, queries, keys).sum(axis=-2)
    return by_head.reshape(*outer, -1, 1)


class QuerySweep(PlacedSweep):
    """A sweep whose outer tiles are query tiles.

    Attributes:
        keys: The keys, in the layout of :meth:`Sweep.split_inner`.
        values: The values, in the layout of ``keys``.
        key_bias: Key biases, in the layout of ``keys``; ``None`` for a call without key biases.
        additional: Additional keys and values; ``None`` for a call without additional tokens.
    """

    arrays = "tables", "keys", "values", "key_bias", "additional"

    def __init__(self, plan: Plan, operands: Operands, pass_: Pass) -> None:
        super().__init__(plan, operands, pass_, outer_is_query=True)
        inputs = operands.inputs
        arrays = inputs.key, inputs.value, inputs.key_bias
        self.keys, self.values, self.key_bias = jax.tree.map(self.sweep.split_inner, arrays)
        self.additional = AdditionalTiles.from_inputs(inputs, self.sweep)

    def inner_tiles(
        self, positions: TilePositions, inner_step: Scalar
    ) -> tuple[TokenTiles, ValueTiles, MaskTiles, PairTiles | None]:
        """Return the keys and values of an inner step, the mask, and the biases to add to the logits."""
        arrays = self.keys, self.values, self.key_bias
        key, value, key_bias = jax.tree.map(lambda array: self.sweep.load(array, positions, inner_step), arrays)
        return key, value, self.sweep.mask(positions, inner_step), self.bias(positions, inner_step, key_bias)

    def softmax(
        self,
        positions: TilePositions,
        query: RowTiles,
        head_dim_v: int | None,
        rounds: Callable[[int], int | Scalar],
        *,
        carries_plan: bool = False,
    ) -> tuple[Softmax, Softmax]:
        """Compute two softmaxes for a step's query tiles.

        The first is over the additional tokens only. The second is over the additional tokens and all keys.

        Args:
            positions: Positions of the step's tiles.
            query: Query tiles.
            head_dim_v: Width of the values; ``None`` to omit the weighted sum of values.
            rounds: Function that receives the full number of rounds of a loop, and returns how many to execute.
            carries_plan: See :func:`softmax_weights`.
        """

        def visit_additional(number: jax.Array, softmax: Softmax) -> Softmax:
            tile = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, number, keepdims=False), self.additional)
            return softmax.over(self.products, query, *tile.for_tiles(query))

        def visit(inner_step: jax.Array, softmax: Softmax) -> Softmax:
            tiles = self.inner_tiles(positions, inner_step)
            return softmax.over(self.products, query, *tiles, carries_plan=carries_plan)

        empty_softmax = Softmax.empty(query.shape[:-1], head_dim_v, self.products.dtype)
        additional_softmax = softmax = varying_like(empty_softmax, self.operands)
        if self.additional is not None:
            additional_softmax = repeated(rounds(self.additional.keys.shape[0]), visit_additional, softmax)
        needed = self.is_needed(positions)
        return additional_softmax, repeated(rounds(self.sweep.inner_steps), visit, additional_softmax, needed)

    def rows(self, positions: TilePositions, query: RowTiles, given: KnownRows) -> tuple[Rows, Softmax]:
        """Return the row statistics of a step's query tiles, recomputed if the given ones are unreliable.

        Args:
            positions: Positions of the step's tiles.
            query: Query tiles.
            given: Row statistics of an earlier sweep.

        Returns:
            The row statistics, and the softmax over the additional tokens only. If the given statistics are reliable,
            this softmax is not computed, and has its initial value.
        """
        computed = self.constant().softmax(positions, lax.stop_gradient(query), None, given.rounds)
        pairs = zip(computed[1].rows, given.rows, strict=True)
        return Rows(*(jnp.where(given.is_unreliable, *pair) for pair in pairs)), computed[0]


class KeySweep(PlacedSweep):
    """A sweep whose outer tiles are key tiles.

    Attributes:
        queries: The queries, in the layout of :meth:`Sweep.split_inner`.
        keys: Key tiles, in the layout of :meth:`Sweep.cut_outer`.
        key_bias: Key biases, in the layout of ``keys``; ``None`` if the call has no key biases.
    """

    arrays = "tables", "queries", "keys", "key_bias"

    def __init__(self, plan: Plan, operands: Operands, pass_: Pass) -> None:
        super().__init__(plan, operands, pass_, outer_is_query=False)
        inputs = operands.inputs
        self.queries, self.keys = self.sweep.split_inner(inputs.query), self.sweep.cut_outer(inputs.key)
        self.key_bias = None if inputs.key_bias is None else self.sweep.cut_outer(inputs.key_bias)

    def rows(self, additional: Softmax | None, known: KnownRows) -> Annotated[jax.Array, "batch heads *coordinates 2"]:
        """Return the statistics of all rows, recomputed if the known ones are unreliable, in the layout of ``queries``.

        Args:
            additional: ``[batch, *query_layout, heads, 1]``. Softmax over the additional tokens; ``None`` for a call
                without additional tokens.
            known: Row statistics of an earlier sweep.
        """
        over, sweep, products = self.constant(), self.sweep, self.products.constant()
        given = sweep.split_inner(jnp.concatenate(known.rows, axis=-1))
        start, no_total = jnp.full_like(given[..., :1], -jnp.inf), jnp.zeros_like(given[..., :1])
        additional_softmax: Softmax | None = jax.tree.map(sweep.split_inner, lax.stop_gradient(additional))
        if additional_softmax is not None:
            start = jnp.where(additional_softmax.total == 0, -jnp.inf, additional_softmax.maximum)

        def step(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Process the outer tiles of one step.

            The first half of the rounds updates the maxima, and the second half updates the totals.
            """
            is_second = number >= sweep.steps
            outer = jnp.where(is_second, number - sweep.steps, number)
            packed, key, key_bias = jax.tree.map(
                lambda array: lax.dynamic_index_in_dim(array, outer, keepdims=False),
                (over.positions, over.keys, over.key_bias),
            )
            positions = sweep.at(packed)

            def visit(inner_step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                maxima, totals = carry
                query = sweep.load(over.queries, positions, inner_step)
                bias = over.bias(positions, inner_step, key_bias)
                mask = sweep.mask(positions, inner_step)
                scores = jnp.where(mask, products.scores(query, key, bias), -jnp.inf)
                largest = jnp.where(is_second, -jnp.inf, scores.max(axis=-1, keepdims=True))
                maxima = sweep.store(lax.scatter_max, maxima, positions, inner_step, largest)
                maximum = sweep.load(maxima, positions, inner_step)
                weights = exponentials(products, scores, maximum).sum(axis=-1, keepdims=True)
                weights = jnp.where(is_second, weights, 0)
                return maxima, sweep.store(lax.scatter_add, totals, positions, inner_step, weights)

            return repeated(sweep.inner_steps, visit, carry)

        carry = varying_like((start, no_total), (self.operands, known))
        maximum, total = lax.fori_loop(0, known.rounds(2 * sweep.steps), step, carry)
        if additional_softmax is not None:
            logit_scale = products.logit_scale
            if isinstance(logit_scale, jax.Array):
                logit_scale = logit_scale.reshape(*logit_scale.shape, *(1,) * (start.ndim - 2))
            total += additional_softmax.total * jnp.exp(logit_scale * (start - reference(maximum)))
        computed = jnp.concatenate(Softmax(maximum, total, None).rows, axis=-1)
        return jnp.where(known.is_unreliable, computed, given)
