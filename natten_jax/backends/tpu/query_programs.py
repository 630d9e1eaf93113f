"""What kernels that own queries share: their grid, and the blocks of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from natten_jax.backends.tpu.boxes import box_spec
from natten_jax.backends.tpu.kernels import Call, Place, last_of, spec
from natten_jax.backends.tpu.masks import key_coordinates_spec, last_bounds_spec


def query_grid(call: Call, heads: int) -> tuple[int, ...]:
    """Heads of all batch entries, dilation groups, tiles, and boxes of keys."""
    return heads // call.heads_of_program, call.groups, *call.queries.grid, *_steps(call)


def _steps(call: Call) -> list[int]:
    return [max(visits.most_boxes, 1) for visits in call.visits]


def is_last(call: Call, place: Place) -> Any:
    """Whether a program's step is its last one."""
    return last_of(_steps(call), place.step)


def query_spec(call: Call, width: int) -> pl.BlockSpec:
    """The tile of a program."""
    return spec(
        (call.heads_of_program, None, *call.queries.tile, width),
        lambda place, _: (place.head, place.group, *place.tile, 0),
    )


def rows_spec(call: Call, count: int) -> pl.BlockSpec:
    """Numbers of its queries, ``[count, tokens]``."""
    shape = call.heads_of_program, None, None, None, None, count, call.queries.tile_tokens
    return spec(shape, lambda place, _: (place.head, place.group, *place.tile, 0, 0))


def common_specs(call: Call, width: int, width_v: int) -> list[pl.BlockSpec]:
    """Those of the head's scale, the coordinates of keys, the bounds of windows, and of query, key and value."""
    blocks: Sequence[pl.BlockSpec] = query_spec(call, width), box_spec(call, width), box_spec(call, width_v)
    return [pl.BlockSpec(memory_space=pltpu.SMEM), key_coordinates_spec(), last_bounds_spec(call), *blocks]
