"""What the exchange of halos takes, how much of it passes hide behind what they compute, and what they take in all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from natten_jax.cost import small_windows
from natten_jax.cost.calibration import Calibration, calibration_for
from natten_jax.cost.local_tiles import Visits, visits_at_once, visits_by_keys, visits_of_one
from natten_jax.cost.predict import predict
from natten_jax.cost.tile_counts import TimedTiles, count_tiles
from natten_jax.halo import Halo, bytes_received, halos_of, travel_order
from natten_jax.performance import TilePair
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import Axis


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        name: For people.
        latency: Seconds that an exchange takes, whatever its size.
        byte: Seconds per byte that a device receives.
    """

    name: str
    latency: float
    byte: float

    def seconds(self, received: int) -> float:
        """Seconds of an exchange in which the device that receives most receives so many bytes."""
        return self.latency + received * self.byte if received else 0.0


#: Two H200 on NVLink, both directions at once: 0.12 ms for 1 MB, 0.25 for 16, 0.44 for 64, 1.03 for 212, 1.59 for 425.
#: This line is within 21% of each.
NVLINK = Link("NVLink", 1.4e-4, 1 / 280e9)

#: Between hosts; an assumption, which nothing was measured for: 80% of 400 Gbit/s for each device.
NETWORK = Link("network of 400 Gbit/s per device (assumed)", 2e-4, 1 / 40e9)

_DEVICES_OF_HOST = 8

#: How much longer passes take once devices exchange anything at all: links that are awake, which they stay for 50 ms,
#: take power from devices at their limit. With 4 KB per call, two H200 took 11.92 instead of 11.68 ms, at 1563 instead
#: of 1591 MHz.
_OF_LINKS_AWAKE = 1.02

#: The share of multiprocessors that an exchange keeps from what runs meanwhile: 16 of 132 on H200, a channel each.
#: With 8 or 4 of them it takes twice and four times as long, and passes as long as before.
_TAKEN = 16 / 132


def link_between(devices: int) -> Link:
    """The slowest link between so many devices, eight of which a host has.

    Example:
        >>> from natten_jax.simulator import link_between
        >>> link_between(8).name
        'NVLink'
    """
    return NVLINK if devices <= _DEVICES_OF_HOST else NETWORK


@dataclasses.dataclass(frozen=True)
class SplitTime:
    """What a pass takes that is split over devices.

    Attributes:
        devices: How many.
        tiles: Query and key/value tile.
        received: Bytes of keys and values that the device which receives most receives.
        compute: Seconds that it computes and copies.
        exchange: Seconds that keys, values and their gradients travel.
        exposed: How much of these nothing is computed in.
    """

    devices: int
    tiles: TilePair
    received: int
    compute: float
    exchange: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return self.compute + self.exposed


def predict_split(plan: Plan, parts: Sequence[int], calibration: Calibration) -> SplitTime | None:
    """Predict a pass whose token dimensions are split over devices.

    Example:
        A video, split along its width over eight Hopper GPUs of a host:

        >>> from natten_jax.plan.devices import Device
        >>> from natten_jax.plan.request import Request
        >>> from natten_jax.backends.select import resolve
        >>> from natten_jax.simulator import calibration_for, predict_split, problem_of
        >>> video = problem_of((32, 48, 80), 24, 8, heads=24, head_dim=128, dtype="bfloat16")
        >>> parts = 1, 1, 8
        >>> hopper = Device("cuda", (9, 0), is_present=False)
        >>> plan = resolve(Request(video, parts=parts), hopper, "forward")
        >>> split = predict_split(plan, parts, calibration_for("hopper"))
        >>> split.received // 10**6, split.exposed <= split.exchange  # megabytes; seconds
        (528, True)

    Args:
        plan: The one of the pass on one of the devices; its problem has the global layout, and the device's share of
            batch and heads.
        parts: Into how many parts each token dimension is split.
        calibration: The time model of its kernels.

    Returns:
        The prediction; ``None`` where these kernels were not calibrated for the problem.

    Raises:
        ValueError: A dimension does not consist of as many equal parts.
    """
    halos = tuple(halo.evened() for halo in halos_of(plan.problem, parts))
    way = overlap_that_pays(plan, halos) or _halos_first(plan, halos)
    return _split_time(plan, halos, way, calibration)


def _split_time(plan: Plan, halos: Sequence[Halo], way: HaloStrategy, calibration: Calibration) -> SplitTime | None:
    problem, pass_ = plan.problem, plan.pass_
    kernels = _kernel_seconds(plan, halos, way, calibration)
    if kernels is None:
        return None
    more_calls = len(way.calls) - 1
    compute = kernels + more_calls * (calibration.launch_of(pass_) + _between(plan)) + way.moved * calibration.byte

    received = _slab_bytes(problem, halos)
    devices = math.prod(halo.parts for halo in halos)
    once = link_between(devices).seconds(received)
    inner = sum(call.inner for call in way.calls)
    exchange = once if pass_ == "forward" else 2 * once
    # A slab travels while the call before its own runs.
    hidden = sum(
        min(share * once, kernels * call.inner / inner) for share, call in zip(way.travel, way.calls, strict=False)
    )
    if received:
        compute = compute * _OF_LINKS_AWAKE + hidden * _TAKEN
    return SplitTime(devices, plan.tiles, received, compute, exchange, exchange - hidden)


def _kernel_seconds(plan: Plan, halos: Sequence[Halo], way: HaloStrategy, calibration: Calibration) -> float | None:
    """Seconds that the kernels of all calls compute; ``None`` where they were not calibrated for the problem."""
    problem, pass_ = plan.problem, plan.pass_
    one, inner = visits_of_one(plan), sum(call.inner for call in way.calls)
    inner_share = inner / one.inner
    if small_windows.is_for(calibration, problem, pass_, plan.tiles):
        as_parts = dataclasses.replace(problem, own_origins=True)  # which have no rings, either
        whole_seconds = small_windows.seconds(
            calibration.family, as_parts, pass_, plan.tiles, calibration.compute_capability
        )
        return None if whole_seconds is None else whole_seconds * inner_share
    kernel = calibration.kernel(problem, plan.tiles, pass_)
    if kernel is None:
        return None
    whole = count_tiles(problem, plan.tiles, pass_, placement="anchored", kernel=kernel).tiles
    outer_share = sum(call.outer for call in way.calls) / one.outer
    # Nothing but the layout's size counts here.
    local = dataclasses.replace(problem, axes=tuple(Axis(halo.part, halo.part, 1) for halo in halos))
    tiles = TimedTiles(whole.outer * outer_share, *(each * inner_share for each in whole[1:]))
    return float(predict(local, tiles, pass_, kernel, calibration))


def _token_bytes(problem: Problem) -> int:
    """Bytes of a token's queries, or of its outputs if they are wider, over batch and heads."""
    return problem.batch * problem.heads * max(problem.head_dim, problem.head_dim_v) * problem.element.bytes


@dataclasses.dataclass(frozen=True)
class HaloStrategy:
    """What it takes to get halos to where a pass reads them.

    Attributes:
        calls: Tiles that its calls visit, on the device that visits most.
        moved: Bytes that are read or written for it.
        travel: The share of what travels while one of the calls runs that travels with each.
    """

    calls: Sequence[Visits]
    moved: int
    travel: Sequence[float] = ()


def _between(plan: Plan) -> float:
    """Seconds that small kernels in front of a further call, and behind it, take, whatever they copy.

    They work out where it is, which are two or three; others, six or more, cut queries and merge results.
    """
    return 5e-6 if _is_continued(plan) else 2e-5


def _copies(plan: Plan) -> int:
    """How often a query that sees a halo, or its output, is read or written more.

    Forwards, a kernel that continues another reads earlier output. Else queries are cut, and the halo's output is
    merged with the other one, in its place. Backwards, saved outputs and gradients of these are cut, too; gradients of
    queries are cleared, added up, converted and added, and outputs are multiplied with their gradients again.
    """
    return 16 if plan.pass_ == "backward" else 1 if _is_continued(plan) else 5


def _is_continued(plan: Plan) -> bool:
    calibration = calibration_for(plan.backend.family)
    return plan.pass_ == "forward" and calibration is not None and calibration.merges(plan.problem)


@functools.lru_cache(maxsize=1024)
def overlap_that_pays(plan: Plan, halos: tuple[Halo, ...]) -> HaloStrategy | None:
    """How a pass computes while halos travel; ``None`` where it had better have them first.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: One for each token dimension.
    """
    halos = tuple(halo.evened() for halo in halos)
    by_keys = _by_keys(plan, halos)
    return by_keys if by_keys is not None and gains(plan, halos, by_keys) else None


def gains(plan: Plan, halos: Sequence[Halo], by_keys: HaloStrategy) -> bool:
    """Whether computing while halos travel takes less time than to have them first.

    The one place where that is decided, for kernels whose times are known; others gain nothing.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: One for each token dimension.
        by_keys: The pass that computes meanwhile.
    """
    calibration = calibration_for(plan.backend.family)
    if calibration is None:
        return False
    ways = by_keys, _halos_first(plan, halos)
    meanwhile, first = (_split_time(plan, halos, way, calibration) for way in ways)
    return meanwhile is not None and first is not None and meanwhile.seconds < first.seconds


def _halos_first(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy:
    """A pass that has all halos before it computes anything.

    Slabs are cut, and put beside a device's own keys and values, which are copied there while they travel.
    """

    return HaloStrategy([visits_at_once(plan, halos)], 4 * _slab_bytes(plan.problem, halos))


def _by_keys(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy | None:
    """A pass that takes a device's own keys first, and then each halo; ``None`` where that cannot be."""
    if any(halo.is_gathered for halo in halos) or not any(halo.received for halo in halos):
        return None
    problem = plan.problem
    copied, slabs = 0, []
    held = [halo.part for halo in halos]
    part = math.prod(held)
    for i in travel_order(halos):
        across = math.prod(held) // held[i]
        for slab in halos[i].seen_slabs(problem.axes[i]):
            copied += part // halos[i].part * slab.queries * _copies(plan)
            slabs.append(slab.keys * across)
        held[i] += halos[i].received
    # Keys and values are cut and put together, and taken apart where they arrive.
    moved = copied * _token_bytes(problem) + 5 * _slab_bytes(problem, halos)
    return HaloStrategy(visits_by_keys(plan, halos), moved, [slab / sum(slabs) for slab in slabs])


def _slab_bytes(problem: Problem, halos: Sequence[Halo]) -> int:
    """Bytes of the keys and values that a device receives."""
    return bytes_received(problem, [halo.parts for halo in halos])
