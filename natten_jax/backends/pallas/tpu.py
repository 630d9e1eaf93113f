"""The ``tpu`` backend: Pallas kernels for TPUs, and a model that ranks their tiles.

The model estimates the number of instruction bundles (VLIW) that a pass executes. A TPU core issues one bundle per
cycle. The coefficients are fitted to bundle counts of programs that the TPU compiler generates for v5e
(``bench/tpu_bundles.py``). Use the model to rank tiles, not to predict times.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.biases import over_tokens, products_of_heads
from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.backends.base import Backend, Capabilities, Earlier, Platform
from natten_jax.backends.pallas import _common as common
from natten_jax.backends.pallas._tpu_call import LANES, MAX_LOGITS, Chunks, call_of, pack_size, packs_of_program
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES, Axis

#: Maximum number of tokens in a query tile, and in a box of keys.
LARGEST_TILE, LARGEST_BOX = 1024, 32768
#: ``_MAX_BYTES`` is the maximum size of a query tile in bytes, and in the backward pass also of a key tile.
#: ``_MAX_BOX_BYTES`` is the maximum size in bytes of the keys and values of a box. Two boxes must fit into VMEM.
_MAX_BYTES, _MAX_BOX_BYTES = 512 * 1024, 5_600_000
#: Bundles per grid step, per chunk of keys, and per row of a tile.
_STEP, _CHUNK, _ROW = 220, 50, 1.05
#: Bundles if every query tile sees at most one chunk: per program, per head or pack, and per row of a tile.
_PROGRAM, _PER_PACK, _PER_ROW = 300, 10, 0.6
#: Bundles for padding by XLA, per token of the padded array.
_PADDED = 0.5
#: Latency of the matrix products of a chunk, in bundles: for tiles of at most 128 rows, and for tiles of more rows.
_LATENCY_OF_FEW_ROWS, _LATENCY = 180, 80
#: Bundles of the softmax of 1024 logits, and bundles of the product of a 128 x 128 matrix with 128 rows.
_SOFTMAX, _PRODUCT = 2.5, 32.0
#: Number of matrix units of a v5e core.
_UNITS = 4
#: Number of matrix products per block of logits in each kernel.
_FORWARD, _QUERY_GRADIENT, _KEY_GRADIENTS = 2, 3, 4
#: Maximum number of pairs of tiles that ``recommended`` returns.
_LISTED = 6


def _largest_tiles(problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
    # A tile has one row for each pair of a token and a head of the pack.
    tile = LARGEST_TILE // pack_size(problem.heads, problem.heads_kv, (problem.head_dim, problem.head_dim_v))
    return tile, LARGEST_BOX if pass_ == "forward" else tile


class TpuBackend(Backend):
    """Neighborhood attention on TPUs; see :class:`natten_jax.backends.base.Backend`."""

    family = "tpu"
    capabilities = Capabilities(
        platform=Platform("tpu"),
        is_by_name_only=True,  # until the kernels have been measured
        dtypes=("bfloat16", "float32"),
        largest_tiles=_largest_tiles,
        edges=EDGES,
        wraps_by_strips=True,
        head_dim_step=8,
        largest_head_dim=256,
        features=("key_bias",),
        needs_columns=lambda _: True,
        used_arguments=("backward_deterministic",),  # every run is deterministic
        carries_plan=False,
    )

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tile shapes to choose from for a pass, the recommended pair first."""
        return recommended(problem, pass_)

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Return True if the kernels support a pair of tiles. The last extents must fill whole registers."""
        return super().offers(problem, device, pass_, pair) and all(tile[-1] % alignment(problem) == 0 for tile in pair)

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute the output, the logsumexp, and its remainder."""
        from natten_jax.backends.pallas._tpu_kernels import forward

        call = call_of(plan, operands, alignment(plan.problem))
        out, statistics = forward(call, *call.laid_out(operands.inputs), _scales(plan, operands))
        rows = common.logsumexp_and_remainder(*call.queries.unpacked(statistics))
        return Saved(call.queries.restored(out), *rows)

    def backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        from natten_jax.backends.pallas._tpu_kernels import key_gradients, query_gradient

        call, inputs = call_of(plan, operands, alignment(plan.problem)), operands.inputs
        out_gradient = call.queries.laid_out(cotangents.out.astype(inputs.query.dtype))
        # The logsumexp, cotangent and delta of padding queries are 0, so that these queries add 0 to gradients.
        statistics = call.queries.in_tiles(common.saved_statistics(saved, cotangents))
        scales = _scales(plan, operands)
        arrays = *call.laid_out(inputs), out_gradient, statistics, scales
        query_sums = call.queries.restored(query_gradient(call, arrays))
        key_sums, value_sums = key_gradients(call, arrays)
        scale_gradient, scale = None, scales[None]
        if inputs.scale is not None:
            scale_gradient = products_of_heads(query_sums, inputs.query.astype(jnp.float32))
            scale = scales.reshape(scale_gradient.shape)
        query = (query_sums * over_tokens(scale, query_sums)).astype(inputs.query.dtype)
        return Gradients(query, call.keys.restored(key_sums), call.keys.restored(value_sums), scale=scale_gradient)


def _scales(plan: Plan, operands: Operands) -> jax.Array:
    """Return the scales of the logits in float32: ``[batch * heads]``, or ``[1]`` if all heads share one scale.

    Raises:
        ValueError: The scale is an array, and the batch size is symbolic. The kernels load the scales of all batch
            entries at once.
    """
    scale = operands.inputs.scale
    if scale is None:
        return jnp.full((1,), plan.problem.scale, jnp.float32)
    batch, *_, heads, _ = operands.inputs.query.shape
    if not isinstance(batch, int):
        raise ValueError(f"scale is an array, and the batch size is {batch}: kernels for TPUs need a static batch size")
    return jnp.broadcast_to(common.finite_scale(plan.problem.scale, scale), (batch, heads)).reshape(-1)


# Tiles ---------------------------------------------------------------------------------------------------------------


def alignment(problem: Problem) -> int:
    """Return the number of consecutive tokens, along the last token dimension, that fill a register."""
    return 16 if problem.dtype == "bfloat16" else 8


@functools.lru_cache(maxsize=1024)
def recommended(problem: Problem, pass_: Pass) -> list[TilePair]:
    """Return the pairs of query and key/value tiles with the fewest estimated bundles, sorted by this estimate."""
    model, step = _Model(problem), alignment(problem)
    token_bytes = problem.element.bytes * sum(-(-width // LANES) * LANES for width in model.widths)
    limit = min(LARGEST_TILE, 2 * _MAX_BYTES // token_bytes) // model.heads
    costs: dict[TilePair, float] = {}
    for q_tile in _shapes([-(-axis.query_extent // axis.dilation) for axis in problem.axes], step, limit):
        spans = [_spans(*each) for each in zip(problem.axes, q_tile, model.steps, strict=True)]
        hull = [-(-max(each) // each_step) * each_step for each, each_step in zip(spans, model.steps, strict=True)]
        if pass_ == "forward":
            boxes = _boxes(hull, model.steps, min(LARGEST_BOX, _MAX_BOX_BYTES // token_bytes))
            costs |= {(q_tile, box): model.forward(spans, q_tile, box) for box in itertools.islice(boxes, 2)}
            continue
        for kv_tile in _shapes(hull, step, limit):
            if model.heads * math.prod(q_tile) * math.prod(kv_tile) <= MAX_LOGITS:
                costs[q_tile, kv_tile] = model.backward(spans, q_tile, kv_tile)
    return heapq.nsmallest(_LISTED, costs, key=lambda pair: costs[pair])


class _Model:
    """A model of the number of instruction bundles that a pass executes.

    Attributes:
        axes: Token dimensions.
        heads: Heads per pack; 1 if heads are not packed.
        leading: Number of packs, or of heads if they are not packed, over all batch entries. A program of the forward
            pass may process several of them. The number is 1 if query heads share key heads, because a program then
            processes one head.
        widths: Two numbers of elements per token of one pack (or head): first in queries and keys, then in values.
        steps: Box starts and box extents are multiples of these numbers of tokens: :func:`alignment` along the last
            token dimension, 1 along the others.
    """

    def __init__(self, problem: Problem) -> None:
        self.axes = problem.axes
        widths = problem.head_dim, problem.head_dim_v
        self.heads = pack_size(problem.heads, problem.heads_kv, widths)
        # If query heads share key heads, a program processes one head.
        leading = problem.batch * (1 if self.heads > 1 else problem.heads)
        self.leading = leading if problem.heads == problem.heads_kv else 1
        self.widths = [width * self.heads for width in widths]
        self.steps = *(1 for _ in problem.axes[1:]), alignment(problem)

    def forward(self, spans: Sequence[Sequence[int]], q_tile: Shape, box: Shape) -> float:
        """Return the bundles that the forward pass of one pack takes."""
        rows = self.heads * math.prod(q_tile)
        chunks, padded = Chunks.for_rows(box, rows, self.steps[-1]), self._padding(q_tile)
        dilated = math.prod(axis.dilation for axis in self.axes)
        tiles = math.prod(map(len, spans)) * dilated
        boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, box, strict=True)]
        if chunks.number == 1 and max(map(max, boxes)) == 1:
            # A program processes several packs, whose computations overlap, so no latency is added.
            columns, depth = -(-chunks.keys // LANES), -(-max(self.widths) // LANES)
            products = _FORWARD * rows / LANES * columns * depth * _PRODUCT
            program = _PROGRAM / packs_of_program(self.leading, rows * chunks.keys)
            return padded + tiles * (program + _PER_PACK + _PER_ROW * rows + products)
        programs = math.prod(max(each) * len(each) for each in boxes)
        # Along the dimension that chunks divide (`chunks.cut`), programs skip keys after the last key that the tile
        # sees.
        visited = 1.0
        for dim, (each, extent) in enumerate(zip(spans, box, strict=True)):
            whole = [-(-span // extent) * extent for span in each]
            visited *= sum(each if dim == chunks.cut else whole) / extent
        latency = _LATENCY_OF_FEW_ROWS if rows <= LANES else _LATENCY
        chunk = _CHUNK + latency + self._products(rows, chunks.keys, _FORWARD)
        steps = dilated * (programs * _STEP + visited * math.prod(box) / chunks.keys * chunk)
        return padded + steps + tiles * _ROW * rows

    def _padding(self, q_tile: Shape) -> float:
        """Return the bundles that XLA takes to pad queries to whole tiles, and to pad and align keys and values."""
        all_queries = math.prod(axis.query_extent // axis.dilation for axis in self.axes)
        all_keys = math.prod(axis.kv_extent // axis.dilation for axis in self.axes)
        groups, queries, keys = 1, 1, 1
        for axis, tile, step in zip(self.axes, q_tile, self.steps, strict=True):
            groups *= axis.dilation
            queries *= -(-axis.query_extent // (tile * axis.dilation)) * tile
            keys *= -(-(common.before_keys(axis, tile, step) + -(-axis.kv_extent // axis.dilation)) // step) * step
        return _PADDED * groups * ((queries if queries != all_queries else 0) + (2 * keys if keys != all_keys else 0))

    def backward(self, spans: Sequence[Sequence[int]], q_tile: Shape, kv_tile: Shape) -> float:
        """Return the bundles that the backward pass takes for one pack and one dilation group."""
        rows, keys = self.heads * math.prod(q_tile), math.prod(kv_tile)
        boxes = [[-(-span // extent) for span in each] for each, extent in zip(spans, kv_tile, strict=True)]
        visited, programs = math.prod(map(sum, boxes)), math.prod(max(each) * len(each) for each in boxes)
        query_step = _STEP + _LATENCY + self._products(rows, keys, _QUERY_GRADIENT)
        key_step = _STEP + _LATENCY + self._products(rows, keys, _KEY_GRADIENTS)
        query_bundles = (programs - visited) * _STEP + visited * query_step
        query_bundles += math.prod(map(len, spans)) * 2 * _ROW * rows
        pairs = zip(self.axes, kv_tile, strict=True)
        kv_tiles = [-(-axis.kv_extent // axis.dilation) / extent for axis, extent in pairs]
        # Estimated number of pairs of a key tile and a query tile that visits it. At least one pair per key tile is
        # assumed.
        seen = math.prod(
            max(1.0, sum(span / kv + 1 for span in each) / math.ceil(tiles)) * math.ceil(tiles)
            for each, kv, tiles in zip(spans, kv_tile, kv_tiles, strict=True)
        )
        return query_bundles + seen * key_step + math.prod(kv_tiles) * 2 * _ROW * keys

    def _products(self, rows: int, keys: int, products: int) -> float:
        """Return the bundles of one block of logits: the matrix products and the softmax, which overlap."""
        columns, depth = -(-keys // LANES), -(-max(self.widths) // LANES)
        bundles = products * rows / LANES * columns * depth * _PRODUCT
        if columns % _UNITS:
            bundles = min(bundles * -(-columns // _UNITS) * _UNITS / columns, bundles + 2 * _LATENCY)
        return max(bundles, rows * columns * LANES / 1024 * _SOFTMAX * products / _FORWARD)


def _boxes(hull: Sequence[int], steps: Sequence[int], limit: int) -> Iterator[Shape]:
    """Yield boxes of at most ``limit`` keys, the largest first.

    The hull of a tile is the box of all keys that the tile's queries see. ``hull`` contains the largest extent of these
    hulls along each dimension. It is divided into equal boxes along the first dimension, then also along the next one.
    """
    box = [*hull]
    for dim, step in enumerate(steps):
        for count in range(1, hull[dim] // step + 1):
            box[dim] = -(-hull[dim] // step // count) * step
            if math.prod(box) <= limit:
                yield tuple(box)


@functools.lru_cache(maxsize=4096)
def _spans(axis: Axis, tile: int, step: int) -> tuple[int, ...]:
    """Return the extent in keys of each query tile's hull along a dimension, for one dilation group.

    The hull is the range of keys that at least one query of the tile sees. Its start is rounded down to a multiple of
    ``step``.
    """
    queries, keys = (-(-extent // axis.dilation) for extent in (axis.query_extent, axis.kv_extent))
    first, end = axis.bounds(np.arange(queries), (queries, keys))
    before = common.before_keys(axis, tile, step)
    starts = np.arange(0, queries, tile)
    first, end = first + before, end + before
    first, end = np.minimum.reduceat(first, starts), np.maximum.reduceat(end, starts)
    return tuple(int(n) for n in np.maximum(end - first // step * step, 1))


def _shapes(lengths: Sequence[int], step: int, limit: int) -> Iterator[Shape]:
    """Yield candidate tiles of at most ``limit`` tokens.

    An extent is a power of two, or divides its dimension into about equal parts. The last extent is a multiple of
    ``step``.
    """
    *leading, last = lengths
    last_lengths = {-(-length // step) * step for length in _parts(last, limit)}
    aligned = {length // LANES * LANES for length in last_lengths if length > LANES}
    for tile in itertools.product(*(_parts(length, 64) for length in leading), sorted(last_lengths | aligned)):
        if math.prod(tile) <= limit:
            yield tile


def _parts(length: int, limit: int) -> list[int]:
    """Return candidate extents of at most ``limit``: powers of two, and ``length`` divided by powers of two."""
    whole = {-(-length // 2**i) for i in range(length.bit_length() + 1)}
    return sorted(part for part in whole | {2**i for i in range(length.bit_length())} if part <= limit)
