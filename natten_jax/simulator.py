"""What a tile configuration makes of a problem, and how long that takes: counted and predicted without a device.

Counts are exact (:mod:`natten_jax.cost.tile_counts`). The time is that of a model (:mod:`natten_jax.cost.predict`) that
was fitted to measurements on one kind of device (:mod:`natten_jax.cost.calibration`).

Example:
    >>> from natten_jax import simulator
    >>> problem = simulator.problem_of((256, 256), kernel_size=80, stride=16, heads=24, head_dim=128)
    >>> tiles = (16, 8), (16, 8)  # query, key/value
    >>> simulator.count_tiles(problem, tiles).is_fully_block_sparse
    True
    >>> simulator.least_block_sparse_stride(problem, tiles)
    (16, 8)
"""

from __future__ import annotations

from collections.abc import Sequence

from natten_jax.cost.advice import Recommendation, least_block_sparse_stride, recommend_stride
from natten_jax.cost.calibration import Calibration, Kernel, calibration_for
from natten_jax.cost.predict import predict
from natten_jax.cost.ranking import rank
from natten_jax.cost.simulation import Simulation, simulate
from natten_jax.cost.tile_counts import TileCounts, count_tiles
from natten_jax.problem import SUPPORTED_DTYPES, Problem, check_windows_fit, window_parameters
from natten_jax.static_arguments import int_tuple

__all__ = [
    "Calibration",
    "Kernel",
    "Recommendation",
    "Simulation",
    "TileCounts",
    "calibration_for",
    "count_tiles",
    "least_block_sparse_stride",
    "predict",
    "problem_of",
    "rank",
    "recommend_stride",
    "simulate",
]


def problem_of(
    layout: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    additional_kv: int = 0,
) -> Problem:
    """Describe a problem without arrays; arguments as in :func:`natten_jax.na1d` and its like.

    Args:
        layout: Tokens per dimension.
        kernel_size: Window extent, per dimension or one for all, and so on for the next three.
        stride: Queries that share a window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Whether later keys are hidden.
        batch: Batch size.
        heads: Query heads.
        heads_kv: Key/value heads; ``None`` is ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value heads; ``None`` is ``head_dim``.
        dtype: Name of the element type.
        additional_kv: Tokens that every query sees.

    Raises:
        ValueError: A value breaks a rule of the operators.
        TypeError: An argument is of the wrong type.
    """
    tokens = int_tuple("layout", tuple(layout), len(layout))
    parameters = window_parameters(len(tokens), kernel_size, stride, dilation, is_causal)
    check_windows_fit(tokens, *parameters[:3])
    window, strides, dilations, causal = parameters
    heads_kv = heads if heads_kv is None else heads_kv
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(SUPPORTED_DTYPES)}, got {dtype!r}")
    if heads % heads_kv:
        raise ValueError(f"heads {heads} must be a multiple of heads_kv {heads_kv}")
    return Problem(
        operator="fna",
        batch=batch,
        query_layout=tokens,
        kv_layout=tokens,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        kernel_size=window,
        stride=strides,
        dilation=dilations,
        is_causal=causal,
        scale=head_dim**-0.5,
        additional_kv=additional_kv,
    )
