"""Keyword arguments of the operators except ``return_lse``, for the overloads, which differ in it and in the result."""

from __future__ import annotations

from typing import TypedDict

from jax.typing import DTypeLike

from natten_jax.arguments.arrays import Counts, Origin, TokenAxes
from natten_jax.arguments.static import Ints
from natten_jax.ops.canonicalize import ArrayLike
from natten_jax.ops.float8 import Factor
from natten_jax.performance import AttentionPerformanceArguments, PerformanceArguments
from natten_jax.windows import Edges


class _Options(TypedDict, total=False):
    """Keyword arguments of all operators."""

    query_origin: Origin | None
    key_bias: ArrayLike | None
    sinks: ArrayLike | None
    query_scale: Factor | None
    key_scale: Factor | None
    value_scale: Factor | None
    out_dtype: DTypeLike | None
    fp8: str | None


class AttentionOptions(_Options, AttentionPerformanceArguments, total=False):
    """Keyword arguments of ``attention`` except ``return_lse``."""

    is_causal: bool
    query_lengths: Counts | None
    kv_lengths: Counts | None
    backend: str | None


class NeighborhoodOptions(_Options, PerformanceArguments, total=False):
    """Keyword arguments of ``na1d``, ``na2d`` and ``na3d`` except ``return_lse``."""

    edges: Edges
    extents: Counts | None
    upsample: Ints
    clamp_window: bool
    try_fuse_additional_kv: bool | None
    token_axes: TokenAxes | None
    relative_bias: ArrayLike | None
