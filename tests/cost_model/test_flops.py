"""Floating-point operations of a problem, against its dense mask."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from natten_jax.arrays.operands import Inputs
from natten_jax.cost_model import tiles
from natten_jax.ops.canonicalize import attention_problem, neighborhood_problem
from natten_jax.windows import WindowArguments
from tests.support import oracle


@pytest.mark.parametrize(
    ("layout", "window", "stride", "dilation", "causal"),
    [
        ((11,), (4,), (3,), (2,), (False,)),
        ((10,), (4,), (4,), (1,), (True,)),
        ((6, 7), (3, 7), (2, 5), (2, 1), (True, False)),
        ((4, 5, 6), (2, 4, 3), (1, 2, 3), (2, 1, 2), (False, True, False)),
    ],
)
@pytest.mark.parametrize("additional", [0, 3])
def test_flops_count_the_mask(
    layout: tuple[int, ...],
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    causal: tuple[bool, ...],
    additional: int,
) -> None:
    query = jax.ShapeDtypeStruct((2, *layout, 6, 8), jnp.float32)
    key = query.update(shape=(2, *layout, 3, 8))
    value = query.update(shape=(2, *layout, 3, 24))
    extra: tuple[Any, ...] = (None, None)
    if additional:
        extra = key.update(shape=(2, additional, 3, 8)), key.update(shape=(2, additional, 3, 24))
    problem = neighborhood_problem(
        len(layout),
        Inputs(query, key, value, *extra),  # type: ignore[arg-type]
        WindowArguments(window, stride, dilation, causal),
    )
    pairs = int(oracle.neighborhood_mask(layout, window, stride, dilation, causal).sum()) + additional * math.prod(
        layout
    )
    assert tiles.visible_pairs(problem) == pairs
    assert tiles.flops(problem, "forward") == 2 * 2 * 6 * (8 + 24) * pairs
    assert tiles.flops(problem, "backward") == 2.5 * tiles.flops(problem, "forward")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_flops_of_attention_between_sequences(queries: int, keys: int, is_causal: bool) -> None:
    query = jax.ShapeDtypeStruct((1, queries, 1, 8), jnp.float32)
    key = query.update(shape=(1, keys, 1, 8))
    problem = attention_problem(query, key, key, None, is_causal)
    assert tiles.visible_pairs(problem) == oracle.attention_mask(queries, keys, is_causal).sum()
