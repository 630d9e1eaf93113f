"""How much of the other side a tile of one dimension sees, at most."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from natten_jax.windows import Axis


@functools.lru_cache(maxsize=1024)
def largest_hull(
    axis: Axis,
    tile: int,
    outer_is_query: bool,
    is_aligned: bool,
) -> int:
    """Indices from the first to the last that any tile of a dimension sees, over all tiles and groups.

    Its cost depends on the tile alone, not on how many tokens there are.

    Args:
        axis: The dimension.
        tile: Extent of the tiles.
        outer_is_query: Whether the tiles hold queries, which see keys, or keys, which are seen by queries.
        is_aligned: Whether tiles start at multiples of their extent only.
    """
    largest = 1
    window = axis.window
    for group in {0, axis.dilation - 1}:  # the longest groups and the shortest
        lengths = axis.lengths(group)
        length = lengths[0 if outer_is_query else 1]
        first = _decisive_tiles(length, window.kernel_size, window.stride, tile, tile if is_aligned else 1)
        last = first + tile - 1
        if axis.edges != "wrap" or outer_is_query or is_aligned:  # halos of keys go on behind the layout's ends
            last = np.minimum(last, length - 1)
        start, _ = axis.bounds(first, lengths, of_query=outer_is_query)
        _, end = axis.bounds(last, lengths, of_query=outer_is_query)
        largest = max(largest, int((end - start).max(initial=0)))
    return largest


def largest_hull_of_any_layout(axis: Axis, tile: int, outer_is_query: bool) -> int:
    """A bound on the same for tiles anywhere in a layout of any extent, whose windows are those that fit.

    In steps of the stride, windows begin at most as far apart as their queries. What an edge shifts makes them begin
    closer together, and keys be seen by more queries: those of a layout of less than two windows by all of it.
    """
    if outer_is_query:
        return axis.kernel_size + -(-(tile - 1) // axis.stride) * axis.stride
    bound = 2 * axis.kernel_size + tile + axis.stride
    # In attention a key is seen by every query, and there may be more of them than keys.
    return bound if axis.query_extent == axis.kv_extent else max(bound, axis.query_extent)


def _decisive_tiles(length: int, kernel_size: int, stride: int, tile: int, step: int) -> Any:
    """First tokens of tiles, among them one of the tiles with the largest hull.

    Both ends of a hull are steps of ``stride``, clamped at the layout's edges. So between the places where a clamp
    sets in, hulls either repeat with the period ``lcm(stride, step)``, or one of their ends stands still: then they
    only grow, or only shrink. It takes one period at either side of these places, and of each step of an end the last
    tile before it and the first after it.
    """
    left = kernel_size // 2
    middles = 0, left, kernel_size, length - kernel_size, length - kernel_size + left, length - left, length
    clamps = [place - offset for place in middles for offset in (0, tile - 1)]
    reach = 2 * (step // math.gcd(stride, step)) + 4
    blocks = np.unique(np.concatenate([clamp // stride + np.arange(-reach, reach + 1) for clamp in clamps]))
    # Ends step where a token, seen through the window, passes a multiple of the stride.
    right = kernel_size - 1 - left
    shifts = 0, right - (stride - stride // 2 - 1), -(left + stride - stride // 2), -kernel_size
    steps = [blocks * stride + shift - offset for shift in shifts for offset in (0, tile - 1)]
    edges = np.concatenate([np.array(clamps), *steps])
    before = (edges - 1) // step * step
    first = np.unique(np.concatenate([before, before + step]))
    return first[(first >= 0) & (first < length)]
