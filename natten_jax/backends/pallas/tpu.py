"""The ``tpu`` backend: Pallas kernels for TPUs.

Calls run it by name alone: the kernels have been interpreted and compiled, and never run on a TPU.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Output, Saved
from natten_jax.arrays.remainders import base2_parts
from natten_jax.backends.base import Backend, Platform
from natten_jax.backends.ffi import delta
from natten_jax.backends.pallas._common import finite_scale, logsumexp_and_remainder
from natten_jax.backends.pallas._tpu_call import LANES, MOST_LOGITS, Chunks, before_keys, pack_of, together
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES, Axis

#: Most tokens of a tile of queries, and of a box of keys.
LARGEST_TILE, LARGEST_BOX = 1024, 32768
#: Most bytes of a tile of queries, of a box of keys with its values (of which two are in VMEM at a time), and of a tile
#: of keys of the backward pass.
_MOST_BYTES, _MOST_BOX_BYTES = 512 * 1024, 5_600_000
#: Bundles of a grid's step beside all else, of a chunk, and of a tile for each of its rows.
_STEP, _CHUNK, _ROW = 220, 50, 1.05
#: Those of a program that has its keys in one chunk, of each head or pack of it, and of each row.
_PROGRAM, _OF_PACK, _OF_ROW = 300, 10, 0.6
#: Those of XLA for a token of one array, where it pads.
_PADDED = 0.5
#: Bundles of a chunk's products that nothing overlaps with: of few rows, and of more.
_LATENCY_OF_FEW, _LATENCY = 180, 80
#: Bundles for the softmax of 1024 logits, and for a product of 128 rows with a matrix of 128 x 128 elements, by as
#: many matrix units as v5e has.
_SOFTMAX, _PRODUCT = 2.5, 32.0
_UNITS = 4
#: Products of a step of each kernel.
_FORWARD, _QUERY_GRADIENT, _KEY_GRADIENTS = 2, 3, 4
_LISTED = 6


def alignment(problem: Problem) -> int:
    """Tokens of a register along the last dimension."""
    return 16 if problem.dtype == "bfloat16" else 8


def recommended(problem: Problem, pass_: Pass) -> list[TilePair]:
    """Query and key/value tiles, the fastest first."""
    widths = problem.head_dim, problem.head_dim_v
    pack = pack_of(problem.heads, problem.heads_kv, widths)
    leading = problem.batch * (1 if pack > 1 else problem.heads)
    # Heads that share keys do not go together.
    packs = _Packs(leading if problem.heads == problem.heads_kv else 1, pack, (widths[0] * pack, widths[1] * pack))
    return _recommended(problem.axes, packs, problem.element.bytes, alignment(problem), pass_)


class _Packs(NamedTuple):
    """What the model knows of packs, or of heads where these are first.

    Attributes:
        leading: How many there may be in a program.
        heads: Heads of one.
        widths: Elements of a row of queries and keys, and of values.
    """

    leading: int
    heads: int
    widths: tuple[int, int]


@functools.lru_cache(maxsize=1024)
def _recommended(axes: tuple[Axis, ...], packs: _Packs, element_bytes: int, step: int, pass_: Pass) -> list[TilePair]:
    of_token = element_bytes * sum(-(-width // LANES) * LANES for width in packs.widths)
    most = min(LARGEST_TILE, 2 * _MOST_BYTES // of_token) // packs.heads
    steps = (*(1 for _ in axes[1:]), step)
    costs: dict[TilePair, float] = {}
    for q_tile in _shapes([-(-axis.query_extent // axis.dilation) for axis in axes], step, most):
        spans = [_spans(*each) for each in zip(axes, q_tile, steps, strict=True)]
        hull = [-(-max(each) // each_step) * each_step for each, each_step in zip(spans, steps, strict=True)]
        if pass_ == "forward":
            for box in _boxes(hull, steps, min(LARGEST_BOX, _MOST_BOX_BYTES // of_token)):
                costs[q_tile, box] = _of_queries(axes, spans, (q_tile, box), packs, step)
        else:
            for kv_tile in _shapes(hull, step, most):
                if packs.heads * math.prod(q_tile) * math.prod(kv_tile) <= MOST_LOGITS:
                    costs[q_tile, kv_tile] = _of_backward(axes, spans, (q_tile, kv_tile), packs)
    return heapq.nsmallest(_LISTED, costs, key=lambda pair: costs[pair])


def _boxes(hull: Sequence[int], steps: Sequence[int], most: int) -> Iterator[Shape]:
    """The largest boxes of all keys that a tile sees, or of parts of them along the first dimensions."""
    box, found = [*hull], 0
    for dim, step in enumerate(steps):
        for count in range(1, hull[dim] // step + 1):
            box[dim] = -(-hull[dim] // step // count) * step
            if math.prod(box) <= most:
                yield tuple(box)
                found += 1
                if found == 2:
                    return


@functools.lru_cache(maxsize=4096)
def _spans(axis: Axis, tile: int, step: int) -> tuple[int, ...]:
    """How many keys each tile of a dilation group's queries spans, from a multiple of ``step`` on."""
    queries, keys = (-(-extent // axis.dilation) for extent in (axis.query_extent, axis.kv_extent))
    first, end = axis.bounds(np.arange(queries), (queries, keys))
    before = before_keys(axis, tile, step)
    starts = np.arange(0, queries, tile)
    first, end = first + before, end + before
    first, end = np.minimum.reduceat(first, starts), np.maximum.reduceat(end, starts)
    return tuple(int(n) for n in np.maximum(end - first // step * step, 1))


def _shapes(lengths: Sequence[int], step: int, most: int) -> Iterator[Shape]:
    """Tiles of a box: parts of each dimension that are about equal."""
    *leading, last = lengths
    of_last = {-(-length // step) * step for length in _parts(last, most)}
    aligned = {length // LANES * LANES for length in of_last if length > LANES}
    for tile in itertools.product(*(_parts(length, 64) for length in leading), sorted(of_last | aligned)):
        if math.prod(tile) <= most:
            yield tile


def _parts(length: int, most: int) -> list[int]:
    """Lengths of parts, in steps of a factor of two: of equal ones, and of powers of two."""
    whole = {-(-length // 2**i) for i in range(length.bit_length() + 1)}
    return sorted(part for part in whole | {2**i for i in range(length.bit_length())} if part <= most)


def _products(rows: int, keys: int, widths: tuple[int, int], products: int) -> float:
    """Bundles of the products and the softmax of so many rows and keys."""
    columns, depth = -(-keys // LANES), -(-max(widths) // LANES)
    of_products = products * rows / LANES * columns * depth * _PRODUCT
    if columns % _UNITS:
        of_products = min(of_products * -(-columns // _UNITS) * _UNITS / columns, of_products + 2 * _LATENCY)
    return max(of_products, rows * columns * LANES / 1024 * _SOFTMAX * products / _FORWARD)


def _of_queries(
    axes: Sequence[Axis], spans: Sequence[Sequence[int]], pair: TilePair, packs: _Packs, step: int
) -> float:
    """What the forward pass of a pack executes."""
    q_tile, box = pair
    rows = packs.heads * math.prod(q_tile)
    chunks, padded = Chunks.of(box, rows, step), _of_padding(axes, q_tile, step)
    tiles = math.prod(map(len, spans)) * math.prod(axis.dilation for axis in axes)
    boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, box, strict=True)]
    if chunks.count == 1 and max(map(max, boxes)) == 1:
        # Several go together, and hide each other's latency.
        columns, depth = -(-chunks.keys // LANES), -(-max(packs.widths) // LANES)
        of_products = _FORWARD * rows / LANES * columns * depth * _PRODUCT
        of_program = _PROGRAM / together(packs.leading, rows * chunks.keys)
        return padded + tiles * (of_program + _OF_PACK + _OF_ROW * rows + of_products)
    programs = math.prod(max(each) * len(each) for each in boxes)
    # Keys behind the last one that a tile sees are passed over along the dimension that is cut.
    visited = 1.0
    for dim, (each, extent) in enumerate(zip(spans, box, strict=True)):
        whole = [-(-span // extent) * extent for span in each]
        visited *= sum(each if dim == chunks.cut else whole) / extent
    latency = _LATENCY_OF_FEW if rows <= LANES else _LATENCY
    of_chunk = _CHUNK + latency + _products(rows, chunks.keys, packs.widths, _FORWARD)
    dilated = math.prod(axis.dilation for axis in axes)
    of_steps = dilated * (programs * _STEP + visited * math.prod(box) / chunks.keys * of_chunk)
    return padded + of_steps + tiles * _ROW * rows


def _of_padding(axes: Sequence[Axis], q_tile: Shape, step: int) -> float:
    """What XLA executes to pad queries to whole tiles, and keys and values to where boxes begin."""
    steps = [*(1 for _ in axes[1:]), step]
    queries = [-(-axis.query_extent // (tile * axis.dilation)) * tile for axis, tile in zip(axes, q_tile, strict=True)]
    keys = [
        -(-(before_keys(axis, tile, each) + -(-axis.kv_extent // axis.dilation)) // each) * each
        for axis, tile, each in zip(axes, q_tile, steps, strict=True)
    ]
    own = math.prod(axis.query_extent // axis.dilation for axis in axes)
    others = math.prod(axis.kv_extent // axis.dilation for axis in axes)
    groups = math.prod(axis.dilation for axis in axes)
    of_queries = math.prod(queries) if math.prod(queries) != own else 0
    of_keys = 2 * math.prod(keys) if math.prod(keys) != others else 0
    return _PADDED * groups * (of_queries + of_keys)


def _of_backward(axes: Sequence[Axis], spans: Sequence[Sequence[int]], pair: TilePair, packs: _Packs) -> float:
    """What the kernels of the backward pass execute for a dilation group of a pack."""
    q_tile, kv_tile = pair
    rows, keys = packs.heads * math.prod(q_tile), math.prod(kv_tile)
    boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, kv_tile, strict=True)]
    visited, programs = math.prod(map(sum, boxes)), math.prod(max(each) * len(each) for each in boxes)

    def of_step(products: int) -> float:
        return _STEP + _LATENCY + _products(rows, keys, packs.widths, products)

    of_queries = (programs - visited) * _STEP + visited * of_step(_QUERY_GRADIENT)
    of_queries += math.prod(map(len, spans)) * 2 * _ROW * rows
    kv_tiles = [-(-axis.kv_extent // axis.dilation) / extent for axis, extent in zip(axes, kv_tile, strict=True)]
    # A tile of keys is seen by about as many tiles of queries as there are pairs of both for each.
    seen = math.prod(
        max(1.0, sum(span / kv + 1 for span in each) / math.ceil(tiles)) * math.ceil(tiles)
        for each, kv, tiles in zip(spans, kv_tile, kv_tiles, strict=True)
    )
    return of_queries + seen * of_step(_KEY_GRADIENTS) + math.prod(kv_tiles) * 2 * _ROW * keys


#: Logsumexp in base 2 of queries that see nothing, or that are padding: their weights are zero.
_NOTHING_SEEN = 1e30


class TpuBackend(Backend):
    """Neighborhood attention on TPUs; see :class:`natten_jax.backends.base.Backend`."""

    family = "tpu"
    is_by_name_only = True  # until somebody has measured it
    platform = Platform("tpu")
    dtypes = ("bfloat16", "float32")
    edges = EDGES
    wraps_by_strips = True
    head_dim_step = 8
    largest_head_dim = 256
    biases = ("key_bias",)
    key_bias_by_columns = True
    carries_plan = False
    fuses_additional_kv = False
    heeds = ("backward_deterministic",)  # in every run

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tile shapes of a pass, the recommended pair first."""
        return recommended(problem, pass_)

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of a tile: each has a row for every head of a pack."""
        tile = LARGEST_TILE // pack_of(problem.heads, problem.heads_kv, (problem.head_dim, problem.head_dim_v))
        return tile, LARGEST_BOX if pass_ == "forward" else tile

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Whether the kernels accept this pair: the last extents fill whole registers."""
        return super().offers(problem, device, pass_, pair) and all(tile[-1] % alignment(problem) == 0 for tile in pair)

    def forward(self, plan: Plan, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        return Output(*self.forward_saving(plan, operands)[:2])

    def forward_saving(self, plan: Plan, operands: Operands) -> Saved:
        """Compute them for a backward pass."""
        from natten_jax.backends.pallas._tpu_call import call_of
        from natten_jax.backends.pallas._tpu_kernels import forward

        call = call_of(plan, operands, alignment(plan.problem))
        out, statistics = forward(call, *call.laid_out(operands), _scales(plan, operands))
        rows = logsumexp_and_remainder(*call.queries.of_tiles(statistics))
        return Saved(call.queries.restored(out), *rows)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the gradients of the differentiable operands."""
        from natten_jax.backends.pallas._tpu_call import call_of
        from natten_jax.backends.pallas._tpu_kernels import key_gradients, query_gradient

        call = call_of(plan, operands, alignment(plan.problem))
        arrays = *call.laid_out(operands), call.queries.laid_out(cotangents.out.astype(operands.inputs.query.dtype))
        reference, remainder = base2_parts(saved.logsumexp, saved.remainder)
        logsumexp = jnp.where(saved.logsumexp == -jnp.inf, _NOTHING_SEEN, reference)
        # Padding has logsumexp, cotangent and delta 0 here, so that it adds 0 to gradients.
        statistics = call.queries.in_tiles([logsumexp, remainder, delta(saved.out, *cotangents)])
        scales = _scales(plan, operands)
        of_query = query_gradient(call, *arrays, statistics, scales)
        of_query = call.queries.restored(of_query)
        of_key, of_value = key_gradients(call, *arrays, statistics, scales)
        heads = 1 if operands.inputs.scale is None else call.queries.heads.count
        scale = scales.reshape(-1, *(1,) * plan.problem.rank, heads, 1)
        of_scale = None
        if operands.inputs.scale is not None:
            products = of_query * operands.inputs.query.astype(jnp.float32)
            of_scale = jnp.sum(products, axis=(*range(1, 1 + plan.problem.rank), -1))
        return Gradients(
            (of_query * scale).astype(operands.inputs.query.dtype),
            call.keys.restored(of_key),
            call.keys.restored(of_value),
            scale=of_scale,
        )


def _scales(plan: Plan, operands: Operands) -> jax.Array:
    """Factors of the logits, float32 ``[batch * heads]``, or ``[1]`` where they are the same.

    Raises:
        ValueError: They differ, and how many there are is not known: kernels have all of them at hand.
    """
    scale = operands.inputs.scale
    if scale is None:
        return jnp.full((1,), plan.problem.scale, jnp.float32)
    batch, *_, heads, _ = operands.inputs.query.shape
    if not isinstance(batch, int):
        raise ValueError(f"scale is an array, and the batch size is {batch}: kernels for TPUs have to know how many")
    return jnp.broadcast_to(finite_scale(plan.problem.scale, scale), (batch, heads)).reshape(-1)
