"""The performance arguments, which affect speed and memory but never results; passes and tiles.

To add an argument, add a line to :class:`PerformanceArguments`, its public form, and a line to :class:`Performance`,
its internal form.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack

from natten_jax.arguments.static import LARGEST_INT, Ints, flag, int_tuple, shown

Shape = tuple[int, ...]

Pass = Literal["forward", "backward"]

#: In order of execution.
PASSES: tuple[Pass, ...] = ("forward", "backward")

#: Tokens of a query and of a key/value tile, per token dimension.
TilePair = tuple[tuple[int, ...], tuple[int, ...]]


def outer_and_inner(pair: TilePair, pass_: Pass) -> TilePair:
    """Order a query tile and a key/value tile as the outer and inner loops of a kernel in a pass.

    A thread block owns an *outer* tile (queries in the forward pass, keys and values in the backward pass) and iterates
    over *inner* tiles (keys and values in the forward pass, queries in the backward pass).
    """
    return pair if pass_ == "forward" else pair[::-1]


class KernelSchedule(enum.StrEnum):
    """Work distribution of a Hopper kernel; members are the strings that ``kernel_schedule`` takes.

    NATTEN's names are aliases: ``KernelSchedule.WarpSpecializedPingpong`` is ``KernelSchedule.PING_PONG``.
    """

    NON_PERSISTENT = "non"  # a thread block per query tile
    COOPERATIVE = "coop"  # a thread block per SM; its warpgroups run unordered
    PING_PONG = "pp"  # warpgroups alternate: one computes logits while the other computes exponentials
    NonPersistent = NON_PERSISTENT
    WarpSpecializedCooperative = COOPERATIVE
    WarpSpecializedPingpong = PING_PONG

    @property
    def natten_name(self) -> str:
        """NATTEN's name of the member."""
        *_, alias = (name for name, member in KernelSchedule.__members__.items() if member is self)
        return alias


class MemoryUsagePreference(enum.StrEnum):
    """Limit on a backward pass's scratch memory; members are the strings that ``memory_usage_preference`` takes."""

    DEFAULT = "default"  # at most 1 GiB
    STRICT = "strict"  # at most 64 MiB
    UNRESTRICTED = "unrestricted"


class _CommonArguments(TypedDict, total=False):
    backward_kv_splits: Ints | None
    backward_use_xla_reduction: bool
    backward_deterministic: bool
    memory_usage_preference: str
    run_persistent_kernel: bool
    kernel_schedule: str | None


class PerformanceArguments(_CommonArguments, total=False):
    """Performance arguments of ``na1d``, ``na2d`` and ``na3d``. All are optional; ``None`` lets the backend choose.

    An argument without effect on a call raises a warning (:class:`natten_jax.IgnoredArgumentWarning`).

    Attributes:
        q_tile_shape: Query tile of the forward pass; ``natten_jax.get_configs_for_*`` list the choices.
        kv_tile_shape: Key/value tile of the forward pass.
        backward_q_tile_shape: Query tile of the backward pass.
        backward_kv_tile_shape: Key/value tile of the backward pass.
        backward_kv_splits: Key/value tiles of the backward pass that may run in parallel.
        backward_use_xla_reduction: Let XLA compute the row sums that the backward pass needs.
        backward_deterministic: Make gradients bitwise reproducible on backends that are faster without it: the
            ``hopper`` backends, which otherwise accumulate the query gradient in any order, and the ``cutlass``
            backends, where it sets ``backward_kv_splits`` to 1.
        memory_usage_preference: Limit on the scratch memory of the backward pass, for backends that can trade memory
            for speed: ``"strict"`` (64 MiB), ``"default"`` (1 GiB) or ``"unrestricted"``. If the batch would exceed the
            limit, it is processed in rounds of several entries or, if one entry would exceed the limit, of several
            heads (at least one key/value head). ``backward_kv_splits`` does not change the scratch memory.
        run_persistent_kernel: Use persistent tile scheduling if the backend supports it.
        kernel_schedule: ``None``, ``"non"``, ``"coop"`` or ``"pp"``, if the backend has schedules.
    """

    q_tile_shape: Ints | None
    kv_tile_shape: Ints | None
    backward_q_tile_shape: Ints | None
    backward_kv_tile_shape: Ints | None


class AttentionPerformanceArguments(_CommonArguments, total=False):
    """Performance arguments of ``attention``: :class:`PerformanceArguments` with tile sizes (tokens) for shapes."""

    q_tile_size: int | None
    kv_tile_size: int | None
    backward_q_tile_size: int | None
    backward_kv_tile_size: int | None


@dataclasses.dataclass(frozen=True)
class Performance:
    """Checked and canonical performance arguments: hashable, with an extent per token dimension in every shape."""

    q_tile_shape: Shape | None = None
    kv_tile_shape: Shape | None = None
    backward_q_tile_shape: Shape | None = None
    backward_kv_tile_shape: Shape | None = None
    backward_kv_splits: Shape | None = None
    backward_use_xla_reduction: bool = False
    backward_deterministic: bool = False
    memory_usage_preference: str = str(MemoryUsagePreference.DEFAULT)
    run_persistent_kernel: bool = True
    kernel_schedule: str | None = None

    def tiles(self, pass_: Pass) -> TilePair | None:
        """Return the requested tile shapes of a pass, or ``None``."""
        query, key_value = [getattr(self, name) for name in _TILE_NAMES[pass_]]
        return None if query is None or key_value is None else (query, key_value)

    def with_tiles(self, pass_: Pass, pair: TilePair | None) -> Performance:
        """Return a copy with other tiles for a pass."""
        changes: dict[str, Any] = dict(zip(_TILE_NAMES[pass_], (None, None) if pair is None else pair, strict=True))
        return dataclasses.replace(self, **changes)

    def flattened(self) -> dict[str, Any]:
        """Convert the performance arguments of neighborhood attention to arguments of ``attention``."""
        arguments = {name: getattr(self, field) for name, field in ATTENTION_NAMES.items()}
        return {
            name: min(math.prod(value), LARGEST_INT) if isinstance(value, tuple) else value
            for name, value in arguments.items()
        }


def tile_names(pass_: Pass) -> tuple[str, str]:
    """Return the field names of a pass's query tile and key/value tile."""
    return _TILE_NAMES[pass_]


_TILE_NAMES: dict[Pass, tuple[str, str]] = {
    "forward": ("q_tile_shape", "kv_tile_shape"),
    "backward": ("backward_q_tile_shape", "backward_kv_tile_shape"),
}


#: Fields by the argument names of ``attention``, whose tiles have sizes instead of shapes.
ATTENTION_NAMES = {
    field.name.replace("_tile_shape", "_tile_size"): field.name for field in dataclasses.fields(Performance)
}

_FLAGS = [field.name for field in dataclasses.fields(Performance) if isinstance(field.default, bool)]


def performance_of(rank: int, *, tile_suffix: str = "shape", **arguments: Unpack[PerformanceArguments]) -> Performance:
    """Check the performance arguments.

    Args:
        rank: Number of token dimensions.
        tile_suffix: Suffix of the caller's tile arguments, for error messages.
        **arguments: The arguments.

    Raises:
        ValueError: A value breaks a rule.
        TypeError: A value is of the wrong type.
    """
    given = Performance(**arguments)  # type: ignore[arg-type]  # canonical below
    checked: dict[str, Any] = {name: flag(name, getattr(given, name)) for name in _FLAGS}
    checked |= _checked_tiles(rank, given, tile_suffix)
    if given.backward_kv_splits is not None:
        checked["backward_kv_splits"] = int_tuple("backward_kv_splits", given.backward_kv_splits, rank)
    if given.kernel_schedule is not None:
        checked["kernel_schedule"] = _one_of("kernel_schedule", given.kernel_schedule, KernelSchedule, "None or ")
    preference = _one_of("memory_usage_preference", given.memory_usage_preference, MemoryUsagePreference)
    return Performance(**checked, memory_usage_preference=preference)


def attention_performance(arguments: Mapping[str, Any]) -> Performance:
    """Check the performance arguments of ``attention``, with its names for tiles. Raise as :func:`performance_of`."""
    return performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})


def _checked_tiles(rank: int, given: Any, tile_suffix: str) -> dict[str, Any]:
    tiles = {}
    for fields in _TILE_NAMES.values():
        names = [field.replace("shape", tile_suffix) for field in fields]
        pair = [getattr(given, field) for field in fields]
        if (pair[0] is None) != (pair[1] is None):
            present = pair[0] is None  # index of the given tile
            raise ValueError(
                f"{names[present]}={shown(pair[present])} was given without {names[not present]}: give both or neither"
            )
        for name, field, tile in zip(names, fields, pair, strict=True):
            tiles[field] = None if tile is None else int_tuple(name, tile, rank, repeat=rank == 1)
    return tiles


def _one_of(name: str, value: Any, choices: type[enum.StrEnum], or_none: str = "") -> str:
    allowed = tuple(map(str, choices))
    if not isinstance(value, str) or value not in allowed:
        is_name = isinstance(value, str) and value in choices.__members__
        meant = f": did you mean {choices[value].value!r}?" if is_name else ""
        raise ValueError(f"{name} must be {or_none}one of {allowed}, got {shown(value)}{meant}")
    return str(value)
