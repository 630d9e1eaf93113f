"""The boxes of keys of programs that own queries: where they lie, and which are visited, with a mask or without."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from natten_jax.backends.tpu.kernels import Call, Place, Scalar, divided, matrix, spec
from natten_jax.backends.tpu.visits import CORE_END, CORE_FIRST, COUNT, HULL_END, START


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


def sees_all(rows: Sequence[Any], boxes: Sequence[KeyBox], shape: Sequence[Scalar]) -> jax.Array:
    """Whether all queries of a tile see all keys of boxes of a shape, none of which an earlier box had."""
    inside = [
        (box.first >= box.own) & (box.first >= row(CORE_FIRST)) & (box.first + extent <= row(CORE_END))
        for row, box, extent in zip(rows, boxes, shape, strict=True)
    ]
    return functools.reduce(jnp.logical_and, inside)


def visit(add: Callable[[bool], None], is_full: Any) -> None:
    """Add keys: with a mask, or without where nothing is hidden."""
    pl.when(is_full)(lambda: add(False))
    pl.when(~is_full)(lambda: add(True))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a box: its number, its first key in the order of the box's, and where the box lies."""

    number: Scalar
    start: Scalar
    boxes: Sequence[KeyBox]

    def of(self, call: Call, ref: Any) -> jax.Array:
        """Its keys, or their values, as ``[keys, width]``."""
        if call.chunks.count == 1:
            return matrix(ref)
        flat = ref.reshape(math.prod(ref.shape[:-1]), ref.shape[-1])
        return flat[pl.ds(pl.multiple_of(self.start, call.alignment), call.chunks.keys), :]


def visit_keys(call: Call, place: Place, tables: Sequence[Any], add: Callable[[Chunk, bool], None]) -> None:
    """Add the keys of a step of a program that owns queries, a chunk at a time.

    Args:
        call: What runs.
        place: The place of the program.
        tables: Its box tables.
        add: Adds a chunk, and is told whether some of its keys are hidden from some queries.
    """
    rows, boxes, chunks = call.rows_of(place.group, place.tile, tables), key_boxes(call, place, tables), call.chunks
    cut, stride = chunks.cut, chunks.stride
    box, extent = boxes[cut], chunks.box[cut]

    def one() -> None:
        visit(lambda is_masked: add(Chunk(0, 0, boxes), is_masked), sees_all(rows, boxes, chunks.box))

    def all_() -> None:
        # Chunks whose keys an earlier box had, and those behind the last key that is seen, are passed over.
        first = divided(jnp.minimum(box.own - box.first, extent) * stride, chunks.keys)[0]
        behind = jnp.clip(rows[cut](HULL_END) - box.first, 0, extent) * stride
        end = divided(behind + chunks.keys - 1, chunks.keys)[0]

        @pl.loop(first, end)
        def _(number: Any) -> None:
            start = jnp.minimum(number * chunks.keys, math.prod(chunks.box) - chunks.keys)
            of_cut = divided(start, stride)[0], divided(start + chunks.keys - 1, stride)[0] + 1
            parts, shape = [*boxes], [*chunks.box]
            parts[cut], shape[cut] = KeyBox(box.first + of_cut[0], box.own), of_cut[1] - of_cut[0]
            is_full = sees_all(rows, parts, shape) & (start == number * chunks.keys)
            visit(lambda is_masked: add(Chunk(number, start, boxes), is_masked), is_full)

    is_step = [
        step < row(COUNT)
        for visits, step, row in zip(call.visits, place.step, rows, strict=True)
        if visits.most_boxes > 1 or not visits.fewest_boxes
    ]
    visit_all = one if chunks.count == 1 else all_
    if is_step:
        pl.when(functools.reduce(jnp.logical_and, is_step))(visit_all)
    else:
        visit_all()


def box_spec(call: Call, width: int) -> pl.BlockSpec:
    """The box of keys or values of a step of a program that owns queries, wherever it begins."""

    def index(place: Place, tables: Sequence[Any]) -> tuple[Scalar, ...]:
        x, y, z = (box.first for box in key_boxes(call, place, tables))
        key_group = call.key_group(place.group, tables)
        first, last = call.block_of(place.head)
        first = call.kv_head(first) * call.together
        return first, key_group, x, y, pl.multiple_of(z, call.alignment), last * width

    return spec([*map(pl.Element, (call.together, 1, *call.keys.tile, width))], index)
