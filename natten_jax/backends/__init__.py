"""The registry of backends, and which of them runs a problem."""

from __future__ import annotations

from collections.abc import Iterable

from natten_jax.backends import cpu, cutlass, flex, hopper, missing_kernels
from natten_jax.backends.base import Backend, requested_pair
from natten_jax.devices import Device
from natten_jax.passes import Pass, TilePair
from natten_jax.problem import Problem, TileConfig
from natten_jax.static_arguments import shown

#: In order of preference.
BACKENDS: tuple[Backend, ...] = (
    hopper.HopperBackend(),
    cutlass.CutlassBackend(),
    cpu.CpuBackend(),
    flex.FlexBackend(),
)

OPERATORS = ("fna", "fmha")


def backend_name(backend: Backend, operator: str) -> str:
    """The name users give: ``cpu-fna``, ``flex-fmha``, ..."""
    return f"{backend.family}-{operator}"


def backend_names(operator: str | None = None) -> tuple[str, ...]:
    """Names of all backends of an operator (``"fna"`` or ``"fmha"``), or of both."""
    operators = OPERATORS if operator is None else (operator,)
    return tuple(backend_name(backend, o) for o in operators for backend in BACKENDS)


def find(name: str, operator: str) -> Backend:
    """The backend called ``name``.

    Raises:
        ValueError: No backend of this operator has that name.
    """
    for backend in BACKENDS:
        if isinstance(name, str) and name == backend_name(backend, operator):
            return backend
    raise ValueError(f"backend={shown(name)} is unknown; choose None or one of {', '.join(backend_names(operator))}")


def fmha_counterpart(name: str | None) -> str | None:
    """The FMHA backend of the family that an FNA backend's name belongs to."""
    if name is None:
        return None
    return backend_name(find(name, "fna"), "fmha")


def rejections(problem: Problem, device: Device, pass_: Pass) -> dict[str, str]:
    """Why each backend that cannot run this pass cannot, by name."""
    return {
        backend_name(backend, problem.operator): reason
        for backend in BACKENDS
        if (reason := backend.rejection(problem, device, pass_)) is not None
    }


def runnable(problem: Problem, device: Device, pass_: Pass) -> list[Backend]:
    """The backends that can run this pass, best first."""
    rejected = rejections(problem, device, pass_)
    return [backend for backend in BACKENDS if backend_name(backend, problem.operator) not in rejected]


def choose(problem: Problem, tiles: TileConfig, device: Device, pass_: Pass, requested: str | None = None) -> Backend:
    """The backend that runs a pass of a problem on a device.

    Args:
        problem: The problem.
        tiles: Tile shapes asked for; where no backend is named, one that offers them is preferred.
        device: Where the program is going to run.
        pass_: The pass.
        requested: Name of the backend that the user asked for.

    Raises:
        ValueError: The requested backend cannot run the pass, or none can, or none that can offers the tiles.
    """
    if requested is not None:
        backend = find(requested, problem.operator)
        reason = backend.rejection(problem, device, pass_)
        if reason is not None:
            raise ValueError(_refusal(requested, reason, problem, device, pass_))
        candidates = [backend]
    else:
        candidates = runnable(problem, device, pass_)
        if not candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in rejections(problem, device, pass_).items())
            raise ValueError(f"no backend can run the {pass_} pass of {problem.describe()} on {device}: {reasons}")
    pair = requested_pair(tiles, pass_)
    for backend in candidates:
        if pair is None or backend.offers(problem, device, pass_, pair):
            if requested is None and backend.is_pure_jax:
                _warn_of_missing_kernels(problem, device, pass_)
            return backend
    assert pair is not None
    raise ValueError(_unknown_tiles(problem, pair, device, pass_, candidates[0]))


def _warn_of_missing_kernels(problem: Problem, device: Device, pass_: Pass) -> None:
    reason = missing_kernels.lack(BACKENDS, problem, device, pass_)
    if reason is not None:
        missing_kernels.warn_once(reason)


def choose_pass(problem: Problem, tiles: TileConfig, device: Device, pass_: Pass, requested: str | None) -> Backend:
    """As ``choose``, but where the requested family has no such backward pass, the best other one serves it."""
    if requested is not None and pass_ == "backward":
        reason = find(requested, problem.operator).rejection(problem, device, pass_)
        requested = requested if reason is None else None
    return choose(problem, tiles, device, pass_, requested)


def _refusal(requested: str, reason: str, problem: Problem, device: Device, pass_: Pass) -> str:
    able = [backend_name(backend, problem.operator) for backend in runnable(problem, device, pass_)]
    return (
        f"backend={requested!r} cannot run the {pass_} pass of {problem.describe()} ({problem.dtype}) on {device}: "
        f"{reason}. Backends that can: {', '.join(able) or 'none'}"
    )


def _unknown_tiles(problem: Problem, pair: TilePair, device: Device, pass_: Pass, backend: Backend) -> str:
    prefix = "" if pass_ == "forward" else "backward_"
    query_function = f"get_{'bwd_' if prefix else ''}configs_for_{backend.query_family}_{problem.operator}"
    examples: Iterable[TilePair] = backend.tile_pairs(problem, device, pass_)[:5]
    if problem.operator == "fmha":
        shown = ", ".join(f"({q[0]}, {kv[0]})" for q, kv in examples)
        asked = f"{prefix}q_tile_size={pair[0][0]}, {prefix}kv_tile_size={pair[1][0]}"
    else:
        shown = ", ".join(map(str, examples))
        asked = f"{prefix}q_tile_shape={pair[0]}, {prefix}kv_tile_shape={pair[1]}"
    return (
        f"{backend_name(backend, problem.operator)} does not offer {asked} for {problem.describe()}; "
        f"among those it offers are {shown} (natten_jax.{query_function} lists them)"
    )
