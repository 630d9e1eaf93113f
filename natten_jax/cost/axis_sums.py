"""Sums over the tiles of one token dimension, however many they are.

Between the places where windows run into an end of the sequence, tiles repeat: with ``t`` tokens in a tile, after
every ``p`` of them (``t * p`` is a multiple of the stride) a window's first and last key have moved on by ``t * p``, or
not at all. So every tile number is a residue ``r`` modulo ``p`` and a round ``m``, and for one residue each bound is
linear in ``m``. What is summed is ``max(0, min(ends) - max(begins))``: inside of the ``max`` it is concave in ``m``,
and a concave function is linear between two places if it is on their line anywhere in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from natten_jax.windows import Window

#: Maps tile numbers (int64) to the lengths that are to be summed: an int64 array, a row for every kind of length.
Lengths = Callable[[Any], Any]

#: Tiles that are looked at one by one without a second thought, and at most: tiles are ranked by the hundred.
_FEW, _MOST = 1 << 12, 1 << 20
#: Fewer repetitions are not worth the detour.
_ROUNDS = 4
#: Most tokens of a dimension: what is added up on the way has to fit 64 bits.
_LARGEST_EXTENT = 1 << 60


#: Sums of the lengths of some tiles, and the largest length of each kind.
_Part = tuple[list[int], list[int]]


class Totals(NamedTuple):
    """Sums over the tiles of a dimension, a value for every kind of length.

    Attributes:
        sums: Sum of the lengths, where negative ones count as 0.
        most: Largest length.
        last: The last tile's length.
    """

    sums: list[int]
    most: list[int]
    last: list[int]


def check_extent(extent: int) -> None:
    """Refuse extents whose sums would not fit.

    Raises:
        ValueError: There are more tokens than can be counted.
    """
    if extent > _LARGEST_EXTENT:
        raise ValueError(f"{extent} tokens in a dimension are too many to count tiles: at most 2**60 may be there")


def window_changes(window: Window, queries: int, keys: int) -> list[int]:
    """Query indices at which :func:`natten_jax.windows.window_bounds` goes on in another way."""
    kernel_size, stride, is_causal, _ = window  # windows that are shifted and those that are cut change alike

    def group_at(index: int) -> int:
        return -(-index // stride) * stride  # first query whose stride group starts there or later

    if is_causal:
        return [group_at(keys - stride), group_at(kernel_size - stride), keys - 1]
    before = kernel_size // 2 - stride // 2
    return [group_at(keys - 1 - stride // 2), group_at(before), group_at(keys - kernel_size + before)]


def inverse_window_changes(window: Window, queries: int, keys: int) -> list[int]:
    """Key indices at which :func:`natten_jax.windows.inverse_window_bounds` goes on in another way."""
    kernel_size, stride, is_causal, edges = window
    end = -(-queries // stride) * stride
    changes = [kernel_size, keys - kernel_size, queries]
    if is_causal:
        return [*changes, end - kernel_size]
    left = kernel_size // 2
    right, offset = kernel_size - 1 - left, stride - stride // 2 - 1
    # The queries' groups before the first one that sees anything, and after the last one.
    changes += [stride - left - offset - 1, end - left - offset - 1, end + right - offset]
    # Where windows reach an end, and where those do that go around.
    return changes if edges == "shift" else [*changes, right, keys - left - 1, end + right - offset - keys]


def are_few(tiles: int) -> bool:
    """Whether so many tiles are looked at one by one, in which case their period does not matter."""
    return tiles <= _FEW


def totals(tiles: int, period: int, changes: Iterable[int], lengths: Lengths) -> Totals:
    """Sums over all tiles.

    Args:
        tiles: How many there are.
        period: After so many of them, between the changes, lengths differ by what is linear.
        changes: Numbers of tiles from which on lengths go on in another way; more than there are do not matter.
        lengths: The lengths of tiles; the last one may be unlike all others.

    Raises:
        ValueError: There are too many different tiles.
    """
    if are_few(tiles):
        every = lengths(np.arange(tiles))
        return Totals(*_summed(every), every[:, -1].tolist())
    last = lengths(np.array([tiles - 1]))[:, 0].tolist()
    sums, most = [max(each, 0) for each in last], last
    for segment in _segments(tiles - 1, period, changes, lengths):
        sums = [a + b for a, b in zip(sums, segment[0], strict=True)]
        most = [max(each) for each in zip(most, segment[1], strict=True)]
    return Totals(sums, most, last)


def _segments(tiles: int, period: int, changes: Iterable[int], lengths: Lengths) -> Iterator[_Part]:
    """Sums and largest lengths of parts of the first ``tiles``."""
    inside = {change for change in changes if 0 < change < tiles}
    bounds = sorted({0, tiles, *inside})
    for begin, end in itertools.pairwise(bounds):
        rounds = (end - begin) // period
        if rounds < _ROUNDS:
            rounds = 0
        if max(period if rounds else 0, end - begin - rounds * period) > _MOST:
            raise ValueError(
                f"tiles repeat only after {period} of them, which are too many to count: take a smaller stride, or one "
                "that is a multiple of the tiles"
            )
        if rounds:
            residues = np.arange(begin, begin + period)

            def of_round(number: int, residues: Any = residues) -> Any:
                return lengths(residues + number * period)

            yield from _pieces(of_round, 0, rounds - 1, of_round(0), of_round(rounds - 1))
        if begin + rounds * period < end:
            yield _summed(lengths(np.arange(begin + rounds * period, end)))


def _pieces(of_round: Callable[[int], Any], first: int, last: int, at_first: Any, at_last: Any) -> Iterator[_Part]:
    """Sums and largest lengths over rounds, all residues at once, in pieces that are linear or of two rounds."""
    rounds = last - first
    if rounds <= 1:
        yield _summed(at_first if rounds == 0 else np.concatenate([at_first, at_last], axis=1))
        return
    middle = (first + last) // 2
    at_middle = of_round(middle)
    step = (at_last - at_first) // rounds
    if np.array_equal(at_first + step * rounds, at_last) and np.array_equal(
        at_first + step * (middle - first), at_middle
    ):
        sums = [_linear_sum(*each, rounds + 1) for each in zip(at_first, at_last, strict=True)]
        yield sums, np.maximum(at_first, at_last).max(axis=1).tolist()
        return
    yield from _pieces(of_round, first, middle, at_first, at_middle)
    # The middle was counted.
    after = of_round(middle + 1)
    yield from _pieces(of_round, middle + 1, last, after, at_last)


def _linear_sum(begin: Any, end: Any, terms: int) -> int:
    """Sum over residues of so many terms from ``begin`` to ``end``, negative ones as 0."""
    is_positive = (begin >= 0) & (end >= 0)
    total = terms * (_exact_sum(begin[is_positive]) + _exact_sum(end[is_positive])) // 2
    is_mixed = np.minimum(begin, end) * 1.0 * np.maximum(begin, end) < 0
    for low, high in zip(
        np.minimum(begin, end)[is_mixed].tolist(), np.maximum(begin, end)[is_mixed].tolist(), strict=True
    ):
        step = (high - low) // (terms - 1)
        positive = high // step + 1  # high, high - step, ... down to 0 or more
        total += positive * high - step * (positive * (positive - 1) // 2)
    return total


def _summed(values: Any) -> _Part:
    return _exact_sums(np.maximum(values, 0)), values.max(axis=1).tolist()


def _exact_sum(values: Any) -> int:
    (total,) = _exact_sums(values[np.newaxis])
    return total


def _exact_sums(values: Any) -> list[int]:
    """Sums of rows of int64 values that are not negative; a sum may need more than 64 bits."""
    high, low = (np.sum(part, axis=1).tolist() for part in (values >> 32, values & 0xFFFFFFFF))
    return [(a << 32) + b for a, b in zip(high, low, strict=True)]
