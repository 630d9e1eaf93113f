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

from natten_jax.performance import Pass, TilePair
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

LARGEST_TILE = 32768  # tokens
#: Most logits of a step: several copies of them are in VMEM at a time.
_MOST_LOGITS = {"forward": 512 * 8192, "backward": 512 * 512}
#: Most bytes of a tile of tokens.
_MOST_BYTES = 512 * 1024
#: Bundles of a step beside its products and softmax: with one token dimension, and of each other one.
_STEP, _STEP_OF_DIMENSION = 120, 95
#: Bundles of a tile of 512 queries: before its first step and after its last.
_TILE = 800
#: Those of a step's products and softmax, at least.
_LATENCY = 90
#: Bundles for the softmax of 1024 logits, and for a product of 128 rows with a matrix of 128 x 128 elements, by as
#: many matrix units as v5e has.
_SOFTMAX, _PRODUCT = 4.0, 32.0
#: How much longer they take where logits are so many that they leave the registers more often.
_SPILLED, _SPILLING = 512 * 512, 1.08
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
    most = min(LARGEST_TILE, _MOST_BYTES // (element_bytes * -(-max(widths) // _LANES) * _LANES))
    steps = (*(1 for _ in axes[1:]), step)
    costs: dict[TilePair, float] = {}
    for q_tile in _shapes([-(-axis.query_extent // axis.dilation) for axis in axes], step, most):
        spans = [_spans(*each) for each in zip(axes, q_tile, steps, strict=True)]
        for kv_tile in _shapes([max(each) for each in spans], step, most):
            if math.prod(q_tile) * math.prod(kv_tile) <= _MOST_LOGITS[pass_]:
                costs[q_tile, kv_tile] = _bundles(axes, spans, (q_tile, kv_tile), widths, pass_)
    return heapq.nsmallest(_LISTED, costs, key=lambda pair: costs[pair])


@functools.lru_cache(maxsize=4096)
def _spans(axis: Axis, tile: int, step: int) -> tuple[int, ...]:
    """How many keys each tile of a dilation group's queries spans, from a multiple of ``step`` on."""
    queries, keys = (-(-extent // axis.dilation) for extent in (axis.query_extent, axis.kv_extent))
    first, end = axis.bounds(np.arange(queries), (queries, keys))
    starts = np.arange(0, queries, tile)
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


def _bundles(
    axes: Sequence[Axis],
    spans: Sequence[Sequence[int]],
    pair: TilePair,
    widths: tuple[int, int],
    pass_: Pass,
) -> float:
    """What the programs of a head execute."""
    q_tile, kv_tile = pair
    tokens = math.prod(q_tile), math.prod(kv_tile)
    boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, kv_tile, strict=True)]
    visited, programs = math.prod(map(sum, boxes)), math.prod(max(each) * len(each) for each in boxes)
    overhead = _STEP + _STEP_OF_DIMENSION * (len(axes) - 1)

    def of_step(products: int) -> float:
        columns, depth = -(-tokens[1] // _LANES), -(-max(widths) // _LANES)
        of_products = products * tokens[0] / _LANES * columns * depth * _PRODUCT
        of_softmax = tokens[0] * columns * _LANES / 1024 * _SOFTMAX * products / _FORWARD
        slower = _SPILLING if tokens[0] * tokens[1] > _SPILLED else 1.0
        return overhead + _LATENCY + slower * max(of_products, of_softmax)

    def of_queries(products: int) -> float:
        tiles = math.prod(map(len, spans)) * _TILE * tokens[0] / 512
        return tiles + (programs - visited) * overhead + visited * of_step(products)

    if pass_ == "forward":
        return of_queries(_FORWARD)
    kv_tiles = [-(-axis.kv_extent // axis.dilation) / extent for axis, extent in zip(axes, kv_tile, strict=True)]
    # A tile of keys is seen by about as many tiles of queries as there are pairs of both for each.
    seen = math.prod(
        max(1.0, sum(span / kv + 1 for span in each) / math.ceil(tiles)) * math.ceil(tiles)
        for each, kv, tiles in zip(spans, kv_tile, kv_tiles, strict=True)
    )
    return of_queries(_QUERY_GRADIENT) + seen * of_step(_KEY_GRADIENTS) + math.prod(kv_tiles) * _TILE * tokens[1] / 512
