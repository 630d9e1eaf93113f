"""Tiles that a device visits of a split dimension, counted one by one."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
from test_halo import seen

from natten_jax.cost.part_tiles import Range, Visits, visits
from natten_jax.passes import PASSES, Pass
from natten_jax.problem import Axis


def counted(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Tiles from the first inner token that an outer tile sees to its last."""
    runs, others = (queries, keys) if pass_ == "forward" else (keys, queries)
    outer, inner = tile if pass_ == "forward" else tile[::-1]
    visited = 0
    firsts = range(runs[0], runs[1], outer)
    for first in firsts:
        tokens = [token for token in range(first, min(first + outer, runs[1])) if 0 <= token < axis.kv_extent]
        found: set[int] = set()
        for token in tokens:
            if pass_ == "forward":
                found |= set(seen(axis, token))
            else:
                found |= {query for query in range(axis.kv_extent) if token in seen(axis, query)}
        found &= set(range(*others))
        if found:
            visited += -(-(max(found) + 1 - min(found)) // inner)
    return Visits(len(firsts), visited)


@hypothesis.given(st.data())
def test_visits_are_those_that_one_counts(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 4))
    extent = parts * data.draw(st.integers(1, 12))
    kernel = data.draw(st.integers(1, extent))
    axis = Axis(extent, extent, kernel, data.draw(st.integers(1, kernel)), 1, data.draw(st.booleans()))
    tile = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    first = extent // parts * data.draw(st.integers(0, parts - 1))
    last = first + extent // parts
    reach = data.draw(st.integers(0, extent)), data.draw(st.integers(0, extent))
    for pass_ in PASSES:
        for keys in ((first, last), (max(first - reach[0], 0), first), (first - reach[0], last + reach[1])):
            if keys[0] < keys[1]:
                expected = counted(axis, pass_, tile, (first, last), keys)
                assert visits(axis, pass_, tile, (first, last), keys) == expected
