"""The TPU kernels of both passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.arrays.remainders import LOG2_E
from natten_jax.backends.pallas._tpu_call import LANES, Call, Scalar, divided, side_by_side
from natten_jax.backends.pallas._tpu_grid import (
    HIDDEN,
    INDICES,
    SMALLEST_MAXIMUM,
    Chunk,
    KeyBox,
    Place,
    QueryMask,
    across,
    called,
    columns,
    common_specs,
    contract,
    first_of,
    hidden_from,
    is_last,
    keep_windows,
    key_boxes,
    key_coordinates,
    last_bounds,
    last_of,
    matrix,
    queries_of,
    query_bounds,
    query_grid,
    query_spec,
    rows_of_columns,
    rows_spec,
    scale_of,
    sees_all,
    semantics,
    slab_bounds,
    visit,
    visit_keys,
    window_scratch,
)

#: What sums of weights are taken for, at least: those of queries that see nothing are 0, and so is what they mix.
_SMALLEST_SUM = 1e-30


def forward(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Compute the output, and the softmax's maxima and sums.

    Args:
        call: What runs.
        query: ``[batch * heads, groups, *lengths, head_dim]``, or packed, as :class:`Layout` has it.
        key: ``[batch * heads_kv, groups, *lengths, head_dim]``, likewise.
        value: Likewise, of ``head_dim_v``.
        scale: float32 ``[batch * heads]`` or ``[1]``: factors of the logits.

    Returns:
        The output, laid out as the query; maxima of the logits in base 2 and sums of the weights,
        ``[batch * leading, blocks, groups, *tiles, 2, rows]``.
    """
    width, together = call.width(value), call.together
    grid = query_grid(call)

    def finish(out: Any, statistics: Any, found: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> None:
        """Write maxima, sums and sums of values of each pack."""
        rows = rows_of_columns([column for maxima, sums, _ in found for column in (maxima, sums)])
        for pack, (_, sums, mix) in enumerate(found):
            inverse = jnp.reciprocal(jnp.maximum(sums, _SMALLEST_SUM))
            mixed = side_by_side(mix * across(inverse, width), call.pack)
            out[pack] = mixed.reshape(out.shape[1:]).astype(out.dtype)
            statistics[pack] = rows[2 * pack : 2 * pack + 2, :]

    def in_all_lanes(column: jax.Array) -> jax.Array:
        return jnp.broadcast_to(column, (call.rows, LANES))

    def with_one_chunk(*refs: Any) -> None:
        """For tiles that have all their keys in one chunk: of several packs at a time, which share the mask."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows = rest
        place = Place.here()
        keep_windows(last, windows)
        mask = QueryMask(call, place, bounds, coordinates, windows)
        chunk = Chunk(0, 0, key_boxes(call, place, tables))
        hidden = mask.hidden(chunk)
        # In this order the compiler overlaps what the packs have to wait for.
        packs, found = range(together), []
        products = [contract(call, queries_of(call, q.at[pack]), chunk.of(call, k.at[pack]), (1, 1)) for pack in packs]
        for pack in packs:
            values = chunk.of(call, v.at[pack])
            scaled = products[pack] * (scale_of(call, factor, call.pack_number(place.head, pack)) * LOG2_E)
            logits = jnp.where(hidden, HIDDEN, scaled)
            maxima = jnp.maximum(jnp.max(logits, axis=1, keepdims=True), SMALLEST_MAXIMUM)
            weights = jnp.exp2(logits - maxima)
            sums = jnp.sum(weights, axis=1, keepdims=True)
            mix = contract(call, weights.astype(values.dtype), values, (1, 0))
            found.append((in_all_lanes(maxima), in_all_lanes(sums), mix))
        finish(out, statistics, found)

    def with_chunks(*refs: Any) -> None:
        """For all others: a chunk after another one, and what they come to in scratch memory."""
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, out, statistics, windows, maximum, total, mixed = rest
        place = Place.here()
        mask = QueryMask(call, place, bounds, coordinates, windows)
        to_base_2 = scale_of(call, factor, place.head) * LOG2_E

        def add(chunk: Chunk, is_masked: bool) -> None:
            logits = contract(call, queries_of(call, q.at[0]), chunk.of(call, k.at[0]), (1, 1)) * to_base_2
            if is_masked:
                logits = jnp.where(mask.hidden(chunk), HIDDEN, logits)
            before = maximum[...]
            now = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            weights, change = jnp.exp2(logits - across(now, logits.shape[1])), jnp.exp2(before - now)
            maximum[...] = now
            total[...] = total[...] * change + jnp.sum(weights, axis=1, keepdims=True)
            values = chunk.of(call, v.at[0])
            mixed[...] = mixed[...] * across(change, width) + contract(
                call, weights.astype(values.dtype), values, (1, 0)
            )

        @pl.when(first_of(place.step))
        def _() -> None:
            keep_windows(last, windows)
            maximum[...] = jnp.full_like(maximum, SMALLEST_MAXIMUM)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        visit_keys(call, place, tables, add)

        @pl.when(is_last(call, place))
        def _() -> None:
            finish(out, statistics, [(maximum[...], total[...], mixed[...])])

    state = [pltpu.VMEM((call.rows, lanes), jnp.float32) for lanes in (LANES, LANES, width)]
    return list(
        called(
            with_one_chunk if call.is_single else with_chunks,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=grid,
                in_specs=common_specs(call, call.width(query), width),
                out_specs=[query_spec(call, width), rows_spec(call, 2)],
                scratch_shapes=[window_scratch(call), *([] if call.is_single else state)],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype),
                jax.ShapeDtypeStruct(
                    (query.shape[0], call.queries.heads.blocks, *grid[1:5], 2, call.rows), jnp.float32
                ),
            ],
            compiler_params=semantics(3),
            name="natten_jax_tpu_forward",
        )(
            *call.box_tables(),
            *slab_bounds(call),
            scale,
            key_coordinates(call),
            last_bounds(call),
            query,
            key,
            value,
        )
    )


#: Rows of what a query's weights and their gradients are computed from.
LOGSUMEXP, REMAINDER, DELTA = range(3)
STATISTICS = 3


def _weights(logits: jax.Array, logsumexp: jax.Array, remainder: jax.Array) -> jax.Array:
    """Weights, from the logits in base 2."""
    # The forward pass rounds logits before it subtracts. The maximum keeps compilers from fusing their product here.
    return jnp.exp2(jnp.minimum((jnp.maximum(logits, HIDDEN) - logsumexp) - remainder, 0))


def query_gradient(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    statistics: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Compute the query's gradient, but for the scale, in float32.

    Args:
        call: What runs.
        query: As in :func:`forward`.
        key: Likewise.
        value: Likewise.
        out_gradient: Cotangent of the output.
        statistics: The statistics of each row, ``[batch * leading, blocks, groups, *tiles, 3, rows]``.
        scale: Factors of the logits.
    """
    width, width_v = call.width(query), call.width(value)

    def kernel(*refs: Any) -> None:
        tables, bounds, rest = refs[:3], refs[3:5], refs[5:]
        factor, coordinates, last, q, k, v, do, stats, dq, windows, of_queries, mixed = rest
        place = Place.here()
        mask = QueryMask(call, place, bounds, coordinates, windows)

        @pl.when(first_of(place.step))
        def _() -> None:
            keep_windows(last, windows)
            for index in range(STATISTICS):
                of_queries[index] = columns(stats[0, index : index + 1, :])
            mixed[...] = jnp.zeros_like(mixed)

        def add(chunk: Chunk, is_masked: bool) -> None:
            keys = chunk.of(call, k.at[0])
            logits = contract(call, queries_of(call, q.at[0]), keys, (1, 1))
            logits *= scale_of(call, factor, place.head) * LOG2_E
            if is_masked:
                logits = jnp.where(mask.hidden(chunk), HIDDEN, logits)
            products = contract(call, queries_of(call, do.at[0]), chunk.of(call, v.at[0]), (1, 1))
            logsumexp, remainder, delta = (across(of_queries[i], logits.shape[1]) for i in range(STATISTICS))
            gradients = _weights(logits, logsumexp, remainder) * (products - delta)
            mixed[...] += contract(call, gradients.astype(keys.dtype), keys, (1, 0))

        visit_keys(call, place, tables, add)

        @pl.when(is_last(call, place))
        def _() -> None:
            dq[...] = side_by_side(mixed[...], call.pack).reshape(dq.shape)

    return called(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=query_grid(call),
            in_specs=[*common_specs(call, width, width_v), query_spec(call, width_v), rows_spec(call, STATISTICS)],
            out_specs=query_spec(call, width),
            scratch_shapes=[
                window_scratch(call),
                pltpu.VMEM((STATISTICS, call.rows, LANES), jnp.float32),
                pltpu.VMEM((call.rows, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        compiler_params=semantics(3),
        name="natten_jax_tpu_query_gradient",
    )(
        *call.box_tables(),
        *slab_bounds(call),
        scale,
        key_coordinates(call),
        last_bounds(call),
        query,
        key,
        value,
        out_gradient,
        statistics,
    )


class _KeyPrograms:
    """The programs that own keys: a tile each, whose steps are the query heads that share it, and tiles of queries."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.heads = call.queries.heads.count // call.keys.heads.count
        self.steps = [self.heads, *(max(visits.most_tiles, 1) for visits in call.visits)]

    def grid(self) -> tuple[Any, ...]:
        """Heads or packs of all batch entries, dilation groups, tiles, query heads, and tiles of queries."""
        heads = self.call.leading // self.heads * self.call.queries.heads.blocks
        return heads, self.call.groups, *self.call.keys.grid, *self.steps

    def here(self) -> tuple[Place, Scalar]:
        """The place of the program that asks, but for the query head among those of a key head, and that."""
        return self._split([pl.program_id(axis) for axis in range(INDICES + 1)])

    @staticmethod
    def _split(indices: Sequence[Scalar]) -> tuple[Place, Scalar]:
        return Place.of((*indices[:5], *indices[6:])), indices[5]

    def spec(self, shape: Sequence[Any], index: Any) -> pl.BlockSpec:
        """A block of an array, from a function of a program's place, its query head, and its tables."""
        count = len(self.grid())
        return pl.BlockSpec(tuple(shape), lambda *indices: index(*self._split(indices[:count]), indices[count:]))

    def query_head(self, place: Place, own: Scalar) -> Scalar:
        """The query head of a step, or the pack, with its batch entry."""
        if self.heads == 1:
            return place.head
        batch, head = divided(place.head, self.call.keys.heads.count)
        return batch * self.call.queries.heads.count + head * self.heads + own

    def seeing(self, place: Place, tables: Sequence[Any]) -> tuple[list[Scalar], Scalar]:
        """The tile of queries of a step along each dimension, that of the last step where there are no more, and
        whether the step has one."""
        tiles, is_step = [], []
        groups = self.call.group_of(place.group)
        for lengths, visits, g, t, step, table in zip(
            self.call.lengths, self.call.visits, groups, place.tile, place.step, tables, strict=True
        ):
            row = (g * lengths.kv_tiles + t) * 2
            first, count = table[row], table[row + 1]
            tiles.append(first + jnp.maximum(jnp.minimum(step, count - 1), 0) if visits.most_tiles > 1 else first)
            is_step.append(step < count)
        return tiles, functools.reduce(jnp.logical_and, is_step)


def key_gradients(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out_gradient: jax.Array,
    statistics: jax.Array,
    scale: jax.Array,
) -> list[jax.Array]:
    """Compute the gradients of keys and values; arguments as in :func:`query_gradient`.

    Logits are ``[keys, queries]``, so that no product has a transposed operand. The query heads of a key head are gone
    over one after another.
    """
    programs = _KeyPrograms(call)

    def of_key(place: Place, own: Scalar, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, last = call.block_of(place.head)
        return (first, call.key_group(place.group, tables[:3]), *place.tile, last)

    def of_query(place: Place, own: Scalar, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, last = call.block_of(programs.query_head(place, own))
        return (first, place.group, *programs.seeing(place, tables[3:])[0], last)

    def of_statistics(place: Place, own: Scalar, tables: Sequence[Any]) -> tuple[Any, ...]:
        first, *tile, last = of_query(place, own, tables)
        return (first, last, *tile, 0, 0)

    def bounds_spec(dim: int) -> pl.BlockSpec:
        def index(place: Place, own: Scalar, tables: Sequence[Any]) -> tuple[Any, ...]:
            return call.group_of(place.group)[dim], programs.seeing(place, tables[3:])[0][dim], 0, 0

        return programs.spec((None, None, 2, call.rows), index)

    def kernel(*refs: Any) -> None:
        tables, (factor, q, k, v, do, stats, *bounds, dk, dv, key_sum, value_sum) = refs[:6], refs[6:]
        place, own = programs.here()
        steps = own, *place.step

        @pl.when(first_of(steps))
        def _() -> None:
            key_sum[...] = jnp.zeros_like(key_sum)
            value_sum[...] = jnp.zeros_like(value_sum)

        def add(is_masked: bool) -> None:
            queries, outs = queries_of(call, q), queries_of(call, do)
            scale_of_head = scale_of(call, factor, programs.query_head(place, own), axis=1)
            logits = contract(call, matrix(k), queries, (1, 1)) * (scale_of_head * LOG2_E)
            if is_masked:
                logits = hidden_from(call, logits, firsts, bounds)
            products = contract(call, matrix(v), outs, (1, 1))
            logsumexp, remainder, delta = (stats[i : i + 1, :] for i in range(STATISTICS))
            weights = _weights(logits, logsumexp, remainder)
            gradients = weights * (products - delta)
            if call.pack > 1:
                gradients, scale_of_head = gradients * scale_of_head, 1
            value_sum[...] += contract(call, weights.astype(outs.dtype), outs, (1, 0))
            key_sum[...] += contract(call, gradients.astype(queries.dtype), queries, (1, 0)) * scale_of_head

        firsts = [t * extent for t, extent in zip(place.tile, call.keys.tile, strict=True)]
        tile, is_step = programs.seeing(place, tables[3:])
        rows = call.rows_of(place.group, tile, tables[:3])
        is_full = sees_all(rows, [KeyBox(first, first) for first in firsts], call.keys.tile)
        pl.when(is_step)(lambda: visit(add, is_full))

        @pl.when(last_of(programs.steps, steps))
        def _() -> None:
            dk[...] = key_sum[...].reshape(dk.shape).astype(dk.dtype)
            dv[...] = value_sum[...].reshape(dv.shape).astype(dv.dtype)

    query_block, key_block = (None, None, *call.queries.tile), (None, None, *call.keys.tile)
    widths = [call.width(array) for array in (key, value)]
    specs = [programs.spec((*key_block, width), of_key) for width in widths]
    return list(
        called(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=6,
                grid=programs.grid(),
                in_specs=[
                    pl.BlockSpec(memory_space=pltpu.SMEM),
                    programs.spec((*query_block, widths[0]), of_query),
                    *specs,
                    programs.spec((*query_block, widths[1]), of_query),
                    programs.spec((*(None,) * 6, STATISTICS, call.rows), of_statistics),
                    *map(bounds_spec, range(3)),
                ],
                out_specs=specs,
                scratch_shapes=[pltpu.VMEM((call.keys.tile_tokens, width), jnp.float32) for width in widths],
            ),
            out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (key, value)],
            compiler_params=semantics(4),
            name="natten_jax_tpu_key_gradients",
        )(
            *call.box_tables(),
            *call.tile_tables(),
            scale,
            query,
            key,
            value,
            out_gradient,
            statistics,
            *query_bounds(call),
        )
    )
