"""The ``hopper`` backend: TMA and wgmma kernels for NVIDIA GPUs of compute capability 9.0."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from natten_jax import native, simulator
from natten_jax.backends.base import Gradients, Operands, Output, Pass, TilePair
from natten_jax.backends.kernel_rank import attributes, kernel_operands
from natten_jax.devices import Device
from natten_jax.native import ResultType
from natten_jax.problem import KernelSchedule, Problem, Shape, TileConfig

_FORWARD = "natten_jax_sm90_forward"
_COMPUTE_CAPABILITY = (9, 0)
_DTYPES = ("float16", "bfloat16")
_HEAD_DIM_STEP = 8
_LARGEST_HEAD_DIM = 256
#: Head dimensions are loaded in rows of 128 bytes; others are padded with zeros.
_HEAD_DIM_CHUNK = 64
_Q_TILE_TOKENS = 128


class HopperBackend:
    """Attention on Hopper GPUs; the forward pass."""

    family = "hopper"
    query_family = "cutlass_hopper"
    is_pure_jax = False
    fuses_additional_kv = True

    def rejection(self, problem: Problem, device: Device, which: Pass) -> str | None:
        """Why the kernels cannot run a pass."""
        if device.platform != "cuda" or device.compute_capability != _COMPUTE_CAPABILITY:
            return f"it runs on NVIDIA GPUs of compute capability 9.0 only, not on {device}"
        if which == "backward":
            return "it has a forward pass only"
        if problem.dtype not in _DTYPES:
            return f"it supports {', '.join(_DTYPES)}, not {problem.dtype}"
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim % _HEAD_DIM_STEP or head_dim > _LARGEST_HEAD_DIM:
                return f"{name} must be a multiple of {_HEAD_DIM_STEP} up to {_LARGEST_HEAD_DIM}, not {head_dim}"
        return native.missing(_FORWARD) if device.is_present else None

    def tile_pairs(self, problem: Problem, device: Device, which: Pass) -> list[TilePair]:
        """Query and key/value tiles by estimated time, the fastest first."""
        return list(_ranked_pairs(problem))

    def offers(self, problem: Problem, device: Device, which: Pass, pair: TilePair) -> bool:
        """The kernels take any tile of up to 128 queries and 128 keys (64 for wide heads)."""
        limits = (_Q_TILE_TOKENS, max(_columns(problem)))
        return all(
            len(tile) == problem.rank and min(tile) >= 1 and math.prod(tile) <= limit
            for tile, limit in zip(pair, limits, strict=True)
        )

    def forward(self, problem: Problem, tiles: TileConfig, operands: Operands) -> Output:
        """Compute output and logsumexp."""
        out_shape = (*operands.query.shape[:-1], operands.value.shape[-1])
        if tiles.q_tile_shape is None or tiles.kv_tile_shape is None:
            q_tile, kv_tile = _ranked_pairs(problem)[0]
        else:
            q_tile, kv_tile = tiles.q_tile_shape, tiles.kv_tile_shape
        arrays = kernel_operands(problem, Operands._make([*map(_padded, operands[:5]), operands.origins]))
        tokens = arrays[0].shape[:-2]
        heads, width = out_shape[-2], arrays[2].shape[-1]
        schedule = KernelSchedule(tiles.kernel_schedule or KernelSchedule.PING_PONG)
        is_persistent = tiles.run_persistent_kernel and schedule is not KernelSchedule.NON_PERSISTENT
        out, logsumexp, _ = native.call(
            _FORWARD,
            [
                ResultType((*tokens, heads, width), operands.query.dtype),
                ResultType((*tokens, heads), jnp.float32),
                ResultType((1,), jnp.int32),  # scratch: counts query tiles
            ],
            *arrays,
            **attributes(problem, q_tile, kv_tile),
            is_ping_pong=int(schedule is KernelSchedule.PING_PONG),
            is_persistent=int(is_persistent),
        )
        return Output(out[..., : out_shape[-1]].reshape(out_shape), logsumexp.reshape(out_shape[:-1]))

    def backward(
        self,
        problem: Problem,
        tiles: TileConfig,
        operands: Operands,
        output: Output,
        out_cotangent: jax.Array,
        logsumexp_cotangent: jax.Array,
    ) -> Gradients:
        """Never called: ``rejection`` refuses the backward pass."""
        raise NotImplementedError(self.rejection(problem, Device("cuda", _COMPUTE_CAPABILITY), "backward"))


def _padded(array: jax.Array | None) -> jax.Array | None:
    """``array`` with zeros up to a whole number of head dimension chunks: they change no logit and no output."""
    if array is None or array.shape[-1] % _HEAD_DIM_CHUNK == 0:
        return array
    missing = -array.shape[-1] % _HEAD_DIM_CHUNK
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])


def _columns(problem: Problem) -> tuple[int, ...]:
    """Keys per tile that the kernels are compiled for."""
    width = -(-max(problem.head_dim, problem.head_dim_v) // _HEAD_DIM_CHUNK) * _HEAD_DIM_CHUNK
    return (128,) if width == 64 else (128, 96) if width == 128 else (64,)


def _factorisations(size: int, rank: int) -> list[Shape]:
    if rank == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in _factorisations(size // first, rank - 1)
    ]


@functools.lru_cache(maxsize=256)
def _ranked_pairs(problem: Problem) -> tuple[TilePair, ...]:
    q_tiles = _factorisations(_Q_TILE_TOKENS, problem.rank)
    kv_tiles = [tile for columns in _columns(problem) for tile in _factorisations(columns, problem.rank)]
    calibration = simulator.calibration_for(HopperBackend.family)
    ranked = simulator.rank(problem, itertools.product(q_tiles, kv_tiles), "forward", calibration)
    return tuple(pair for pair, _ in ranked)
