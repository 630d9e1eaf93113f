"""Predicted times of passes whose token dimensions are sharded over devices, and the choices that follow from them.

A halo consists of keys of other devices that a device's queries see. A device either waits for its halos, or overlaps
the halo exchange with attention to its own keys, and then processes each slab of a halo. For the same query-key pairs,
a sharded dimension needs more tiles than an unsharded dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from natten_jax.cost_model import small_windows
from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.simulation import predict
from natten_jax.cost_model.tiles import MOST_TILES, TimedTiles, count_tiles, has_longer_groups
from natten_jax.halo import Halo, bytes_received, halos_of, travel_order
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import Axis

#: Tokens ``[first, last)`` in coordinates of the global layout; the range may extend beyond the layout.
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between devices.

    Attributes:
        name: Name for reports.
        latency: Fixed overhead of an exchange, in seconds.
        byte: Seconds per byte that a device receives.
    """

    name: str
    latency: float
    byte: float

    def seconds(self, received: int) -> float:
        """Return the seconds of an exchange. ``received`` is the largest number of bytes that a device receives."""
        return self.latency + received * self.byte if received else 0.0


#: Two H200 on NVLink, both directions at once: 0.12 ms for 1 MB, 0.25 for 16, 0.44 for 64, 1.03 for 212, 1.59 for 425.
#: The linear model is within 21% of each measurement.
NVLINK = Link("NVLink", 1.4e-4, 1 / 280e9)

#: Link between hosts. Assumed, not measured: 80% of 400 Gbit/s for each device.
NETWORK = Link("network of 400 Gbit/s per device (assumed)", 2e-4, 1 / 40e9)

_DEVICES_OF_HOST = 8

#: Factor of the time of passes with any exchange, however small: links draw power for 50 ms after a transfer, which
#: reduces the clock of devices at their power limit. With 4 KB per call, two H200 took 11.92 instead of 11.68 ms, at
#: 1563 instead of 1591 MHz.
_LINKS_AWAKE_FACTOR = 1.02

#: Share of the multiprocessors that an exchange takes from concurrent kernels: 16 of 132 on H200, one per channel. With
#: 8 or 4 channels, the exchange takes twice or four times the time, and passes are not faster.
_TAKEN = 16 / 132

#: Maximum number of tile pairs that are tried for a shard, starting with those predicted to be fastest for the whole
#: layout. The shard's fastest pair was among the first 64 for a video whose height or width is sharded over two to
#: eight devices. Trying 64 pairs takes 0.2 seconds.
_PAIRS = 64

#: Tiles of a shard replace the tiles for the whole layout only if they take less than this share of the time.
_CLEARLY_FASTER = 0.95


def link_between(devices: int) -> Link:
    """Return the slowest link among this number of devices, with eight devices per host.

    Example:
        >>> from natten_jax.simulator import link_between
        >>> link_between(8).name
        'NVLink'
    """
    return NVLINK if devices <= _DEVICES_OF_HOST else NETWORK


class Visits(NamedTuple):
    """Numbers of outer tiles and of the inner tiles that they visit, along a dimension or in a layout."""

    outer: int
    inner: int


def _product(found: Iterable[Visits]) -> Visits:
    """Multiply the visits per dimension to get the visits of a layout."""
    return Visits(*map(math.prod, zip(*found, strict=True)))


def _dimensions(plan: Plan, halos: Sequence[Halo]) -> Iterator[tuple[Axis, Halo, tuple[int, int]]]:
    """Yield each dimension with its halo, and its extents of the query and key/value tile."""
    return zip(plan.problem.axes, halos, zip(*plan.tiles, strict=True), strict=True)


@functools.lru_cache(maxsize=4096)
def visits(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Count tiles along a dimension; with dilation, in all groups, as if all groups had the length of the first.

    Args:
        axis: The dimension.
        pass_: The pass. Outer tiles are query tiles in the forward pass, key/value tiles in the backward pass.
        tile: Extents of query and key/value tile.
        queries: Queries that are computed.
        keys: Keys that are computed.
    """
    is_forward, dilation, lengths = pass_ == "forward", axis.dilation, axis.lengths(0)
    queries, keys = ((first // dilation, -(-last // dilation)) for first, last in (queries, keys))
    (first, last), inner_range = (queries, keys) if is_forward else (keys, queries)
    outer_tile, inner_tile = tile if is_forward else tile[::-1]
    outer = np.arange(first, last, outer_tile)
    starts, ends = outer, np.minimum(outer + outer_tile, last) - 1
    is_inside: Any = True
    if axis.edges != "wrap":  # halos may extend beyond the layout
        last_token = lengths[0 if is_forward else 1] - 1
        is_inside = (starts <= last_token) & (ends >= 0)
        starts, ends = np.clip(starts, 0, last_token), np.clip(ends, 0, last_token)
    begin, _ = axis.bounds(starts, lengths, of_query=is_forward)
    _, stop = axis.bounds(ends, lengths, of_query=is_forward)
    if axis.edges != "wrap" or lengths[0] not in (queries[1] - queries[0], keys[1] - keys[0]):
        begin, stop = np.maximum(begin, inner_range[0]), np.minimum(stop, inner_range[1])
    inner = np.where(is_inside, np.maximum(-(-(stop - begin) // inner_tile), 0), 0)
    return Visits(dilation * len(outer), dilation * int(inner.sum()))


def visits_at_once(plan: Plan, halos: Sequence[Halo]) -> Visits:
    """Count tiles of a call with a device's keys and all halos, on the device that visits the most tiles."""
    found = []
    for axis, halo, tile in _dimensions(plan, halos):
        ranges = [((first, first + halo.part), halo.held(first)) for first in _starts_of_some_parts(halo)]
        found.append(max((visits(axis, plan.pass_, tile, *each) for each in ranges), key=lambda each: each.inner))
    return _product(found)


def slab_visits(axis: Axis, pass_: Pass, tile: tuple[int, int], halo: Halo) -> list[Visits]:
    """Count tiles of a shard's queries with its own keys, with its keys and the halo, and with the keys of each slab.

    The counts are from the shard that visits the most tiles.
    """
    per_shard = []
    for first in _starts_of_some_parts(halo):
        before, after = halo.before, halo.after
        if halo.changes_places:
            before, after = (before, 0) if first > 0 else (0, after)
        own = first, first + halo.part
        ranges = [(own, own), (own, (own[0] - before, own[1] + after))]
        for slab in halo.seen_slabs(axis):
            is_front = first > 0 if slab.is_front is None else slab.is_front
            query, key = (first + start for start in slab.starts(halo.part, is_front))
            ranges.append(((query, query + slab.queries), (key, key + slab.keys)))
        per_shard.append([visits(axis, pass_, tile, *each) for each in ranges])
    return max(per_shard, key=lambda each: sum(call.inner for call in (each[0], *each[2:])))


def _starts_of_some_parts(halo: Halo) -> list[int]:
    """Return the first tokens of shards at both ends and in the middle, one of which visits the most tiles."""
    return [halo.part * i for i in sorted({0, min(1, halo.parts - 1), halo.parts // 2, halo.parts - 1})]


@dataclasses.dataclass(frozen=True)
class SplitTime:
    """Predicted time of a pass that is sharded over devices.

    Attributes:
        devices: Number of devices.
        tiles: Query and key/value tile.
        received: Bytes of keys and values that a device receives, at most.
        compute: Seconds of computation and copies.
        exchange: Seconds of the exchange of keys, values and their gradients.
        exposed: Seconds of the exchange that are not hidden by computation.
    """

    devices: int
    tiles: TilePair
    received: int
    compute: float
    exchange: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def predict_split(plan: Plan, parts: Sequence[int], calibration: Calibration) -> SplitTime | None:
    """Predict the time of a pass whose token dimensions are sharded over devices.

    Example:
        A video, sharded along its width over eight Hopper GPUs of a host:

        >>> from natten_jax.plan.devices import Device
        >>> from natten_jax.plan.plan import Request
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
        plan: The plan of the pass on a device; its problem has the global layout, and the device's share of batch and
            heads.
        parts: Number of shards of each token dimension.
        calibration: The time model of the kernels.

    Returns:
        The prediction; ``None`` if the kernels were not calibrated for the problem.

    Raises:
        ValueError: A dimension is not divisible into this number of shards, or has more than ``2**20`` tiles.
    """
    halos = tuple(halo.evened() for halo in halos_of(plan.problem, parts))
    strategy = overlap_that_pays(plan, halos) or _halos_first(plan, halos)
    return _split_time(plan, halos, strategy, calibration)


@dataclasses.dataclass(frozen=True)
class HaloStrategy:
    """Calls and copies of a pass with halos.

    Attributes:
        calls: Tiles that each call visits, on the device that visits the most tiles.
        moved: Bytes that copies of halos, queries and results read or write.
        travel: Share of the halo traffic during each call.
    """

    calls: Sequence[Visits]
    moved: int
    travel: Sequence[float] = ()


def _halos_first(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy:
    """Return the strategy that receives all halos before it computes.

    Slabs are sliced, and concatenated with the device's local keys and values. These are copied during the exchange.
    """
    return HaloStrategy([visits_at_once(plan, halos)], 4 * _slab_bytes(plan.problem, halos))


def _by_keys(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy | None:
    """Return the strategy that processes a device's own keys first and then each slab; ``None`` if impossible."""
    if any(halo.is_gathered for halo in halos) or not any(halo.received for halo in halos):
        return None
    problem, copies = plan.problem, _copies(plan)
    dimensions = [slab_visits(axis, plan.pass_, tile, halo) for axis, halo, tile in _dimensions(plan, halos)]
    held, across = [halo.part for halo in halos], [own for own, *_ in dimensions]
    part, copied = math.prod(held), 0
    calls, slabs = [_product(across)], list[int]()
    for i in travel_order(halos):
        _, joined, *per_slab = dimensions[i]
        for slab, seen in zip(halos[i].seen_slabs(problem.axes[i]), per_slab, strict=True):
            copied += part // halos[i].part * slab.queries * copies
            slabs.append(slab.keys * math.prod(held) // held[i])
            calls.append(_product([*across[:i], seen, *across[i + 1 :]]))
        held[i], across[i] = held[i] + halos[i].received, joined
    # Bytes of a token's queries, or of its outputs if they are wider.
    width = max(problem.head_dim, problem.head_dim_v)
    token_bytes = problem.batch * problem.heads * width * problem.element.bytes
    # Keys and values are sliced and packed by the sender, and unpacked by the receiver.
    moved = copied * token_bytes + 5 * _slab_bytes(problem, halos)
    return HaloStrategy(calls, moved, [slab / sum(slabs) for slab in slabs])


def _slab_bytes(problem: Problem, halos: Sequence[Halo]) -> int:
    """Return the bytes of the keys and values that a device receives."""
    return bytes_received(problem, [halo.parts for halo in halos])


def _copies(plan: Plan) -> int:
    """Return the number of additional reads and writes of a query that sees a halo, or of its output.

    In the forward pass, a kernel that continues an earlier call reads the earlier output. Other kernels need sliced
    queries, and an in-place merge of the two outputs. The backward pass slices the queries, the saved outputs and their
    gradients; query gradients are zeroed, accumulated, converted and added; and the row sums of outputs times their
    gradients are computed again.
    """
    return 16 if plan.pass_ == "backward" else 1 if _is_continued(plan) else 5


def _is_continued(plan: Plan) -> bool:
    calibration = calibration_for(plan.backend.family)
    return plan.pass_ == "forward" and calibration is not None and calibration.merges(plan.problem)


def _split_time(
    plan: Plan, halos: Sequence[Halo], strategy: HaloStrategy, calibration: Calibration
) -> SplitTime | None:
    kernels = _kernel_seconds(plan, halos, strategy, calibration)
    if kernels is None:
        return None
    # Time of the small kernels before and after every call except the first: two or three kernels if a call continues
    # an earlier call; otherwise six or more, which slice queries and merge results.
    between = calibration.launch_of(plan.pass_) + (5e-6 if _is_continued(plan) else 2e-5)
    compute = kernels + (len(strategy.calls) - 1) * between + strategy.moved * calibration.byte

    received = _slab_bytes(plan.problem, halos)
    devices = math.prod(halo.parts for halo in halos)
    once = link_between(devices).seconds(received)
    inner = sum(call.inner for call in strategy.calls)
    exchange = once if plan.pass_ == "forward" else 2 * once
    # A slab travels during the call before the call that needs it.
    pairs = zip(strategy.travel, strategy.calls, strict=False)
    hidden = sum(min(share * once, kernels * call.inner / inner) for share, call in pairs)
    if received:
        compute = compute * _LINKS_AWAKE_FACTOR + hidden * _TAKEN
    return SplitTime(devices, plan.tiles, received, compute, exchange, exchange - hidden)


def _kernel_seconds(
    plan: Plan, halos: Sequence[Halo], strategy: HaloStrategy, calibration: Calibration
) -> float | None:
    """Return the seconds of the kernels of all calls; ``None`` if they were not calibrated for the problem."""
    problem, pass_ = plan.problem, plan.pass_
    one = visits_at_once(plan, [Halo(axis.kv_extent, 1, 0, 0) for axis in problem.axes])  # a device with all tokens
    inner_share = sum(call.inner for call in strategy.calls) / one.inner
    if small_windows.is_for(calibration, problem, pass_, plan.tiles):
        as_parts = dataclasses.replace(problem, own_origins=True)  # without rings
        seconds = small_windows.seconds(calibration, as_parts, pass_, plan.tiles)
        return None if seconds is None else seconds * inner_share
    kernel = calibration.kernel(problem, plan.tiles, pass_)
    if kernel is None:
        return None
    whole = count_tiles(problem, plan.tiles, pass_, placement="anchored", kernel=kernel).tiles
    outer_share = sum(call.outer for call in strategy.calls) / one.outer
    # `predict` uses only the size of the layout, for the bytes of inputs and results.
    local = dataclasses.replace(problem, axes=tuple(Axis(halo.part, halo.part, 1) for halo in halos))
    tiles = TimedTiles(whole.outer * outer_share, *(each * inner_share for each in whole[1:]))
    return float(predict(local, tiles, pass_, kernel, calibration))


@functools.lru_cache(maxsize=1024)
def overlap_that_pays(plan: Plan, halos: tuple[Halo, ...]) -> HaloStrategy | None:
    """Return the strategy that overlaps computation and halo exchange; ``None`` if waiting for the halos is faster.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: The halo of each token dimension.
    """
    if has_longer_groups(plan.problem, MOST_TILES):  # too long to simulate
        return None
    halos = tuple(halo.evened() for halo in halos)
    by_keys = _by_keys(plan, halos)
    return by_keys if by_keys is not None and gains(plan, halos, by_keys) else None


def gains(plan: Plan, halos: Sequence[Halo], by_keys: HaloStrategy) -> bool:
    """Return True if overlapping computation and halo exchange takes less time than waiting for the halos.

    All callers decide with this function. It returns False for kernels without predicted times.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: The halo of each token dimension.
        by_keys: The strategy that overlaps.
    """
    calibration = calibration_for(plan.backend.family)
    if calibration is None:
        return False
    meanwhile = _split_time(plan, halos, by_keys, calibration)
    first = _split_time(plan, halos, _halos_first(plan, halos), calibration)
    return meanwhile is not None and first is not None and meanwhile.seconds < first.seconds


def retile_for_part(plan: Plan, parts: tuple[int, ...], pairs: Sequence[TilePair]) -> Plan:
    """Return the plan with the tiles that are fastest for a device's shard of the layout, including its halos.

    They may differ from the fastest tiles for the whole layout: in a shard of ten columns, the second tile of eight
    columns has six idle columns, and windows are cut off at the ends of the shard and its halos.

    Args:
        plan: The plan of the pass, with the tiles for the whole layout.
        parts: Number of shards of each token dimension.
        pairs: Query and key/value tiles that the backend offers, sorted by predicted time for the whole layout.

    Returns:
        The unchanged plan if other tiles are not clearly faster, the kernels were not calibrated, or the layout is too
        long to simulate.
    """
    is_too_long = has_longer_groups(plan.problem, MOST_TILES)
    return plan if is_too_long else _fastest(plan, parts, tuple(pairs[:_PAIRS]))


@functools.lru_cache(maxsize=1024)
def _fastest(plan: Plan, parts: tuple[int, ...], pairs: tuple[TilePair, ...]) -> Plan:
    calibration = calibration_for(plan.backend.family)
    if calibration is None:
        return plan

    def seconds(plan: Plan) -> float:
        split = predict_split(plan, parts, calibration)
        return math.inf if split is None else split.seconds

    whole = seconds(plan)
    if whole == math.inf:
        return plan
    others = [dataclasses.replace(plan, performance=plan.performance.with_tiles(plan.pass_, pair)) for pair in pairs]
    fastest = min(others, key=seconds)
    return fastest if seconds(fastest) < _CLEARLY_FASTER * whole else plan
