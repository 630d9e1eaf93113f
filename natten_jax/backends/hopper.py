"""The ``hopper`` backend: TMA and wgmma kernels for NVIDIA GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved, delta
from natten_jax.backends import ffi
from natten_jax.backends.base import Capabilities, Earlier, Form, Platform
from natten_jax.backends.ffi import NativeBackend, with_kernel_rank
from natten_jax.cost_model.calibration import calibration_for
from natten_jax.cost_model.simulation import rank
from natten_jax.cost_model.tiles import shortened, tile_pairs_of_sizes
from natten_jax.native import module as native
from natten_jax.native.module import KERNEL_RANK, ResultType, axis_rows, box_start, continues, with_kernel_tiles
from natten_jax.performance import KernelSchedule, Pass, TilePair, outer_and_inner
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES

#: Pairs of tiles, each with the predicted seconds of the pass; the fastest pair first.
_Ranked = tuple[tuple[TilePair, float], ...]


def rank_with_seams(problem: Problem, pass_: Pass, ranked: _Ranked) -> _Ranked:
    """Multiply predicted times by the cost factor of seams, and sort the pairs of tiles by the new times.

    A seam is the wrap-around point of a dimension, at which the first token follows the last token.

    Args:
        problem: The problem whose times are predicted.
        pass_: The pass.
        ranked: Pairs of tiles, each with the predicted seconds of the pass without seams.
    """
    if "wrap" not in problem.edges:
        return ranked
    timed = ((pair, seconds * seam_slowdown(problem, pass_, pair)) for pair, seconds in ranked)
    return tuple(sorted(timed, key=operator.itemgetter(1)))


def seam_slowdown(problem: Problem, pass_: Pass, pair: TilePair) -> float:
    """Return the predicted time of a pass relative to the same pass without seams (wrap-around points).

    Args:
        problem: A problem with dimensions that wrap around.
        pass_: The pass.
        pair: Query and key/value tile.
    """
    outer, inner = outer_and_inner(with_kernel_tiles(problem, pair), pass_)
    return native.seam_factor(axis_rows(problem), inner, outer)


_FORWARD = "natten_jax_sm90_forward"
_FORWARD_CONTINUED = "natten_jax_sm90_forward_continued"
_FORWARD_FLOAT8 = "natten_jax_sm90_forward_float8"
_BACKWARD = "natten_jax_sm90_backward"
_STATISTICS = "natten_jax_sm90_backward_statistics"
_KERNELS = "sm90"
_LIMITS = native.limits(_KERNELS)


def _tile_tokens(problem: Problem, pass_: Pass) -> list[tuple[int, int]]:
    """Return the tile sizes ``(queries, keys)`` of kernels with the smallest head dimension that fits a problem."""
    forms = _LIMITS["float8_forward" if problem.element.is_float8 else pass_]
    forms = ffi.narrowest_forms(HopperBackend, forms, problem)
    return [(form["q_tile_tokens"], form["kv_tile_tokens"]) for form in forms]


def _largest_tiles(problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
    query, key_value = (max(tokens) for tokens in zip(*_tile_tokens(problem, pass_), strict=True))
    return query, key_value


class HopperBackend(NativeBackend):
    """Attention on Hopper GPUs (compute capability 9.0)."""

    family = "hopper"
    capabilities = Capabilities(
        query_family="cutlass_hopper",
        platform=Platform("cuda", (9, 0), is_exact=True),
        dtypes=("float16", "bfloat16"),
        largest_tiles=_largest_tiles,
        float8_dtypes=("float8_e4m3fn",),
        is_by_name_only_for_float8=True,
        edges=EDGES,
        wraps_by_strips=True,
        features=(*ffi.NATIVE_FEATURES, "shared_key_bias"),
        excludes={
            ("element.is_float8", "own_extents"): "its kernels take 8-bit elements or extents, not both",
            ("element.is_float8", "key_bias"): "its kernels for 8-bit arrays do not support a key_bias",
            ("element.is_float8", "block_scales"): "its kernels for 8-bit arrays take factors per head, not per block",
        },
        head_dim_step=_LIMITS.get("head_dim_step", 1),
        float8_head_dim_step=_LIMITS.get("float8_head_dim_step"),  # TMA copies multiples of 16 bytes
        largest_head_dim=_LIMITS.get("largest_head_dim"),
        targets={"forward": (_FORWARD, _FORWARD_CONTINUED, _FORWARD_FLOAT8), "backward": (_BACKWARD, _STATISTICS)},
        schedules={"forward": (KernelSchedule.PING_PONG, KernelSchedule.COOPERATIVE, KernelSchedule.NON_PERSISTENT)},
        used_arguments=("run_persistent_kernel", "backward_use_xla_reduction", "backward_deterministic"),
    )

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return why this backend cannot run a pass of a problem on a device; ``None`` if it can."""
        reason = super().rejection(problem, device, pass_)
        if reason is not None or not problem.element.is_float8:
            return reason
        dtypes = self.capabilities.dtypes
        if problem.output_dtype not in dtypes:
            return f"its kernels for 8-bit arrays have outputs of {' or '.join(dtypes)}, not {problem.output_dtype}"
        return None

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return pairs of query and key/value tiles, in order of predicted time, the fastest first."""
        return [pair for pair, _ in _ranked_pairs(problem, pass_)]

    def predicted_seconds(self, problem: Problem, device: Device, pass_: Pass) -> float | None:
        """Return the predicted seconds of a pass with the recommended tiles; ``None`` if no pair of tiles is ranked."""
        ranked = _ranked_pairs(problem, pass_)
        return ranked[0][1] if ranked else None

    def form(self, plan: Plan) -> Form:
        """Return the features of the kernels that a plan selects."""
        problem, is_forward = plan.problem, plan.pass_ == "forward"
        unused = {}
        if is_forward and problem.key_bias and plan.kernel_schedule is KernelSchedule.COOPERATIVE:
            unused = {"kernel_schedule": "uses the ping-pong schedule with a key_bias, as with kernel_schedule='pp'"}
        # The deterministic backward kernel processes tiles in a fixed order, and does not support wrapped dimensions.
        wraps = is_forward or not plan.performance.backward_deterministic
        is_plain = is_forward and not problem.element.is_float8 and not problem.key_bias
        return Form(wraps, is_plain and continues(_KERNELS, problem), unused)

    def forward(self, plan: Plan, operands: Operands, *, saves: bool = False, earlier: Earlier | None = None) -> Saved:
        """Compute output and logsumexp. If ``earlier`` is given, merge them into the earlier results in place."""
        if earlier is None:
            return super().forward(plan, operands, saves=saves)
        problem, (saved, box) = plan.problem, earlier
        given = [with_kernel_rank(array, problem.rank) for array in saved if array is not None]
        arrays = [*ffi.forward_operands(problem, operands), box_start(box)]
        types = [ResultType(each.shape, each.dtype, len(arrays) + i) for i, each in enumerate(given)]
        attributes = {"queries": (*(1,) * (KERNEL_RANK - problem.rank), *box.extents), **_forward_attributes(plan)}
        results = native.call(_FORWARD_CONTINUED, [*types, _SCRATCH], *arrays, *given, **attributes)
        return jax.tree.map(lambda old, new: new.reshape(old.shape), saved, Saved(*results[:3]))

    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        arrays, types = ffi.forward_operands(plan.problem, operands), [*types, _SCRATCH]
        if plan.problem.element.is_float8:
            arrays.append(ffi.or_empty(operands.inputs.out_scale))
            return native.call(_FORWARD_FLOAT8, types, *arrays, **_forward_attributes(plan))
        arrays += [ffi.layouts_operand(operands), ffi.key_bias_operand(plan.problem, operands)]
        types.append(ffi.entry_maps(operands, _ENTRY_MAPS))
        return native.call(_FORWARD, types, *arrays, **_forward_attributes(plan))

    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Compute the statistics of queries with XLA or with the statistics kernel, then call the gradient kernel."""
        problem, performance, inputs = plan.problem, plan.performance, operands.inputs
        (out, logsumexp, remainder), cotangents = ffi.with_kernel_ranks(problem, saved, cotangents)
        layouts, (batch, *tokens, heads, _) = ffi.layouts_operand(operands), inputs.query.shape
        if performance.backward_use_xla_reduction:
            # Compute the base-2 logsumexp with one float32 product, like the kernels: the saved remainders are relative
            # to this rounded product.
            per_query = logsumexp * np.float32(1 / math.log(2)), delta(out, *cotangents)
            statistics = jnp.stack([jnp.moveaxis(array, -1, 1) for array in per_query], axis=-1)
        else:
            # If batch entries have separate layouts, the kernel skips queries that see no key, such as padding.
            types = [ResultType((batch, heads, *out.shape[1:-2], 2), jnp.float32)]
            arrays = out, cotangents.out, logsumexp, ffi.or_empty(cotangents.logsumexp), layouts
            (statistics,) = native.call(_STATISTICS, types, *arrays)
        # The scratch memory contains accumulators of the query gradient and a tile counter. The deterministic kernel
        # also has a counter per query tile, which orders the additions to the tile's gradient.
        scratch = inputs.query.size + 1
        if performance.backward_deterministic:
            groups_and_tiles = zip(tokens, problem.dilation, plan.tiles[0], strict=True)
            scratch += batch * heads * math.prod(d * -(-extent // (d * tile)) for extent, d, tile in groups_and_tiles)
        key_bias = ffi.key_bias_operand(problem, operands)
        added = layouts, key_bias, cotangents.out, statistics, ffi.or_empty(remainder)
        types = [ResultType((scratch,), jnp.float32), ffi.key_bias_gradient_type(problem, operands)]
        types.append(ffi.entry_maps(operands, _BACKWARD_ENTRY_MAPS))
        options = {"is_deterministic": int(performance.backward_deterministic)}
        grads, (_, key_bias_gradient, _) = ffi.call_for_gradients(_BACKWARD, plan, operands, added, types, **options)
        grads = ffi.with_key_bias_gradient(grads, inputs, key_bias_gradient)
        return ffi.with_sinks_gradient(grads, inputs, logsumexp, jnp.moveaxis(statistics[..., 1], 1, -1))


#: Scratch memory of the forward kernels, which contains a counter of query tiles.
_SCRATCH = ResultType((1,), jnp.int32)

#: Number of tensor maps per batch entry in the forward pass. Each of four arrays has eight maps, one per class of
#: dilation groups. All groups of a class have the same extents.
_ENTRY_MAPS = 4 * 8
#: Number of tensor maps per batch entry in the backward pass. Each of seven arrays has eight maps, one per class of
#: dilation groups. All groups of a class have the same extents.
_BACKWARD_ENTRY_MAPS = 7 * 8


def _forward_attributes(plan: Plan) -> dict[str, Shape | float]:
    schedule = plan.kernel_schedule
    is_persistent = plan.performance.run_persistent_kernel and schedule is not KernelSchedule.NON_PERSISTENT
    is_ping_pong = schedule is KernelSchedule.PING_PONG or plan.problem.key_bias
    return {**ffi.attributes(plan), "is_ping_pong": int(is_ping_pong), "is_persistent": int(is_persistent)}


@functools.lru_cache(maxsize=256)
def _ranked_pairs(problem: Problem, pass_: Pass) -> _Ranked:
    times = calibration_for(HopperBackend.family)
    pairs = [pair for size in _tile_tokens(problem, pass_) for pair in tile_pairs_of_sizes(*size, problem.rank)]
    return rank_with_seams(problem, pass_, tuple(rank(shortened(problem), dict.fromkeys(pairs), pass_, times)))
