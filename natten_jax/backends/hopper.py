"""The ``hopper`` backend: TMA and wgmma kernels for NVIDIA GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from natten_jax import native
from natten_jax.backends import hopper_backward
from natten_jax.backends.base import Gradients, Operands, Output, Saved, requested_pair
from natten_jax.backends.kernel_rank import attributes, kernel_operands, output_of, output_types, saved_of
from natten_jax.cost.calibration import calibration_for
from natten_jax.cost.ranking import rank_sizes
from natten_jax.devices import Device
from natten_jax.native import OptionalArray, ResultType
from natten_jax.passes import Pass, TilePair
from natten_jax.problem import KernelSchedule, Problem, TileConfig

_FORWARD = "natten_jax_sm90_forward"
_COMPUTE_CAPABILITY = (9, 0)
_DTYPES = ("float16", "bfloat16")
_HEAD_DIM_STEP = 8
_LARGEST_HEAD_DIM = 256
#: The backward pass loads head dimensions in rows of 128 bytes; others are padded with zeros.
_HEAD_DIM_CHUNK = 64
#: Queries and keys of the forward kernels' tiles, by the widest heads that they are compiled for.
_FORWARD_TILES = {
    64: [(192, 128), (128, 128)],
    128: [(128, 128), (128, 96)],
    192: [(128, 96)],
    256: [(128, 64)],
}


class HopperBackend:
    """Attention on Hopper GPUs."""

    family = "hopper"
    query_family = "cutlass_hopper"
    is_pure_jax = False
    fuses_additional_kv = True

    def rejection(self, problem: Problem, device: Device, pass_: Pass) -> str | None:
        """Why the kernels cannot run a pass."""
        if device.platform != "cuda" or device.compute_capability != _COMPUTE_CAPABILITY:
            return f"it runs on NVIDIA GPUs of compute capability 9.0 only, not on {device}"
        if problem.dtype not in _DTYPES:
            return f"it supports {', '.join(_DTYPES)}, not {problem.dtype}"
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim % _HEAD_DIM_STEP or head_dim > _LARGEST_HEAD_DIM:
                return f"{name} must be a multiple of {_HEAD_DIM_STEP} up to {_LARGEST_HEAD_DIM}, not {head_dim}"
        targets = (_FORWARD,) if pass_ == "forward" else hopper_backward.TARGETS
        missing = (native.missing(target) for target in targets)
        return next(filter(None, missing), None) if device.is_present else None

    def tile_pairs(self, problem: Problem, device: Device, pass_: Pass) -> list[TilePair]:
        """Query and key/value tiles by estimated time, the fastest first."""
        return list(_ranked_pairs(problem, pass_))

    def offers(self, problem: Problem, device: Device, pass_: Pass, pair: TilePair) -> bool:
        """The kernels take any tile of up to as many tokens as they are compiled for."""
        limits = [max(tokens) for tokens in zip(*_tile_tokens(problem, pass_), strict=True)]
        return all(
            len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= limit
            for tile, limit in zip(pair, limits, strict=True)
        )

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
        q_tile, kv_tile = requested_pair(tiles, "backward") or _ranked_pairs(problem, "backward")[0]
        padded = hopper_backward.gradients(
            problem,
            q_tile,
            kv_tile,
            tiles,
            Operands._make([*map(_padded, operands[:5]), operands.origins]),
            saved._replace(out=_padded(saved.out)),
            _padded(out_cotangent),
            logsumexp_cotangent,
        )
        return Gradients._make(
            None if operand is None or gradient is None else gradient[..., : operand.shape[-1]]
            for gradient, operand in zip(padded, operands[:5], strict=True)
        )


def _forward(problem: Problem, tiles: TileConfig, operands: Operands, *, saves: bool) -> list[jax.Array]:
    q_tile, kv_tile = requested_pair(tiles, "forward") or _ranked_pairs(problem, "forward")[0]
    schedule = KernelSchedule(tiles.kernel_schedule or KernelSchedule.PING_PONG)
    is_persistent = tiles.run_persistent_kernel and schedule is not KernelSchedule.NON_PERSISTENT
    return native.call(
        _FORWARD,
        [
            *output_types(problem, operands, saves=saves),
            ResultType((1,), jnp.int32),  # scratch: counts query tiles
        ],
        *kernel_operands(problem, operands),
        **attributes(problem, q_tile, kv_tile),
        is_ping_pong=int(schedule is KernelSchedule.PING_PONG),
        is_persistent=int(is_persistent),
    )


def _padded(array: OptionalArray) -> OptionalArray:
    """``array`` with zeros up to a whole number of head dimension chunks: they change no logit and no output."""
    if array is None or array.shape[-1] % _HEAD_DIM_CHUNK == 0:
        return array
    missing = -array.shape[-1] % _HEAD_DIM_CHUNK
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])


def _tile_tokens(problem: Problem, pass_: Pass) -> list[tuple[int, int]]:
    """Queries and keys of the tiles that the kernels for these heads are compiled for."""
    wider = max(problem.head_dim, problem.head_dim_v)
    if pass_ == "backward":
        return [hopper_backward.tile_tokens(wider)]
    return _FORWARD_TILES[min(width for width in _FORWARD_TILES if width >= wider)]


@functools.lru_cache(maxsize=256)
def _ranked_pairs(problem: Problem, pass_: Pass) -> tuple[TilePair, ...]:
    times = calibration_for(HopperBackend.family)
    return rank_sizes(problem, pass_, _tile_tokens(problem, pass_), times)
