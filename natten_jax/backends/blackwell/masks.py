"""Rows of logits, a thread's each: windows of their queries, and what they hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from natten_jax.backends.blackwell.call import ROWS, Call, Item, Scalar, divided

#: A row is a thread's, in all of its columns.
BY_ROWS = plgpu.Layout.TCGEN05_TMEM_NATIVE
OF_ROW = BY_ROWS.reduce(1)
#: Logit of a key that a query does not see.
HIDDEN = -3.3e38

#: First and end of the keys that each row's query sees, along the dimensions of the problem.
Windows = Sequence[tuple[jax.Array, jax.Array]]


def windows_of(call: Call, item: Item, half: int, bounds: Sequence[Any]) -> Windows:
    """Those of a half of an item's tile, from references to the bounds of windows."""
    rows = list(zip(bounds, call.rows(item), strict=True))[call.first_dim :]
    return [(load_row(array, row, 0, half), load_row(array, row, 1, half)) for array, row in rows]


def load_row(array: Any, row: Scalar, index: int, half: int) -> jax.Array:
    """Numbers of a half's rows, of an array ``[rows, indices, tokens]``."""
    return plgpu.load(array.at[row, index, pl.ds(half * ROWS, ROWS)], layout=OF_ROW, optimized=False)


def hide(call: Call, logits: jax.Array, first: Sequence[Scalar], windows: Windows, first_column: int = 0) -> jax.Array:
    """Logits, with ``HIDDEN`` where a query does not see a key of a box.

    Args:
        call: What runs.
        logits: Some columns of them.
        first: The first key of the box along each dimension.
        windows: What queries see.
        first_column: Where the columns begin.
    """
    width = logits.shape[1]
    rest: Any = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=BY_ROWS)
    if first_column:
        rest += first_column
    keys = []
    for extent in reversed(call.key_pieces.tile[call.first_dim + 1 :]):
        rest, key = divided(rest, extent)
        keys.append(key)
    keys.append(rest)
    dims = range(call.first_dim, len(call.visits))
    for dim, key, (first_seen, end_seen) in zip(dims, reversed(keys), windows, strict=True):
        if call.key_pieces.tile[dim] == 1:
            sees = columns((first[dim] >= first_seen) & (first[dim] < end_seen), width)
        else:
            sees = (key >= columns(first_seen - first[dim], width)) & (key < columns(end_seen - first[dim], width))
        logits = jnp.where(sees, logits, HIDDEN)
    return logits


def columns(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers of rows in as many columns."""
    return jax.lax.broadcast_in_dim(numbers, (numbers.shape[0], width), (0,))


def every_row(number: float) -> jax.Array:
    """A number for each row."""
    return plgpu.layout_cast(jnp.full((ROWS,), number, jnp.float32), OF_ROW)
