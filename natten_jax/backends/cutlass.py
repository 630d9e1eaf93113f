"""The ``cutlass`` backend: cp.async and mma.sync kernels for NVIDIA GPUs of compute capability 8.0 and higher."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp

from natten_jax.arguments.static import least_batch
from natten_jax.arrays.biases import with_columns
from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved, delta
from natten_jax.backends import ffi
from natten_jax.backends.base import Capabilities, Form, Platform, heads_rejection, with_wide_heads
from natten_jax.backends.ffi import NativeBackend, or_empty, with_kernel_rank
from natten_jax.cost_model import small_windows
from natten_jax.cost_model.calibration import calibration_for
from natten_jax.cost_model.simulation import rank
from natten_jax.cost_model.tiles import shortened, tile_pairs_of_sizes
from natten_jax.native import module as native
from natten_jax.native.module import ResultType, axis_rows, with_kernel_tiles
from natten_jax.performance import MemoryUsagePreference, Pass, Performance, TilePair
from natten_jax.plan.devices import ComputeCapability, Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES

#: Value of ``Plan.kernels`` for the small-window kernels. For the large-window kernels it is ``None``.
_SMALL_WINDOWS = "small windows"
_SMALL_FORWARD = "natten_jax_sm80_small_forward"
_SMALL_BACKWARD = "natten_jax_sm80_small_backward"

#: Number of tensor maps per batch entry and kernel: two for the arrays that the kernel loops over (keys and values, or
#: queries and output cotangents), and one for the statistics of queries.
_ENTRY_MAPS = 3

#: Performance arguments that the small-window backward kernels ignore, and the reasons.
_UNUSED_BY_SMALL_WINDOWS = {
    "backward_kv_splits": "does not split keys and values with the tiles for small windows",
    "backward_use_xla_reduction": "computes row sums in its gradient kernel with the tiles for small windows",
    "memory_usage_preference": "needs hardly any scratch memory with the tiles for small windows",
}


#: Sizes of scratch arrays are padded to a multiple of this number of elements, because kernels use vectorised loads.
_STEP = 4

#: Maximum number of partial sums per head of the separate kernel that computes the sinks' gradient. If batch entries
#: have separate sinks, the number is divided by the number of these entries, but each entry has at least one sum.
_MAX_SINKS_PARTS = 256


def _float32(*shape: int) -> ResultType:
    return ResultType(shape, jnp.float32)


def _filled_up(number: int) -> int:
    return number + -number % _STEP


def _call_small_forward(plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
    problem, inputs = plan.problem, operands.inputs
    products = _table_products(problem, operands, *with_kernel_tiles(problem, plan.tiles))
    types = [*types, products, ffi.entry_maps(operands, _ENTRY_MAPS)]
    arrays = [*ffi.kernel_operands(problem, operands), ffi.layouts_operand(operands)]
    arrays += [or_empty(inputs.relative_bias), ffi.key_bias_operand(problem, operands), or_empty(inputs.sinks)]
    return native.call(_SMALL_FORWARD, types, *arrays, **ffi.attributes(plan))


def _sinks_parts(plan: Plan, operands: Operands) -> ResultType:
    """Return the type of the scratch memory for partial sums of the sinks' gradient.

    The gradient kernels write a partial sum per query tile. If layouts differ between batch entries, a separate kernel
    splits the queries into parts, and writes a partial sum per part instead. The memory is large enough in both cases.
    """
    sinks, problem = operands.inputs.sinks, plan.problem
    if sinks is None:
        return _float32(0)
    _, *extents, heads, _ = operands.inputs.query.shape
    # Upper bound of the number of query tiles: kernels process regions of several tiles, and the last region may be
    # incomplete.
    tiles = math.prod(
        axis.dilation * (2 * -(-extent // (axis.dilation * rows)) - 1)
        for axis, extent, rows in zip(problem.axes, extents, plan.tiles[1], strict=True)
    )
    entries = sinks.shape[0]  # number of batch entries with separate sinks, or 1 if all entries share them
    tile_parts = entries * heads * _filled_up(operands.inputs.query.shape[0] // entries * tiles)
    return _float32(max(tile_parts, entries * max(_MAX_SINKS_PARTS // entries, 1) * _filled_up(heads)))


def _table_products(problem: Problem, operands: Operands, rows: Shape, columns: Shape) -> ResultType:
    """Return the type of the scratch memory for bias tables in the kernels' format; empty without a relative bias.

    All batch entries share one table, unless they have separate bias tables or separate scales.

    Args:
        problem: The problem.
        operands: The arrays of the call.
        rows: Extents of a tile of rows: the tokens that a warp owns.
        columns: Extents of a group of columns: the tokens that a warp processes at a time. The padding of the table's
            last dimension depends on ``rows`` and ``columns``.
    """
    inputs = operands.inputs
    if inputs.relative_bias is None:
        return _float32(0)
    entries = math.prod(problem.bias_shape[:-1]) * native.bias_line(axis_rows(problem), rows, columns)
    tables, heads, _ = inputs.relative_bias.shape
    return _float32(tables if inputs.scale is None else inputs.query.shape[0], heads, _filled_up(entries))


def _table_sums(plan: Plan, operands: Operands) -> list[ResultType]:
    """Return the types of the two scratch arrays for the gradient of a relative bias.

    The first contains a record per query tile. The second contains partial sums of the records.
    """
    inputs, problem = operands.inputs, plan.problem
    if inputs.relative_bias is None:
        return [_float32(0)] * 2
    group, tile = with_kernel_tiles(problem, plan.tiles)
    batch, *extents, _, _ = with_kernel_rank(inputs.query, problem.rank).shape
    sums = native.bias_sums(axis_rows(problem), extents, tile, group)
    _, heads, entries = inputs.relative_bias.shape
    return [_float32(batch, heads, sums.tiles, sums.record), _float32(sums.parts, batch, heads, _filled_up(entries))]


def _small_gradients(plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
    """Call the small-window backward kernels.

    The query gradient kernel also computes the query statistics that the key/value gradient kernel reads.
    """
    problem, inputs = plan.problem, operands.inputs
    query_arrays = saved.logsumexp, saved.remainder, saved.out, cotangents.out, cotangents.logsumexp
    batch, *tokens, heads = saved.logsumexp.shape
    count = math.prod(tokens)
    additional_parts = native.additional_parts(count * problem.heads // problem.heads_kv, problem.additional_kv)
    additional_width = problem.head_dim + problem.head_dim_v
    columns, rows = with_kernel_tiles(problem, plan.tiles)
    tables, sinks = or_empty(inputs.relative_bias), or_empty(inputs.sinks)
    biases = ffi.layouts_operand(operands), tables, ffi.key_bias_operand(problem, operands), sinks
    results = [
        _float32(batch, count, heads, 4),
        # Partial sums of the gradients of additional tokens. The queries are split into parts, with one sum per part.
        _float32(additional_parts, batch, problem.additional_kv, problem.heads_kv, additional_width),
        _table_products(problem, operands, rows, columns),
        *_table_sums(plan, operands),
        _float32(*tables.shape),
        ffi.key_bias_gradient_type(problem, operands),
        _sinks_parts(plan, operands),
        _float32(*sinks.shape),
        ffi.entry_maps(operands, 2 * _ENTRY_MAPS),
    ]
    arrays = *biases, *map(or_empty, query_arrays)
    grads, behind = ffi.call_for_gradients(_SMALL_BACKWARD, plan, operands, arrays, results)
    *_, table_gradient, key_bias_gradient, _, sinks_gradient, _ = behind
    return ffi.with_key_bias_gradient(grads, inputs, key_bias_gradient)._replace(
        sinks=None if inputs.sinks is None else sinks_gradient,
        relative_bias=None if inputs.relative_bias is None else table_gradient,
    )


_FORWARD = "natten_jax_sm80_forward"
_BACKWARD = "natten_jax_sm80_backward"
_DELTA = "natten_jax_sm80_delta"
_LIMITS = native.limits("sm80")

#: Maximum total size in bytes of the query gradient accumulators of a backward pass. The accumulators of one key/value
#: head are always allocated, even if they exceed the maximum.
_SCRATCH_BYTES = {
    MemoryUsagePreference.STRICT: 64 << 20,
    MemoryUsagePreference.DEFAULT: 1 << 30,
    MemoryUsagePreference.UNRESTRICTED: None,
}

#: Values of ``jax.default_matmul_precision`` for which the kernels multiply float32 matrices in TF32, as XLA does. If
#: the option is not set, the kernels compute with float32 accuracy.
_TF32_PRECISIONS = (
    *("default", "fastest", "bfloat16", "BF16_BF16_F32"),
    *("high", "bfloat16_3x", "tensorfloat32", "TF32_TF32_F32"),
)


def _needs_columns(problem: Problem) -> bool:
    """Return True if no kernel can add the key biases: if elements have 32 bits or there is a relative bias."""
    return problem.relative_bias or problem.element.bytes != 2


def _shared_memory(device: Device) -> int:
    """Return the number of bytes of shared memory per thread block that the kernels can use on a device."""
    capability = device.compute_capability
    if capability is None or capability[0] not in _LIMITS["wide_form_capabilities"]:
        return _LIMITS["least_shared_memory"]
    return max(form["shared_memory"] for form in (*_LIMITS["forward"], *_LIMITS["backward"]))


def _largest_tiles(problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
    """Return the maximum number of queries in a query tile, and of keys in a key/value tile.

    The kernels are compiled in several variants. Only the variants with the smallest sufficient head dimension count,
    and only if they fit into shared memory.
    """
    forms = [form for form in _LIMITS[pass_] if form["element_bytes"] == problem.element.bytes]
    forms = ffi.narrowest_forms(CutlassBackend, forms, problem)
    able = [form for form in forms if form["shared_memory"] <= _shared_memory(device)]
    return max(form["q_tile_tokens"] for form in able), max(form["kv_tile_tokens"] for form in able)


class CutlassBackend(NativeBackend):
    """Attention on NVIDIA GPUs, from the Ampere generation on."""

    family = "cutlass"
    capabilities = Capabilities(
        platform=Platform("cuda", (8, 0)),
        dtypes=("float32", "float16", "bfloat16"),
        largest_tiles=_largest_tiles,
        edges=EDGES,
        wraps_by_strips=True,
        features=(*ffi.NATIVE_FEATURES, "shared_key_bias", "relative_bias"),
        excludes={
            ("relative_bias", "own_extents"): "its kernels take a relative_bias or extents, not both",
            ("relative_bias", "additional_kv"): "its kernels with a relative_bias do not support additional tokens",
        },
        needs_columns=_needs_columns,
        head_dim_step=_LIMITS.get("head_dim_step", 1),
        largest_head_dim=_LIMITS.get("largest_head_dim"),
        targets={"forward": (_FORWARD, _SMALL_FORWARD), "backward": (_BACKWARD, _DELTA, _SMALL_BACKWARD)},
        used_arguments=(
            "backward_kv_splits",
            "backward_use_xla_reduction",
            "backward_deterministic",
            "memory_usage_preference",
        ),
    )

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return the reason why the kernels cannot run a pass, such as no code for the GPU; ``None`` if they can."""
        reason = super().rejection(problem, device, pass_)
        if reason is None and problem.relative_bias:
            reason = self._table_rejection(problem, device, pass_)
        if reason is not None or not device.is_present or device.compute_capability is None:
            return reason
        return _missing_code(device.compute_capability)

    def _table_rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Return the reason why the kernels cannot add the relative bias of a problem; ``None`` if they can."""
        if problem.element.bytes != 2:
            return f"its kernels support a relative_bias for 16-bit arrays only, not for {problem.dtype}"
        if "wrap" in problem.edges:
            return "its kernels with a relative_bias do not support edges 'wrap'"
        if not _ranked_pairs(self.widened(problem, device, pass_), device, pass_):
            limit = small_windows.largest_biased_head_dim()
            return f"its kernels support a relative_bias for small windows and heads of at most {limit} only"
        return None

    def widened(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair | None = None) -> Problem:
        """Return the problem that the kernels compute.

        For some problems with key biases, only the large-window kernels can add the biases. The small-window kernels
        need the biases as additional columns, but may still be faster. This method chooses the kernels with the smaller
        predicted time. If tiles are requested, it chooses the kernels that offer these tiles.
        """
        narrow = super().widened(problem, device, pass_, pair)
        if not narrow.key_bias:
            return narrow
        wider = with_wide_heads(self.capabilities, with_columns(problem))
        if heads_rejection(self.capabilities, wider) is not None:
            return narrow
        if pair is not None:
            is_narrow = self.offers(narrow, device, pass_, pair) or not self.offers(wider, device, pass_, pair)
        else:
            is_narrow = _ranked_pairs(narrow, device, pass_)[0][1] <= _ranked_pairs(wider, device, pass_)[0][1]
        return narrow if is_narrow else wider

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Return the pairs of query and key/value tiles, sorted by predicted time, with the fastest pair first."""
        return [pair for pair, _ in _ranked_pairs(problem, device, pass_)]

    def predicted_seconds(self, problem: Problem, device: Device, pass_: Pass) -> float | None:
        """Return the predicted seconds of a pass with the recommended tiles; ``None`` if unknown, as for float32."""
        ranked = _ranked_pairs(problem, device, pass_)
        return ranked[0][1] if ranked and problem.dtype != "float32" else None

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """Return True if the kernels support a pair of tiles. Small-window tiles must fit into shared memory."""
        if not super().offers(problem, device, pass_, pair):
            return False
        if self.kernels(problem, pass_, pair) is None:
            return not _is_for_small_windows(problem)
        if not _small_windows_take_biases(problem):
            return False
        return small_windows.estimate(self.family, problem, pass_, pair, device.compute_capability) is not None

    def kernels(self, problem: Problem, pass_: Pass, pair: TilePair) -> str | None:
        """Return the name of the kernels that a pair of tiles selects; ``None`` for the large-window kernels."""
        return _SMALL_WINDOWS if small_windows.are_selected(problem, pass_, pair) else None

    def form(self, plan: Plan) -> Form:
        """Return the features of a plan's kernels. Only the small-window kernels support windows that wrap."""
        is_small = plan.kernels == _SMALL_WINDOWS
        if plan.pass_ == "backward" and is_small:
            return Form(wraps=True, unused=_UNUSED_BY_SMALL_WINDOWS)
        unused = {}
        if plan.performance.backward_deterministic:
            unused["backward_kv_splits"] = "has one split with backward_deterministic=True"
        if plan.problem.dtype == "float32":
            unused["memory_usage_preference"] = "accumulates float32 gradients in place, without scratch memory"
        return Form(wraps=is_small, unused=unused)

    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        if plan.kernels == _SMALL_WINDOWS:
            return _call_small_forward(plan, operands, types)
        biases = ffi.layouts_operand(operands), ffi.key_bias_operand(plan.problem, operands)
        arrays, is_accurate = ffi.forward_operands(plan.problem, operands), plan.precision not in _TF32_PRECISIONS
        return native.call(_FORWARD, types, *arrays, *biases, **ffi.attributes(plan), is_accurate=int(is_accurate))

    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        problem, performance, inputs = plan.problem, plan.performance, operands.inputs
        saved, cotangents = ffi.with_kernel_ranks(problem, saved, cotangents)
        if plan.kernels == _SMALL_WINDOWS:
            return _small_gradients(plan, operands, saved, cotangents)
        out, logsumexp, remainder = saved
        if performance.backward_use_xla_reduction:
            delta_of_queries = delta(out, *cotangents)
        else:  # call a kernel that reads each array once
            arrays = out, *map(or_empty, cotangents)
            (delta_of_queries,) = native.call(_DELTA, [_float32(*out.shape[:-1])], *arrays)
        behind = [ffi.key_bias_gradient_type(problem, operands)]
        if problem.dtype != "float32":
            behind.append(_float32(scratch_elements(problem, inputs.query, performance)))
        biases = ffi.layouts_operand(operands), ffi.key_bias_operand(problem, operands)
        # Number of thread blocks that share the key/value tiles of a head and dilation group; 0 means one block per
        # tile. With one block per head and dilation group, gradients are reproducible. The number does not affect
        # memory use.
        splits = min(math.prod(performance.backward_kv_splits or (0,)), 2**31 - 1)
        options = {"is_accurate": int(plan.precision not in _TF32_PRECISIONS)}
        options["kv_splits"] = 1 if performance.backward_deterministic else splits
        arrays = *biases, logsumexp, or_empty(remainder), cotangents.out, delta_of_queries
        grads, (key_bias_gradient, *_) = ffi.call_for_gradients(_BACKWARD, plan, operands, arrays, behind, **options)
        grads = ffi.with_key_bias_gradient(grads, inputs, key_bias_gradient)
        return ffi.with_sinks_gradient(grads, inputs, logsumexp, delta_of_queries)


def scratch_elements(problem: Problem, query: jax.Array, performance: Performance) -> int:
    """Return the number of float32 elements to allocate for query gradient accumulators.

    The memory preference of a call limits this number. If the accumulators of the whole batch exceed the limit, the
    kernels process the batch in rounds of equal size. A round consists of one or more batch entries. If a single entry
    exceeds the limit, a round consists of one or more key/value heads of an entry.

    Args:
        problem: The problem.
        query: ``[batch, *tokens, heads, head_dim]``. The problem's query, or a shard of it.
        performance: Performance arguments of the call, including the memory preference.
    """
    limit = _SCRATCH_BYTES[MemoryUsagePreference(performance.memory_usage_preference)]
    batch, heads = least_batch(query.shape[0]), query.shape[-2]
    heads_kv = heads * problem.heads_kv // problem.heads
    head_bytes = (
        4 * math.prod(query.shape[1:]) // heads_kv
    )  # bytes of the accumulators of all query heads that share a key/value head

    def at_once(count: int, item_bytes: int) -> int:
        turns = 1 if limit is None else math.ceil(count / max(limit // item_bytes, 1))
        return math.ceil(count / turns)

    entries = at_once(batch, heads_kv * head_bytes)
    return entries * (heads_kv if entries > 1 else at_once(heads_kv, head_bytes)) * head_bytes // 4


def _missing_code(capability: ComputeCapability) -> str | None:
    """Return an error message if this build lacks code for a compute capability; otherwise return ``None``."""
    architectures = native.build_info()["cuda_architectures"]
    # The last digit of an architecture's name is its minor version. Machine code runs on GPUs of the same major version
    # whose minor version is equal or higher. For GPUs newer than all architectures, the driver compiles the PTX of the
    # newest one.
    built = sorted(divmod(int(name.rstrip("af")), 10) for name in architectures)
    if built[-1] <= capability or any(major == capability[0] and minor <= capability[1] for major, minor in built):
        return None
    return (
        f"this build of natten_jax has no code for compute capability {capability[0]}.{capability[1]} "
        f"(CUDA architectures: {', '.join(architectures)})"
    )


def _large_tile_sizes(problem: Problem, device: Device, pass_: Pass) -> tuple[tuple[int, int], ...]:
    """Return the large-window tile sizes to rank, as pairs: queries per query tile, keys per key/value tile."""
    queries, keys = _largest_tiles(problem, device, pass_)  # for both passes, because it raises if heads are too wide
    if pass_ == "backward":
        return (64, 128), (64, 64), (128, 128), (128, 64)
    rows = min(queries, keys)
    # Query tiles with fewer than `rows` queries leave some of the kernel's rows idle. They are faster only if there are
    # few queries or the windows are narrow.
    sizes = (rows, 64), (rows, 128), (64, 64), (64, 128), (32, 128)
    return (*sizes, (queries, 64)) if queries > rows else sizes


def _is_for_small_windows(problem: Problem) -> bool:
    """Return True if the large-window kernels cannot add the biases of a problem."""
    return problem.relative_bias or (problem.key_bias and _needs_columns(problem))


def _small_windows_take_biases(problem: Problem) -> bool:
    """Return True unless a problem has key biases that the small-window kernels cannot add."""
    return not problem.key_bias or not (problem.own_layouts or "wrap" in problem.edges)


@functools.lru_cache(maxsize=256)
def _ranked_pairs(problem: Problem, device: Device, pass_: Pass) -> tuple[tuple[TilePair, float], ...]:
    sizes = _large_tile_sizes(problem, device, pass_)
    pairs = [pair for size in sizes for pair in tile_pairs_of_sizes(*size, problem.rank)]
    ranked: list[tuple[TilePair, float]] = []
    if _small_windows_take_biases(problem):
        ranked += small_windows.ranked(CutlassBackend.family, problem, pass_, device.compute_capability)
    if _is_for_small_windows(problem):
        return tuple(ranked)
    if problem.dtype == "float32":
        # The time model covers only 16-bit elements. Kernels are compiled for certain sizes of a head in bytes, so
        # model a float32 head as a 16-bit head of twice the width.
        head_dim, head_dim_v = (
            min(2 * each, _LIMITS["largest_head_dim"]) for each in (problem.head_dim, problem.head_dim_v)
        )
        problem = dataclasses.replace(problem, dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim_v)
    ranked += rank(shortened(problem), dict.fromkeys(pairs), pass_, calibration_for(CutlassBackend.family))
    return tuple(sorted(ranked, key=operator.itemgetter(1)))
