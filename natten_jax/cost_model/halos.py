"""Predicted times of passes whose token dimensions are sharded over devices, and choices based on these times.

A halo consists of the keys on other devices that the queries of a shard see. A slab is the part of a halo that one
other device sends. There are two strategies. In the first one, a device receives all halos before it computes. In the
second one, a device overlaps the exchange with computation: it processes its own keys first, and then one slab at a
time.

For the same query-key pairs, a sharded dimension has more tiles than an unsharded one, because each shard and each slab
is divided into tiles separately.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from natten_jax.arguments.names import check_types
from natten_jax.cost_model import small_windows
from natten_jax.cost_model.calibration import Calibration, calibration_for
from natten_jax.cost_model.simulation import predict
from natten_jax.cost_model.tiles import MAX_TILES, TimedTiles, count_tiles, has_longer_groups
from natten_jax.halo import Halo, bytes_received, halos_of, travel_order
from natten_jax.performance import Pass, TilePair
from natten_jax.plan.plan import Plan
from natten_jax.problem import Problem
from natten_jax.windows import Axis

#: Range of tokens, ``[first, end)``, in coordinates of the global layout. It may extend beyond the layout.
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Link:
    """A model of the connection between devices.

    Attributes:
        name: Name of the link in reports.
        latency: Fixed overhead of an exchange, in seconds.
        byte: Seconds per byte that a device receives.
    """

    name: str
    latency: float
    byte: float

    def seconds(self, received: int) -> float:
        """Return the seconds of an exchange in which each device receives at most ``received`` bytes."""
        return self.latency + received * self.byte if received else 0.0


#: An exchange between two H200 over NVLink, in both directions at once, took 0.12 ms for 1 MB, 0.25 ms for 16 MB, 0.44
#: ms for 64 MB, 1.03 ms for 212 MB and 1.59 ms for 425 MB. The linear model is within 21% of each measurement.
NVLINK = Link("NVLink", 1.4e-4, 1 / 280e9)

#: Link between hosts. Its coefficients are assumed, not measured: each device reaches 80% of 400 Gbit/s.
NETWORK = Link("network of 400 Gbit/s per device (assumed)", 2e-4, 1 / 40e9)

_DEVICES_OF_HOST = 8

#: Factor on the computation time of a pass if devices exchange data, however little. Links draw power for 50 ms after a
#: transfer, which lowers the clock of devices at their power limit. On two H200, an exchange of 4 KB per call lowered
#: the clock from 1591 to 1563 MHz, and calls took 11.92 ms instead of 11.68 ms.
_LINKS_AWAKE_FACTOR = 1.02

#: Fraction of the multiprocessors that an exchange occupies, so that concurrent kernels cannot use them. On an H200, it
#: occupies 16 of 132, one per channel. Compared with 16 channels, the exchange takes twice as long with 8 channels, and
#: four times as long with 4 channels. Passes are not faster with fewer channels.
_TAKEN = 16 / 132

#: Maximum number of tile pairs that are tried for a shard. The pairs that are predicted to be the fastest for the whole
#: layout are tried first. In tests with a video whose height or width was sharded over two to eight devices, the
#: shard's fastest pair was among the first 64. Trying 64 pairs takes 0.2 seconds.
_PAIRS = 64

#: Ratio of two predicted times of a shard: with another tile pair, and with the tile pair for the whole layout. The
#: other pair is used only if the ratio is less than this number.
_CLEARLY_FASTER = 0.95


@check_types
def link_between(devices: int) -> Link:
    """Return the slowest link among ``devices`` devices, if each host has eight devices.

    Example:
        >>> from natten_jax.simulator import link_between
        >>> link_between(8).name
        'NVLink'
    """
    return NVLINK if devices <= _DEVICES_OF_HOST else NETWORK


class Visits(NamedTuple):
    """Number of outer tiles, and number of inner tiles that they visit, along one dimension or in a whole layout.

    A thread block owns an outer tile and loops over inner tiles (``natten_jax.cost_model.tiles``).
    """

    outer: int
    inner: int


def _product(counts: Iterable[Visits]) -> Visits:
    """Multiply the counts of all dimensions to get the counts of a layout."""
    return Visits(*map(math.prod, zip(*counts, strict=True)))


def _dimensions(plan: Plan, halos: Sequence[Halo]) -> Iterator[tuple[Axis, Halo, tuple[int, int]]]:
    """Yield each token dimension with its halo, and with the extents of the query and key/value tile along it."""
    return zip(plan.problem.axes, halos, zip(*plan.tiles, strict=True), strict=True)


@functools.lru_cache(maxsize=4096)
def visits(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Count tiles along a dimension, in all dilation groups.

    All dilation groups are counted as if they had as many tokens as the first one.

    Args:
        axis: The dimension.
        pass_: The pass. Outer tiles are query tiles in the forward pass, key/value tiles in the backward pass.
        tile: Extents of the query tile and of the key/value tile along the dimension.
        queries: Range of the queries that the pass processes.
        keys: Range of the keys that the pass processes.
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
    """Count the tiles of one call over a shard's keys and all its halos, for the shard that visits the most tiles."""
    counts = []
    for axis, halo, tile in _dimensions(plan, halos):
        ranges = [((first, first + halo.part), halo.held(first)) for first in _starts_of_some_parts(halo)]
        counts.append(max((visits(axis, plan.pass_, tile, *each) for each in ranges), key=lambda each: each.inner))
    return _product(counts)


def slab_visits(axis: Axis, pass_: Pass, tile: tuple[int, int], halo: Halo) -> list[Visits]:
    """Count the tiles of several calls along one dimension, for the shard that visits the most tiles.

    The first count is for a call over the shard's own keys, the second for a call over its own keys and its halos. Each
    remaining count is for a call over one slab, with only the queries that see the slab.
    """
    per_shard = []
    for first in _starts_of_some_parts(halo):
        before, after = halo.before, halo.after
        if halo.changes_places:
            before, after = (before, 0) if first > 0 else (0, after)
        local = first, first + halo.part
        ranges = [(local, local), (local, (local[0] - before, local[1] + after))]
        for slab in halo.seen_slabs(axis):
            is_front = first > 0 if slab.is_front is None else slab.is_front
            query, key = (first + start for start in slab.starts(halo.part, is_front))
            ranges.append(((query, query + slab.queries), (key, key + slab.keys)))
        per_shard.append([visits(axis, pass_, tile, *each) for each in ranges])
    return max(per_shard, key=lambda each: sum(call.inner for call in (each[0], *each[2:])))


def _starts_of_some_parts(halo: Halo) -> list[int]:
    """Return the first tokens of four shards: the first, second, middle and last. One of them visits the most tiles."""
    return [halo.part * i for i in sorted({0, min(1, halo.parts - 1), halo.parts // 2, halo.parts - 1})]


@dataclasses.dataclass(frozen=True)
class SplitTime:
    """Predicted time of a pass that is sharded over devices.

    Attributes:
        devices: Number of devices.
        tiles: Query tile and key/value tile.
        received: Maximum number of bytes of keys and values that a device receives.
        compute: Seconds of computation and of copies within a device.
        exchange: Seconds of the exchange of keys and values, and in the backward pass also of their gradients.
        exposed: Seconds of the exchange that do not overlap with computation.
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


@check_types
def predict_split(plan: Plan, parts: Sequence[int], calibration: Calibration) -> SplitTime | None:
    """Predict the time of a pass whose token dimensions are sharded over devices.

    Example:
        The width of a video is sharded over eight Hopper GPUs of one host:

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
        plan: The plan of the pass on a device. Its problem has the token dimensions of the global layout, but only the
            batch entries and heads of the device.
        parts: Number of shards of each token dimension.
        calibration: The time model of the backend's kernels.

    Returns:
        The predicted time; ``None`` if the time model does not include kernels for the problem and the tiles.

    Raises:
        ValueError: A dimension cannot be divided into this number of equal shards, or has more than ``2**20`` tiles.
    """
    halos = tuple(halo.evened() for halo in halos_of(plan.problem, parts))
    strategy = profitable_overlap(plan, halos) or _halos_first(plan, halos)
    return _split_time(plan, halos, strategy, calibration)


@dataclasses.dataclass(frozen=True)
class HaloStrategy:
    """The calls and the copies of a strategy for a pass with halos.

    Attributes:
        calls: Tile counts of each call, for the shard that visits the most tiles.
        moved: Bytes that a device reads and writes to copy halos, queries and results.
        travel: For each call except the last one, the fraction of the halo traffic that overlaps with the call. Empty
            if the halos are received before the first call.
    """

    calls: Sequence[Visits]
    moved: int
    travel: Sequence[float] = ()


def _halos_first(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy:
    """Return the strategy in which a device receives all halos before it computes.

    The sender slices slabs, and the receiver concatenates them with its local keys and values. The copy of the local
    keys and values is not counted, because it overlaps with the exchange.
    """
    return HaloStrategy([visits_at_once(plan, halos)], 4 * _slab_bytes(plan.problem, halos))


def _by_keys(plan: Plan, halos: Sequence[Halo]) -> HaloStrategy | None:
    """Return the strategy that processes a device's own keys and then one slab at a time.

    ``None`` if no device receives a halo, or if devices gather all keys along a dimension.
    """
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
    # Bytes of the query array per token, or of the output array if its heads are wider.
    width = max(problem.head_dim, problem.head_dim_v)
    token_bytes = problem.batch * problem.heads * width * problem.element.bytes
    # The sender slices and packs keys and values, and the receiver unpacks them.
    moved = copied * token_bytes + 5 * _slab_bytes(problem, halos)
    return HaloStrategy(calls, moved, [slab / sum(slabs) for slab in slabs])


def _slab_bytes(problem: Problem, halos: Sequence[Halo]) -> int:
    """Return the number of bytes of keys and values that a device receives."""
    return bytes_received(problem, [halo.parts for halo in halos])


def _copies(plan: Plan) -> int:
    """Return the number of additional row reads and row writes for each query that sees a halo.

    A row contains the elements of one query in the query array, the output array or one of their gradients. In the
    forward pass, a kernel that continues an earlier call reads the output of that call. For other kernels, the queries
    are sliced, and the outputs of the two calls are merged in place.

    In the backward pass, the queries, the saved outputs and the output gradients are sliced. The query gradients are
    set to zero, accumulated, converted and added. The row sums of output times output gradient are computed again.
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
    # Overhead of every call except the first: its launch, and small kernels before and after it. A call that continues
    # an earlier call has two or three small kernels. Other calls have six or more, which slice queries and merge
    # results.
    between = calibration.launch_of(plan.pass_) + (5e-6 if _is_continued(plan) else 2e-5)
    compute = kernels + (len(strategy.calls) - 1) * between + strategy.moved * calibration.byte

    received = _slab_bytes(plan.problem, halos)
    devices = math.prod(halo.parts for halo in halos)
    once = link_between(devices).seconds(received)
    inner = sum(call.inner for call in strategy.calls)
    exchange = once if plan.pass_ == "forward" else 2 * once
    # A slab is received during the call before the call that processes it.
    pairs = zip(strategy.travel, strategy.calls, strict=False)
    hidden = sum(min(share * once, kernels * call.inner / inner) for share, call in pairs)
    if received:
        compute = compute * _LINKS_AWAKE_FACTOR + hidden * _TAKEN
    return SplitTime(devices, plan.tiles, received, compute, exchange, exchange - hidden)


def _kernel_seconds(
    plan: Plan, halos: Sequence[Halo], strategy: HaloStrategy, calibration: Calibration
) -> float | None:
    """Return the seconds of the kernels of all calls; ``None`` if the time model does not include these kernels."""
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
    # Of the axes, `predict` reads only the extents, to compute the bytes of inputs and results.
    local = dataclasses.replace(problem, axes=tuple(Axis(halo.part, halo.part, 1) for halo in halos))
    tiles = TimedTiles(whole.outer * outer_share, *(each * inner_share for each in whole[1:]))
    return float(predict(local, tiles, pass_, kernel, calibration))


@functools.lru_cache(maxsize=1024)
def profitable_overlap(plan: Plan, halos: tuple[Halo, ...]) -> HaloStrategy | None:
    """Return the strategy that overlaps computation and halo exchange, if this is predicted to be faster.

    Otherwise, return ``None``: it is then faster if a device receives all halos before it computes.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: The halo of each token dimension.
    """
    if has_longer_groups(plan.problem, MAX_TILES):  # too long to simulate
        return None
    halos = tuple(halo.evened() for halo in halos)
    by_keys = _by_keys(plan, halos)
    return by_keys if by_keys is not None and is_overlap_faster(plan, halos, by_keys) else None


def is_overlap_faster(plan: Plan, halos: Sequence[Halo], by_keys: HaloStrategy) -> bool:
    """Return True if overlapping computation and halo exchange is predicted to be faster than receiving halos first.

    The result is False if there is no predicted time for the kernels.

    Args:
        plan: The plan of the pass, whose problem has the global layout.
        halos: The halo of each token dimension.
        by_keys: The strategy that overlaps computation and exchange.
    """
    calibration = calibration_for(plan.backend.family)
    if calibration is None:
        return False
    overlapped = _split_time(plan, halos, by_keys, calibration)
    sequential = _split_time(plan, halos, _halos_first(plan, halos), calibration)
    return overlapped is not None and sequential is not None and overlapped.seconds < sequential.seconds


def retile_for_shard(plan: Plan, parts: tuple[int, ...], pairs: Sequence[TilePair]) -> Plan:
    """Return the plan with the tiles that are predicted to be fastest for a device's shard of the layout and its halos.

    These tiles may differ from the fastest tiles for the whole layout. For example, if tiles have eight columns and a
    shard has ten, six columns of the second tile are padding. In addition, a tile visits no keys beyond the ends of the
    shard's halos.

    Args:
        plan: The plan of the pass, with the tiles for the whole layout.
        parts: Number of shards of each token dimension.
        pairs: Query and key/value tiles that the backend offers, sorted by predicted time for the whole layout.

    Returns:
        The plan with these tiles. The unchanged plan if other tiles are not clearly faster, if there is no predicted
        time for the kernels, or if the layout is too long to simulate.
    """
    is_too_long = has_longer_groups(plan.problem, MAX_TILES)
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
    retiled = [dataclasses.replace(plan, performance=plan.performance.with_tiles(plan.pass_, pair)) for pair in pairs]
    fastest = min(retiled, key=seconds)
    return fastest if seconds(fastest) < _CLEARLY_FASTER * whole else plan
