"""What kernels that own queries share: their grid, and the blocks of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.boxes import box_spec
from natten_jax.backends.tpu.kernels import Call, Place, last_of, spec
from natten_jax.backends.tpu.masks import key_coordinates_spec, last_bounds_spec


def query_grid(call: Call) -> tuple[Any, ...]:
    """Heads or packs of all batch entries, dilation groups, tiles, and boxes of keys."""
    programs = call.leading // call.together * call.queries.heads.blocks
    return programs, call.groups, *call.queries.grid, *_steps(call)


def _steps(call: Call) -> list[int]:
    return [max(visits.most_boxes, 1) for visits in call.visits]


def is_last(call: Call, place: Place) -> Any:
    """Whether a program's step is its last one."""
    return last_of(_steps(call), place.step)


def query_spec(call: Call, width: int) -> pl.BlockSpec:
    """The tile of a program, of rows of a pack's width."""

    def index(place: Place, _: Any) -> tuple[Any, ...]:
        first, last = call.block_of(place.head)
        return first, place.group, *place.tile, last

    return spec((call.together, None, *call.queries.tile, width), index)


def rows_spec(call: Call, count: int) -> pl.BlockSpec:
    """Numbers of its rows, ``[count, rows]``."""
    return spec(
        (call.together, *(None,) * 5, count, call.rows),
        lambda place, _: (*call.block_of(place.head), place.group, *place.tile, 0, 0),
    )


def common_specs(call: Call, width: int, width_v: int) -> list[pl.BlockSpec]:
    """Those of the head's scale, the coordinates of keys, the bounds of windows, and of query, key and value."""
    blocks: Sequence[pl.BlockSpec] = query_spec(call, width), box_spec(call, width), box_spec(call, width_v)
    return [pl.BlockSpec(memory_space=pltpu.SMEM), key_coordinates_spec(), last_bounds_spec(call), *blocks]
