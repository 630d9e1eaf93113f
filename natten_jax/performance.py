"""The performance arguments of the operators, and the types of passes and tiles.

Performance arguments affect speed and memory, but not which function the operators compute. A new argument needs a line
in :class:`PerformanceArguments`, which users see, and a line in :class:`Performance`, which the package uses.
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

#: The passes in order of execution.
PASSES: tuple[Pass, ...] = ("forward", "backward")

#: Shapes ``(query tile, key/value tile)``. A shape is the number of tokens per token dimension.
TilePair = tuple[tuple[int, ...], tuple[int, ...]]


def outer_and_inner(pair: TilePair, pass_: Pass) -> TilePair:
    """Return the outer tile and the inner tile of a pass, from a query tile and a key/value tile.

    A thread block owns an *outer* tile and iterates over *inner* tiles. In the forward pass, the outer tile contains
    queries, and the inner tiles contain keys and values. In the backward pass, the outer tile contains keys and values,
    and the inner tiles contain queries.
    """
    return pair if pass_ == "forward" else pair[::-1]


class KernelSchedule(enum.StrEnum):
    """Work distribution of a Hopper kernel. The members are the values of the argument ``kernel_schedule``.

    NATTEN's names are aliases. For example, ``KernelSchedule.WarpSpecializedPingpong`` is ``KernelSchedule.PING_PONG``.
    """

    NON_PERSISTENT = "non"  # one thread block per query tile
    COOPERATIVE = "coop"  # persistent: at most one thread block per SM; warpgroups do not alternate
    PING_PONG = "pp"  # as COOPERATIVE, but one warpgroup computes logits while the other computes exponentials
    NonPersistent = NON_PERSISTENT
    WarpSpecializedCooperative = COOPERATIVE
    WarpSpecializedPingpong = PING_PONG

    @property
    def natten_name(self) -> str:
        """NATTEN's name of the member."""
        *_, alias = (name for name, member in KernelSchedule.__members__.items() if member is self)
        return alias


class MemoryUsagePreference(enum.StrEnum):
    """Limit on the scratch memory of a backward pass. The members are the values of ``memory_usage_preference``."""

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
    """Performance arguments of ``na1d``, ``na2d`` and ``na3d``. All arguments are optional.

    If a tile, ``backward_kv_splits`` or ``kernel_schedule`` is ``None``, the backend chooses the value. If an argument
    does not affect a call, the call warns (:class:`natten_jax.IgnoredArgumentWarning`).

    Attributes:
        q_tile_shape: Query tile of the forward pass. ``natten_jax.get_configs_for_*`` list the choices.
        kv_tile_shape: Key/value tile of the forward pass.
        backward_q_tile_shape: Query tile of the backward pass.
        backward_kv_tile_shape: Key/value tile of the backward pass.
        backward_kv_splits: One number per token dimension. The product of these numbers is the maximum number of thread
            blocks that share the key/value tiles of a head and dilation group in the backward pass.
        backward_use_xla_reduction: Let XLA, instead of a kernel, compute the sums of ``out * d_out`` over the features.
            The backward pass needs these sums.
        backward_deterministic: Make gradients bitwise reproducible. This can slow down two backend families:
            ``hopper``, which otherwise accumulates the query gradient in an arbitrary order, and ``cutlass``, where
            ``backward_kv_splits`` becomes 1.
        memory_usage_preference: Limit on the scratch memory of the backward pass, for backends that can trade memory
            for speed: ``"strict"`` (64 MiB), ``"default"`` (1 GiB) or ``"unrestricted"``. If the whole batch exceeds
            the limit, the backend processes the batch in rounds. A round consists of one or more batch entries. If a
            single entry exceeds the limit, a round consists of one or more key/value heads of an entry.
            ``backward_kv_splits`` does not change the scratch memory.
        run_persistent_kernel: Use persistent tile scheduling if the backend supports it.
        kernel_schedule: Member of :class:`KernelSchedule` or its value: ``"non"``, ``"coop"`` or ``"pp"``. Only some
            backends have schedules.
    """

    q_tile_shape: Ints | None
    kv_tile_shape: Ints | None
    backward_q_tile_shape: Ints | None
    backward_kv_tile_shape: Ints | None


class AttentionPerformanceArguments(_CommonArguments, total=False):
    """Performance arguments of ``attention``: :class:`PerformanceArguments`, except that tiles are sizes in tokens."""

    q_tile_size: int | None
    kv_tile_size: int | None
    backward_q_tile_size: int | None
    backward_kv_tile_size: int | None


@dataclasses.dataclass(frozen=True)
class Performance:
    """Checked performance arguments in a hashable form. Every shape has one extent per token dimension."""

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
        """Return the requested tile shapes of a pass; ``None`` if no tiles were requested."""
        query, key_value = [getattr(self, name) for name in _TILE_NAMES[pass_]]
        return None if query is None or key_value is None else (query, key_value)

    def with_tiles(self, pass_: Pass, pair: TilePair | None) -> Performance:
        """Return a copy with ``pair`` as the tiles of a pass. ``None`` removes the tiles."""
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


#: Map from each performance argument of ``attention`` to its field of :class:`Performance`.
ATTENTION_NAMES = {
    field.name.replace("_tile_shape", "_tile_size"): field.name for field in dataclasses.fields(Performance)
}

_FLAGS = [field.name for field in dataclasses.fields(Performance) if isinstance(field.default, bool)]


def performance_of(rank: int, *, tile_suffix: str = "shape", **arguments: Unpack[PerformanceArguments]) -> Performance:
    """Check performance arguments, and return them in canonical form.

    Args:
        rank: Number of token dimensions.
        tile_suffix: Suffix of the names of tile arguments in error messages: ``"shape"`` or ``"size"``.
        **arguments: The performance arguments.

    Raises:
        ValueError: A value breaks a rule.
        TypeError: A value is of the wrong type.
    """
    given = Performance(**arguments)  # type: ignore[arg-type]  # values are checked below
    checked: dict[str, Any] = {name: flag(name, getattr(given, name)) for name in _FLAGS}
    checked |= _checked_tiles(rank, given, tile_suffix)
    if given.backward_kv_splits is not None:
        checked["backward_kv_splits"] = int_tuple("backward_kv_splits", given.backward_kv_splits, rank)
    if given.kernel_schedule is not None:
        checked["kernel_schedule"] = _one_of("kernel_schedule", given.kernel_schedule, KernelSchedule, "None or ")
    preference = _one_of("memory_usage_preference", given.memory_usage_preference, MemoryUsagePreference)
    return Performance(**checked, memory_usage_preference=preference)


def attention_performance(arguments: Mapping[str, Any]) -> Performance:
    """Check performance arguments of ``attention``, and return them in canonical form."""
    return performance_of(1, tile_suffix="size", **{ATTENTION_NAMES[name]: each for name, each in arguments.items()})


def _checked_tiles(rank: int, given: Any, tile_suffix: str) -> dict[str, Any]:
    tiles = {}
    for fields in _TILE_NAMES.values():
        names = [field.replace("shape", tile_suffix) for field in fields]
        pair = [getattr(given, field) for field in fields]
        if (pair[0] is None) != (pair[1] is None):
            present = pair[0] is None  # index of the tile that was given
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
