"""What the ``flex`` backend knows of the softmax of every query row, and how sweeps of the backward pass find it anew.

Weights are recomputed from what the forward pass says about the rows. That is accurate as long as the recomputed
scores are the forward pass's: a matrix product of another shape may be rounded otherwise, by a unit in the last place,
and a unit of a logit of 1e7 is a factor of e. So where logits may be large, each sweep of the backward pass first finds
the rows anew, by the products that it is going to use. That takes loops of as many rounds as are needed, which may be
none: unlike ``lax.cond``, they are not run for nothing where ``jax.vmap`` maps the condition.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.avals import varying_like
from natten_jax.arrays.operands import Operands
from natten_jax.backends.flex.bias import TileBias
from natten_jax.backends.flex.blocks import TilePositions
from natten_jax.backends.flex.loops import repeated
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep
from natten_jax.backends.flex.shapes import Cut, RowTiles, Scalar, Split
from natten_jax.backends.flex.softmax import Products, Rows, Softmax, exponentials, highest, masked, reference
from natten_jax.plan.plan import Plan

#: A product of two float32 numbers of this size is off by less than 2e-5, and so is a weight.
LARGEST_RELIABLE_LOGIT = 256.0


class KnownRows(NamedTuple):
    """What is known of the rows before a sweep.

    Attributes:
        rows: As another sweep found them.
        is_unreliable: Whether they have to be found anew.
    """

    rows: Rows
    is_unreliable: Scalar

    @classmethod
    def of(cls, plan: Plan, operands: Operands, rows: Rows | None) -> KnownRows:
        """Rows as another sweep found them, or ``None`` where none did: constants for every derivative."""
        if rows is None:
            per_row = (*operands.inputs.query.shape[:-1], 1)
            nothing = varying_like(jnp.zeros(per_row, plan.problem.element.accumulator), operands)
            return cls(Rows(nothing, nothing), varying_like(jnp.array(True), operands))
        constants: tuple[Operands, Rows] = lax.stop_gradient((operands, rows))
        return cls(constants[1], _may_be_large(plan, constants[0]))


def rows_rounds(known: KnownRows, rounds: int) -> Scalar:
    """How many of so many rounds of a loop are needed to find the rows."""
    return jnp.where(known.is_unreliable, rounds, 0).astype(jnp.int32)


def rows_of(softmax: Softmax) -> Rows:
    """What the weights of a sweep need to know of its rows."""
    return Rows(softmax.maximum, jnp.where(softmax.total == 0, 0, jnp.log(softmax.total)))


def rows_of_tile(
    products: Products,
    biases: TileBias,
    placed: PlacedSweep,
    positions: TilePositions,
    query: RowTiles,
    keys: Split,
    additional: AdditionalTiles | None,
    given: KnownRows,
) -> tuple[Rows, Softmax]:
    """The rows of a step's query tiles, by the products of the sweep over query tiles.

    Args:
        products: The problem's.
        biases: The biases of the sweep.
        placed: The sweep.
        positions: The positions of the tiles.
        query: Query tiles.
        keys: All keys, as the sweep loads them.
        additional: Additional tokens.
        given: What is given for the tiles.

    Returns:
        The rows, and the softmax over the additional tokens alone, which is right where rows are found anew.
    """
    query, keys, additional, biases = lax.stop_gradient((query, keys, additional, biases))
    products = products.constant()
    sweep, problem = placed.sweep, placed.plan.problem
    softmax = varying_like(Softmax.of_no_key(query.shape[:-1], None, products.dtype), (query, keys, given))

    def visit(inner_step: jax.Array, softmax: Softmax) -> Softmax:
        key = sweep.load(keys, positions, inner_step, problem.heads_kv)
        mask = sweep.mask(positions, inner_step, problem.heads // problem.heads_kv)
        return softmax.over(products, query, key, None, mask, biases.at(positions, inner_step))

    def visit_additional(number: jax.Array, softmax: Softmax) -> Softmax:
        assert additional is not None
        key, _, mask = additional.tile(number, query)
        return softmax.over(products, query, key, None, mask)

    of_additional = softmax
    if additional is not None:
        of_additional = lax.fori_loop(0, rows_rounds(given, additional.tiles), visit_additional, softmax)
    softmax = lax.fori_loop(0, rows_rounds(given, sweep.inner_steps), visit, of_additional)
    rows = Rows(*(jnp.where(given.is_unreliable, *pair) for pair in zip(rows_of(softmax), given.rows, strict=True)))
    return rows, of_additional


def rows_by_key(
    placed: PlacedSweep,
    operands: Operands,
    queries: Annotated[jax.Array, "batch heads *coordinates head_dim"],
    keys: Cut,
    key_bias: Annotated[jax.Array, "steps tiles batch heads_kv _ 1"] | None,
    additional: Softmax | None,
    known: KnownRows,
) -> Annotated[jax.Array, "batch heads *coordinates 2"]:
    """The rows by the products of the sweep over key/value tiles, as that sweep loads them.

    Args:
        placed: The sweep.
        operands: The arrays.
        queries: All queries, as the sweep loads them.
        keys: Key tiles.
        key_bias: Their biases, cut likewise.
        additional: Over the additional tokens alone, ``[batch, *query_layout, heads, 1]``; ``None`` without any.
        known: All rows.
    """
    sweep, problem = placed.sweep, placed.plan.problem
    products = Products(placed.plan, operands.inputs.scale).constant()
    queries, keys, additional = lax.stop_gradient((queries, keys, additional))
    biases = lax.stop_gradient(TileBias.of(problem, operands.inputs, sweep))
    key_bias = lax.stop_gradient(key_bias)
    given = sweep.split_inner(jnp.concatenate(known.rows, axis=-1))
    shape = given[..., :1]
    no_key: tuple[jax.Array, jax.Array] = (jnp.full_like(shape, -jnp.inf), jnp.zeros_like(shape))
    start = no_key[0]
    of_additional: Softmax | None = jax.tree.map(sweep.split_inner, additional)
    if of_additional is not None:
        start = jnp.where(of_additional.total == 0, -jnp.inf, of_additional.maximum)

    def step(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Rounds of the first half find the largest scores, those of the second half add exponentials."""
        is_second = number >= sweep.steps
        outer = jnp.where(is_second, number - sweep.steps, number)
        key = lax.dynamic_index_in_dim(keys, outer, keepdims=False)
        of_outer_keys = None if key_bias is None else lax.dynamic_index_in_dim(key_bias, outer, keepdims=False)
        positions = sweep.at(lax.dynamic_index_in_dim(placed.positions, outer, keepdims=False))

        def visit(inner_step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            maxima, totals = carry
            query = sweep.load(queries, positions, inner_step, problem.heads_kv)
            mask = sweep.mask(positions, inner_step, problem.heads // problem.heads_kv)
            bias = biases.at(positions, inner_step, of_outer_keys)
            scores = masked(products.scores(query, key, bias), mask)
            largest = jnp.where(is_second, -jnp.inf, highest(scores))
            maxima = sweep.raise_to(maxima, positions, inner_step, largest)
            maximum = sweep.load(maxima, positions, inner_step, problem.heads_kv)
            added = exponentials(products, scores, maximum).sum(axis=-1, keepdims=True)
            return maxima, sweep.add(totals, positions, inner_step, jnp.where(is_second, added, 0))

        return repeated(sweep.inner_steps, visit, carry)

    carry = varying_like((start, no_key[1]), (operands, known))
    maximum, total = lax.fori_loop(0, rows_rounds(known, 2 * sweep.steps), step, carry)
    if of_additional is not None:
        steepness = products.steepness_of_heads(start.ndim)
        total += of_additional.total * jnp.exp(steepness * (start - reference(maximum)))
    found = jnp.concatenate(rows_of(Softmax(maximum, total, None)), axis=-1)
    return jnp.where(known.is_unreliable, found, given)


def _may_be_large(plan: Plan, operands: Operands) -> Scalar:
    """Whether some logit of numbers that are finite may exceed LARGEST_RELIABLE_LOGIT.

    Rows are found anew for the whole batch or not at all, and round otherwise then. Numbers that are not finite make
    their rows' weights NaN either way, and must not change those of other batch entries.
    """
    products = Products(plan, operands.inputs.scale)

    def square(array: jax.Array) -> jax.Array:
        array = products.cast(array)
        array = jnp.where(jnp.isfinite(array), array, 0)
        return jnp.max(jnp.sum(array * array, axis=-1))

    keys = square(operands.inputs.key)
    if operands.inputs.additional_keys is not None:
        keys = jnp.maximum(keys, square(operands.inputs.additional_keys))
    # Where the product overflows, it is not below the bound.
    scale = jnp.abs(jnp.asarray(products.scale_of_tokens(plan.problem.rank), products.dtype))
    scale = jnp.max(jnp.where(jnp.isfinite(scale), scale, 0))
    largest = square(operands.inputs.query) * keys
    if not plan.problem.biases:
        return ~(scale**2 * largest <= LARGEST_RELIABLE_LOGIT**2)
    biases = [each for each in (operands.inputs.relative_bias, operands.inputs.key_bias) if each is not None]
    added = sum(jnp.max(jnp.abs(jnp.where(jnp.isfinite(bias), bias, 0))) for bias in biases)
    return ~(scale * jnp.sqrt(largest) + added <= LARGEST_RELIABLE_LOGIT)
