"""Which tiles a pass takes: the fastest by a model of what the kernels execute.

The model counts bundles, of which a core of a TPU issues one a cycle, and is fitted to what the compiler for TPUs makes
of the kernels for v5e (``bench/tpu_bundles.py``). It is good for comparing tiles; it is no time.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from natten_jax.backends.tpu.chunks import MOST_LOGITS, Chunks
from natten_jax.backends.tpu.visits import before_keys
from natten_jax.performance import Pass, TilePair
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

#: Most tokens of a tile of queries, and of a box of keys.
LARGEST_TILE, LARGEST_BOX = 1024, 32768
#: Most bytes of a tile of queries, of a box of keys with its values (of which two are in VMEM at a time), and of a tile
#: of keys of the backward pass.
_MOST_BYTES, _MOST_BOX_BYTES = 512 * 1024, 5_600_000
#: Bundles of a grid's step beside all else, of a chunk, and of a tile for each of its queries.
_STEP, _CHUNK, _QUERY = 220, 50, 1.05
#: Those of a program that has its keys in one chunk: of each of its heads, and for each of their queries.
_HEAD, _OF_ROW = 40, 0.25
#: Bundles of a chunk's products that nothing overlaps with: of few queries, and of more.
_LATENCY_OF_FEW, _LATENCY = 180, 80
#: Bundles for the softmax of 1024 logits, and for a product of 128 rows with a matrix of 128 x 128 elements, by as
#: many matrix units as v5e has.
_SOFTMAX, _PRODUCT = 2.5, 32.0
_UNITS = 4
#: Products of a step of each kernel.
_FORWARD, _QUERY_GRADIENT, _KEY_GRADIENTS = 2, 3, 4
_LISTED = 6
_LANES = 128


def alignment(problem: Problem) -> int:
    """Tokens of a register along the last dimension."""
    return 16 if problem.dtype == "bfloat16" else 8


def recommended(problem: Problem, pass_: Pass) -> list[TilePair]:
    """Query and key/value tiles, the fastest first."""
    return _recommended(
        problem.axes, (problem.head_dim, problem.head_dim_v), problem.element.bytes, alignment(problem), pass_
    )


@functools.lru_cache(maxsize=1024)
def _recommended(
    axes: tuple[Axis, ...], widths: tuple[int, int], element_bytes: int, step: int, pass_: Pass
) -> list[TilePair]:
    of_token = element_bytes * sum(-(-width // _LANES) * _LANES for width in widths)
    most = min(LARGEST_TILE, 2 * _MOST_BYTES // of_token)
    steps = (*(1 for _ in axes[1:]), step)
    costs: dict[TilePair, float] = {}
    for q_tile in _shapes([-(-axis.query_extent // axis.dilation) for axis in axes], step, most):
        spans = [_spans(*each) for each in zip(axes, q_tile, steps, strict=True)]
        hull = [-(-max(each) // each_step) * each_step for each, each_step in zip(spans, steps, strict=True)]
        if pass_ == "forward":
            for box in _boxes(hull, steps, min(LARGEST_BOX, _MOST_BOX_BYTES // of_token)):
                costs[q_tile, box] = _of_queries(axes, spans, (q_tile, box), widths, step)
        else:
            for kv_tile in _shapes(hull, step, most):
                if math.prod(q_tile) * math.prod(kv_tile) <= MOST_LOGITS:
                    costs[q_tile, kv_tile] = _of_backward(axes, spans, (q_tile, kv_tile), widths)
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
    aligned = {length // _LANES * _LANES for length in of_last if length > _LANES}
    for tile in itertools.product(*(_parts(length, 64) for length in leading), sorted(of_last | aligned)):
        if math.prod(tile) <= most:
            yield tile


def _parts(length: int, most: int) -> list[int]:
    """Lengths of parts, in steps of a factor of two: of equal ones, and of powers of two."""
    whole = {-(-length // 2**i) for i in range(length.bit_length() + 1)}
    return sorted(part for part in whole | {2**i for i in range(length.bit_length())} if part <= most)


def _products(queries: int, keys: int, widths: tuple[int, int], products: int) -> float:
    """Bundles of the products and the softmax of so many queries and keys."""
    columns, depth = -(-keys // _LANES), -(-max(widths) // _LANES)
    of_products = products * queries / _LANES * columns * depth * _PRODUCT
    if columns % _UNITS:
        of_products = min(of_products * -(-columns // _UNITS) * _UNITS / columns, of_products + 2 * _LATENCY)
    return max(of_products, queries * columns * _LANES / 1024 * _SOFTMAX * products / _FORWARD)


def _of_queries(
    axes: Sequence[Axis], spans: Sequence[Sequence[int]], pair: TilePair, widths: tuple[int, int], step: int
) -> float:
    """What the forward pass of a head executes."""
    q_tile, box = pair
    queries, chunks = math.prod(q_tile), Chunks.of(box, math.prod(q_tile), step)
    tiles = math.prod(map(len, spans)) * math.prod(axis.dilation for axis in axes)
    boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, box, strict=True)]
    if chunks.count == 1 and max(map(max, boxes)) == 1:
        # Several heads go together, and hide each other's latency.
        of_logits = queries * -(-chunks.keys // _LANES) * _LANES / 1024
        return tiles * (
            _HEAD + _OF_ROW * queries + 1.25 * _products(queries, chunks.keys, widths, _FORWARD) + of_logits
        )
    programs = math.prod(max(each) * len(each) for each in boxes)
    # Keys behind the last one that a tile sees are passed over along the dimension that is cut.
    visited = 1.0
    for dim, (each, extent) in enumerate(zip(spans, box, strict=True)):
        whole = [-(-span // extent) * extent for span in each]
        visited *= sum(each if dim == chunks.cut else whole) / extent
    latency = _LATENCY_OF_FEW if queries <= _LANES else _LATENCY
    of_chunk = _CHUNK + latency + _products(queries, chunks.keys, widths, _FORWARD)
    dilated = math.prod(axis.dilation for axis in axes)
    return dilated * (programs * _STEP + visited * math.prod(box) / chunks.keys * of_chunk) + tiles * _QUERY * queries


def _of_backward(
    axes: Sequence[Axis], spans: Sequence[Sequence[int]], pair: TilePair, widths: tuple[int, int]
) -> float:
    """What the kernels of the backward pass execute for a dilation group of a head."""
    q_tile, kv_tile = pair
    queries, keys = math.prod(q_tile), math.prod(kv_tile)
    boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, kv_tile, strict=True)]
    visited, programs = math.prod(map(sum, boxes)), math.prod(max(each) * len(each) for each in boxes)

    def of_step(products: int) -> float:
        return _STEP + _LATENCY + _products(queries, keys, widths, products)

    of_queries = (programs - visited) * _STEP + visited * of_step(_QUERY_GRADIENT)
    of_queries += math.prod(map(len, spans)) * 2 * _QUERY * queries
    kv_tiles = [-(-axis.kv_extent // axis.dilation) / extent for axis, extent in zip(axes, kv_tile, strict=True)]
    # A tile of keys is seen by about as many tiles of queries as there are pairs of both for each.
    seen = math.prod(
        max(1.0, sum(span / kv + 1 for span in each) / math.ceil(tiles)) * math.ceil(tiles)
        for each, kv, tiles in zip(spans, kv_tile, kv_tiles, strict=True)
    )
    return of_queries + seen * of_step(_KEY_GRADIENTS) + math.prod(kv_tiles) * 2 * _QUERY * keys
