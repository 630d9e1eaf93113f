"""Queries for the tile shapes that a backend offers: ``get_[bwd_]configs_for_<family>_<fna|fmha>``.

Each takes one array of query, key or value, or all three, in the layout that the operator takes, as arrays or
as ``jax.ShapeDtypeStruct``. The first configuration is the recommended one; the list is empty where the backend
cannot run the arrays. Neighborhood attention queries also take the window arguments, which the
recommendation depends on; without them the window is the whole layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from natten_jax import backends
from natten_jax.devices import Device, compute_capability_of, default_device
from natten_jax.passes import Pass
from natten_jax.problem import Bools, Ints, KernelSchedule, Problem, Shape, attention_problem, neighborhood_problem

FnaConfig = tuple[Shape, Shape]
FmhaConfig = tuple[int, int]
CapabilityLike = str | float | Sequence[int]


class _Array(Protocol):
    """An array, or its shape and dtype."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def ndim(self) -> int: ...


class FnaQuery(Protocol):
    """Type of the queries for neighborhood attention."""

    def __call__(
        self,
        query: _Array,
        key: _Array | None = None,
        value: _Array | None = None,
        *,
        kernel_size: Ints | None = None,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        compute_capability: CapabilityLike | None = None,
    ) -> list[FnaConfig]: ...


class FmhaQuery(Protocol):
    """Type of the queries for attention."""

    def __call__(
        self,
        query: _Array,
        key: _Array | None = None,
        value: _Array | None = None,
        *,
        is_causal: bool = False,
        compute_capability: CapabilityLike | None = None,
    ) -> list[FmhaConfig]: ...


def target_device(compute_capability: CapabilityLike | None) -> Device:
    """The device to answer for: a GPU of the given compute capability, or this process's default device."""
    if compute_capability is None:
        return default_device()
    return Device("cuda", compute_capability_of(compute_capability), is_present=False)


def _pairs(family: str, problem: Problem, device: Device, pass_: Pass) -> list[FnaConfig]:
    backend = backends.find(f"{family}-{problem.operator}", problem.operator)
    if backend.rejection(problem, device, pass_) is not None:
        return []
    return backend.tile_pairs(problem, device, pass_)


def _fna_query(family: str, pass_: Pass) -> FnaQuery:
    def get_configs(
        query: Any,
        key: Any = None,
        value: Any = None,
        *,
        kernel_size: Ints | None = None,
        stride: Ints = 1,
        dilation: Ints = 1,
        is_causal: Bools = False,
        compute_capability: CapabilityLike | None = None,
    ) -> list[FnaConfig]:
        device = target_device(compute_capability)
        shape = getattr(query, "shape", ())  # what is no array is refused below
        rank = max(1, min(3, len(shape) - 3))
        window = shape[1:-2] if kernel_size is None else kernel_size
        key, value = query if key is None else key, query if value is None else value
        problem = neighborhood_problem(rank, query, key, value, window, stride, dilation, is_causal, None, None, None)
        return _pairs(family, problem, device, pass_)

    return _documented(get_configs, family, "fna", pass_)


def _fmha_query(family: str, pass_: Pass) -> FmhaQuery:
    def get_configs(
        query: Any,
        key: Any = None,
        value: Any = None,
        *,
        is_causal: bool = False,
        compute_capability: CapabilityLike | None = None,
    ) -> list[FmhaConfig]:
        device = target_device(compute_capability)
        key, value = query if key is None else key, query if value is None else value
        problem = attention_problem(query, key, value, None, is_causal)
        pairs = _pairs(family, problem, device, pass_)
        return [(q_tile[0], kv_tile[0]) for q_tile, kv_tile in pairs]

    return _documented(get_configs, family, "fmha", pass_)


def _documented(function: Callable[..., Any], family: str, operator: str, pass_: Pass) -> Any:
    prefix = "" if pass_ == "forward" else "bwd_"
    query_family = backends.find(f"{family}-{operator}", operator).query_family
    tiles = "shapes" if operator == "fna" else "sizes"
    schedules = ", each with a kernel schedule" if family == "hopper" else ""
    function.__name__ = function.__qualname__ = f"get_{prefix}configs_for_{query_family}_{operator}"
    function.__doc__ = f"""Query and key/value tile {tiles} of the {pass_} pass of {family}-{operator}, best first.

Args:
    query: An array of the operator's query, key or value, or a ``jax.ShapeDtypeStruct``.
    key: The key where it differs from ``query``.
    value: The value where it differs from ``query``.
    **problem: ``kernel_size``, ``stride``, ``dilation`` and ``is_causal`` as in the operator.
    compute_capability: Answer for a GPU of this compute capability, ``"9.0"``, ``(9, 0)`` or ``9.0``, instead of
        for the default device.

Returns:
    Pairs of query and key/value tile {tiles}{schedules}; empty where the backend cannot run the arrays.

Raises:
    ValueError: The arrays and arguments describe no problem of the operator, or no compute capability.
    TypeError: An argument is of the wrong type.
"""
    return function


def kernel_schedules(family: str, pass_: Pass) -> tuple[KernelSchedule, ...]:
    """The schedules that a pass of a backend family has, the default one first; empty where there is no choice."""
    if (family, pass_) != ("hopper", "forward"):
        return ()
    return KernelSchedule.PING_PONG, KernelSchedule.COOPERATIVE, KernelSchedule.NON_PERSISTENT


def _with_schedules(query: Callable[..., list[Any]]) -> Callable[..., list[tuple[Any, KernelSchedule]]]:
    """A query whose configurations are pairs of tiles and kernel schedules, the default schedule first."""

    def get_configs(*arrays: Any, **arguments: Any) -> list[tuple[Any, KernelSchedule]]:
        schedules = kernel_schedules("hopper", "forward")
        return [(tiles, schedule) for tiles in query(*arrays, **arguments) for schedule in schedules]

    return functools.wraps(query)(get_configs)


get_configs_for_cutlass_fna = _fna_query("cutlass", "forward")
get_configs_for_cutlass_fmha = _fmha_query("cutlass", "forward")
get_bwd_configs_for_cutlass_fna = _fna_query("cutlass", "backward")
get_bwd_configs_for_cutlass_fmha = _fmha_query("cutlass", "backward")
get_configs_for_cutlass_hopper_fna = _with_schedules(_fna_query("hopper", "forward"))
get_configs_for_cutlass_hopper_fmha = _with_schedules(_fmha_query("hopper", "forward"))
get_bwd_configs_for_cutlass_hopper_fna = _fna_query("hopper", "backward")
get_bwd_configs_for_cutlass_hopper_fmha = _fmha_query("hopper", "backward")
get_configs_for_cpu_fna = _fna_query("cpu", "forward")
get_configs_for_cpu_fmha = _fmha_query("cpu", "forward")
get_bwd_configs_for_cpu_fna = _fna_query("cpu", "backward")
get_bwd_configs_for_cpu_fmha = _fmha_query("cpu", "backward")
get_configs_for_flex_fna = _fna_query("flex", "forward")
get_configs_for_flex_fmha = _fmha_query("flex", "forward")
get_bwd_configs_for_flex_fna = _fna_query("flex", "backward")
get_bwd_configs_for_flex_fmha = _fmha_query("flex", "backward")
