"""Softmax as the ``flex`` backend computes it, in each pass: scores, sums over keys, and weights."""

from __future__ import annotations

import contextlib
import copy
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from natten_jax.arrays.operands import Operands, varying_like
from natten_jax.backends.flex.geometry import (
    Cut,
    MaskTiles,
    PairTiles,
    PerHead,
    PerRow,
    RowTiles,
    Scalar,
    Split,
    TilePositions,
    TokenTiles,
    ValueTiles,
    repeated,
)
from natten_jax.backends.flex.operands import AdditionalTiles, PlacedSweep, TileBias
from natten_jax.plan.plan import Plan, carrying_plan


class Products:
    """The matrix products of a problem: operands and results in the accumulator's element type.

    Args:
        plan: How the problem is computed.
        scale: The factors of the logits, in place of the problem's; or ``None``.
    """

    def __init__(self, plan: Plan, scale: PerHead | None = None):
        problem = plan.problem
        self.dtype = jnp.dtype(problem.element.accumulator)
        self._heads = problem.heads_kv, problem.heads // problem.heads_kv
        #: The factor of all logits; 1 where heads have scales of their own.
        self.scale = problem.scale if scale is None else 1.0
        # A scale of inf would hide keys whose products are negative, and NaN is never hidden.
        self._scales = scale = None if scale is None else jnp.where(jnp.isfinite(scale), scale, jnp.nan)
        self._adds = bool(problem.biases)
        self._sign = None if scale is None else jnp.where(scale < 0, -1, 1).astype(self.dtype)
        # Half-precision values are exact in TF32 and bfloat16 passes; float32 is not, so it takes full
        # precision unless the user chose one.
        is_chosen = problem.element.bytes == 2 or plan.precision is not None
        self._precision = None if is_chosen else lax.Precision.HIGHEST

    def cast(self, array: jax.Array) -> jax.Array:
        """``array`` in the element type of the computation."""
        return array.astype(self.dtype)

    def steepness(self, rows: int) -> float | jax.Array:
        """Factors from scores to logits, never negative, for ``[tiles, batch, heads_kv, rows, ...]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else self._of_rows(steepness, rows)

    def steepness_of_tokens(self, rank: int) -> float | jax.Array:
        """The same for ``[batch, *layout, heads, width]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else self._of_tokens(steepness, rank)

    def steepness_of_heads(self, ndim: int) -> float | jax.Array:
        """The same for arrays of so many dimensions, ``[batch, heads, ...]``."""
        steepness = self._steepness
        return steepness if isinstance(steepness, float) else steepness.reshape(*steepness.shape, *(1,) * (ndim - 2))

    def scale_of_tokens(self, rank: int) -> float | jax.Array:
        """The factors of logits for ``[batch, *layout, heads, width]``."""
        return self.scale if self._scales is None else self._of_tokens(self._scales, rank)

    def scaled(self, rows: RowTiles) -> RowTiles:
        """Rows times the scales of heads, where these have their own."""
        return rows if self._scales is None else self._of_rows(self._scales, rows.shape[-2]) * rows

    def constant(self) -> Products:
        """The same, without derivatives with respect to the scales."""
        result = copy.copy(self)
        result._scales = lax.stop_gradient(self._scales)
        return result

    def with_constant_maximum(self, rows: Rows) -> Rows:
        """Rows of tiles whose maximum times the scale is a constant for derivatives, as it is without scales of heads.

        What is added to the logarithm of the total is zero, and has the derivative of that product.
        """
        if self._scales is None or self._adds:
            return rows
        steepness = self.steepness(rows.maximum.shape[-2])
        change = (steepness - lax.stop_gradient(steepness)) * reference(rows.maximum)
        return Rows(rows.maximum, rows.log_total - change)

    def scores(self, query: RowTiles, key: TokenTiles, bias: PairTiles | None = None) -> PairTiles:
        """``query key^T``, in the order of the logits; these, with what is added, where something may be."""
        if self._adds:
            logits = self.logits(query, key)
            return logits if bias is None else logits + bias
        if self._sign is not None:
            return self.inner(self.cast(query) * self._of_rows(self._sign, query.shape[-2]), key)
        return self.inner(query if self.scale >= 0 else -query, key)

    def inner(self, rows: RowTiles, tokens: TokenTiles) -> PairTiles:
        """``rows tokens^T``: a number for each row and token."""
        return self._product("cbhqd,cbhkd->cbhqk", rows, tokens)

    def logits(self, query: RowTiles, key: TokenTiles) -> PairTiles:
        """``scale * query key^T``."""
        if self._adds:
            return self.scaled(self.scale * self.inner(query, key))
        return self.steepness(query.shape[-2]) * self.scores(query, key)

    def logit_tangents(self, scale_tangent: PerHead, query: RowTiles, key: TokenTiles) -> PairTiles:
        """``scale_tangent * query key^T``, where heads have scales of their own."""
        return self._of_rows(scale_tangent, query.shape[-2]) * self.inner(query, key)

    def mix(self, weights: PairTiles, value: TokenTiles) -> RowTiles:
        """``weights value``."""
        return self._product("cbhqk,cbhkd->cbhqd", weights, value)

    def mix_rows(self, weights: PairTiles, rows: RowTiles) -> TokenTiles:
        """``weights^T rows``: a sum over rows for each token."""
        return self._product("cbhqk,cbhqd->cbhkd", weights, rows)

    @property
    def _steepness(self) -> float | jax.Array:
        """Absolute scales of heads that have their own: products with the sign, since ``abs`` has a kink at zero."""
        if self._adds:
            return 1.0
        return abs(self.scale) if self._scales is None or self._sign is None else self._scales * self._sign

    def _of_rows(self, factors: jax.Array, rows: int) -> jax.Array:
        """``[batch, heads]`` as ``[1, batch, heads_kv, rows, 1]``: rows are tokens, head by head."""
        heads_kv, repeats = self._heads
        per_head = factors.reshape(-1, heads_kv, repeats, 1)
        per_row = jnp.broadcast_to(per_head, (*per_head.shape[:-1], rows // repeats))
        return per_row.reshape(1, -1, heads_kv, rows, 1)

    @staticmethod
    def _of_tokens(factors: jax.Array, rank: int) -> jax.Array:
        batch, heads = factors.shape
        return factors.reshape(batch, *(1,) * rank, heads, 1)

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts,
            self.cast(a),
            self.cast(b),
            precision=self._precision,
            preferred_element_type=self.dtype,
        )


class Softmax(NamedTuple):
    """Softmax of rows over the keys seen so far.

    Attributes:
        maximum: Largest score; ``-inf`` where no key was seen.
        total: Sum of the exponentials of the logits less the largest.
        mixed: Values mixed with these exponentials; ``None`` where nobody asks for them.
    """

    maximum: PerRow
    total: PerRow
    mixed: Annotated[jax.Array, "... width_v"] | None

    @classmethod
    def of_no_key(cls, rows: tuple[int, ...], head_dim_v: int | None, dtype: jnp.dtype) -> Softmax:
        """The softmax of rows that have seen no key yet."""
        mixed = None if head_dim_v is None else jnp.zeros((*rows, head_dim_v), dtype)
        return cls(jnp.full((*rows, 1), -jnp.inf, dtype), jnp.zeros((*rows, 1), dtype), mixed)

    def over(
        self,
        products: Products,
        query: RowTiles,
        key: TokenTiles,
        value: ValueTiles | None,
        mask: MaskTiles,
        bias: PairTiles | None = None,
        *,
        carries_plan: bool = False,
    ) -> Softmax:
        """Over more keys; ``carries_plan`` as in :func:`softmax_weights`."""
        scores = masked(products.scores(query, key, bias), mask)
        maximum = jnp.maximum(self.maximum, highest(scores))
        decay = jnp.where(
            self.maximum == -jnp.inf,
            0,
            jnp.exp(products.steepness(scores.shape[-2]) * (self.maximum - reference(maximum))),
        )
        weights = exponentials(products, scores, maximum, carries_plan=carries_plan)
        total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        mixed = self.mixed
        if mixed is not None and value is not None:
            mixed = mixed * decay + products.mix(weights, value)
        return Softmax(maximum, total, mixed)


class Rows(NamedTuple):
    """What turns the scores of rows into weights.

    Attributes:
        maximum: Largest score.
        log_total: Logarithm of the sum of the exponentials of the logits less the largest.
    """

    maximum: PerRow
    log_total: PerRow


def masked(scores: PairTiles, mask: Annotated[jax.Array, "_ _ _ _ tokens"]) -> PairTiles:
    """The scores, ``-inf`` where a key is not seen."""
    return jnp.where(mask, scores, -jnp.inf)


def highest(scores: PairTiles) -> PerRow:
    """The largest of each row's masked scores."""
    return scores.max(axis=-1, keepdims=True)


def exponentials(products: Products, scores: PairTiles, maximum: PerRow, *, carries_plan: bool = False) -> PairTiles:
    """Exponentials of the logits of masked scores less those of ``maximum``; 0 where a key is not seen."""
    # A mask again: where the scale is 0, so is every other logit.
    logits = masked(products.steepness(scores.shape[-2]) * (scores - reference(maximum)), scores != -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def softmax_weights(
    products: Products,
    query: RowTiles,
    key: TokenTiles,
    rows: Rows,
    mask: MaskTiles,
    bias: PairTiles | None = None,
    *,
    carries_plan: bool = False,
) -> PairTiles:
    """Softmax weights; 0 where a key is not seen.

    ``carries_plan`` is for one sweep of a pass, whose exponential the plan is put onto: XLA leaves those alone.
    """
    below = products.steepness(query.shape[-2]) * (products.scores(query, key, bias) - reference(rows.maximum))
    # Scores that are computed twice may differ in the last place, which counts where they are large.
    below = below - lax.stop_gradient(jnp.maximum(below, 0))
    logits = jnp.where(mask, below - rows.log_total, -jnp.inf)
    with carrying_plan() if carries_plan else contextlib.nullcontext():
        return jnp.exp(logits)


def reference(maximum: PerRow) -> PerRow:
    """What to subtract from scores: a row that has seen no key has no maximum."""
    return jnp.where(maximum == -jnp.inf, 0, maximum)


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
