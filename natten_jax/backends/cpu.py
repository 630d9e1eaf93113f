"""The ``cpu`` backend: C++ kernels on XLA's host threads, vectorised for the instruction set of the processor."""

from __future__ import annotations

import itertools
import math

import jax

from natten_jax.arrays.biases import gradient_of_shared_table, table_of_each_entry
from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved, delta
from natten_jax.backends import ffi
from natten_jax.backends.base import Capabilities, Platform
from natten_jax.backends.ffi import NativeBackend
from natten_jax.native import module as native
from natten_jax.native.module import ResultType
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES

_FORWARD = "natten_jax_cpu_forward"
_BACKWARD = "natten_jax_cpu_backward"
_LARGEST_TILE = native.limits("cpu").get("tile_tokens", 0)
_MAX_TABLE_ENTRIES = native.limits("cpu").get("table_entries", 0)


class CpuBackend(NativeBackend):
    """Attention on the CPU. The forward and backward kernels support all windows."""

    family = "cpu"
    capabilities = Capabilities(
        platform=Platform("cpu"),
        dtypes=("float32", "float16", "bfloat16"),
        largest_tiles=lambda *_: (_LARGEST_TILE, _LARGEST_TILE),
        converts_float8_to="float32",  # the output is then rounded only once
        edges=EDGES,
        targets={"forward": (_FORWARD,), "backward": (_BACKWARD,)},
        used_arguments=("backward_deterministic",),  # every run is deterministic
        features=(*ffi.NATIVE_FEATURES, "relative_bias"),
    )

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return the reason why this backend cannot run a pass of a problem on a device; ``None`` if it can."""
        reason = super().rejection(problem, device, pass_)
        entries = problem.heads // problem.heads_kv * math.prod(problem.bias_shape)
        if reason is None and problem.relative_bias and entries > _MAX_TABLE_ENTRIES:
            return f"it supports at most {_MAX_TABLE_ENTRIES} relative_bias entries per key/value head, not {entries}"
        return reason

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tiles to choose from, with the default pair first."""
        default = _default_pair(problem, pass_)
        q_tiles, kv_tiles = _CANDIDATES[problem.rank]
        return list(dict.fromkeys([default, *itertools.product(q_tiles, kv_tiles)]))

    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        arrays = *ffi.forward_operands(plan.problem, operands), *_more_operands(plan.problem, operands)
        return native.call(_FORWARD, types, *arrays, **ffi.attributes(plan))

    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        inputs, more = operands.inputs, _more_operands(plan.problem, operands)
        saved, cotangents = ffi.with_kernel_ranks(plan.problem, saved, cotangents)
        delta_of_queries = delta(saved.out, *cotangents)
        per_query = saved.logsumexp, ffi.or_empty(saved.remainder), cotangents.out, delta_of_queries
        types = [ResultType(array.shape, array.dtype) for array in more[1:]]
        grads, (table_gradient, key_bias_gradient) = ffi.call_for_gradients(
            _BACKWARD, plan, operands, (*more, *per_query), types
        )
        grads = ffi.with_key_bias_gradient(grads, inputs, key_bias_gradient)
        if inputs.relative_bias is not None:
            grads = grads._replace(relative_bias=gradient_of_shared_table(table_gradient, inputs.relative_bias))
        return ffi.with_sinks_gradient(grads, inputs, saved.logsumexp, delta_of_queries)


def _more_operands(problem: Problem, operands: Operands) -> list[jax.Array]:
    """Return the layouts and biases, which follow the operands of :func:`natten_jax.backends.ffi.kernel_operands`."""
    table = None if operands.inputs.relative_bias is None else table_of_each_entry(operands.inputs)
    return [ffi.layouts_operand(operands), ffi.or_empty(table), ffi.key_bias_operand(problem, operands)]


#: Candidate query tiles and candidate key/value tiles, by rank. ``tile_pairs`` returns all their combinations after the
#: default pair.
_CANDIDATES: dict[int, tuple[list[Shape], list[Shape]]] = {
    1: ([(16,), (64,), (128,), (256,)], [(128,), (256,), (512,), (1024,)]),
    2: ([(4, 4), (8, 8), (16, 16), (4, 16)], [(8, 8), (16, 16), (24, 24), (8, 64)]),
    3: ([(1, 4, 4), (2, 4, 8), (2, 8, 8), (4, 8, 8)], [(2, 8, 8), (4, 8, 8), (4, 12, 12), (2, 16, 16)]),
}

#: Default tile shapes, which ``_outer_tile`` fits to a problem. A thread's work item is one outer tile: in the forward
#: pass, a query tile. The work item loops over inner tiles: in the forward pass, key/value tiles. An inner tile should
#: hold the keys that 16 neighboring queries see, about 256 to 512 keys, and should fit into the L1 cache. With larger
#: outer tiles, 16-bit tokens are converted less often, but there are fewer work items for the threads. On two cores of
#: an AVX-512 server, times differed by less than 10% between all tile shapes from half to twice these sizes.
_FORWARD_Q_TILE: dict[int, Shape] = {1: (128,), 2: (8, 8), 3: (2, 8, 8)}
_BACKWARD_TILE: dict[int, Shape] = {1: (256,), 2: (16, 16), 3: (4, 8, 8)}
_INNER_TOKENS = 512
_SMALLEST_TILE = 16  # tokens; the number of vector lanes in the kernels
_ENOUGH_ITEMS = 128


def _default_pair(problem: Problem, pass_: Pass) -> TilePair:
    if pass_ == "backward":
        # The kernel loops over all tiles twice. Outer tiles are query tiles in one loop, and key/value tiles in the
        # other.
        tile = _BACKWARD_TILE[problem.rank]
        return _outer_tile(problem, problem.query_layout, tile), _outer_tile(problem, problem.kv_layout, tile)
    q_tile = _outer_tile(problem, problem.query_layout, _FORWARD_Q_TILE[problem.rank])
    return q_tile, _inner_tile(problem, q_tile)


def _outer_tile(problem: Problem, layout: Shape, tile: Shape) -> Shape:
    """Fit an outer tile to a problem.

    Each extent is rounded up to a multiple of the stride, unless the stride is larger than the extent. Then the longest
    extent is halved until there are enough work items, or until the tile has fewer than ``2 * _SMALLEST_TILE`` tokens.

    The tile does not depend on the number of threads, because results must be equal for any number of threads.
    """
    axes = problem.axes
    extents = [t if axis.stride > t else -(-t // axis.stride) * axis.stride for t, axis in zip(tile, axes, strict=True)]

    while math.prod(extents) >= 2 * _SMALLEST_TILE:
        tiles = [a.dilation * -(-x // (t * a.dilation)) for x, t, a in zip(layout, extents, axes, strict=True)]
        if problem.batch * problem.heads_kv * math.prod(tiles) >= _ENOUGH_ITEMS:
            break
        longest = extents.index(max(extents))
        extents[longest] = -(-extents[longest] // 2)
    return tuple(extents)


def _inner_tile(problem: Problem, q_tile: Shape) -> Shape:
    """Return the shape of the key/value tiles for a query tile.

    The range of keys that the query tile sees is split into equal tiles of at most ``_INNER_TOKENS`` tokens.
    """
    extents = [
        min(axis.kernel_size + t + axis.stride - 2, -(-axis.kv_extent // axis.dilation))
        for axis, t in zip(problem.axes, q_tile, strict=True)
    ]
    while math.prod(extents) > _INNER_TOKENS:
        longest = extents.index(max(extents))
        extents[longest] = -(-extents[longest] // 2)
    return tuple(extents)
