"""The ``hopper`` backend: TMA and wgmma kernels for NVIDIA GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from natten_jax.arrays.operands import Cotangents, Gradients, Operands, Saved
from natten_jax.arrays.query_box import QueryBox
from natten_jax.backends.base import Platform
from natten_jax.backends.hopper import backward
from natten_jax.backends.hopper.seams import ranked_around
from natten_jax.backends.native_backend import (
    NativeBackend,
    attributes,
    entry_maps,
    forward_operands,
    key_bias_operand,
    layouts_operand,
    with_kernel_rank,
)
from natten_jax.cost_model.calibration import calibration_for
from natten_jax.cost_model.simulation import rank_sizes
from natten_jax.native import module as native
from natten_jax.native.abi import KERNEL_RANK, box_start, continues
from natten_jax.native.module import ResultType
from natten_jax.performance import KernelSchedule, Pass, TilePair
from natten_jax.plan.devices import Device
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem, Shape
from natten_jax.windows import EDGES

_FORWARD = "natten_jax_sm90_forward"
_FORWARD_CONTINUED = "natten_jax_sm90_forward_continued"
_FORWARD_FLOAT8 = "natten_jax_sm90_forward_float8"
_KERNELS = "sm90"
_LIMITS = native.limits(_KERNELS)


class HopperBackend(NativeBackend):
    """Attention on Hopper GPUs."""

    family = "hopper"
    query_family = "cutlass_hopper"
    platform = Platform("cuda", (9, 0), is_exact=True)
    dtypes = ("float16", "bfloat16")
    float8_dtypes = ("float8_e4m3fn",)
    edges = EDGES
    wraps_by_strips = True
    biases = ("key_bias",)
    takes_shared_key_bias = True
    takes_own_layouts = True
    takes_extents = True
    head_dim_step = _LIMITS.get("head_dim_step", 1)
    largest_head_dim = _LIMITS.get("largest_head_dim")
    targets: ClassVar = {"forward": (_FORWARD, _FORWARD_CONTINUED, _FORWARD_FLOAT8), "backward": backward.TARGETS}
    schedules: ClassVar = {
        "forward": (KernelSchedule.PING_PONG, KernelSchedule.COOPERATIVE, KernelSchedule.NON_PERSISTENT)
    }
    heeds = ("run_persistent_kernel", "backward_use_xla_reduction", "backward_deterministic")

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why this backend cannot run a pass of the problem on the device; ``None`` where it can."""
        reason = super().rejection(problem, device, pass_)
        if reason is not None or not problem.element.is_float8:
            return reason
        if problem.key_bias:
            return "its kernels for 8-bit arrays add no key_bias"
        if problem.block_scales:
            return "its kernels for 8-bit arrays take factors of heads, not of blocks"
        if problem.output_dtype not in self.dtypes:
            return (
                f"its kernels for 8-bit arrays have outputs of {' or '.join(self.dtypes)}, not {problem.output_dtype}"
            )
        return None

    def runs_only_by_name(self, problem: Problem) -> bool:
        """Whether only calls that name it run it for this problem: for 8-bit arrays."""
        return problem.element.is_float8

    def wraps_in_kernels(self, plan: Plan) -> bool:
        """Whether a plan's kernels know windows that wrap; tiles that take turns go around no seam."""
        return plan.pass_ == "forward" or not plan.performance.backward_deterministic

    @classmethod
    def head_step_of(cls, problem: Problem) -> int:
        """What the head dimensions of the problem's kernels are multiples of: rows are multiples of 16 bytes."""
        return int(_LIMITS["float8_head_dim_step"]) if problem.element.is_float8 else cls.head_dim_step

    @classmethod
    def layouts_rejection(cls, problem: Problem) -> str | None:
        """Why the kernels take no layouts of batch entries."""
        return "its kernels take 8-bit elements or extents, not both" if problem.element.is_float8 else None

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tiles by estimated time, the fastest first."""
        return [pair for pair, _ in _ranked_pairs(problem, pass_)]

    def predicted_seconds(self, problem: Problem, device: Device, pass_: Pass) -> float | None:
        """Predicted seconds of a pass with the recommended tiles; ``None`` where there are none, or no times."""
        ranked = _ranked_pairs(problem, pass_)
        return ranked[0][1] if ranked else None

    def largest_tiles(self, problem: Problem, device: Device, pass_: Pass) -> tuple[int, int]:
        """Most tokens of the tiles that the kernels for these heads are compiled for."""
        query, key_value = (max(tokens) for tokens in zip(*_tile_tokens(problem, pass_), strict=True))
        return query, key_value

    def unused_in(self, plan: Plan) -> Mapping[str, str]:
        """What the plan's kernels have no use for."""
        is_other = plan.pass_ == "forward" and plan.kernel_schedule is KernelSchedule.COOPERATIVE
        if not (is_other and plan.problem.key_bias):
            return {}
        return {"kernel_schedule": "issues products in turns with a key_bias, as with kernel_schedule='pp'"}

    def call_forward(self, plan: Plan, operands: Operands, types: list[ResultType]) -> list[jax.Array]:
        """Call the kernel."""
        target, arrays, types = _FORWARD, forward_operands(plan.problem, operands), [*types, _SCRATCH]
        if plan.problem.element.is_float8:
            factors = operands.inputs.out_scale
            target, arrays = _FORWARD_FLOAT8, [*arrays, jnp.zeros((0,), jnp.float32) if factors is None else factors]
        else:
            arrays = [*arrays, layouts_operand(operands), key_bias_operand(plan.problem, operands)]
            types = [*types, entry_maps(operands, _ENTRY_MAPS)]
        return native.call(target, types, *arrays, **_forward_attributes(plan))

    def forward_continued(self, plan: Plan, operands: Operands, saved: Saved, seeing: QueryBox) -> Saved | None:
        """Compute what is saved of more keys, in the place of what was saved of others."""
        problem = plan.problem
        if problem.element.is_float8 or problem.key_bias or not continues(_KERNELS, problem):
            return None
        earlier = [with_kernel_rank(array, problem.rank) for array in saved if array is not None]
        arrays = [*forward_operands(problem, operands), box_start(seeing)]
        results = native.call(
            _FORWARD_CONTINUED,
            [*(ResultType(each.shape, each.dtype, len(arrays) + i) for i, each in enumerate(earlier)), _SCRATCH],
            *arrays,
            *earlier,
            queries=(*(1,) * (KERNEL_RANK - problem.rank), *seeing.extents),
            **_forward_attributes(plan),
        )
        return jax.tree.map(lambda old, new: new.reshape(old.shape), saved, Saved(*results[:3]))

    def call_backward(self, plan: Plan, operands: Operands, saved: Saved, cotangents: Cotangents) -> Gradients:
        """Call the kernels."""
        return backward.gradients(plan, operands, saved, cotangents)


#: Counts query tiles.
_SCRATCH = ResultType((1,), jnp.int32)

#: Tensor maps of a batch entry: four arrays, of eight classes of dilation groups.
_ENTRY_MAPS = 4 * 8


def _forward_attributes(plan: Plan) -> dict[str, Shape | float]:
    schedule = plan.kernel_schedule
    is_persistent = plan.performance.run_persistent_kernel and schedule is not KernelSchedule.NON_PERSISTENT
    return {
        **attributes(plan),
        "is_ping_pong": int(schedule is KernelSchedule.PING_PONG or plan.problem.key_bias),
        "is_persistent": int(is_persistent),
    }


def _tile_tokens(problem: Problem, pass_: Pass) -> list[tuple[int, int]]:
    """Queries and keys of the tiles that the narrowest kernels for these heads are compiled for."""
    HopperBackend.check_heads(problem)
    wider = max(problem.head_dim, problem.head_dim_v)
    table = _LIMITS["float8_forward" if problem.element.is_float8 else pass_]
    forms = [form for form in table if form["head_dim"] >= wider]
    narrowest = min(form["head_dim"] for form in forms)
    return [(form["q_tile_tokens"], form["kv_tile_tokens"]) for form in forms if form["head_dim"] == narrowest]


@functools.lru_cache(maxsize=256)
def _ranked_pairs(problem: Problem, pass_: Pass) -> tuple[tuple[TilePair, float], ...]:
    times = calibration_for(HopperBackend.family)
    return ranked_around(problem, pass_, rank_sizes(problem, pass_, _tile_tokens(problem, pass_), times))
