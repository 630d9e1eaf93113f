"""The ``cpu`` backend: C++ kernels on XLA's host threads, vectorised for the processor at hand."""

from __future__ import annotations

import functools
import itertools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Gradients, Operands, Output, Saved
from natten_jax.backends.base import Platform
from natten_jax.backends.native_backend import (
    NativeBackend,
    attributes,
    call_for_gradients,
    delta,
    kernel_operands,
    saved_remainder,
    with_kernel_rank,
)
from natten_jax.native import module as native
from natten_jax.native.abi import KERNEL_RANK
from natten_jax.native.module import ResultType
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES

_FORWARD = "natten_jax_cpu_forward"
_BACKWARD = "natten_jax_cpu_backward"
_LARGEST_TILE = native.limits("cpu").get("tile_tokens", 0)


class CpuBackend(NativeBackend):
    """Attention on the host, forward and backward, for every window."""

    family = "cpu"
    platform = Platform("cpu")
    dtypes = ("float32", "float16", "bfloat16")
    edges = EDGES
    targets: ClassVar = {"forward": (_FORWARD,), "backward": (_BACKWARD,)}
    heeds = ("backward_deterministic",)  # in every run
    takes_own_layouts = True
    takes_extents = True

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Tile shapes worth trying, the default first."""
        default = _default_pair(problem, pass_)
        q_tiles, kv_tiles = _CANDIDATES[problem.rank]
        return list(dict.fromkeys([default, *itertools.product(q_tiles, kv_tiles)]))

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of a tile."""
        return _LARGEST_TILE, _LARGEST_TILE

    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        """Call the kernel."""
        return native.call(
            _FORWARD,
            types,
            *kernel_operands(plan.problem, operands),
            _layouts(operands),
            **attributes(plan),
        )

    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Output) -> Gradients:
        """Call the kernels."""
        rank = functools.partial(with_kernel_rank, rank=plan.problem.rank)
        of_rows = rank(saved.logsumexp), saved_remainder(plan.problem, saved)
        per_query = _layouts(operands), *of_rows, rank(cotangents.out), rank(delta(saved.out, *cotangents))
        return call_for_gradients(_BACKWARD, plan, operands, per_query)


def _layouts(operands: Operands) -> jax.Array:
    """The operand behind those of all kernels: an array of nothing where batch entries are alike."""
    return jnp.zeros((0, KERNEL_RANK, KERNEL_RANK), jnp.int32) if operands.layouts is None else operands.layouts


#: Query and key/value tiles that tile_pairs lists after the default, by rank.
_CANDIDATES: dict[int, tuple[list[Shape], list[Shape]]] = {
    1: ([(16,), (64,), (128,), (256,)], [(128,), (256,), (512,), (1024,)]),
    2: ([(4, 4), (8, 8), (16, 16), (4, 16)], [(8, 8), (16, 16), (24, 24), (8, 64)]),
    3: ([(1, 4, 4), (2, 4, 8), (2, 8, 8), (4, 8, 8)], [(2, 8, 8), (4, 8, 8), (4, 12, 12), (2, 16, 16)]),
}

#: Default tiles before they are fitted to a problem. A work item owns one of them, its outer tile, and the inner tiles
#: that it goes over should hold what 16 neighboring tokens see, about 256 to 512 tokens, so that they stay in the
#: first-level cache. Larger outer tiles convert 16-bit tokens less often but leave fewer items to spread over threads.
#: On two cores of an AVX-512 server all shapes between half and twice these were within 10% of each other.
_FORWARD_Q_TILE: dict[int, Shape] = {1: (128,), 2: (8, 8), 3: (2, 8, 8)}
_BACKWARD_TILE: dict[int, Shape] = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}
_INNER_TOKENS = 512
_SMALLEST_TILE = 16  # tokens: the lanes of the kernels' vectors
_ENOUGH_ITEMS = 128


def _default_pair(problem: Problem, pass_: Pass) -> TilePair:
    if pass_ == "backward":
        # Either tile is the outer one in one sweep of the kernel, and the inner one in the other.
        tile = _BACKWARD_TILE[problem.rank]
        return _outer_tile(problem, problem.query_layout, tile), _outer_tile(problem, problem.kv_layout, tile)
    q_tile = _outer_tile(problem, problem.query_layout, _FORWARD_Q_TILE[problem.rank])
    return q_tile, _inner_tile(problem, q_tile)


def _outer_tile(problem: Problem, layout: Shape, tile: Shape) -> Shape:
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


def _inner_tile(problem: Problem, q_tile: Shape) -> Shape:
    """The keys that a tile of queries sees, cut evenly into parts of at most _INNER_TOKENS."""
    windows = zip(problem.kernel_size, problem.stride, q_tile, problem.kv_layout, problem.dilation, strict=True)
    extents = [min(k + t + s - 2, -(-x // d)) for k, s, t, x, d in windows]
    while math.prod(extents) > _INNER_TOKENS:
        largest = max(range(problem.rank), key=lambda dim: (extents[dim], -dim))
        extents[largest] = -(-extents[largest] // 2)
    return tuple(extents)
