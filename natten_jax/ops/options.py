"""The keyword arguments of the operators, for overloads that differ in the type of their results alone."""

from __future__ import annotations

from typing import TypedDict

from jax.typing import DTypeLike

from natten_jax.arguments.arrays import Counts, Origin, TokenAxes
from natten_jax.arguments.static import Ints
from natten_jax.ops.canonicalize import ArrayLike
from natten_jax.ops.float8 import Factor
from natten_jax.performance import AttentionPerformanceArguments, PerformanceArguments
from natten_jax.windows import WindowOptions


class _Options(TypedDict, total=False):
    """Those of all operators."""

    query_origin: Origin | None
    key_bias: ArrayLike | None
    sinks: ArrayLike | None
    query_scale: Factor | None
    key_scale: Factor | None
    value_scale: Factor | None
    out_dtype: DTypeLike | None
    fp8: str | None


class AttentionOptions(_Options, AttentionPerformanceArguments, total=False):
    """Those of ``attention``, without ``return_lse``, by which the types of results differ."""

    is_causal: bool
    query_lengths: Counts | None
    kv_lengths: Counts | None
    backend: str | None


class OptionsOfOthers(WindowOptions, PerformanceArguments, total=False):
    """Those of neighborhood attention that are declared where windows and performance are."""


class NeighborhoodOptions(_Options, OptionsOfOthers, total=False):
    """Those of ``na1d``, ``na2d`` and ``na3d``, without ``return_lse``."""

    extents: Counts | None
    upsample: Ints
    clamp_window: bool
    try_fuse_additional_kv: bool | None
    token_axes: TokenAxes | None
    relative_bias: ArrayLike | None
