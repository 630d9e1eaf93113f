"""Problems as native code has them: with three token dimensions, whatever their rank; and whose heads it merges."""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp

from natten_jax.arrays.query_box import QueryBox
from natten_jax.native import module as native
from natten_jax.performance import TilePair
from natten_jax.problem import Problem, Shape
from natten_jax.windows import Axis

KERNEL_RANK = 3

_FACTS = [field.name for field in dataclasses.fields(Axis)]
#: Those facts of an axis that are numbers, which come first.
_numbers_of = operator.attrgetter(*_FACTS[: _FACTS.index("is_causal")])
#: ``Ends`` of csrc/include/natten_jax/windows.h, by whether an axis is causal and what becomes of windows at its edges.
_ENDS_OF_WINDOWS = {(False, "shift"): 0, (True, "shift"): 1, (False, "cut"): 2, (False, "wrap"): 3}


def axis_rows(problem: Problem) -> Shape:
    """A row for each token dimension: its facts in the order that csrc/ffi/decode.cpp names them in."""
    missing = (Axis(1, 1, 1),) * (KERNEL_RANK - problem.rank)
    axes = (*missing, *problem.axes)
    rows = [(*_numbers_of(axis), _ENDS_OF_WINDOWS[axis.is_causal, axis.edges]) for axis in axes]
    return tuple(fact for row in rows for fact in row)


def with_kernel_tiles(problem: Problem, pair: TilePair) -> TilePair:
    """Tiles of three token dimensions: leading ones have extent 1."""
    q_tile, kv_tile = ((*(1,) * (KERNEL_RANK - problem.rank), *tile) for tile in pair)
    return q_tile, kv_tile


def box_start(box: QueryBox) -> jax.Array:
    """Where a box of queries begins."""
    return jnp.pad(box.first, (KERNEL_RANK - len(box.extents), 0))


def continues(kernels: str, problem: Problem) -> bool:
    """Whether forward kernels merge what they find with what was found before on other keys.

    Args:
        kernels: Their name in ``natten_jax.native.module.limits``.
        problem: Whose heads they get.
    """
    most = native.limits(kernels).get("largest_continued_head_dim", 0)
    return max(problem.head_dim, problem.head_dim_v) <= most
