"""What the exchange of halos takes, how much of it passes hide behind what they compute, and what they take in all."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from natten_jax.cost.calibration import Calibration, calibration_for
from natten_jax.cost.predict import predict
from natten_jax.cost.simulation import simulate
from natten_jax.cost.tile_counts import TimedTiles, count_tiles
from natten_jax.halo import Division, Halo, bytes_received, division_of, halos_of, key_value_bytes
from natten_jax.plan import Plan
from natten_jax.problem import ELEMENT_BYTES, Axis, Problem


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
        """Of an exchange in which the device that receives most receives so many bytes."""
        return self.latency + received * self.byte if received else 0.0


#: Two H200 on NVLink, both directions at once: 0.12 ms for 1 MB, 0.25 for 16, 0.44 for 64, 1.03 for 212, 1.59 for 425.
#: This line is within 21% of each.
NVLINK = Link("NVLink", 1.4e-4, 1 / 280e9)

#: Between hosts; an assumption, which nothing was measured for: 80% of 400 Gbit/s for each device.
NETWORK = Link("network of 400 Gbit/s per device (assumed)", 2e-4, 1 / 40e9)

_DEVICES_OF_HOST = 8


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
        received: Bytes of keys and values that the device which receives most receives.
        compute: Seconds that it computes and copies.
        exchange: Seconds that keys, values and their gradients travel.
        exposed: How much of these nothing is computed in.
    """

    devices: int
    received: int
    compute: float
    exchange: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Of the pass."""
        return self.compute + self.exposed


def predict_split(plan: Plan, parts: Sequence[int], calibration: Calibration) -> SplitTime | None:
    """Predict a pass whose token dimensions are split over devices.

    Example:
        A video, split along its width over eight Hopper GPUs of a host:

        >>> from natten_jax.devices import Device
        >>> from natten_jax.resolve import Request, resolve
        >>> from natten_jax.simulator import calibration_for, predict_split, problem_of
        >>> video = problem_of((32, 48, 80), 24, 8, heads=24, head_dim=128, dtype="bfloat16")
        >>> plan = resolve(Request(video), Device("cuda", (9, 0), is_present=False), "forward")
        >>> split = predict_split(plan, (1, 1, 8), calibration_for("hopper"))
        >>> split.received // 10**6, split.exposed <= split.exchange  # megabytes; seconds
        (528, True)

    Args:
        plan: Of the pass on one device; its problem has the global layout, and a device's share of batch and heads.
        parts: Into how many parts each token dimension is split.
        calibration: The time model of its kernels.

    Returns:
        The prediction; ``None`` where these kernels were not calibrated for the problem.

    Raises:
        ValueError: A dimension does not consist of as many equal parts.
    """
    problem, pass_ = plan.problem, plan.pass_
    halos = halos_of(problem, parts)
    kernel = calibration.kernel(problem, plan.tiles, pass_)
    if kernel is None:
        return None
    whole = count_tiles(problem, plan.tiles, pass_, placement="anchored", kernel=kernel).tiles
    outer_share = inner_share = 1.0
    for axis, halo, *tile in zip(problem.axes, halos, *plan.tiles, strict=True):
        tiles = functools.partial(_tiles, dilation=axis.dilation)
        of_queries = tiles(halo.part, tile=tile[0]) / tiles(halo.extent, tile=tile[0])
        of_keys = tiles(halo.part + halo.received, tile=tile[1]) / tiles(halo.extent, tile=tile[1])
        # A device has few queries, and visits as many fewer tiles. Backwards it does so from all keys that it gets.
        inner_share *= of_queries
        outer_share *= of_queries if pass_ == "forward" else of_keys
    # Of the layout nothing but its size counts here.
    local = dataclasses.replace(problem, axes=tuple(Axis(halo.part, halo.part, 1) for halo in halos))
    of_part = TimedTiles(whole.outer * outer_share, *(each * inner_share for each in whole[1:]))
    compute = float(predict(local, of_part, pass_, kernel, calibration))

    devices, received = math.prod(parts), bytes_received(problem, parts)
    once = link_between(devices).seconds(received)
    exchange = once if pass_ == "forward" else 2 * once
    byte = calibration.byte
    compute += _joined_bytes(problem, halos) * byte
    overlap = overlap_that_pays(plan, halos)
    if overlap is not None:
        compute += overlap.lost * compute + overlap.moved * byte + overlap.calls * calibration.launch_of(pass_)
        meanwhile = min(overlap.share * compute, once * _HIDDEN_BY[pass_])
    else:  # own keys and values are copied to where their halos go
        meanwhile = 2 * math.prod(halo.part for halo in halos) * key_value_bytes(problem) * byte
    # The halos of one dimension travel meanwhile: those of others take along what it brought.
    widths = [halo.received / halo.part for halo in halos]
    first = min(max(widths) / (math.prod(1 + width for width in widths) - 1), 1.0) if received else 0.0
    return SplitTime(devices, received, compute, exchange, exchange - min(once * first, meanwhile))


def _tiles(tokens: int, dilation: int, tile: int) -> int:
    """Tiles of all dilation groups of so many tokens."""
    length, longer = divmod(tokens, dilation)
    return longer * -(-(length + 1) // tile) + (dilation - longer) * -(-length // tile)


def _token_bytes(problem: Problem) -> int:
    """Of a query, or its output if that is wider, over batch and heads."""
    return problem.batch * problem.heads * max(problem.head_dim, problem.head_dim_v) * ELEMENT_BYTES[problem.dtype]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What it takes to compute while halos travel, beside a pass that has them before it computes anything.

    Attributes:
        share: How much of the pass is computed meanwhile.
        calls: How many more calls there are.
        moved: Bytes that are read or written more often.
        lost: How much longer the kernels take, of the pass.
        division: Of the queries, in a forward pass.
    """

    share: float
    calls: int
    moved: int
    lost: float = 0.0
    division: Division | None = None


#: How much longer a halo's pairs of queries and keys take in a call of their own: tiles at their edges are halves. On
#: two H200, backward passes of a video of 30x48x80 tokens took 2 to 4% longer in all.
_LOST_IN_CALLS = 0.35

#: How much of an exchange is over before kernels end that are launched after it: the kernels of both want all registers
#: of a multiprocessor. Traces on two H200 showed 26 to 41% forwards, and 13 to 68% backwards, where more kernels come.
_HIDDEN_BY = {"forward": 0.3, "backward": 0.65}


@functools.lru_cache(maxsize=1024)
def overlap_that_pays(plan: Plan, halos: tuple[Halo, ...]) -> Overlap | None:
    """How a pass gains by computing while halos travel; ``None`` where it does not.

    Args:
        plan: Of the pass, whose problem has the global layout.
        halos: One for each token dimension.
    """
    if plan.pass_ == "forward":
        division = division_of(plan.problem, halos, plan.tiles[0])
        overlap = None if division is None else _by_queries(plan.problem, halos, division)
    else:
        overlap = _by_keys(plan.problem, halos)
    return overlap if overlap is not None and gains(plan, halos, overlap) else None


def division_that_pays(plan: Plan, halos: tuple[Halo, ...]) -> Division | None:
    """How a forward pass divides its queries to compute while halos travel; ``None`` where it gains nothing by that."""
    overlap = overlap_that_pays(plan, halos)
    return None if overlap is None else overlap.division


def dividing_keys_pays(plan: Plan, halos: tuple[Halo, ...]) -> bool:
    """Whether a backward pass gains by taking a device's own keys while the others travel."""
    return overlap_that_pays(plan, halos) is not None


def _by_queries(problem: Problem, halos: Sequence[Halo], division: Division) -> Overlap:
    """Of a forward pass that takes the queries first that need nobody else's keys."""
    part = math.prod(halo.part for halo in halos)
    borders = [box for sides in division.borders for box in sides if box is not None]
    keys = 0
    for box in borders:
        ranges = zip(halos, problem.axes, box, strict=True)
        keys += math.prod(last - first for first, last in (halo.keys_of(axis, each) for halo, axis, each in ranges))
    # Queries are cut and outputs joined, each read and written; so are the borders' keys, in place of all keys.
    moved = 4 * part * _token_bytes(problem) + 2 * keys * key_value_bytes(problem) - _joined_bytes(problem, halos)
    share = math.prod(last - first for first, last in division.interior) / part
    return Overlap(share, len(borders), moved, division=division)


def _by_keys(problem: Problem, halos: Sequence[Halo]) -> Overlap | None:
    """Of a backward pass that takes a device's own keys first, and then each halo; ``None`` where that cannot be."""
    if any(halo.is_gathered for halo in halos) or not any(halo.received for halo in halos):
        return None
    part = math.prod(halo.part for halo in halos)
    calls, copied, lost = 0, 0, 0.0
    for axis, halo in zip(problem.axes, halos, strict=True):
        begin, end = halo.borders(axis)
        for seeing, keys in ((begin, halo.before), (halo.part - end, halo.after)):
            if not seeing:
                continue
            calls += 1
            # Where only some queries see a halo, these, their outputs and gradients of these are cut. Gradients of
            # theirs are cleared, added up, converted and added, and outputs are multiplied with their gradients again.
            copied += part // halo.part * seeing * (10 + (6 if seeing < halo.part else 0))
            # Of these queries' windows, on average half as much as the halo is long.
            lost += _LOST_IN_CALLS * seeing / halo.part * min(keys / (2 * axis.kernel_size), 1.0)
    own = math.prod(halo.part / (halo.part + halo.received) for halo in halos)
    moved = copied * _token_bytes(problem) - _joined_bytes(problem, halos)
    return Overlap(own, calls, moved, lost)


def gains(plan: Plan, halos: Sequence[Halo], overlap: Overlap) -> bool:
    """Whether computing while halos travel hides more of their time than it costs.

    The one place where that is decided, for kernels whose times are known; others gain nothing.

    Args:
        plan: Of the pass, whose problem has the global layout.
        halos: One for each token dimension.
        overlap: What it takes.
    """
    calibration = calibration_for(plan.backend.family)
    problem, devices = plan.problem, math.prod(halo.parts for halo in halos)
    seconds = None
    if calibration is not None:
        seconds = simulate(problem, plan.tiles, plan.pass_, calibration=calibration).seconds
    if calibration is None or seconds is None:
        return False
    exchange = link_between(devices).seconds(bytes_received(problem, [halo.parts for halo in halos]))
    alone = seconds / devices
    cost = overlap.calls * calibration.launch_of(plan.pass_) + overlap.moved * calibration.byte + overlap.lost * alone
    return min(exchange * _HIDDEN_BY[plan.pass_], overlap.share * alone) > cost


def _joined_bytes(problem: Problem, halos: Sequence[Halo]) -> int:
    """Read and written where keys and values are joined with their halos."""
    held = math.prod(halo.part + halo.received for halo in halos)
    return 2 * held * key_value_bytes(problem) if any(halo.received for halo in halos) else 0
