"""The boxes of keys of programs that own queries: where they lie, and which are visited, with a mask or without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from natten_jax.backends.tpu.kernels import Call, Place, Scalar, spec
from natten_jax.backends.tpu.visits import CORE_END, CORE_FIRST, COUNT, START


@dataclasses.dataclass(frozen=True)
class KeyBox:
    """A box of keys along one dimension: its first key, and the first that no earlier box had."""

    first: Scalar
    own: Scalar


def key_boxes(call: Call, place: Place, tables: Sequence[Any]) -> list[KeyBox]:
    """Where a step's box of keys lies; that of the last step, where there are no more."""
    found = []
    rows = call.rows_of(place.group, place.tile, tables)
    for lengths, visits, row, step in zip(call.lengths, call.visits, rows, place.step, strict=True):
        if visits.most_boxes > 1:
            own = row(START) + jnp.maximum(jnp.minimum(step, row(COUNT) - 1), 0) * lengths.kv_tile
        else:
            own = row(START)
        found.append(KeyBox(jnp.minimum(own, lengths.keys - lengths.kv_tile), own))
    return found


def sees_all(call: Call, rows: Sequence[Any], boxes: Sequence[KeyBox]) -> jax.Array:
    """Whether all queries of a tile see all keys of a box, none of which an earlier box had."""
    inside = [
        (box.first == box.own) & (box.first >= row(CORE_FIRST)) & (box.first + lengths.kv_tile <= row(CORE_END))
        for lengths, row, box in zip(call.lengths, rows, boxes, strict=True)
    ]
    return functools.reduce(jnp.logical_and, inside)


def visit(add: Callable[[Sequence[KeyBox] | None], None], is_step: Any, is_full: Any, boxes: Sequence[KeyBox]) -> None:
    """Add a step's box, where there is one: without a mask where nothing is hidden."""
    pl.when(is_step & is_full)(lambda: add(None))
    pl.when(is_step & ~is_full)(lambda: add(boxes))


def visit_keys(call: Call, place: Place, tables: Sequence[Any], add: Callable[[Sequence[KeyBox] | None], None]) -> None:
    """Add the box of keys of a program that owns queries."""
    rows = call.rows_of(place.group, place.tile, tables)
    boxes = key_boxes(call, place, tables)
    is_step = functools.reduce(jnp.logical_and, [step < row(COUNT) for step, row in zip(place.step, rows, strict=True)])
    visit(add, is_step, sees_all(call, rows, boxes), boxes)


def box_spec(call: Call, width: int) -> pl.BlockSpec:
    """The box of keys or values of a step of a program that owns queries, wherever it begins."""

    def index(place: Place, tables: Sequence[Any]) -> tuple[Scalar, ...]:
        x, y, z = (box.first for box in key_boxes(call, place, tables))
        key_group = call.key_group(place.group, tables)
        return call.kv_head(place.head), key_group, x, y, pl.multiple_of(z, call.alignment), 0

    return spec([*map(pl.Element, (1, 1, *call.keys.tile, width))], index)
