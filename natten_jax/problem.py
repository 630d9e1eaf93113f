"""The description of one attention problem, and the only checks of the public functions' arguments.

Everything below this module works on :class:`Problem` and :class:`TileConfig`, which are frozen,
hashable and canonical: every per-dimension argument is a tuple of Python values.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from natten_jax.static_arguments import bool_tuple, check_static, flag, int_tuple, one_bool, shown

Shape = tuple[int, ...]

#: One value for each dimension, or one for all. Arrays are those whose values are known while the program is built.
Ints = int | Sequence[int] | np.ndarray[Any, Any] | jax.Array
Bools = bool | Sequence[bool] | np.ndarray[Any, Any] | jax.Array

SUPPORTED_DTYPES = ("float16", "bfloat16", "float32", "float64")

#: Of logits in float32, times log2(e) with room for both to be rounded.
_LARGEST_SCALE = float(np.finfo(np.float32).max) * (1 - 2**-22) / math.log2(math.e)


class KernelSchedule(enum.StrEnum):
    """How a Hopper kernel distributes its work; members are the strings that ``kernel_schedule`` takes."""

    NON_PERSISTENT = "non"  # a thread block for every query tile
    COOPERATIVE = "coop"  # a thread block per multiprocessor; its warpgroups run unordered
    PING_PONG = "pp"  # its warpgroups take turns: one computes logits while the other takes exponentials


class MemoryUsagePreference(enum.StrEnum):
    """How much scratch memory a backward pass may take; members are what ``memory_usage_preference`` takes."""

    DEFAULT = "default"  # at most 1 GiB
    STRICT = "strict"  # at most 64 MiB
    UNRESTRICTED = "unrestricted"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is computed, without how: the static facts of one attention call.

    ``attention`` is the special case of one dimension whose window is the whole key sequence, the only
    case in which query and key/value layouts may differ.

    Attributes:
        operator: ``"fna"`` (neighborhood attention) or ``"fmha"`` (attention).
        batch: Batch size of the arrays at hand.
        query_layout: Global extents of the query tokens, one per dimension.
        kv_layout: Global extents of the key/value tokens.
        heads: Query heads.
        heads_kv: Key/value heads; divides ``heads``.
        head_dim: Width of query and key heads.
        head_dim_v: Width of value and output heads.
        dtype: Element type name of query, key, value and output.
        kernel_size: Window extents in tokens.
        stride: Queries per dimension that share one window.
        dilation: Distance between neighboring tokens of a window.
        is_causal: Per dimension, whether later keys are hidden.
        scale: Factor of the logits.
        additional_kv: Number of key/value tokens that every query sees.
    """

    operator: Literal["fna", "fmha"]
    batch: int
    query_layout: Shape
    kv_layout: Shape
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kernel_size: Shape
    stride: Shape
    dilation: Shape
    is_causal: tuple[bool, ...]
    scale: float
    additional_kv: int = 0

    @property
    def rank(self) -> int:
        """Number of token dimensions."""
        return len(self.query_layout)

    @property
    def is_attention(self) -> bool:
        """Whether every query sees every key of the layout, so that flattened attention is the same thing.

        In one dimension a causal window over the whole sequence is causal attention for any stride.
        """
        if self.kernel_size != self.kv_layout:
            return False
        return not any(self.is_causal) or (self.rank == 1 and self.additional_kv == 0)

    @property
    def accumulator_dtype(self) -> str:
        """Element type of the logsumexp and of all accumulation."""
        return "float64" if self.dtype == "float64" else "float32"

    def describe(self) -> str:
        """One line for traces and messages."""
        name = "attention" if self.operator == "fmha" else f"na{self.rank}d"
        window = "x".join(map(str, self.kernel_size))
        parts = [f"{name} {'x'.join(map(str, self.query_layout))} k={window}"]
        if any(s > 1 for s in self.stride):
            parts.append(f"s={'x'.join(map(str, self.stride))}")
        if any(d > 1 for d in self.dilation):
            parts.append(f"d={'x'.join(map(str, self.dilation))}")
        if any(self.is_causal):
            parts.append(f"causal={''.join('01'[c] for c in self.is_causal)}")
        if self.additional_kv:
            parts.append(f"add_kv={self.additional_kv}")
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How a backend is asked to run a problem; ``None`` leaves the choice to the backend.

    Tile shapes have one extent per token dimension. Knobs that a backend does not have are ignored by it.
    """

    q_tile_shape: Shape | None = None
    kv_tile_shape: Shape | None = None
    backward_q_tile_shape: Shape | None = None
    backward_kv_tile_shape: Shape | None = None
    backward_kv_splits: Shape | None = None
    backward_use_xla_reduction: bool = False
    backward_deterministic: bool = False
    memory_usage_preference: str = "default"
    run_persistent_kernel: bool = True
    kernel_schedule: str | None = None


def neighborhood_problem(
    rank: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kernel_size: Ints,
    stride: Ints,
    dilation: Ints,
    is_causal: Bools,
    scale: float | None,
    additional_keys: jax.Array | None,
    additional_values: jax.Array | None,
) -> Problem:
    """Check the arguments of ``na{rank}d`` and describe the problem."""
    _check_arrays(query, key, value, rank + 3, f"na{rank}d")
    layout = query.shape[1:-2]
    for name, array in (("key", key), ("value", value)):
        if array.shape[1:-2] != layout:
            raise ValueError(
                f"{name} has token layout {array.shape[1:-2]}, but query has {layout}: "
                "query, key and value must share one token layout"
            )
    windows = window_parameters(rank, kernel_size, stride, dilation, is_causal)
    check_windows_fit(layout, *windows[:3])
    kernel_size, stride, dilation, is_causal = windows
    return Problem(
        operator="fna",
        batch=query.shape[0],
        query_layout=layout,
        kv_layout=layout,
        heads=query.shape[-2],
        heads_kv=key.shape[-2],
        head_dim=query.shape[-1],
        head_dim_v=value.shape[-1],
        dtype=query.dtype.name,
        kernel_size=kernel_size,
        stride=stride,
        dilation=dilation,
        is_causal=is_causal,
        scale=_scale(scale, query),
        additional_kv=_check_additional_kv(query, key, value, additional_keys, additional_values),
    )


def attention_problem(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float | None,
    is_causal: bool | np.ndarray[Any, Any] | jax.Array,
) -> Problem:
    """Check the arguments of ``attention`` and describe the problem."""
    _check_arrays(query, key, value, 4, "attention")
    if key.shape[1] != value.shape[1]:
        raise ValueError(
            f"value has {value.shape[1]} tokens, but key has {key.shape[1]}: "
            "key and value must have the same sequence length"
        )
    return Problem(
        operator="fmha",
        batch=query.shape[0],
        query_layout=query.shape[1:2],
        kv_layout=key.shape[1:2],
        heads=query.shape[-2],
        heads_kv=key.shape[-2],
        head_dim=query.shape[-1],
        head_dim_v=value.shape[-1],
        dtype=query.dtype.name,
        kernel_size=key.shape[1:2],
        stride=(1,),
        dilation=(1,),
        is_causal=(one_bool("is_causal", is_causal),),
        scale=_scale(scale, query),
    )


def window_parameters(
    rank: int,
    kernel_size: Ints,
    stride: Ints,
    dilation: Ints,
    is_causal: Bools,
) -> tuple[Shape, Shape, Shape, tuple[bool, ...]]:
    """Canonical window parameters, checked as far as that is possible without a layout."""
    kernel = int_tuple("kernel_size", kernel_size, rank)
    strides = int_tuple("stride", stride, rank)
    dilations = int_tuple("dilation", dilation, rank)
    causal = bool_tuple("is_causal", is_causal, rank)
    for s, k in zip(strides, kernel, strict=True):
        if s > k:
            raise ValueError(f"stride {strides} exceeds kernel_size {kernel}: stride <= kernel_size must hold")
    return kernel, strides, dilations, causal


def check_windows_fit(layout: Shape, kernel_size: Shape, stride: Shape, dilation: Shape) -> None:
    """Check that dilated windows fit into the token layout."""
    for extent, k, d in zip(layout, kernel_size, dilation, strict=True):
        if k * d > extent:
            product = "kernel_size" if d == 1 else "kernel_size * dilation"
            raise ValueError(
                f"kernel_size {kernel_size} with dilation {dilation} exceeds the token layout {layout}: "
                f"{product} <= extent must hold in every dimension ({k * d} > {extent})"
            )


def tile_config(
    rank: int,
    *,
    q_tile_shape: Ints | None = None,
    kv_tile_shape: Ints | None = None,
    backward_q_tile_shape: Ints | None = None,
    backward_kv_tile_shape: Ints | None = None,
    backward_kv_splits: Ints | None = None,
    backward_use_xla_reduction: bool = False,
    backward_deterministic: bool = False,
    memory_usage_preference: str = "default",
    run_persistent_kernel: bool = True,
    kernel_schedule: str | None = None,
    tile_suffix: str = "shape",
) -> TileConfig:
    """Check the performance arguments; ``tile_suffix`` is how the caller's tile arguments end."""
    pairs = {}
    for prefix, q_tile, kv_tile in (
        ("", q_tile_shape, kv_tile_shape),
        ("backward_", backward_q_tile_shape, backward_kv_tile_shape),
    ):
        names = f"{prefix}q_tile_{tile_suffix}", f"{prefix}kv_tile_{tile_suffix}"
        if (q_tile is None) != (kv_tile is None):
            given, missing = names if kv_tile is None else names[::-1]
            value = shown(q_tile if kv_tile is None else kv_tile)
            raise ValueError(f"{given}={value} was given without {missing}: give both or neither")
        for name, field, tile in zip(names, ("q", "kv"), (q_tile, kv_tile), strict=True):
            key = f"{prefix}{field}_tile_shape"
            pairs[key] = None if tile is None else int_tuple(name, tile, rank, repeat=rank == 1)
    use_xla_reduction = flag("backward_use_xla_reduction", backward_use_xla_reduction)
    deterministic = flag("backward_deterministic", backward_deterministic)
    persistent = flag("run_persistent_kernel", run_persistent_kernel)
    preferences = tuple(map(str, MemoryUsagePreference))
    if not isinstance(memory_usage_preference, str) or memory_usage_preference not in preferences:
        raise ValueError(f"memory_usage_preference must be one of {preferences}, got {shown(memory_usage_preference)}")
    schedules = tuple(map(str, KernelSchedule))
    if kernel_schedule is not None and not (isinstance(kernel_schedule, str) and kernel_schedule in schedules):
        raise ValueError(f"kernel_schedule must be None or one of {schedules}, got {shown(kernel_schedule)}")
    splits = None if backward_kv_splits is None else int_tuple("backward_kv_splits", backward_kv_splits, rank)
    return TileConfig(
        **pairs,
        backward_kv_splits=splits,
        backward_use_xla_reduction=use_xla_reduction,
        backward_deterministic=deterministic,
        memory_usage_preference=str(memory_usage_preference),
        run_persistent_kernel=persistent,
        kernel_schedule=None if kernel_schedule is None else str(kernel_schedule),
    )


def checked_scale(scale: float | None, dtype: str | None = None) -> float | None:
    """The factor of the logits as a Python float.

    Args:
        scale: The argument; ``None`` stands for the default.
        dtype: Element type of the problem, where it is known. Logits of float64 problems are computed in float64,
            all others in float32, and the kernels' exponentials have base 2: there, ``scale * log2(e)`` is finite.

    Raises:
        ValueError: The scale is not finite, or too large for ``dtype``.
        TypeError: It is no real number.
    """
    if scale is None:
        return None
    check_static("scale", scale)
    if isinstance(scale, (bool, np.complexfloating)) or not isinstance(scale, (numbers.Real, np.number)):
        raise TypeError(f"scale must be None or a real Python number, got {shown(scale)}")
    try:
        factor = float(scale)
    except OverflowError:
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, as a float64, too, got {shown(scale)}")
    if dtype not in (None, "float64") and not abs(factor) <= _LARGEST_SCALE:
        raise ValueError(
            f"scale must be within +-{_LARGEST_SCALE:.6g} for {dtype} arrays, whose logits are float32 "
            f"(scale * log2(e) has to be finite), got {shown(scale)}"
        )
    return factor


def _scale(scale: float | None, query: jax.Array) -> float:
    factor = checked_scale(scale, query.dtype.name)
    return float(query.shape[-1]) ** -0.5 if factor is None else factor


def check_array(name: str, array: Any) -> None:
    if not isinstance(getattr(array, "dtype", None), np.dtype):
        raise TypeError(f"{name} must be an array, got {type(array).__name__}")


def _check_arrays(query: jax.Array, key: jax.Array, value: jax.Array, ndim: int, function: str) -> None:
    arrays = {"query": query, "key": key, "value": value}
    for name, array in arrays.items():
        check_array(name, array)
        if array.ndim != ndim:
            raise ValueError(
                f"{name} has shape {array.shape}, but {function} takes {ndim}-dimensional arrays "
                "[batch, *token layout, heads, head_dim]"
            )
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}: every extent must be at least 1")
    if query.dtype.name not in SUPPORTED_DTYPES:
        raise ValueError(f"query has dtype {query.dtype.name}; supported are {', '.join(SUPPORTED_DTYPES)}")
    for name in ("key", "value"):
        if arrays[name].dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {arrays[name].dtype.name}, but query has {query.dtype.name}: query, key and "
                f"value must share one dtype (supported: {', '.join(SUPPORTED_DTYPES)})"
            )
        if arrays[name].shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} has batch size {arrays[name].shape[0]}, but query has {query.shape[0]}: they must be equal"
            )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value has {value.shape[-2]} heads, but key has {key.shape[-2]}: they must be equal")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[-2]} heads, which is not a multiple of the {key.shape[-2]} heads of key and value"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key has head_dim {key.shape[-1]}, but query has {query.shape[-1]}: they must be equal")


def _check_additional_kv(
    query: jax.Array, key: jax.Array, value: jax.Array, keys: jax.Array | None, values: jax.Array | None
) -> int:
    if keys is None and values is None:
        return 0
    if keys is None or values is None:
        given, missing = ("additional_keys", "additional_values")[:: 1 if values is None else -1]
        shape = getattr(keys if values is None else values, "shape", None)
        raise ValueError(f"{given} (shape {shape}) was given without {missing}: give both or neither")
    for name, array, source, source_name in (
        ("additional_keys", keys, key, "key"),
        ("additional_values", values, value, "value"),
    ):
        check_array(name, array)
        expected = (query.shape[0], keys.shape[1] if keys.ndim == 4 else "n", *source.shape[-2:])
        if array.ndim != 4 or array.shape != expected or array.shape[1] < 1:
            raise ValueError(
                f"{name} has shape {array.shape}, but [batch, n, heads_kv, head_dim] of {source_name} asks for "
                f"{expected} with n >= 1"
            )
        if array.dtype != source.dtype:
            raise ValueError(f"{name} has dtype {array.dtype.name}, but {source_name} has {source.dtype.name}")
    return int(keys.shape[1])
