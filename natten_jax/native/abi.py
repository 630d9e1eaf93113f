"""Problems as native code has them: with three token dimensions, whatever their rank."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from natten_jax.arrays.query_box import QueryBox
from natten_jax.performance import TilePair
from natten_jax.problem import Axis, Problem, Shape

KERNEL_RANK = 3


def axis_rows(problem: Problem) -> Shape:
    """A row for each token dimension: its facts in the order that csrc/ffi/decode.cpp names them in."""
    missing = (Axis(1, 1, 1),) * (KERNEL_RANK - problem.rank)
    rows = map(dataclasses.astuple, (*missing, *problem.axes))
    return tuple(int(fact) for row in rows for fact in row)


def with_kernel_tiles(problem: Problem, pair: TilePair) -> TilePair:
    """Tiles of three token dimensions: leading ones have extent 1."""
    q_tile, kv_tile = ((*(1,) * (KERNEL_RANK - problem.rank), *tile) for tile in pair)
    return q_tile, kv_tile


def box_start(box: QueryBox) -> jax.Array:
    """Where a box of queries begins."""
    return jnp.pad(box.first, (KERNEL_RANK - len(box.extents), 0))
