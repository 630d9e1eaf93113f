"""Queries that are a box of the layout, layouts that are padded, and queries on a finer grid than keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natten_jax.arguments.boxes import Counts, Origin, checked_counts, checked_origin
from natten_jax.arguments.static import Ints, int_tuple
from natten_jax.arrays.operands import Inputs, Output
from natten_jax.arrays.padding import is_real
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.sharding.explicit import replicated, reshaped, split_like


class BoxArguments(NamedTuple):
    """The arguments of neighborhood attention that say where tokens lie."""

    query_origin: Origin | None = None
    extents: Counts | None = None
    upsample: Ints = 1


class Placement(NamedTuple):
    """Where queries lie, and what is real of the layout, as :class:`natten_jax.arrays.operands.Operands` has it."""

    origins: jax.Array | None = None
    layouts: jax.Array | None = None

    @property
    def is_whole(self) -> bool:
        """Whether queries are those of the whole layout, all of which is real."""
        return self.origins is None and self.layouts is None

    def without_padding(self, query: jax.Array) -> jax.Array:
        """The query, zero where it is padding."""
        assert self.layouts is not None
        inside = is_real(self.layouts, query.shape[1:-2], of_queries=True)[..., None, None]
        return jnp.where(split_like(inside, query), query, 0)

    def with_nothing_outside(self, output: Output) -> Output:
        """The output, of padding zero, and its logsumexp that of no key."""
        assert self.layouts is not None
        inside = is_real(self.layouts, output.out.shape[1:-2], of_queries=True)[..., None]
        return Output(
            jnp.where(split_like(inside[..., None], output.out), output.out, 0),
            jnp.where(split_like(inside, output.logsumexp), output.logsumexp, -jnp.inf),
        )


def placement_of_windows(inputs: Inputs, box: BoxArguments) -> Placement:
    """Where a call of neighborhood attention has its tokens.

    Raises:
        ValueError: A number is out of range, or an argument has another shape.
        TypeError: An argument holds something else than integers.
    """
    layout = inputs.key.shape[1:-2]
    extents = checked_counts("extents", box.extents, inputs.query.shape[0], layout, is_length=False)
    return _placement(inputs, box.query_origin, extents, extents)


def placement_of_sequences(
    inputs: Inputs, query_origin: Origin | None, query_lengths: Counts | None, kv_lengths: Counts | None
) -> Placement:
    """Where a call of attention has its tokens; raises as :func:`placement_of_windows`."""
    batch, tokens, *_ = inputs.query.shape
    of_queries = checked_counts("query_lengths", query_lengths, batch, (tokens,), is_length=True)
    of_keys = checked_counts("kv_lengths", kv_lengths, batch, inputs.key.shape[1:2], is_length=True)
    if of_queries is not None and query_origin is not None:
        origin = checked_origin(query_origin, batch, (inputs.key.shape[1] - tokens,))
        assert origin is not None
        of_queries = of_queries + origin
    return _placement(inputs, query_origin, of_queries, of_keys)


def _placement(
    inputs: Inputs, query_origin: Origin | None, of_queries: jax.Array | None, of_keys: jax.Array | None
) -> Placement:
    """Where queries lie that begin at an origin, in layouts of so many queries and keys."""
    batch, *queries, _, _ = inputs.query.shape
    layout = inputs.key.shape[1:-2]
    room = [k - q for q, k in zip(queries, layout, strict=True)]
    origin, of_queries, of_keys = (
        None if each is None else replicated(each)
        for each in (checked_origin(query_origin, batch, room), of_queries, of_keys)
    )
    # JAX cannot stack arrays that jax.vmap maps with others while a mesh shards the mapped axis: pad and add them.
    missing = KERNEL_RANK - len(layout)
    if of_queries is None and of_keys is None and (origin is None or origin.ndim == 1):
        return Placement(None if origin is None else jnp.pad(origin[None], ((0, 1), (missing, 0))))
    zeros, ones = [0] * len(layout), [1] * missing
    extents_of_queries = queries if origin is None else layout
    constants = (
        [0] * KERNEL_RANK,
        [*ones, *(extents_of_queries if of_queries is None else zeros)],
        [*ones, *(layout if of_keys is None else zeros)],
    )
    layouts = jnp.broadcast_to(jnp.asarray(constants, jnp.int32), (batch, 3, KERNEL_RANK))
    for row, each in enumerate((origin, of_queries, of_keys)):
        if each is not None:
            layouts += jnp.pad(jnp.atleast_2d(each)[:, None], ((0, 0), (row, 2 - row), (missing, 0)))
    return Placement(layouts=layouts)


class FinerGrid(NamedTuple):
    """Queries of a grid that is a multiple of the keys' grid: those of a cell are heads of it, which share its keys.

    Attributes:
        factors: How many queries there are for a cell, along each token dimension.
    """

    factors: tuple[int, ...]

    @classmethod
    def of(cls, upsample: Ints, rank: int) -> FinerGrid | None:
        """That of the argument; ``None`` where both grids are the same.

        Raises:
            ValueError: It has another length, or a number below 1.
            TypeError: It holds something else than ints.
        """
        factors = int_tuple("upsample", upsample, rank)
        return None if set(factors) == {1} else cls(factors)

    @property
    def queries(self) -> int:
        """Queries of a cell."""
        return math.prod(self.factors)

    def folded(self, inputs: Inputs) -> Inputs:
        """The inputs, with the queries of a cell as heads of it.

        Raises:
            ValueError: The layout of the queries is no multiple, or they cannot share heads of keys.
        """
        query, rank = inputs.query, len(self.factors)
        if query.ndim != rank + 3:  # refused as any other array
            return inputs
        batch, *layout, heads, width = query.shape
        if any(isinstance(n, int) and n % factor for n, factor in zip(layout, self.factors, strict=True)):
            raise ValueError(f"query has token layout {tuple(layout)}, which is no multiple of upsample {self.factors}")
        if inputs.key.ndim == rank + 3 and heads % inputs.key.shape[-2]:
            raise ValueError(
                f"query has {heads} heads, which is not a multiple of the {inputs.key.shape[-2]} heads of key and value"
            )
        cells = [n // factor for n, factor in zip(layout, self.factors, strict=True)]
        split = [n for pair in zip(cells, self.factors, strict=True) for n in pair]
        order = [0, *range(1, 2 * rank, 2), 2 * rank + 1, *range(2, 2 * rank + 1, 2), 2 * rank + 2]
        sources = [0, *(n for i in range(rank) for n in (1 + i, None)), rank + 1, rank + 2]
        query = reshaped(jnp.asarray(query), (batch, *split, heads, width), sources).transpose(order)
        sources = [*range(rank + 2), 2 * rank + 2]
        return inputs._replace(query=reshaped(query, (batch, *cells, heads * self.queries, width), sources))

    def unfolded(self, output: Output) -> Output:
        """Output and logsumexp of every query at its place."""
        return Output(self._unfolded(output.out), self._unfolded(output.logsumexp[..., None])[..., 0])

    def scales(self, scale: jax.Array) -> jax.Array:
        """Repeat ``[batch, heads, ...]`` for all queries of a cell, which are heads after :meth:`folded`."""
        batch, heads, *others = scale.shape
        repeated = jnp.broadcast_to(jnp.expand_dims(scale, 2), (batch, heads, self.queries, *others))
        sources = [0, 1, *range(3, repeated.ndim)]
        return reshaped(repeated, (batch, heads * self.queries, *others), sources)

    def _unfolded(self, array: jax.Array) -> jax.Array:
        rank = len(self.factors)
        batch, *cells, folded, width = array.shape
        heads = folded // self.queries
        sources: list[int | None] = [*range(rank + 2), *[None] * rank, rank + 2]
        array = reshaped(array, (batch, *cells, heads, *self.factors, width), sources)
        order = [0, *(n for i in range(rank) for n in (1 + i, rank + 2 + i)), rank + 1, 2 * rank + 2]
        layout: list[Any] = [n * factor for n, factor in zip(cells, self.factors, strict=True)]
        sources = [0, *range(1, 2 * rank, 2), 2 * rank + 1, 2 * rank + 2]
        return reshaped(array.transpose(order), (batch, *layout, heads, width), sources)
