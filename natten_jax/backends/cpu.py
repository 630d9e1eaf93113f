"""The ``cpu`` backend: C++ kernels on XLA's host threads, vectorised for the processor at hand."""

from __future__ import annotations

import itertools
import math

import jax

from natten_jax import native
from natten_jax.backends.base import Gradients, Operands, Output, Pass, Saved, TilePair, requested_pair
from natten_jax.backends.kernel_rank import (
    attributes,
    delta,
    gradients_of,
    kernel_operands,
    output_of,
    output_types,
    saved_of,
    saved_remainder,
    with_kernel_rank,
)
from natten_jax.devices import Device
from natten_jax.native import ResultType
from natten_jax.problem import Problem, Shape, TileConfig

_DTYPES = ("float32", "float16", "bfloat16")
_LARGEST_TILE = 4096  # tokens; kMostTileTokens of csrc/include/natten_jax/problem.h


class CpuBackend:
    """Attention on the host."""

    family = "cpu"
    query_family = "cpu"
    is_pure_jax = False
    fuses_additional_kv = True

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why the host kernels cannot run a pass; they have both passes for every window."""
        if device.platform != "cpu":
            return f"it runs on platform cpu only, not on {device.platform}"
        if problem.dtype not in _DTYPES:
            return f"it supports {', '.join(_DTYPES)}, not {problem.dtype}"
        return native.missing("natten_jax_cpu_forward")

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Tile shapes worth trying, the default first."""
        default = _default_pair(problem, pass_)
        q_tiles, kv_tiles = _CANDIDATES[problem.rank]
        return list(dict.fromkeys([default, *itertools.product(q_tiles, kv_tiles)]))

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """The kernels take any tile of up to 4096 tokens."""
        return all(len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= _LARGEST_TILE for tile in pair)

    def forward(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        return output_of(operands, _forward(problem, tiles, operands, saves=False))

    def forward_saving(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Saved:
        """Compute them for a backward pass."""
        return saved_of(operands, _forward(problem, tiles, operands, saves=True))

    def backward(
        self,
        problem: Problem,
        tiles: TileConfig,
        operands: Operands,
        saved: Saved,
        out_cotangent: jax.Array,
        logsumexp_cotangent: jax.Array,
    ) -> Gradients:
        """Compute the gradients of the differentiable operands."""
        arrays = kernel_operands(problem, operands)
        gradients = native.call(
            "natten_jax_cpu_backward",
            [ResultType(array.shape, array.dtype) for array in arrays[:5]],
            *arrays,
            with_kernel_rank(saved.logsumexp, problem.rank),
            saved_remainder(problem, saved),
            with_kernel_rank(out_cotangent, problem.rank),
            with_kernel_rank(delta(saved.out, out_cotangent, logsumexp_cotangent), problem.rank),
            **_attributes(problem, tiles, "backward"),
        )
        return gradients_of(operands, gradients)


def _forward(problem: Problem, tiles: TileConfig, operands: Operands, *, saves: bool) -> list[jax.Array]:
    return native.call(
        "natten_jax_cpu_forward",
        output_types(problem, operands, saves=saves),
        *kernel_operands(problem, operands),
        **_attributes(problem, tiles, "forward"),
    )


#: Query and key/value tiles that tile_pairs lists after the default, by rank.
_CANDIDATES: dict[int, tuple[list[Shape], list[Shape]]] = {
    1: ([(16,), (64,), (128,), (256,)], [(128,), (256,), (512,), (1024,)]),
    2: ([(4, 4), (8, 8), (16, 16), (4, 16)], [(8, 8), (16, 16), (24, 24), (8, 64)]),
    3: ([(1, 4, 4), (2, 4, 8), (2, 8, 8), (4, 8, 8)], [(2, 8, 8), (4, 8, 8), (4, 12, 12), (2, 16, 16)]),
}

#: Default tiles before they are fitted to a problem. A work item owns one of them, and the tiles that it streams
#: should hold what 16 neighboring tokens see, about 256 to 512 tokens, so that they stay in the first-level cache.
#: Larger owner tiles convert 16-bit tokens less often but leave fewer items to spread over threads. On two cores
#: of an AVX-512 server all shapes between half and twice these were within 10% of each other.
_FORWARD_Q_TILE: dict[int, Shape] = {1: (128,), 2: (8, 8), 3: (2, 8, 8)}
_BACKWARD_TILE: dict[int, Shape] = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}
_STREAM_TOKENS = 512
_SMALLEST_TILE = 16  # tokens: the lanes of the kernels' vectors
_ENOUGH_ITEMS = 128


def _default_pair(problem: Problem, pass_: Pass) -> TilePair:
    if pass_ == "backward":
        # Either tile is owned in one pass and streamed in the other.
        tile = _BACKWARD_TILE[problem.rank]
        return _owner_tile(problem, problem.query_layout, tile), _owner_tile(problem, problem.kv_layout, tile)
    q_tile = _owner_tile(problem, problem.query_layout, _FORWARD_Q_TILE[problem.rank])
    return q_tile, _stream_tile(problem, q_tile)


def _owner_tile(problem: Problem, layout: Shape, tile: Shape) -> Shape:
    """``tile`` made of whole stride groups, and smaller where there would be too few work items.

    It does not depend on the number of threads, because results must not.
    """
    extents = [t if s > t else -(-t // s) * s for t, s in zip(tile, problem.stride, strict=True)]

    def items() -> int:
        tiles = (d * -(-x // (t * d)) for x, t, d in zip(layout, extents, problem.dilation, strict=True))
        return problem.batch * problem.heads_kv * math.prod(tiles)

    while items() < _ENOUGH_ITEMS and math.prod(extents) >= 2 * _SMALLEST_TILE:
        largest = max(range(problem.rank), key=lambda dim: (extents[dim], -dim))
        extents[largest] = -(-extents[largest] // 2)
    return tuple(extents)


def _stream_tile(problem: Problem, q_tile: Shape) -> Shape:
    """The keys that a tile of queries sees, cut evenly into parts of at most _STREAM_TOKENS."""
    windows = zip(problem.kernel_size, problem.stride, q_tile, problem.kv_layout, problem.dilation, strict=True)
    extents = [min(k + t + s - 2, -(-x // d)) for k, s, t, x, d in windows]
    while math.prod(extents) > _STREAM_TOKENS:
        largest = max(range(problem.rank), key=lambda dim: (extents[dim], -dim))
        extents[largest] = -(-extents[largest] // 2)
    return tuple(extents)


def _attributes(problem: Problem, tiles: TileConfig, pass_: Pass) -> dict[str, Shape | float]:
    return attributes(problem, *(requested_pair(tiles, pass_) or _default_pair(problem, pass_)))
