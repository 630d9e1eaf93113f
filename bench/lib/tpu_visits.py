"""From windows and tile shapes, compute how often the parts of TPU kernels run and how many bytes the kernels copy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from natten_jax.backends.pallas._tpu_call import Call
from natten_jax.backends.pallas._tpu_grid import query_grid
from natten_jax.problem import Problem
from natten_jax.windows import Axis

LANES = 128
START, COUNT, HULL_END, CORE_FIRST, CORE_END = map(
    Call.columns.index, ("start", "count", "hull_end", "core_first", "core_end")
)


def query_programs(call: Call) -> dict[str, Any]:
    """Count the executions of a kernel in which each program owns a tile of queries.

    Returns:
        Counts by name. ``steps`` is the number of grid steps, and ``active`` the number of steps with matrix
        multiplications. ``tiles`` is the number of query tiles. ``bodies`` has two counts: chunks of keys that need no
        mask, and chunks that need a mask. ``copied`` is the number of bytes of keys and values that are copied.
    """
    grid = query_grid(call)
    tables = [np.asarray(visits.table(Call.columns)) for visits in call.visits]
    full = masked = active = boxes = 0
    groups = itertools.product(*(range(visits.groups) for visits in call.visits))
    for group in groups:
        rows = [table[g].tolist() for table, g in zip(tables, group, strict=True)]
        for tile in itertools.product(*rows):
            for step in itertools.product(*(range(row[COUNT]) for row in tile)):
                step_chunks = _chunks(call, tile, step)
                full, masked, active = full + step_chunks[0], masked + step_chunks[1], active + 1
            boxes += math.prod(row[COUNT] for row in tile)
    heads, tiles = grid[0], math.prod(grid[:5])
    return {
        "steps": math.prod(grid),
        "active": heads * active,
        "tiles": tiles,
        "bodies": [heads * full, heads * masked],
        "copied": heads * call.together * boxes * _tokens_bytes(call, call.keys.tile_tokens),
    }


def _chunks(call: Call, tile: Any, step: Any) -> tuple[int, int]:
    """Return the number of chunks of a box that need no mask, and the number of chunks that need a mask."""
    chunks, visits = call.chunks, call.visits
    own = [row[START] + number * each.box for row, number, each in zip(tile, step, visits, strict=True)]
    first = [min(each, visit.keys - visit.box) for each, visit in zip(own, visits, strict=True)]
    total, cut, stride = math.prod(chunks.box), chunks.cut, chunks.stride
    behind = max(0, min(tile[cut][HULL_END] - first[cut], chunks.box[cut])) * stride
    begin = 0 if chunks.number == 1 else min(own[cut] - first[cut], chunks.box[cut]) * stride // chunks.keys
    end = 1 if chunks.number == 1 else -(-behind // chunks.keys)
    full = 0
    for number in range(begin, end):
        start = min(number * chunks.keys, total - chunks.keys)
        firsts, shape = [*first], [*chunks.box]
        firsts[cut] += start // stride
        shape[cut] = (start + chunks.keys - 1) // stride + 1 - start // stride
        full += start == number * chunks.keys and all(
            at >= mine and at >= row[CORE_FIRST] and at + extent <= row[CORE_END]
            for at, mine, row, extent in zip(firsts, own, tile, shape, strict=True)
        )
    return full, max(end - begin, 0) - full


def key_programs(call: Call) -> dict[str, Any]:
    """Count the executions of the kernel in which each program owns a tile of keys.

    A program visits every query tile with at least one window that contains keys of the program's key tile.

    Returns:
        Counts by name. ``steps`` is the number of grid steps, and ``active`` the number of steps with matrix
        multiplications. ``tiles`` is the number of key tiles. ``bodies`` has two counts: visits of a query tile that
        need no mask, and visits that need a mask. ``copied`` is the number of bytes of queries and output gradients
        that are copied.
    """
    full = masked = 0
    boxes = [np.asarray(visits.table(Call.columns)) for visits in call.visits]
    tiles = [np.asarray(visits.visitors) for visits in call.visits]
    for group in itertools.product(*(range(visits.groups) for visits in call.visits)):
        # Count pairs of a key tile and a query tile. ``meeting`` counts the tile pairs with at least one visible pair
        # of tokens, and ``whole`` the tile pairs in which all pairs of tokens are visible. Each of the two counts is
        # the product of its counts along the dimensions.
        meeting, whole = 1, 1
        for visits, axis_boxes, axis_tiles, g in zip(call.visits, boxes, tiles, group, strict=True):
            size, seen, all_ = visits.box, 0, 0
            for tile, (first, count) in enumerate(axis_tiles[g].tolist()):
                cores = axis_boxes[g][first : first + count]
                seen += count
                at = tile * size
                all_ += int(((cores[:, CORE_FIRST] <= at) & (cores[:, CORE_END] >= at + size)).sum())
            meeting, whole = meeting * seen, whole * all_
        full, masked = full + whole, masked + meeting - whole
    steps = [call.queries.heads // call.keys.heads, *(max(visits.most_tiles, 1) for visits in call.visits)]
    heads = call.leading * call.queries.blocks
    programs = heads // steps[0] * call.groups * math.prod(call.keys.grid)
    return {
        "steps": programs * math.prod(steps),
        "active": heads * (full + masked),
        "tiles": programs,
        "bodies": [heads * full, heads * masked],
        "copied": heads * (full + masked) * _tokens_bytes(call, call.queries.tile_tokens),
    }


def _tokens_bytes(call: Call, tokens: int) -> int:
    """Return the bytes that ``tokens`` tokens of one head or pack occupy in two arrays together.

    The arrays have the head dimensions ``head_dim`` and ``head_dim_v``. Each row of an array is padded to a multiple of
    ``LANES`` elements.
    """
    widths = (call.pack * width for width in (call.plan.problem.head_dim, call.plan.problem.head_dim_v))
    return tokens * call.plan.problem.element.bytes * sum(-(-width // LANES) * LANES for width in widths)


def blocks_of_flat_tokens(problem: Problem, queries: int, keys: int) -> tuple[int, int, int]:
    """Count the blocks that a kernel visits if each block is a range of tokens of the flattened layout.

    Returns:
        Three counts. The first is the number of query blocks. The second is the largest number of key blocks that one
        query block sees. The third is the number of pairs of a query block and a key block with at least one visible
        pair of tokens.
    """
    layout = problem.query_layout
    bounds = [_bounds(axis) for axis in problem.axes]
    tokens = math.prod(layout)
    counts = []
    for first in range(0, tokens, queries):
        index = np.unravel_index(np.arange(first, min(first + queries, tokens)), layout)
        windows = np.stack([np.stack([start[i], end[i]]) for (start, end), i in zip(bounds, index, strict=True)])
        seen = np.zeros(layout, bool)
        for window in np.unique(windows.reshape(-1, windows.shape[-1]), axis=1).T:
            seen[tuple(slice(window[2 * dim], window[2 * dim + 1]) for dim in range(len(layout)))] = True
        flat = np.pad(seen.reshape(-1), (0, -tokens % keys))
        counts.append(int(flat.reshape(-1, keys).any(axis=1).sum()))
    return len(counts), max(counts), sum(counts)


def _bounds(axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each query's first key, and the index after its last key, for an axis without dilation."""
    first, end = axis.bounds(np.arange(axis.query_extent), (axis.query_extent, axis.kv_extent))
    return np.asarray(first), np.asarray(end)
