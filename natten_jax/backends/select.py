"""Selection of the backend, the tiles and the kernel schedule for each pass of a request on a device.

No other module makes these selections.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from natten_jax import backends, source_tree
from natten_jax.arguments.static import warn_of_line
from natten_jax.autotuning import tables
from natten_jax.backends.base import Backend
from natten_jax.cost_model.halos import retile_for_shard
from natten_jax.native import module as native
from natten_jax.performance import Pass, Performance, TilePair
from natten_jax.plan.devices import Device, lowering_targets
from natten_jax.plan.plan import BackendId, Plan, Request, tile_arguments
from natten_jax.problem import Problem

#: Environment variable: a comma-separated list of families, such as ``"tpu"``. Without it, these families run only in
#: calls that name them. With it, they may be selected by default.
VARIABLE = "NATTEN_JAX_BY_DEFAULT"


def enabled_families(registered: Iterable[Backend]) -> frozenset[str]:
    """Return the families that the environment variable :data:`VARIABLE` lists.

    Args:
        registered: All backends.

    Raises:
        ValueError: The variable lists an unknown family, or a family that is not ``Capabilities.is_by_name_only``.
    """
    families = {family.strip() for family in os.environ.get(VARIABLE, "").split(",")} - {""}
    known = [backend.family for backend in registered if backend.capabilities.is_by_name_only]
    if unknown := sorted(families.difference(known)):
        raise ValueError(
            f"the environment variable {VARIABLE} must name families that otherwise run only by name "
            f"({', '.join(known) or 'this build has none'}), not {', '.join(map(repr, unknown))}"
        )
    return frozenset(families)


def _runs_only_by_name(backend: Backend, problem: Problem) -> bool:
    """Return True if a backend runs only in calls that name it. The environment variable is not read."""
    has = backend.capabilities
    return has.is_by_name_only or (has.is_by_name_only_for_float8 and problem.element.is_float8)


#: Values of ``sys.platform`` for which this package's kernels can be compiled.
_BUILD_PLATFORMS = ("linux", "darwin")

_was_warned = False


class MissingKernelsWarning(UserWarning):
    """Warning that this build of natten_jax lacks kernels for the device, so that the slow portable backend runs."""


def missing_kernels_of(backends: Iterable[Backend], problem: Problem, device: Device, pass_: Pass) -> str | None:
    """Return the reason why this build lacks kernels for a pass, and how to install a build that has them.

    ``None`` if this build has such kernels, if no build can have them, or if kernels cannot be compiled for this
    platform.

    Args:
        backends: All backends.
        problem: The problem.
        device: The device.
        pass_: The pass.
    """
    if not device.is_present or sys.platform not in _BUILD_PLATFORMS:
        return None
    for backend in backends:
        if backend.capabilities.is_slow_fallback or _runs_only_by_name(backend, problem):
            continue
        reason = backend.rejection(problem, device, pass_)
        if reason is None:
            return None
        # For an absent device, rejection() does not check if this build has the kernels. So if the backend rejects the
        # present device, but not an absent device of the same kind, this build lacks the kernels.
        elsewhere = dataclasses.replace(device, is_present=False)
        if reason == native.load_error or backend.rejection(problem, elsewhere, pass_) is None:
            return f"{reason}. {_remedy(device)}"
    return None


def warn_once(reason: str) -> None:
    """Warn that the portable backend runs, and give the reason. Only the first call in a process warns."""
    global _was_warned
    if _was_warned:
        return
    _was_warned = True
    warn_of_line(
        f"attention runs on the slow portable backend (flex): {reason}; python -m natten_jax.doctor shows what was "
        "built. Name the backend (flex-fna or flex-fmha) to suppress this warning.",
        MissingKernelsWarning,
    )


def _remedy(device: Device) -> str:
    variables, capability = "", device.compute_capability
    if device.platform == "cuda" and capability is not None:
        architectures = "80;90a" if capability == (9, 0) else f"{capability[0]}{capability[1]}"
        variables = f"NATTEN_JAX_CUDA={native.choice()} NATTEN_JAX_CUDA_ARCHS='{architectures}'"
    sentence = source_tree.remedy(variables)
    return sentence[0].upper() + sentence[1:]


#: The first backend in order of preference is selected, unless the shortest predicted time is at most this fraction of
#: the first backend's predicted time. In that case, the backend with the shortest time is selected. The margin allows
#: for prediction errors.
_CLEARLY_FASTER = 0.9


class _Decision(NamedTuple):
    """The plan of a pass, or the reason why the pass cannot run.

    Attributes:
        plan: Plan of the pass; ``None`` if the pass cannot run.
        refusal: Reason why the pass cannot run; empty if it can.
        lack: Reason why this build lacks kernels for the pass, if the slow portable backend therefore runs instead;
            ``None`` otherwise.
    """

    plan: Plan | None
    refusal: str = ""
    lack: str | None = None


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """A request, and the kind of device that runs it.

    Attributes:
        request: The request. If a call is sharded, its request describes the part of the call that one device runs.
        device: The kind of device that runs the request.
    """

    request: Request
    device: Device

    def plan(self, pass_: Pass) -> Plan:
        """Return the plan of a pass. Plans are cached.

        If the requested backend cannot run the backward pass, another backend is selected as if none was requested.

        Raises:
            ValueError: The requested backend cannot run the forward pass, no backend can run the pass, or the selected
                backend does not offer the requested tiles.
        """
        plan, refusal, lack = decided(self.request, self.device, pass_, backends.registered())
        if plan is None:
            raise ValueError(refusal)
        if lack is not None:
            warn_once(lack)
        return plan


def resolve(request: Request, device: Device, pass_: Pass) -> Plan:
    """Return the plan of one pass of a request on a device, as :meth:`DeviceCall.plan` does."""
    return DeviceCall(request, device).plan(pass_)


def device_calls(request: Request) -> Iterator[DeviceCall]:
    """Yield a :class:`DeviceCall` for each lowering target (kind of device) that can run the forward pass.

    If the request has tiles for the backward pass, the device must also be able to run the backward pass.

    Raises:
        ValueError: No kind of device can run the request. The message gives the reason for the default device.
    """
    error = None
    is_supported = False
    for device in lowering_targets().values():
        call = DeviceCall(request, device)
        try:
            call.plan("forward")
            if request.performance.backward_q_tile_shape is not None:
                call.plan("backward")
        except ValueError as refusal:
            error = error or refusal
        else:
            is_supported = True
            yield call
    if error is not None and not is_supported:
        raise error


@functools.lru_cache(maxsize=4096)
def decided(request: Request, device: Device, pass_: Pass, registered: Sequence[Backend]) -> _Decision:
    """Select the plan of a pass, or return the reason why it cannot run. Results are cached."""
    try:
        tuned = tables.measured(request, device, pass_)
        if tuned is not None and not tuned.is_default and staleness(tuned.plan, device) is None:
            request = tables.with_configuration(request, tuned.plan)
        problem, requested = request.problem, request.backend
        if requested is not None and pass_ == "backward":
            reason = backends.find(requested, problem.operator).rejection(problem, device, pass_)
            requested = requested if reason is None else None
        pair = request.performance.tiles(pass_)
        candidates = _candidates(problem, device, pass_, requested, registered, with_fallback=pair is not None)
        if len(candidates) > 1 and pair is None:
            times = [each.predicted_seconds(each.widened(problem, device, pass_), device, pass_) for each in candidates]
            candidates = [_fastest(candidates, times)]
        for backend in candidates:
            if pair is None or backend.offers(backend.widened(problem, device, pass_, pair), device, pass_, pair):
                is_default = requested is None and backend.capabilities.is_slow_fallback
                lack = missing_kernels_of(registered, problem, device, pass_) if is_default else None
                return _Decision(plan_with(backend, request, device, pass_), lack=lack)
        assert pair is not None
        return _Decision(None, _unknown_tiles(problem, pair, device, pass_, candidates[0]))
    except ValueError as error:
        return _Decision(None, str(error))


def staleness(plan: Plan, device: Device) -> str | None:
    """Return the reason why this build cannot run a plan from a table of tuned configurations; ``None`` if it can."""
    name, problem = str(plan.backend), plan.problem
    if name not in backends.names(problem.operator):
        return f"there is no backend {name}"
    backend = backends.by_id(plan.backend)
    reason = backend.rejection(problem, device, plan.pass_)
    if reason is None and not backend.offers(problem, device, plan.pass_, plan.tiles):
        reason = f"it does not offer the tiles {plan.tiles}"
    return None if reason is None else f"{name}: {reason}"


def _fastest(candidates: list[Backend], times: list[float | None]) -> Backend:
    """Return the first candidate, unless another one is predicted to be clearly faster; then return the fastest one.

    Args:
        candidates: The candidates, in order of preference.
        times: Predicted seconds of each candidate; ``None`` for a candidate without a cost model.
    """
    first, seconds = times[0], [math.inf if time is None else time for time in times]
    if first is None or min(seconds) > _CLEARLY_FASTER * first:
        return candidates[0]
    return candidates[seconds.index(min(seconds))]


def plan_with(backend: Backend, request: Request, device: Device, pass_: Pass) -> Plan:
    """Return the plan of a pass on a backend that can run it. The backend chooses options that the request omits."""
    performance, pair = request.performance, request.performance.tiles(pass_)
    problem = backend.widened(request.problem, device, pass_, pair)
    is_split = math.prod(request.parts) != 1
    # A device's part of the layout may begin at any token. So choose the tiles as if batch entries had separate
    # origins.
    tiled = dataclasses.replace(problem, own_origins=True) if is_split else problem
    if pair is None:
        performance = performance.with_tiles(pass_, backend.tile_pairs(tiled, device, pass_)[0])
    if backend.capabilities.is_plain_jax:  # JAX differentiates the forward pass, so a plan has the tiles of both passes
        other: Pass = "forward" if pass_ == "backward" else "backward"
        if performance.tiles(other) is None:
            performance = performance.with_tiles(other, backend.tile_pairs(tiled, device, other)[0])
    schedules = backend.capabilities.schedules.get(pass_, ())
    schedule = (performance.kernel_schedule or str(schedules[0])) if schedules else None
    performance = dataclasses.replace(performance, kernel_schedule=schedule)
    id_ = BackendId(backend.family, problem.operator)
    plan = Plan(problem, pass_, id_, device.platform, performance, request.precision)
    if pair is None and is_split:
        plan = retile_for_shard(plan, request.parts, backend.tile_pairs(tiled, device, pass_))
    return dataclasses.replace(plan, kernels=backend.kernels(problem, pass_, plan.tiles))


def rejections(problem: Problem, device: Device, pass_: Pass) -> dict[BackendId, str]:
    """Return all backends that cannot run a pass, each with the reason."""
    return {
        BackendId(backend.family, problem.operator): reason
        for backend in backends.registered()
        if (reason := backend.rejection(problem, device, pass_)) is not None
    }


@functools.lru_cache(maxsize=64)
def _for_device(device: Device, registered: Sequence[Backend]) -> tuple[Backend, ...]:
    """Return the backends that support a kind of device, in order of preference."""
    platforms = [(each, each.capabilities.platform) for each in registered]
    return tuple([each for each, platform in platforms if platform is None or platform.has(device)])


def _candidates(
    problem: Problem,
    device: Device,
    pass_: Pass,
    requested: str | None,
    registered: Sequence[Backend],
    *,
    with_fallback: bool,
) -> list[Backend]:
    """Return the backends that can run a pass, in order of preference.

    If another backend can run the pass, slow fallback backends are omitted, unless ``with_fallback`` is set. A
    requested backend is the only candidate.
    """
    if requested is not None:
        backend = backends.find(requested, problem.operator)
        reason = backend.rejection(problem, device, pass_)
        if reason is None:
            return [backend]
        unable = rejections(problem, device, pass_)
        able = [str(name) for name in backends.ids(problem.operator) if name not in unable]
        raise ValueError(
            f"backend={requested!r} cannot run the {pass_} pass of {problem.describe()} ({problem.dtype}) on {device}: "
            f"{reason}. Backends that can: {', '.join(able) or 'none'}"
        )
    wanted = enabled_families(registered)
    candidates: list[Backend] = []
    for backend in _for_device(device, registered):
        if candidates and backend.capabilities.is_slow_fallback and not with_fallback:
            continue
        if _runs_only_by_name(backend, problem) and backend.family not in wanted:
            continue
        if backend.rejection(problem, device, pass_) is None:
            candidates.append(backend)
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in rejections(problem, device, pass_).items())
        raise ValueError(f"no backend can run the {pass_} pass of {problem.describe()} on {device}: {reasons}")
    return candidates


def _unknown_tiles(problem: Problem, pair: TilePair, device: Device, pass_: Pass, backend: Backend) -> str:
    infix = "" if pass_ == "forward" else "bwd_"
    query_function = f"get_{infix}configs_for_{backend.capabilities.query_family or backend.family}_{problem.operator}"
    is_flat = problem.operator == "fmha"

    def text(tile: tuple[int, ...]) -> str:
        return str(tile[0] if is_flat else tile)

    examples = backend.tile_pairs(backend.widened(problem, device, pass_), device, pass_)[:5]
    offered = ", ".join(f"({text(query)}, {text(key_value)})" for query, key_value in examples)
    names = tile_arguments(problem.operator, pass_)
    tiles = ", ".join(f"{name}={text(tile)}" for name, tile in zip(names, pair, strict=True))
    return (
        f"{BackendId(backend.family, problem.operator)} does not offer {tiles} for {problem.describe()}; "
        f"some that it offers are {offered} (natten_jax.{query_function} lists all)"
    )


# All backends use the tiles. A backend also uses the performance arguments in `Capabilities.used_arguments`, and
# `kernel_schedule` if it has schedules. `Form.unused` lists the arguments that do not affect a particular plan. If a
# call gives an argument that is not used, the argument is reported as ignored.


class Choice(NamedTuple):
    """The pass that a performance argument affects, and the reason why a backend may ignore the argument.

    Attributes:
        pass_: The pass that the argument affects.
        lacking: Reason why backends without support ignore the argument. It is worded to follow "<backend> has".
    """

    pass_: Pass
    lacking: str


#: Performance arguments by name, without the tiles.
CHOICES: Mapping[str, Choice] = {
    "run_persistent_kernel": Choice("forward", "no persistent tile scheduling to turn off"),
    "kernel_schedule": Choice("forward", "no kernel schedules"),
    "backward_kv_splits": Choice("backward", "no choice of key/value splits"),
    "backward_use_xla_reduction": Choice("backward", "no separate kernel for row sums that XLA could replace"),
    "backward_deterministic": Choice("backward", "no deterministic gradients"),
    "memory_usage_preference": Choice("backward", "no scratch memory to trade for speed"),
}


def used_arguments_of(backend: Backend) -> frozenset[str]:
    """Return the names of the performance arguments that a backend uses.

    The names include arguments for a guarantee that always holds, such as deterministic gradients.
    """
    return frozenset(backend.capabilities.used_arguments) | (
        {"kernel_schedule"} if backend.capabilities.schedules else set()
    )


def ignored(plan: Plan, performance: Performance) -> dict[str, str]:
    """Return the performance arguments of a call that do not affect a plan, each with the reason.

    Args:
        plan: Plan of a pass.
        performance: The performance arguments of the call. Arguments that have their default value are not returned.

    Returns:
        A map from argument name to reason, without the arguments for the other pass. A reason is a clause that begins
        with the backend's name.
    """
    backend, reasons = backends.by_id(plan.backend), {}
    known, unused = used_arguments_of(backend), backend.form(plan).unused
    for name, choice in CHOICES.items():
        if choice.pass_ != plan.pass_ or getattr(performance, name) == getattr(_DEFAULTS, name):
            continue
        if name not in known:
            reasons[name] = f"{plan.backend} has {choice.lacking}{_others(name, plan.backend)}"
        elif name in unused:
            reasons[name] = f"{plan.backend} {unused[name]}"
    return reasons


def _others(name: str, here: BackendId) -> str:
    """Return text in parentheses that names the backends that use an argument; empty if no backend uses it."""
    able = [
        str(BackendId(each.family, here.operator)) for each in backends.registered() if name in used_arguments_of(each)
    ]
    if len(able) < 2:
        return f" ({able[0]} has)" if able else ""
    return f" ({', '.join(able[:-1])} and {able[-1]} have)"


_DEFAULTS = Performance()
