"""Windows fitted to the layout.

A ``kernel_size`` of -1 means the whole extent. With ``clamp_window``, a window that is too large gets the largest size
that fits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import natten_jax
from natten_jax.arrays.operands import Inputs
from natten_jax.ops.canonicalize import neighborhood_problem
from natten_jax.windows import Axis, WindowArguments, fitted
from tests.support.families import FAMILIES, Family
from tests.support.problems import Case, Trial, check_all

#: Requested window arguments, and the equivalent problem with fitted windows, derived by hand.
_FITTED: dict[str, tuple[dict[str, Any], Case]] = {
    "whole-dilated": ({"kernel_size": -1, "dilation": 3, "stride": 2}, Case((14,), (4,), stride=(2,), dilation=(3,))),
    "clamped-3d-causal": (
        {"kernel_size": (9, 3, -1), "is_causal": (True, False, False), "clamp_window": True},
        Case((4, 5, 3), (4, 3, 3), is_causal=(True, False, False)),
    ),
}


def test_fitted_windows_equal_windows_of_the_layout(family: Family) -> None:
    trials = []
    for asked, case in _FITTED.values():
        trials.append(Trial(case, family.dtype, arguments=asked))
    check_all(trials, family)


#: The families that support a relative bias and need no GPU.
_WITH_TABLES = [
    pytest.param(each, id=each.name)
    for each in FAMILIES
    if "relative_bias" in each.backend.capabilities.features and not each.needs_gpu
]
#: Requested window arguments, and the equivalent problem with clamped windows. The relative bias table has the shape
#: for the requested ``kernel_size``, which the problem has as ``table_size``.
CLAMPED_WITH_TABLES: dict[str, tuple[dict[str, Any], Case]] = {
    "published": (
        {"kernel_size": 7, "dilation": 2},
        Case((20, 11), (7, 5), dilation=(2, 2), heads=3, table_size=(7, 7), sinks=True, key_bias="heads"),
    ),
    "causal": ({"kernel_size": 9, "is_causal": True}, Case((6,), (6,), is_causal=(True,), table_size=(9,), heads=2)),
    "strided": (
        {"kernel_size": (9, 6), "stride": (7, 3), "dilation": (1, 3), "is_causal": (False, True)},
        Case((5, 13), (5, 4), stride=(5, 3), dilation=(1, 3), is_causal=(False, True), table_size=(9, 6), batch=2),
    ),
    "cut": (
        {"kernel_size": (9, 4), "stride": (2, 1), "edges": ("cut", "shift")},
        Case((6, 7), (6, 4), stride=(2, 1), edges=("cut", "shift"), table_size=(9, 4), heads=4, heads_kv=2),
    ),
    "wrap": (
        {"kernel_size": (9, 8), "dilation": (1, 2), "edges": "wrap"},
        Case((6, 10), (6, 5), dilation=(1, 2), edges=("wrap", "wrap"), table_size=(9, 8), heads=2),
    ),
    "entries of their own extents": (
        {"kernel_size": (9, 5), "dilation": (1, 3)},
        Case(
            (7, 10), (7, 3), dilation=(1, 3), batch=3, extents=((7, 10), (3, 8), (1, 2)), table_size=(9, 5), sinks=True
        ),
    ),
    "box": (
        {"kernel_size": (9, 3)},
        Case((6, 9), (6, 3), batch=2, box=(3, 4), origins=((2, 3), (0, 5)), table_size=(9, 3), heads=2),
    ),
}


@pytest.mark.parametrize("tested", _WITH_TABLES)
def test_a_table_has_the_requested_kernel_size(tested: Family) -> None:
    trials = [
        Trial(dataclasses.replace(case, relative_bias=True), dtype, arguments={**asked, "clamp_window": True})
        for dtype in tested.dtypes[:2]
        for asked, case in CLAMPED_WITH_TABLES.values()
    ]
    check_all(trials, tested)


def test_tables_of_other_windows_are_refused() -> None:
    tokens = jnp.ones((1, 20, 11, 2, 8))
    for shape in ((2, 13, 9), (2, 9, 9), (2, 13, 15)):
        with pytest.raises(ValueError, match=r"^relative_bias has shape .*kernel_size \(7, 7\) requires \(2, 13, 13\)"):
            natten_jax.na2d(tokens, tokens, tokens, 7, dilation=2, clamp_window=True, relative_bias=jnp.ones(shape))


def test_entries_that_no_clamped_window_has_get_no_gradient() -> None:
    tokens = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))

    def loss(table: jax.Array) -> jax.Array:
        out = natten_jax.na1d(tokens, tokens, tokens, 7, clamp_window=True, relative_bias=table)
        return jnp.sum(jnp.sin(out))

    table = jax.random.normal(jax.random.key(1), (2, 13))
    # Table entries that no clamped window uses do not affect results, even if they are not finite.
    spoiled = table.at[:, :3].set(jnp.nan).at[:, 10:].set(jnp.inf)
    gradient = jax.grad(loss)(spoiled)
    assert float(loss(spoiled)) == float(loss(table))
    np.testing.assert_array_equal(gradient[:, :3], 0)
    np.testing.assert_array_equal(gradient[:, 10:], 0)
    assert (jnp.abs(gradient[:, 3:10]) > 0).all()


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 45), st.integers(1, 50), st.booleans())
@settings(deadline=None, max_examples=200)
def test_clamped_windows_are_the_largest_that_fit(
    extent: int, kernel_size: int, dilation: int, stride: int, is_causal: bool
) -> None:
    window = WindowArguments(kernel_size, min(stride, kernel_size), dilation, is_causal)
    (axis,) = window.clamped((extent,)).axes((extent,), (extent,))
    (size,) = fitted(kernel_size, (extent,), dilation)
    assert axis.kernel_size == size
    assert size == max(k for k in range(1, kernel_size + 1) if k == 1 or k * dilation <= extent)
    if size == kernel_size and dilation <= extent:
        assert axis == Axis(extent, extent, *window)  # type: ignore[arg-type]
    for token in range(extent):  # no window is empty or extends past an end
        first, end = axis.reach(np.array(token))
        assert 0 <= first < end <= extent


def test_fitted_takes_sequences_and_arrays() -> None:
    assert fitted(-1, (5, 7)) == (5, 7)
    assert fitted((3, -1), [5, 7], (1, 2)) == (3, 3)
    assert fitted(np.array([9, 9]), (5, 7), 3) == (1, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fitted(0, (5,)), ValueError, r"kernel_size must be at least 1, or -1 for the whole extent in"),
        (lambda: fitted(-2, (5,)), ValueError, r"kernel_size must be at least 1, or -1 .*got -2"),
        (lambda: fitted(3, (5, 0)), ValueError, r"layout must be at least 1"),
        (lambda: fitted((3, 3), (5,)), ValueError, r"kernel_size must have 1 value"),
        (lambda: fitted(3, (5,), 0), ValueError, r"dilation must be at least 1"),
    ],
)
def test_fitted_rejects_invalid_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_parts_of_a_layout_are_fitted_to_the_whole() -> None:
    """If devices share the tokens of a dimension, windows are fitted to its total extent over all devices."""
    part = jax.ShapeDtypeStruct((1, 6, 1, 8), "float32")
    problem = neighborhood_problem(1, Inputs(part, part, part), WindowArguments(50, 1, 2), None, [2], clamp_window=True)  # type: ignore[arg-type]
    assert problem.kernel_size == (6,)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        ({"kernel_size": -1, "stride": 7}, ValueError, "stride"),
        ({"kernel_size": 7, "stride": 8, "clamp_window": True}, ValueError, "stride"),
        ({"kernel_size": 7, "clamp_window": 1}, TypeError, "clamp_window must be a bool"),
        ({"kernel_size": None, "clamp_window": True}, TypeError, "kernel_size"),
    ],
)
def test_other_windows_are_refused(window: dict[str, Any], error: type[Exception], message: str) -> None:
    tokens = jnp.ones((1, 6, 1, 8))
    with pytest.raises(error, match=message):
        natten_jax.na1d(tokens, tokens, tokens, **window)
