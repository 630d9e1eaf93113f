"""Tiles of sharded dimensions: how many a device visits, compared with an enumeration, and which shapes they have."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from natten_jax.backends.select import resolve
from natten_jax.cost_model.halos import Range, Visits, visits
from natten_jax.performance import PASSES, Pass, Performance
from natten_jax.plan.devices import CPU, Device
from natten_jax.plan.plan import Plan, Request
from natten_jax.simulator import calibration_for, predict_split, problem_of
from natten_jax.windows import Axis
from tests.sharding.test_halo import seen


def counted(axis: Axis, pass_: Pass, tile: tuple[int, int], queries: Range, keys: Range) -> Visits:
    """Count the outer tiles and the inner tiles that they visit, by enumeration of tokens.

    An outer tile visits the inner tiles from the first to the last inner token that it sees.
    """
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
def test_visits_equal_a_direct_count(data: st.DataObject) -> None:
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


GPU = Device("cuda", (9, 0), is_present=False)
VIDEO = problem_of((30, 48, 80), (18, 24, 24), (6, 8, 8), heads=24, head_dim=128, dtype="bfloat16")


def planned(parts: tuple[int, ...], pass_: Pass, **asked: Any) -> Plan:
    performance = Performance(**asked)
    return resolve(Request(VIDEO, performance, backend="hopper-fna", parts=parts), GPU, pass_)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("parts", [(1, 1, 4), (1, 4, 1), (1, 1, 8)])
def test_a_part_gets_separate_tiles_if_they_are_clearly_faster(parts: tuple[int, ...], pass_: Pass) -> None:
    model = calibration_for("hopper")
    assert model is not None
    whole, part = planned((), pass_), planned(parts, pass_)
    assert part == dataclasses.replace(whole, performance=part.performance)
    times = [predict_split(plan, parts, model) for plan in (whole, part)]
    assert times[0] is not None and times[1] is not None
    assert times[1].seconds < 0.95 * times[0].seconds
    assert times[1].tiles == part.tiles != whole.tiles
    assert math.prod(part.tiles[0]) == math.prod(whole.tiles[0])


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_tiles_stay_if_others_are_hardly_faster(parts: tuple[int, ...], pass_: Pass) -> None:
    assert planned(parts, pass_) == planned((), pass_)


def test_requested_tiles_apply_to_parts() -> None:
    asked: dict[str, Any] = {"q_tile_shape": (2, 8, 8), "kv_tile_shape": (2, 8, 8)}
    assert planned((1, 1, 4), "forward", **asked).tiles == tuple(asked.values())


def test_kernels_without_a_time_model_keep_their_tiles() -> None:
    requests = (Request(VIDEO, backend="flex-fna", parts=parts) for parts in ((), (1, 1, 4)))
    whole, part = (resolve(request, CPU, "forward") for request in requests)
    assert part == whole
